"""GRU time loop in Gluon, for compute capability 8.0 and newer.

The kernels compute what those of `gru.py` do with SPLITS == 1. The forward kernel supports no reset state but zeros.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_bridge.kernels.common import join_words, split_words, step_time, unpack_float16x4
from torch_bridge.kernels.gluon_common import (
    backward_rows,
    barrier,
    by_unit,
    columns,
    fast_sigmoid,
    forward_rows,
    inverse,
    load_gradient,
    load_inputs,
    load_resets,
    load_weights,
    locate_tile,
    new_state_scale,
    pack,
    scale_to_float16,
    slot_layout,
    state_scale,
    to_operand,
    unit_of_row,
    units_layout,
    weights_scale,
)


@gluon.jit
def _load_inputs(xp_ptr, reset_ptr, rows, unit, mask, mask_q, H: gl.constexpr):
    """Loads what a forward step reads."""
    x_r, x_z, x_n = load_inputs(xp_ptr + rows[None, :] * (3 * H) + unit[:, None], mask, H, 3)
    return x_r, x_z, x_n, load_resets(reset_ptr, rows, mask_q)


@gluon.jit
def new_state(a_r, a_z, a_n, x_r, x_z, x_n, b_hn, h):
    """Returns h_n, r, z, n and the next h, given the products, the input projections and h."""
    h_n = a_n + b_hn
    r = fast_sigmoid(a_r + x_r.to(gl.float32))
    z = fast_sigmoid(a_z + x_z.to(gl.float32))
    n = 2.0 * fast_sigmoid(2.0 * (x_n.to(gl.float32) + r * h_n)) - 1.0
    return h_n, r, z, n, n + z * (h - n)


@gluon.jit
def local_grads_of(h_n, r, z, n, h_prev):
    """Returns a step's local gradients, packed; with z they are the residuals of the step."""
    f_n = (1.0 - z) * (1.0 - n * n)
    return pack(f_n * h_n * r * (1.0 - r), (h_prev - n) * z * (1.0 - z), f_n, f_n * r)


@gluon.jit
def store_residuals(local_grads_ptr, carry_gate_ptr, rows, unit, mask, local_grads, z, H: gl.constexpr):
    """Stores a step's residuals: if there is no `carry_gate`, as words that may overwrite the input projections.

    `rows` and `unit` broadcast to a tile, whose axes are sequences and units in either order.
    """
    if carry_gate_ptr is not None:
        at = rows * H + unit
        gl.store(local_grads_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + at, local_grads, mask=mask)
        gl.store(carry_gate_ptr + at, z, mask=mask)
    else:
        at = local_grads_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (rows * (3 * H) + unit)
        first, second, third = split_words(local_grads, z)
        gl.store(at, first, mask=mask)
        gl.store(at + H, second, mask=mask)
        gl.store(at + 2 * H, third, mask=mask)


