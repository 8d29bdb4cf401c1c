"""Time loop in Gluon, for compute capability 8.0 and newer: one program has all units, 16-bit weights in registers.

The kernels compute what those of `streamed.py` do with SPLITS == 1. The forward kernel supports no reset state but
zeros. `gluon_common` explains where weights and operands are kept.

With three gates, the registers hold the weights and the data of two steps, so memory accesses overlap with products: a
step loads the next step's inputs first, and stores its results while products run. The weights of four gates with 128
units leave few registers for the rest. The forward pass then stores the results of tiles of eight sequences at once,
not while the next step's product runs. In the backward pass, a step stores its results gate by gate, and loads the
inputs of the next step after that.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_bridge.kernels import names
from torch_bridge.kernels.common import step_time
from torch_bridge.kernels.gluon_common import (
    add_inputs,
    backward_rows,
    barrier,
    by_unit,
    columns,
    forward_rows,
    inverse,
    load_gradient,
    load_inputs,
    load_resets,
    load_residuals,
    load_weights,
    locate_tile,
    new_state_scale,
    no_residuals,
    operands_of,
    pack_residuals,
    product_order,
    scale_to_float16,
    slot_layout,
    state_scale,
    store_residuals,
    to_operand,
    unit_of_row,
    units_layout,
    unpack_residuals,
    weights_scale,
)


@gluon.jit
def _load_weights(
    ptr, stride, NEXT: gl.constexpr, H: gl.constexpr, BLOCK_H: gl.constexpr, GATES: gl.constexpr,
    DTYPE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Loads the weights of all gates, whose matrices are NEXT elements apart, as register operands.

    Returns a tuple by gate, the factor that undoes the weights' scale, and the largest sum over a row of absolute
    weights.
    """
    SCALED: gl.constexpr = ptr.dtype.element_ty == gl.float32
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_H, BLOCK_H // 8], [gl.num_warps(), 1], [1, 0])
    rows = unit_of_row(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LOAD)))
    cols = gl.arange(0, BLOCK_H, gl.SliceLayout(0, LOAD))
    mask = (rows < H)[:, None] & (cols < H)[None, :]
    scale, bound, unscale = 1.0, 1.0, 1.0
    if SCALED:
        scale, bound = weights_scale(ptr, stride, NEXT, H, BLOCK_H, GATES, LOAD)
        unscale = inverse(scale)
    weights = ()
    for gate in gl.static_range(GATES):
        w = load_weights(ptr + gate * NEXT, rows, cols, stride, mask, scale, SCALED, DTYPE, OPERAND)
        weights += (w,)
    return weights, unscale, bound


@gluon.jit
def _allocate_operands(COUNT: gl.constexpr, COLS: gl.constexpr, BLOCK_H: gl.constexpr, DTYPE: gl.constexpr):
    """Allocates COUNT operands in shared memory.

    Even and odd steps have their own allocations, in an unrolled loop: with one indexed allocation the compiler could
    not tell that no barrier is missing.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLS, BLOCK_H], DTYPE)
    operands = ()
    for _ in gl.static_range(COUNT):
        x = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
        operands += (x,)
    return operands


@gluon.jit
def _store_operand(buffer, x, scale, SCALED: gl.constexpr):
    if SCALED:
        buffer.store(to_operand(x * scale, buffer.dtype))
    else:
        buffer.store(to_operand(x, buffer.dtype))


@gluon.jit
def _load_step(xp_ptr, reset_ptr, rows, unit, mask, mask_q, H: gl.constexpr, GATES: gl.constexpr):
    """Loads what a forward step reads: input projections by gate, and resets."""
    x = load_inputs(xp_ptr + rows[None, :] * (GATES * H) + unit[:, None], mask, H, GATES)
    return x, load_resets(reset_ptr, rows, mask_q)


@gluon.jit
def _store_results(
    i, states, saved, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
    seq, row, T, stride, unit, mask, H: gl.constexpr, COUNT: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Stores the results of step i, if there is such a step."""
    rows = (row + step_time(gl.minimum(gl.maximum(i, 0), T - 1), T, REVERSE) * stride)[None, :]
    live = mask & (i >= 0) & (i < T)
    at = rows * H + unit[:, None]
    gl.store(hs_ptr + at, states[0].to(hs_ptr.dtype.element_ty), mask=live)
    if cs_ptr is not None:
        gl.store(cs_ptr + at, states[1].to(cs_ptr.dtype.element_ty), mask=live)
    if local_grads_ptr is not None:
        store_residuals(local_grads_ptr, dc_dh_ptr, carry_gate_ptr, rows, unit[:, None], live, saved, H, COUNT)
    last = seq[None, :] * H + unit[:, None]
    gl.store(h_last_ptr + last, states[0], mask=mask & (i == T - 1))
    if c_last_ptr is not None:
        gl.store(c_last_ptr + last, states[1], mask=mask & (i == T - 1))


