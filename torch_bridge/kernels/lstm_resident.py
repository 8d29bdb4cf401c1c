"""LSTM time loop in Gluon, for compute capability 8.0 and newer.

The kernels compute what those of `lstm.py` do with SPLITS == 1. The forward kernel supports no reset state but zeros.

The weights of four gates with 128 units leave few registers for the rest. The forward pass therefore stores the results
of tiles of eight sequences at once, not while the next step's product runs. In the backward pass, a step loads the
inputs of the next step after it has stored its own results.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_bridge.kernels.common import step_time, unpack_float16x4
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
    x_i, x_f, x_g, x_o = load_inputs(xp_ptr + rows[None, :] * (4 * H) + unit[:, None], mask, H, 4)
    return x_i, x_f, x_g, x_o, load_resets(reset_ptr, rows, mask_q)


@gluon.jit
def new_state(a_i, a_f, a_g, a_o, x_i, x_f, x_g, x_o, c):
    """Returns i, f, g, o, tanh of the next c, and the next h and c, given the products, the input projections and c."""
    g_i = fast_sigmoid(a_i + x_i.to(gl.float32))
    g_g = 2.0 * fast_sigmoid(2.0 * (a_g + x_g.to(gl.float32))) - 1.0
    g_f = fast_sigmoid(a_f + x_f.to(gl.float32))
    g_o = fast_sigmoid(a_o + x_o.to(gl.float32))
    c = g_f * c + g_i * g_g
    tanh_c = 2.0 * fast_sigmoid(2.0 * c) - 1.0
    return g_i, g_f, g_g, g_o, tanh_c, g_o * tanh_c, c


@gluon.jit
def local_grads_of(g_i, g_f, g_g, g_o, tanh_c, c_prev, dc_dh_ptr):
    """Returns a step's local gradients, packed, and dc over dh; with f they are the residuals of the step."""
    f_i, f_f = g_g * g_i * (1.0 - g_i), c_prev * g_f * (1.0 - g_f)
    f_g, f_o = g_i * (1.0 - g_g * g_g), tanh_c * g_o * (1.0 - g_o)
    dc_dh = g_o * (1.0 - tanh_c * tanh_c)
    if dc_dh_ptr is not None:
        dc_dh = dc_dh.to(dc_dh_ptr.dtype.element_ty)
    return pack(f_i, f_f, f_g, f_o), dc_dh


@gluon.jit
def store_residuals(local_grads_ptr, dc_dh_ptr, carry_gate_ptr, at, mask, local_grads, dc_dh, g_f):
    """Stores a step's residuals."""
    gl.store(local_grads_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + at, local_grads, mask=mask)
    gl.store(dc_dh_ptr + at, dc_dh, mask=mask)
    gl.store(carry_gate_ptr + at, g_f, mask=mask)