@gluon.jit
def _store_results(
    i, h, local_grads, z, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr, seq, row, T, stride, unit, mask,
    H: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Stores the results of step i, if there is such a step."""
    rows = (row + step_time(gl.minimum(gl.maximum(i, 0), T - 1), T, REVERSE) * stride)[None, :]
    live = mask & (i >= 0) & (i < T)
    gl.store(hs_ptr + rows * H + unit[:, None], h.to(hs_ptr.dtype.element_ty), mask=live)
    if local_grads_ptr is not None:
        store_residuals(local_grads_ptr, carry_gate_ptr, rows, unit[:, None], live, local_grads, z, H)
    gl.store(h_last_ptr + seq[None, :] * H + unit[:, None], h, mask=mask & (i == T - 1))


@gluon.jit
def _forward_step(
    i, h, new_h, local_grads, z, x_r, x_z, x_n, reset, buffer, w_r, w_z, w_n, b_hn, scale, w_unscale, zeros,
    xp_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr, seq, row, T, stride, unit, mask, mask_q,
    H: gl.constexpr, SCALED: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Runs step i, stores the results of step i - 1 (`new_h`, `local_grads`, `z`), and loads what step i + 1 reads."""
    next_rows = forward_rows(row, i + 1, T, stride, REVERSE)
    # registers can hold the inputs of two steps, except in float32 if the tile has sixteen sequences
    EARLY: gl.constexpr = zeros.shape[1] <= 8 or xp_ptr.dtype.element_ty != gl.float32
    if EARLY:
        next_r, next_z, next_n, next_reset = _load_inputs(xp_ptr, reset_ptr, next_rows, unit, mask, mask_q, H)
    if reset_ptr is not None:
        h = gl.where(reset[None, :], 0.0, h)
        if SCALED:
            scale = new_state_scale(scale, reset)
    if SCALED:
        buffer.store(to_operand(h * scale, DTYPE))
    else:
        buffer.store(to_operand(h, DTYPE))
    barrier()
    _store_results(
        i - 1,
        new_h,
        local_grads,
        z,
        hs_ptr,
        h_last_ptr,
        local_grads_ptr,
        carry_gate_ptr,
        seq,
        row,
        T,
        stride,
        unit,
        mask,
        H,
        REVERSE,
    )
    operand = buffer.load(gl.DotOperandLayout(1, zeros.type.layout, 2))
    a_r = by_unit(mma_v2(w_r, operand, zeros), UNITS)
    a_n = by_unit(mma_v2(w_n, operand, zeros), UNITS)
    a_z = by_unit(mma_v2(w_z, operand, zeros), UNITS)
    if SCALED:
        unscale = inverse(scale) * w_unscale
        a_r, a_z, a_n = a_r * unscale, a_z * unscale, a_n * unscale
    if not EARLY:
        next_r, next_z, next_n, next_reset = _load_inputs(xp_ptr, reset_ptr, next_rows, unit, mask, mask_q, H)
    h_n, r, z, n, new_h = new_state(a_r, a_z, a_n, x_r, x_z, x_n, b_hn, h)
    return new_h, new_h, local_grads_of(h_n, r, z, n, h), z, scale, next_r, next_z, next_n, next_reset


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles"])
def fwd_kernel(
    w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr,
    T, B, Q, tiles,
    H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `torch_bridge.kernels.gru.gru_fwd_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = columns(BLOCK_B)
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_t_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    UNITS: gl.constexpr = units_layout(WARPS, COLS)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_H, BLOCK_H // 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLS, BLOCK_H], DTYPE)
    model = (gl.program_id(0) // tiles).to(gl.int64)
    tile = gl.program_id(0) % tiles

    w_rows = unit_of_row(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LOAD)))
    w_cols = gl.arange(0, BLOCK_H, gl.SliceLayout(0, LOAD))
    w_mask = (w_rows < H)[:, None] & (w_cols < H)[None, :]
    w_ptr = w_hh_t_ptr + model * (3 * H * H)
    w_scale = 1.0
    if SCALED:
        w_scale, _ = weights_scale(w_ptr, H, H * H, H, BLOCK_H, 3, LOAD)
    w_r = load_weights(w_ptr, w_rows, w_cols, H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_z = load_weights(w_ptr + H * H, w_rows, w_cols, H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_n = load_weights(w_ptr + 2 * H * H, w_rows, w_cols, H, w_mask, w_scale, SCALED, DTYPE, OPERAND)

    unit, mask_q, mask, seq, row, stride = locate_tile(model, tile, T, B, Q, H, BLOCK_H, BLOCK_B, COLS, REVERSE, UNITS)
    b_hn = gl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(gl.float32)[:, None]
    h = gl.load(h0_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32)
    scale = gl.full([1, COLS], 1.0, gl.float32, UNITS)
    w_unscale = inverse(w_scale)
    if SCALED:
        scale = state_scale(gl.abs(h))[None, :]
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    # two allocations per operand and an unrolled loop, because with one indexed allocation the compiler could not tell
    # that no barrier is missing
    even = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])

    x_r, x_z, x_n, reset = _load_inputs(
        xp_ptr, reset_ptr, row + step_time(0, T, REVERSE) * stride, unit, mask, mask_q, H
    )
    new_h, z, local_grads = h, h, local_grads_of(h, h, h, h, h)  # placeholders: no step has run yet
    barrier()
    for i in range(0, T, 2):
        h, new_h, local_grads, z, scale, x_r, x_z, x_n, reset = _forward_step(
            i, h, new_h, local_grads, z, x_r, x_z, x_n, reset, even, w_r, w_z, w_n, b_hn, scale, w_unscale, zeros,
            xp_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr, seq, row, T, stride, unit, mask,
            mask_q, H, SCALED, DTYPE, REVERSE, UNITS,
        )  # fmt: skip
        h, new_h, local_grads, z, scale, x_r, x_z, x_n, reset = _forward_step(
            i + 1, h, new_h, local_grads, z, x_r, x_z, x_n, reset, odd, w_r, w_z, w_n, b_hn, scale, w_unscale, zeros,
            xp_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr, seq, row, T, stride, unit, mask,
            mask_q, H, SCALED, DTYPE, REVERSE, UNITS,
        )  # fmt: skip
    steps = (T + 1) // 2 * 2  # number of steps run, which for odd T includes one past the last
    _store_results(
        steps - 1, new_h, local_grads, z, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr, seq, row, T, stride,
        unit, mask, H, REVERSE,
    )  # fmt: skip


@gluon.jit
def load_residuals(local_grads_ptr, carry_gate_ptr, rows, unit, mask, H: gl.constexpr):
    """Loads what `store_residuals` stored, without unpacking the data; returns a tuple."""
    if carry_gate_ptr is not None:
        at = rows * H + unit
        local_grads = gl.load(local_grads_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + at, mask=mask, other=0)
        return local_grads, gl.load(carry_gate_ptr + at, mask=mask, other=0.0)
    else:
        return load_inputs(
            local_grads_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (rows * (3 * H) + unit), mask, H, 3
        )


@gluon.jit
def unpack_residuals(saved):
    """Unpacks what `load_residuals` loaded; returns dr, dz, dn and dh_n over dh, and z."""
    if len(saved) == 2:
        f_r, f_z, f_n, f_hn = unpack_float16x4(saved[0])
        return f_r, f_z, f_n, f_hn, saved[1]
    else:
        return join_words(saved[0], saved[1], saved[2])


@gluon.jit
def _backward_step(
    i, dh, dy, dy_next, saved, reset, bound,
    buffer_r, buffer_z, buffer_n, slot, w_r, w_z, w_n, w_bound, w_unscale, zeros,
    local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, seq, row, T, stride,
    unit, mask, mask_q,
    H: gl.constexpr, SCALED: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr,
    UNITS: gl.constexpr, SLOT: gl.constexpr,
):  # fmt: skip
    """Runs step i, and loads the residuals of step i + 1 and the gradient of the output of step i + 2.

    The operands' scale must be known before the operands. `bound`, computed in the previous step, is therefore an upper
    bound on |dh| of each sequence in this step, including the gradient of the step's output. With L = `w_bound`, the
    largest sum of a unit's absolute weights, and with each term's maximum over units,
      |dh_next| <= |dy_next| + |dh| + L max(|dr|, |dz|, |dhn|).
    Each unit adds up the three terms of its own; three times the largest of these sums is an upper bound. Where an
    episode starts, only the first term remains.
    """
    live = mask & (i < T)  # nothing is stored for a step past the last
    f_r, f_z, f_n, f_hn, carry_gate = unpack_residuals(saved)
    this_reset, this_dy = reset, dy
    next_rows = backward_rows(row, i + 1, T, stride, REVERSE)
    saved = load_residuals(local_grads_ptr, carry_gate_ptr, next_rows[None, :], unit[:, None], mask, H)
    reset = load_resets(reset_ptr, next_rows, mask_q)
    dy = dy_next
    next_rows = backward_rows(row, i + 2, T, stride, REVERSE)
    dy_next = load_gradient(dhs_ptr, next_rows, unit, mask, H)
    dh += this_dy.to(gl.float32)
    dr, dz, dhn, dn = dh * f_r, dh * f_z, dh * f_hn, dh * f_n
    if SCALED:
        # the exponent 0 leaves room for local gradients beyond one, which may be a quarter of |h_n| or |h|
        scale = scale_to_float16(bound, 0)[None, :]
        unscale = inverse(scale) * w_unscale
        buffer_r.store(to_operand(dr * scale, DTYPE))
        buffer_z.store(to_operand(dz * scale, DTYPE))
        buffer_n.store(to_operand(dhn * scale, DTYPE))
    else:
        buffer_r.store(to_operand(dr, DTYPE))
        buffer_z.store(to_operand(dz, DTYPE))
        buffer_n.store(to_operand(dhn, DTYPE))
    barrier()
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, zeros.type.layout, 2)
    product_r = mma_v2(w_r, buffer_r.load(OPERAND), zeros)
    product_z = mma_v2(w_z, buffer_z.load(OPERAND), zeros)
    product_n = mma_v2(w_n, buffer_n.load(OPERAND), zeros)

    # while the products run, compute the next bound and store this step's results
    if SCALED:
        largest = gl.maximum(gl.maximum(gl.abs(dr), gl.abs(dz)), gl.abs(dhn))
        largest = gl.abs(dh) + w_bound * largest
        if reset_ptr is not None:
            largest = gl.where(this_reset[None, :], 0.0, largest)
        largest += gl.abs(dy.to(gl.float32))
        slot.store(gl.max(largest.reshape([gl.num_warps(), 16, largest.shape[1]]), axis=1))
        barrier()
    rows = row + step_time(T - 1 - i, T, REVERSE) * stride
    dxp = dxp_ptr + rows[None, :] * (3 * H) + unit[:, None]
    at = rows[None, :] * H + unit[:, None]
    gl.store(dxp, dr.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dxp + H, dz.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dxp + 2 * H, dn.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dhn_ptr + at, dhn.to(dhn_ptr.dtype.element_ty), mask=live)
    if SCALED:
        bound = gl.convert_layout(3.0 * gl.max(slot.load(SLOT), axis=0), gl.SliceLayout(0, UNITS), assert_trivial=True)

    product = by_unit(product_r + product_z + product_n, UNITS)
    if SCALED:
        product = product * unscale
    dh = dh * carry_gate + product
    if reset_ptr is not None:
        if dreset_h_ptr is not None:
            gl.store(dreset_h_ptr + at, gl.where(this_reset[None, :], dh, 0.0), mask=live)
        dh = gl.where(this_reset[None, :], 0.0, dh)
    gl.store(dh0_ptr + seq[None, :] * H + unit[:, None], dh, mask=mask & (i == T - 1))
    return dh, dy, dy_next, saved, reset, bound


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles"])
def bwd_kernel(
    w_hh_ptr, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dh_last_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr,
    T, B, Q, tiles,
    H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `torch_bridge.kernels.gru.gru_bwd_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = columns(BLOCK_B)
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    UNITS: gl.constexpr = units_layout(WARPS, COLS)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_H, BLOCK_H // 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLS, BLOCK_H], DTYPE)
    SLOT: gl.constexpr = slot_layout(WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    model = (gl.program_id(0) // tiles).to(gl.int64)
    tile = gl.program_id(0) % tiles

    w_rows = unit_of_row(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LOAD)))
    w_cols = gl.arange(0, BLOCK_H, gl.SliceLayout(0, LOAD))
    w_mask = (w_rows < H)[:, None] & (w_cols < H)[None, :]
    w_ptr = w_hh_ptr + model * (3 * H * H)
    w_scale, w_bound, w_unscale = 1.0, 1.0, 1.0
    if SCALED:
        w_scale, w_bound = weights_scale(w_ptr, 3 * H, H, H, BLOCK_H, 3, LOAD)
        w_unscale = inverse(w_scale)
    w_r = load_weights(w_ptr, w_rows, w_cols, 3 * H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_z = load_weights(w_ptr + H, w_rows, w_cols, 3 * H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_n = load_weights(w_ptr + 2 * H, w_rows, w_cols, 3 * H, w_mask, w_scale, SCALED, DTYPE, OPERAND)

    unit, mask_q, mask, seq, row, stride = locate_tile(model, tile, T, B, Q, H, BLOCK_H, BLOCK_B, COLS, REVERSE, UNITS)
    dh = gl.load(dh_last_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32)
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    # two allocations per operand and an unrolled loop, because with one indexed allocation the compiler could not tell
    # that no barrier is missing
    even_r = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    even_z = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    even_n = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd_r = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd_z = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd_n = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    even_slot = gl.allocate_shared_memory(gl.float32, [WARPS, COLS], PLAIN)
    odd_slot = gl.allocate_shared_memory(gl.float32, [WARPS, COLS], PLAIN)

    rows = row + step_time(T - 1, T, REVERSE) * stride
    saved = load_residuals(local_grads_ptr, carry_gate_ptr, rows[None, :], unit[:, None], mask, H)
    reset = load_resets(reset_ptr, rows, mask_q)
    dy = load_gradient(dhs_ptr, rows, unit, mask, H)
    rows = row + step_time(gl.maximum(T - 2, 0), T, REVERSE) * stride
    dy_next = load_gradient(dhs_ptr, rows, unit, mask, H)
    bound = gl.max(gl.abs(dh + dy.to(gl.float32)), axis=0)
    barrier()
    for i in range(0, T, 2):
        dh, dy, dy_next, saved, reset, bound = _backward_step(
            i, dh, dy, dy_next, saved, reset, bound, even_r, even_z, even_n, even_slot,
            w_r, w_z, w_n, w_bound, w_unscale, zeros,
            local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, seq, row, T,
            stride, unit, mask, mask_q,
            H, SCALED, DTYPE, REVERSE, UNITS, SLOT,
        )  # fmt: skip
        dh, dy, dy_next, saved, reset, bound = _backward_step(
            i + 1, dh, dy, dy_next, saved, reset, bound, odd_r, odd_z, odd_n, odd_slot,
            w_r, w_z, w_n, w_bound, w_unscale, zeros,
            local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, seq, row, T,
            stride, unit, mask, mask_q,
            H, SCALED, DTYPE, REVERSE, UNITS, SLOT,
        )  # fmt: skip