@gluon.jit
def _forward_step(
    i, states, saved, x, reset, buffer, w, b_hn, scale, w_unscale, zeros,
    xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
    seq, row, T, stride, unit, mask, mask_q,
    STEP: gl.constexpr, RESIDUALS: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, COUNT: gl.constexpr,
    H: gl.constexpr, SCALED: gl.constexpr, REVERSE: gl.constexpr, UNITS: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Runs step i, and loads what step i + 1 reads.

    The results of step i - 1 (`states`, `saved`) are stored if LATE, otherwise those of step i.
    """
    next_rows = forward_rows(row, i + 1, T, stride, REVERSE)
    # registers can hold the inputs of two steps, except in float32 if the tile has sixteen sequences
    EARLY: gl.constexpr = zeros.shape[1] <= 8 or xp_ptr.dtype.element_ty != gl.float32
    if EARLY:
        next_x, next_reset = _load_step(xp_ptr, reset_ptr, next_rows, unit, mask, mask_q, H, GATES)
    before = states
    if reset_ptr is not None:
        before = ()
        for k in gl.static_range(len(states)):
            before += (gl.where(reset[None, :], 0.0, states[k]),)
        if SCALED:
            scale = new_state_scale(scale, reset)
    _store_operand(buffer, before[0], scale, SCALED)
    barrier()
    if LATE:
        _store_results(
            i - 1, states, saved, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            seq, row, T, stride, unit, mask, H, COUNT, REVERSE,
        )  # fmt: skip
    operand = buffer.load(gl.DotOperandLayout(1, zeros.type.layout, 2))
    started = ()
    for k in gl.static_range(GATES):
        started += (by_unit(mma_v2(w[product_order(k, GATES)], operand, zeros), UNITS),)
    products = ()
    unscale = scale
    if SCALED:
        unscale = inverse(scale) * w_unscale
    for gate in gl.static_range(GATES):
        product = started[product_order(gate, GATES)]
        if SCALED:
            product = product * unscale
        products += (product,)
    if not EARLY:
        next_x, next_reset = _load_step(xp_ptr, reset_ptr, next_rows, unit, mask, mask_q, H, GATES)
    gates = add_inputs(products, x, b_hn, SEPARATE)
    states, activations = STEP(gates, x[GATES - 1].to(gl.float32), before, "fast")
    if local_grads_ptr is not None:
        local_grads, factors = RESIDUALS(activations, before)
        saved = pack_residuals(local_grads, factors, dc_dh_ptr)
    if not LATE:
        _store_results(
            i, states, saved, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            seq, row, T, stride, unit, mask, H, COUNT, REVERSE,
        )  # fmt: skip
    return states, saved, scale, next_x, next_reset


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles"], repr=names.of_loop("resident", "fwd"))
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
    T, B, Q, tiles,
    STEP: gl.constexpr, RESIDUALS: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, FACTORS: gl.constexpr,
    H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `streamed.forward_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = columns(BLOCK_B)
    COUNT: gl.constexpr = GATES + 1 if SEPARATE else GATES  # of local gradients
    LATE: gl.constexpr = GATES < 4 or BLOCK_H < 128 or BLOCK_B < 8  # see the top of this file
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_t_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    UNITS: gl.constexpr = units_layout(WARPS, COLS)
    model = (gl.program_id(0) // tiles).to(gl.int64)
    tile = gl.program_id(0) % tiles
    w, w_unscale, _ = _load_weights(
        w_hh_t_ptr + model * (GATES * H * H), H, H * H, H, BLOCK_H, GATES, DTYPE, ACC
    )  # fmt: skip

    unit, mask_q, mask, seq, row, stride = locate_tile(model, tile, T, B, Q, H, BLOCK_H, BLOCK_B, COLS, REVERSE, UNITS)
    b_hn = 0.0
    if SEPARATE:
        b_hn = gl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(gl.float32)[:, None]
    first = seq[None, :] * H + unit[:, None]
    states = (gl.load(h0_ptr + first, mask=mask, other=0.0).to(gl.float32),)
    if c0_ptr is not None:
        states += (gl.load(c0_ptr + first, mask=mask, other=0.0).to(gl.float32),)
    scale = gl.full([1, COLS], 1.0, gl.float32, UNITS)
    if SCALED:
        scale = state_scale(gl.abs(states[0]))[None, :]
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    even = _allocate_operands(1, COLS, BLOCK_H, DTYPE)
    odd = _allocate_operands(1, COLS, BLOCK_H, DTYPE)

    x, reset = _load_step(
        xp_ptr, reset_ptr, row + step_time(0, T, REVERSE) * stride, unit, mask, mask_q, H, GATES
    )  # fmt: skip
    saved = ()
    if local_grads_ptr is not None:
        saved = no_residuals(states[0], dc_dh_ptr, COUNT, FACTORS)  # no step has run yet
    barrier()
    for i in range(0, T, 2):
        states, saved, scale, x, reset = _forward_step(
            i, states, saved, x, reset, even[0], w, b_hn, scale, w_unscale, zeros,
            xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            seq, row, T, stride, unit, mask, mask_q,
            STEP, RESIDUALS, GATES, SEPARATE, COUNT, H, SCALED, REVERSE, UNITS, LATE,
        )  # fmt: skip
        states, saved, scale, x, reset = _forward_step(
            i + 1, states, saved, x, reset, odd[0], w, b_hn, scale, w_unscale, zeros,
            xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
            seq, row, T, stride, unit, mask, mask_q,
            STEP, RESIDUALS, GATES, SEPARATE, COUNT, H, SCALED, REVERSE, UNITS, LATE,
        )  # fmt: skip
    if LATE:
        steps = (T + 1) // 2 * 2  # number of steps run, which for odd T includes one past the last
        _store_results(
            steps - 1, states, saved, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr,
            carry_gate_ptr, seq, row, T, stride, unit, mask, H, COUNT, REVERSE,
        )  # fmt: skip


@gluon.jit
def _load_outputs(dhs_ptr, dcs_ptr, rows, unit, mask, H: gl.constexpr):
    """Loads the gradients of a step's outputs; returns a tuple."""
    gradients = (load_gradient(dhs_ptr, rows, unit, mask, H),)
    if dcs_ptr is not None:
        gradients += (load_gradient(dcs_ptr, rows, unit, mask, H),)
    return gradients


@gluon.jit
def _load_saved(
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, rows, unit, mask, mask_q, H: gl.constexpr,
    COUNT: gl.constexpr, IN_PLACE: gl.constexpr,
):  # fmt: skip
    """Loads the residuals of a step, and which sequences start an episode there."""
    saved = load_residuals(
        local_grads_ptr, dc_dh_ptr, carry_gate_ptr, rows[None, :], unit[:, None], mask, H, COUNT, IN_PLACE
    )
    return saved, load_resets(reset_ptr, rows, mask_q)


@gluon.jit
def _sum_of_magnitudes(values):
    """Returns the sum of the absolute values of a tuple's elements."""
    total = gl.abs(values[0].to(gl.float32))
    for k in gl.static_range(1, len(values)):
        total += gl.abs(values[k].to(gl.float32))
    return total


@gluon.jit
def _store_bound(slot, largest):
    """Stores, for each warp and sequence, the largest element of the warp's units."""
    slot.store(gl.max(largest.reshape([gl.num_warps(), 16, largest.shape[1]]), axis=1))


@gluon.jit
def _multiply(w, operands, zeros, GATES: gl.constexpr):
    """Returns the sum over gates of weights times operands, in two or three sums side by side."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, zeros.type.layout, 2)
    if GATES == 4:
        low = mma_v2(w[0], operands[0].load(OPERAND), zeros)
        high = mma_v2(w[2], operands[2].load(OPERAND), zeros)
        low = mma_v2(w[1], operands[1].load(OPERAND), low)
        high = mma_v2(w[3], operands[3].load(OPERAND), high)
        product = low + high
    else:
        products = ()
        for gate in gl.static_range(GATES):
            products += (mma_v2(w[gate], operands[gate].load(OPERAND), zeros),)
        product = products[0]
        for gate in gl.static_range(1, GATES):
            product += products[gate]
    return product


@gluon.jit
def _store_first(dh0_ptr, dc0_ptr, dstates, seq, unit, mask, H: gl.constexpr):
    """Stores the gradients of the initial states."""
    at = seq[None, :] * H + unit[:, None]
    gl.store(dh0_ptr + at, dstates[0], mask=mask)
    if dc0_ptr is not None:
        gl.store(dc0_ptr + at, dstates[1], mask=mask)


@gluon.jit
def _backward_step(
    i, dstates, dys, next_dys, saved, reset, bound, operands, slot, w, w_bound, w_unscale, zeros,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dc0_ptr,
    dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask, mask_q,
    GRAD_STEP: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, IN_PLACE: gl.constexpr, COUNT: gl.constexpr,
    H: gl.constexpr, SCALED: gl.constexpr, REVERSE: gl.constexpr, UNITS: gl.constexpr, SLOT: gl.constexpr,
    STATES: gl.constexpr,
):  # fmt: skip
    """Runs step i, and loads the residuals of step i + 1 and the gradients of the outputs of step i + 2.

    The operands' scale must be known before the operands. `bound`, computed in the previous step, is therefore an upper
    bound on the gradients of each sequence's states in this step, including those of the step's outputs. With L =
    `w_bound`, the largest sum of a unit's absolute weights, and with each term's maximum over units, the gradients of
    the states of the next step are at most
      |gradients of its outputs| + |what goes straight to the last state| + L max(|gradients of the gates|).
    Each unit adds up the terms of its own; their number times the largest of these sums is an upper bound. Where an
    episode starts, only the first terms remain.
    """
    ROOMY: gl.constexpr = GATES < 4  # there are registers to overlap memory accesses with products
    live = mask & (i < T)  # nothing is stored for a step past the last
    local_grads, factors = unpack_residuals(saved, COUNT, IN_PLACE)
    this_reset = reset
    this_dys = dys
    dys = next_dys
    if ROOMY:
        next_rows = backward_rows(row, i + 1, T, stride, REVERSE)
        saved, reset = _load_saved(
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, next_rows, unit, mask, mask_q, H, COUNT, IN_PLACE
        )
        next_rows = backward_rows(row, i + 2, T, stride, REVERSE)
        next_dys = _load_outputs(dhs_ptr, dcs_ptr, next_rows, unit, mask, H)

    dh = dstates[0] + this_dys[0].to(gl.float32)
    if STATES == 1:
        grads, carried = GRAD_STEP((dh,), local_grads, factors)
        kept = gl.abs(dh)
    else:
        dc = dstates[1] + dh * factors[0]
        if dcs_ptr is not None:
            dc += this_dys[1].to(gl.float32)
        grads, carried = GRAD_STEP((dh, dc), local_grads, factors)
        kept = gl.abs(carried[0])
    scale = zeros
    unscale = zeros
    if SCALED:
        # the exponent 0 leaves room for local gradients beyond one, which may be a quarter of |h| or |c|
        scale = scale_to_float16(bound, 0)[None, :]
        unscale = inverse(scale) * w_unscale
    rows = row + step_time(T - 1 - i, T, REVERSE) * stride
    at = rows[None, :] * H + unit[:, None]
    dxp = dxp_ptr + rows[None, :] * (GATES * H) + unit[:, None]
    multiplied = operands_of(grads, GATES)
    for gate in gl.static_range(GATES):
        _store_operand(operands[gate], multiplied[gate], scale, SCALED)
        if not ROOMY:
            gl.store(dxp + gate * H, grads[gate].to(dxp_ptr.dtype.element_ty), mask=live)
    if ROOMY:
        barrier()
        product = _multiply(w, operands, zeros, GATES)

    # if there are registers, this runs while the product does
    if SCALED:
        largest = gl.abs(multiplied[0])
        for gate in gl.static_range(1, GATES):
            largest = gl.maximum(largest, gl.abs(multiplied[gate]))
        largest = kept + w_bound * largest
        if reset_ptr is not None:
            largest = gl.where(this_reset[None, :], 0.0, largest)
        _store_bound(slot, largest + _sum_of_magnitudes(dys))
        if ROOMY:
            barrier()
    if ROOMY:
        for gate in gl.static_range(GATES):
            gl.store(dxp + gate * H, grads[gate].to(dxp_ptr.dtype.element_ty), mask=live)
    else:
        barrier()
        product = _multiply(w, operands, zeros, GATES)
        next_rows = backward_rows(row, i + 1, T, stride, REVERSE)
        saved, reset = _load_saved(
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, next_rows, unit, mask, mask_q, H, COUNT, IN_PLACE
        )
        next_rows = backward_rows(row, i + 2, T, stride, REVERSE)
        next_dys = _load_outputs(dhs_ptr, dcs_ptr, next_rows, unit, mask, H)
    if SEPARATE:
        gl.store(dhn_ptr + at, grads[GATES].to(dhn_ptr.dtype.element_ty), mask=live)
    if SCALED:
        TERMS: gl.constexpr = 2.0 + STATES
        bound = TERMS * gl.max(slot.load(SLOT), axis=0)
        bound = gl.convert_layout(bound, gl.SliceLayout(0, UNITS), assert_trivial=True)

    product = by_unit(product, UNITS)
    if SCALED:
        product = product * unscale
    if STATES == 1 and len(carried) > 0:
        product = carried[0] + product
    dstates = (product,)
    if STATES > 1:
        dstates += carried
    if reset_ptr is not None:
        if dreset_h_ptr is not None:
            gl.store(dreset_h_ptr + at, gl.where(this_reset[None, :], dstates[0], 0.0), mask=live)
        if dreset_c_ptr is not None:
            gl.store(dreset_c_ptr + at, gl.where(this_reset[None, :], dstates[1], 0.0), mask=live)
        after = ()
        for k in gl.static_range(STATES):
            after += (gl.where(this_reset[None, :], 0.0, dstates[k]),)
        dstates = after
    if ROOMY:
        _store_first(dh0_ptr, dc0_ptr, dstates, seq, unit, mask & (i == T - 1), H)
    elif i == T - 1:  # the branch keeps the addresses of the next step from taking registers before this one ends
        _store_first(dh0_ptr, dc0_ptr, dstates, seq, unit, mask, H)
    return dstates, dys, next_dys, saved, reset, bound


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles"], repr=names.of_loop("resident", "bwd"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dhn_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
    T, B, Q, tiles,
    GRAD_STEP: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, IN_PLACE: gl.constexpr,
    H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `streamed.backward_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = columns(BLOCK_B)
    COUNT: gl.constexpr = GATES + 1 if SEPARATE else GATES  # of local gradients
    STATES: gl.constexpr = 1 if dc0_ptr is None else 2
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    UNITS: gl.constexpr = units_layout(WARPS, COLS)
    SLOT: gl.constexpr = slot_layout(WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    model = (gl.program_id(0) // tiles).to(gl.int64)
    tile = gl.program_id(0) % tiles
    w, w_unscale, w_bound = _load_weights(
        w_hh_ptr + model * (GATES * H * H), GATES * H, H, H, BLOCK_H, GATES, DTYPE, ACC
    )  # fmt: skip

    unit, mask_q, mask, seq, row, stride = locate_tile(model, tile, T, B, Q, H, BLOCK_H, BLOCK_B, COLS, REVERSE, UNITS)
    last = seq[None, :] * H + unit[:, None]
    dstates = (gl.load(dh_last_ptr + last, mask=mask, other=0.0).to(gl.float32),)
    if STATES > 1:
        dstates += (gl.load(dc_last_ptr + last, mask=mask, other=0.0).to(gl.float32),)
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    even = _allocate_operands(GATES, COLS, BLOCK_H, DTYPE)
    odd = _allocate_operands(GATES, COLS, BLOCK_H, DTYPE)
    even_slot = gl.allocate_shared_memory(gl.float32, [WARPS, COLS], PLAIN)
    odd_slot = gl.allocate_shared_memory(gl.float32, [WARPS, COLS], PLAIN)

    rows = row + step_time(T - 1, T, REVERSE) * stride
    saved, reset = _load_saved(
        local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, rows, unit, mask, mask_q, H, COUNT, IN_PLACE
    )
    dys = _load_outputs(dhs_ptr, dcs_ptr, rows, unit, mask, H)
    rows = row + step_time(gl.maximum(T - 2, 0), T, REVERSE) * stride
    next_dys = _load_outputs(dhs_ptr, dcs_ptr, rows, unit, mask, H)
    if STATES == 1:
        bound = gl.max(gl.abs(dstates[0] + dys[0].to(gl.float32)), axis=0)
    else:
        bound = gl.max(_sum_of_magnitudes(dstates) + _sum_of_magnitudes(dys), axis=0)
    barrier()
    for i in range(0, T, 2):
        dstates, dys, next_dys, saved, reset, bound = _backward_step(
            i, dstates, dys, next_dys, saved, reset, bound, even, even_slot, w, w_bound, w_unscale, zeros,
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dc0_ptr,
            dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask, mask_q,
            GRAD_STEP, GATES, SEPARATE, IN_PLACE, COUNT, H, SCALED, REVERSE, UNITS, SLOT, STATES,
        )  # fmt: skip
        dstates, dys, next_dys, saved, reset, bound = _backward_step(
            i + 1, dstates, dys, next_dys, saved, reset, bound, odd, odd_slot, w, w_bound, w_unscale, zeros,
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dc0_ptr,
            dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask, mask_q,
            GRAD_STEP, GATES, SEPARATE, IN_PLACE, COUNT, H, SCALED, REVERSE, UNITS, SLOT, STATES,
        )  # fmt: skip