@gluon.jit
def _store_results(
    i, h, c, local_grads, dc_dh, g_f, hs_ptr, cs_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
    row, T, stride, unit, mask, H: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Stores the results of step i, if there is such a step."""
    time = step_time(gl.minimum(gl.maximum(i, 0), T - 1), T, REVERSE)
    at = (row + time * stride)[None, :] * H + unit[:, None]
    live = mask & (i >= 0) & (i < T)
    gl.store(hs_ptr + at, h.to(hs_ptr.dtype.element_ty), mask=live)
    if cs_ptr is not None:
        gl.store(cs_ptr + at, c.to(cs_ptr.dtype.element_ty), mask=live)
    if local_grads_ptr is not None:
        store_residuals(local_grads_ptr, dc_dh_ptr, carry_gate_ptr, at, live, local_grads, dc_dh, g_f)


@gluon.jit
def _forward_step(
    i, h, c, new_h, new_c, local_grads, dc_dh, g_f, x_i, x_f, x_g, x_o, reset, buffer, w_i, w_f, w_g, w_o,
    scale, w_unscale, zeros,
    xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, seq, row, T,
    stride, unit, mask, mask_q,
    H: gl.constexpr, SCALED: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr, UNITS: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    """Runs step i, and loads what step i + 1 reads.

    The results of step i - 1 (`new_h` to `g_f`) are stored if LATE, otherwise those of step i.
    """
    next_rows = forward_rows(row, i + 1, T, stride, REVERSE)
    next_i, next_f, next_g, next_o, next_reset = _load_inputs(xp_ptr, reset_ptr, next_rows, unit, mask, mask_q, H)
    if reset_ptr is not None:
        h = gl.where(reset[None, :], 0.0, h)
        c = gl.where(reset[None, :], 0.0, c)
        if SCALED:
            scale = new_state_scale(scale, reset)
    if SCALED:
        buffer.store(to_operand(h * scale, DTYPE))
    else:
        buffer.store(to_operand(h, DTYPE))
    barrier()
    if LATE:
        _store_results(
            i - 1, new_h, new_c, local_grads, dc_dh, g_f, hs_ptr, cs_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            row, T, stride, unit, mask, H, REVERSE,
        )  # fmt: skip
    operand = buffer.load(gl.DotOperandLayout(1, zeros.type.layout, 2))
    a_i = by_unit(mma_v2(w_i, operand, zeros), UNITS)
    a_g = by_unit(mma_v2(w_g, operand, zeros), UNITS)
    a_f = by_unit(mma_v2(w_f, operand, zeros), UNITS)
    a_o = by_unit(mma_v2(w_o, operand, zeros), UNITS)
    if SCALED:
        unscale = inverse(scale) * w_unscale
        a_i, a_g, a_f, a_o = a_i * unscale, a_g * unscale, a_f * unscale, a_o * unscale
    g_i, g_f, g_g, g_o, tanh_c, new_h, new_c = new_state(a_i, a_f, a_g, a_o, x_i, x_f, x_g, x_o, c)
    local_grads, dc_dh = local_grads_of(g_i, g_f, g_g, g_o, tanh_c, c, dc_dh_ptr)
    last = seq[None, :] * H + unit[:, None]
    gl.store(h_last_ptr + last, new_h, mask=mask & (i == T - 1))
    gl.store(c_last_ptr + last, new_c, mask=mask & (i == T - 1))
    if not LATE:
        _store_results(
            i, new_h, new_c, local_grads, dc_dh, g_f, hs_ptr, cs_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            row, T, stride, unit, mask, H, REVERSE,
        )  # fmt: skip
    return new_h, new_c, new_h, new_c, local_grads, dc_dh, g_f, scale, next_i, next_f, next_g, next_o, next_reset


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles"])
def fwd_kernel(
    w_hh_t_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
    T, B, Q, tiles,
    H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `torch_bridge.kernels.lstm.lstm_fwd_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = columns(BLOCK_B)
    LATE: gl.constexpr = BLOCK_H < 128 or BLOCK_B < 8  # results are stored a step later if registers can hold them
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
    w_ptr = w_hh_t_ptr + model * (4 * H * H)
    w_scale = 1.0
    if SCALED:
        w_scale, _ = weights_scale(w_ptr, H, H * H, H, BLOCK_H, 4, LOAD)
    w_i = load_weights(w_ptr, w_rows, w_cols, H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_f = load_weights(w_ptr + H * H, w_rows, w_cols, H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_g = load_weights(w_ptr + 2 * H * H, w_rows, w_cols, H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_o = load_weights(w_ptr + 3 * H * H, w_rows, w_cols, H, w_mask, w_scale, SCALED, DTYPE, OPERAND)

    unit, mask_q, mask, seq, row, stride = locate_tile(model, tile, T, B, Q, H, BLOCK_H, BLOCK_B, COLS, REVERSE, UNITS)
    h = gl.load(h0_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32)
    c = gl.load(c0_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32)
    scale = gl.full([1, COLS], 1.0, gl.float32, UNITS)
    w_unscale = inverse(w_scale)
    if SCALED:
        scale = state_scale(gl.abs(h))[None, :]
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    # two allocations per operand and an unrolled loop, because with one indexed allocation the compiler could not tell
    # that no barrier is missing
    even = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])

    rows = row + step_time(0, T, REVERSE) * stride
    x_i, x_f, x_g, x_o, reset = _load_inputs(xp_ptr, reset_ptr, rows, unit, mask, mask_q, H)
    new_h, new_c, g_f = h, c, h  # placeholders: no step has run yet
    local_grads, dc_dh = local_grads_of(h, h, h, h, h, h, dc_dh_ptr)
    barrier()
    for i in range(0, T, 2):
        h, c, new_h, new_c, local_grads, dc_dh, g_f, scale, x_i, x_f, x_g, x_o, reset = _forward_step(
            i, h, c, new_h, new_c, local_grads, dc_dh, g_f, x_i, x_f, x_g, x_o, reset, even, w_i, w_f, w_g, w_o,
            scale, w_unscale, zeros,
            xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            seq, row, T, stride, unit, mask, mask_q,
            H, SCALED, DTYPE, REVERSE, UNITS, LATE,
        )  # fmt: skip
        h, c, new_h, new_c, local_grads, dc_dh, g_f, scale, x_i, x_f, x_g, x_o, reset = _forward_step(
            i + 1, h, c, new_h, new_c, local_grads, dc_dh, g_f, x_i, x_f, x_g, x_o, reset, odd, w_i, w_f, w_g, w_o,
            scale, w_unscale, zeros,
            xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            seq, row, T, stride, unit, mask, mask_q,
            H, SCALED, DTYPE, REVERSE, UNITS, LATE,
        )  # fmt: skip
    if LATE:
        steps = (T + 1) // 2 * 2  # number of steps run, which for odd T includes one past the last
        _store_results(
            steps - 1, new_h, new_c, local_grads, dc_dh, g_f, hs_ptr, cs_ptr, local_grads_ptr, dc_dh_ptr,
            carry_gate_ptr, row, T, stride, unit, mask, H, REVERSE,
        )  # fmt: skip


@gluon.jit
def load_residuals(local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, at, rows, mask, mask_q):
    """Loads what `store_residuals` stored, without unpacking it, and which sequences start an episode."""
    local_grads = gl.load(local_grads_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + at, mask=mask, other=0)
    dc_dh = gl.load(dc_dh_ptr + at, mask=mask, other=0.0)
    carry_gate = gl.load(carry_gate_ptr + at, mask=mask, other=0.0)
    return local_grads, dc_dh, carry_gate, load_resets(reset_ptr, rows, mask_q)


@gluon.jit
def _leave(d, largest, buffer, ptr, live, scale, SCALED: gl.constexpr, DTYPE: gl.constexpr):
    """Stores the gradient `d` of a gate, to memory and as an operand; returns the maximum of |d| and `largest`."""
    if SCALED:
        buffer.store(to_operand(d * scale, DTYPE))
    else:
        buffer.store(to_operand(d, DTYPE))
    gl.store(ptr, d.to(ptr.dtype.element_ty), mask=live)
    return gl.maximum(largest, gl.abs(d))


@gluon.jit
def _backward_step(
    i, dh, dc, dy, dy_next, dcy, dcy_next, local_grads, dc_dh, carry_gate, reset, bound,
    buffer_i, buffer_f, buffer_g, buffer_o, slot, w_i, w_f, w_g, w_o, w_bound, w_unscale, zeros,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dh0_ptr, dc0_ptr,
    dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask, mask_q,
    H: gl.constexpr, SCALED: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr,
    UNITS: gl.constexpr, SLOT: gl.constexpr,
):  # fmt: skip
    """Runs step i, and loads the residuals of step i + 1 and the gradients of the outputs of step i + 2.

    The operands' scale must be known before the operands. `bound`, computed in the previous step, is therefore an upper
    bound on |dh| and |dc| of each sequence in this step, including the gradients of the step's outputs. With L =
    `w_bound`, the largest sum of a unit's absolute weights, and with each term's maximum over units, |dh_next| and
    |dc_next| are at most
      |dy_next| + |dcy_next| + |dc| + L max(|di|, |df|, |dg|, |do|).
    Each unit adds up the four terms of its own; four times the largest of these sums is an upper bound. Where an
    episode starts, only the first two terms remain.
    """
    live = mask & (i < T)  # nothing is stored for a step past the last
    f_i, f_f, f_g, f_o = unpack_float16x4(local_grads)
    this_dc_dh, this_carry_gate, this_reset, this_dy, this_dcy = dc_dh, carry_gate, reset, dy, dcy
    dh += this_dy.to(gl.float32)
    dc += dh * this_dc_dh.to(gl.float32)
    if dcs_ptr is not None:
        dc += this_dcy.to(gl.float32)
    rows = row + step_time(T - 1 - i, T, REVERSE) * stride
    dxp = dxp_ptr + rows[None, :] * (4 * H) + unit[:, None]
    largest = gl.zeros_like(dh)
    scale, unscale = largest, largest
    if SCALED:
        # the exponent 0 leaves room for local gradients beyond one, which may be a quarter of |c|
        scale = scale_to_float16(bound, 0)[None, :]
        unscale = inverse(scale) * w_unscale
    # one gate after the other, because registers cannot hold all of them at once
    largest = _leave(dc * f_i, largest, buffer_i, dxp, live, scale, SCALED, DTYPE)
    largest = _leave(dc * f_f, largest, buffer_f, dxp + H, live, scale, SCALED, DTYPE)
    largest = _leave(dc * f_g, largest, buffer_g, dxp + 2 * H, live, scale, SCALED, DTYPE)
    largest = _leave(dh * f_o, largest, buffer_o, dxp + 3 * H, live, scale, SCALED, DTYPE)
    dc = dc * this_carry_gate
    if reset_ptr is not None:
        if dreset_c_ptr is not None:
            at = rows[None, :] * H + unit[:, None]
            gl.store(dreset_c_ptr + at, gl.where(this_reset[None, :], dc, 0.0), mask=live)
        dc = gl.where(this_reset[None, :], 0.0, dc)
        largest = gl.where(this_reset[None, :], 0.0, largest)
    if SCALED:
        largest = gl.abs(dy_next.to(gl.float32)) + gl.abs(dc) + w_bound * largest
        if dcs_ptr is not None:
            largest += gl.abs(dcy_next.to(gl.float32))
        slot.store(gl.max(largest.reshape([gl.num_warps(), 16, largest.shape[1]]), axis=1))
    barrier()
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, zeros.type.layout, 2)
    dh_if = mma_v2(w_i, buffer_i.load(OPERAND), zeros)
    dh_go = mma_v2(w_g, buffer_g.load(OPERAND), zeros)
    dh_if = mma_v2(w_f, buffer_f.load(OPERAND), dh_if)
    dh_go = mma_v2(w_o, buffer_o.load(OPERAND), dh_go)

    next_rows = backward_rows(row, i + 1, T, stride, REVERSE)
    local_grads, dc_dh, carry_gate, reset = load_residuals(
        local_grads_ptr,
        dc_dh_ptr,
        carry_gate_ptr,
        reset_ptr,
        next_rows[None, :] * H + unit[:, None],
        next_rows,
        mask,
        mask_q,
    )
    dy, dcy = dy_next, dcy_next
    next_rows = backward_rows(row, i + 2, T, stride, REVERSE)
    dy_next = load_gradient(dhs_ptr, next_rows, unit, mask, H)
    if dcs_ptr is not None:
        dcy_next = load_gradient(dcs_ptr, next_rows, unit, mask, H)
    if SCALED:
        bound = gl.convert_layout(4.0 * gl.max(slot.load(SLOT), axis=0), gl.SliceLayout(0, UNITS), assert_trivial=True)

    dh = by_unit(dh_if + dh_go, UNITS)
    if SCALED:
        dh = dh * unscale
    if reset_ptr is not None:
        if dreset_h_ptr is not None:
            at = rows[None, :] * H + unit[:, None]
            gl.store(dreset_h_ptr + at, gl.where(this_reset[None, :], dh, 0.0), mask=live)
        dh = gl.where(this_reset[None, :], 0.0, dh)
    if i == T - 1:
        last = seq[None, :] * H + unit[:, None]
        gl.store(dh0_ptr + last, dh, mask=mask)
        gl.store(dc0_ptr + last, dc, mask=mask)
    return dh, dc, dy, dy_next, dcy, dcy_next, local_grads, dc_dh, carry_gate, reset, bound


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles"])
def bwd_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
    T, B, Q, tiles,
    H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `torch_bridge.kernels.lstm.lstm_bwd_kernel`."""
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
    w_ptr = w_hh_ptr + model * (4 * H * H)
    w_scale, w_bound, w_unscale = 1.0, 1.0, 1.0
    if SCALED:
        w_scale, w_bound = weights_scale(w_ptr, 4 * H, H, H, BLOCK_H, 4, LOAD)
        w_unscale = inverse(w_scale)
    w_i = load_weights(w_ptr, w_rows, w_cols, 4 * H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_f = load_weights(w_ptr + H, w_rows, w_cols, 4 * H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_g = load_weights(w_ptr + 2 * H, w_rows, w_cols, 4 * H, w_mask, w_scale, SCALED, DTYPE, OPERAND)
    w_o = load_weights(w_ptr + 3 * H, w_rows, w_cols, 4 * H, w_mask, w_scale, SCALED, DTYPE, OPERAND)

    unit, mask_q, mask, seq, row, stride = locate_tile(model, tile, T, B, Q, H, BLOCK_H, BLOCK_B, COLS, REVERSE, UNITS)
    dh = gl.load(dh_last_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32)
    dc = gl.load(dc_last_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32)
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    # two allocations per operand and an unrolled loop, because with one indexed allocation the compiler could not tell
    # that no barrier is missing
    even_i = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    even_f = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    even_g = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    even_o = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd_i = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd_f = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd_g = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    odd_o = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
    even_slot = gl.allocate_shared_memory(gl.float32, [WARPS, COLS], PLAIN)
    odd_slot = gl.allocate_shared_memory(gl.float32, [WARPS, COLS], PLAIN)

    rows = row + step_time(T - 1, T, REVERSE) * stride
    local_grads, dc_dh, carry_gate, reset = load_residuals(
        local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, rows[None, :] * H + unit[:, None], rows, mask, mask_q
    )
    dy = load_gradient(dhs_ptr, rows, unit, mask, H)
    dcy = dy
    if dcs_ptr is not None:
        dcy = load_gradient(dcs_ptr, rows, unit, mask, H)
    rows = row + step_time(gl.maximum(T - 2, 0), T, REVERSE) * stride
    dy_next = load_gradient(dhs_ptr, rows, unit, mask, H)
    dcy_next = dy_next
    bound = gl.abs(dh) + gl.abs(dy.to(gl.float32)) + gl.abs(dc)
    if dcs_ptr is not None:
        dcy_next = load_gradient(dcs_ptr, rows, unit, mask, H)
        bound += gl.abs(dcy.to(gl.float32))
    bound = gl.max(bound, axis=0)
    barrier()
    for i in range(0, T, 2):
        dh, dc, dy, dy_next, dcy, dcy_next, local_grads, dc_dh, carry_gate, reset, bound = _backward_step(
            i, dh, dc, dy, dy_next, dcy, dcy_next, local_grads, dc_dh, carry_gate, reset, bound,
            even_i, even_f, even_g, even_o, even_slot, w_i, w_f, w_g, w_o, w_bound, w_unscale, zeros,
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dh0_ptr, dc0_ptr,
            dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask, mask_q, H, SCALED, DTYPE, REVERSE, UNITS, SLOT,
        )  # fmt: skip
        dh, dc, dy, dy_next, dcy, dcy_next, local_grads, dc_dh, carry_gate, reset, bound = _backward_step(
            i + 1, dh, dc, dy, dy_next, dcy, dcy_next, local_grads, dc_dh, carry_gate, reset, bound,
            odd_i, odd_f, odd_g, odd_o, odd_slot, w_i, w_f, w_g, w_o, w_bound, w_unscale, zeros,
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dh0_ptr, dc0_ptr,
            dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask, mask_q, H, SCALED, DTYPE, REVERSE, UNITS, SLOT,
        )  # fmt: skip
