"""Time loop in Gluon, for compute capability 8.0 and newer: one program has all units, 16-bit weights in registers.

The kernels compute what those of `streamed.py` compute with SPLITS == 1. `gluon_common` explains where weights and
operands are kept.

Memory accesses overlap with products as far as registers allow. With up to three gates, the registers hold the weights
and the data of two steps. A step then loads the next step's inputs before its own product, and the memory is written
while a product runs: in the backward pass the product of the same step, in the forward pass that of the next step
(LATE). Some kernels have too few registers for that:
- The forward kernel for 128 units and tiles of at least eight sequences, if the cell has four gates or a norm, stores
  the results of a step at the end of that step.
- The backward kernel for four gates (not ROOMY) stores the gradients of the gates before the product, one gate at a
  time, and loads the next step's inputs after the product.

Tiles of one, two and four sequences leave every other column of a product empty. There, a select with a constant
condition makes states and their gradients zeros, so that the compiler leaves out what a thread would compute for such a
column. In the forward pass of four gates, zeros are used only where that was measured to be faster (ZEROS): see
`docs/design/time_loops.md`.

The reset states of each step are loaded two steps early, where registers can hold them (EARLY). In TF32, the scale
after a reset needs their maximum over the units of all warps. The warps exchange it through shared memory, at the
barrier of the step before.

With NORM_WIDTH > 0, the gates see a norm, as `streamed.py` explains. Its sums over units are computed in two parts:
each warp stores the sum over its 16 units in shared memory, and after the barrier that a step's products need anyway,
every thread adds the warps' sums. The kernels then have tiles of at most eight sequences.

In both kernels, `saved` are the packed residuals of a step, and COUNT is the number of local gradients. `of_norm` is
the tuple of a step's normalized state and the scale of its norm; without a norm it is empty. SCALED says that products
are of float32, with scaled operands in float16.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_bridge.kernels import arrays, names
from torch_bridge.kernels.common import (
    RESET_FIXED,
    RESET_STEPPED,
    load_biases,
    normalize,
    operands_of,
    scaled,
    step_time,
    subtract_mean,
    with_norm_grad,
)
from torch_bridge.kernels.gluon_common import (
    add_inputs,
    backward_rows,
    barrier,
    by_unit,
    columns,
    fixed_reset_states,
    forward_rows,
    has_last_step,
    inverse,
    is_first_step,
    is_last_step,
    load_gradients,
    load_inputs,
    load_resets,
    load_residuals,
    load_states,
    load_statistics,
    load_weights,
    locate_piece,
    locate_tile,
    locate_tile_of_piece,
    no_residuals,
    normalized_state,
    pack_residuals,
    product_order,
    reset_gradients,
    runs,
    scale_from_largest,
    scale_from_magnitudes,
    scale_of_norm,
    scale_to_float16,
    scaled_reset_states,
    slot_layout,
    states_without_empty_columns,
    store_residuals,
    store_states,
    store_totals,
    to_operand,
    unit_of_row,
    units_layout,
    unpack_residuals,
    weights_scale,
    without_empty_columns,
)


class _Weights(NamedTuple):
    """The weights of a forward program; `b_hn`, `bias` and `w_sum` are tiles that broadcast over sequences."""

    w: Any  # register operands by gate
    unscale: Any  # the factor that undoes the scale of `w`
    b_hn: Any
    bias: Any  # by gate
    w_sum: Any  # by gate


class _ForwardMemory(NamedTuple):
    """The shared memory of even or of odd forward steps."""

    operand: Any
    sums: Any  # slots of the sums of a norm
    slot: Any  # if SCALED, for the largest reset state if EARLY, or for the largest tangent of a state


class _ForwardCarry(NamedTuple):
    """The values that a forward step passes on to the next one; the latter is step i here."""

    states: Any
    scale: Any  # of hidden states, by sequence
    new: Any  # reset states of step i
    after: Any  # reset states of step i + 1 if EARLY
    new_scale: Any  # scale after a reset to `new`
    x: Any  # input projections of step i by gate
    reset: Any  # of step i
    statistics: Any  # of the inputs of step i, for the norm
    saved: Any  # residuals of step i - 1 or, of a tangent, of step i
    of_norm: Any  # of step i - 1


class _ForwardConfig(NamedTuple):
    """The compile-time values of a forward kernel."""

    STEP: Any
    RESIDUALS: Any
    GATES: Any
    SEPARATE: Any
    NORM_WIDTH: Any
    COUNT: Any
    RESET_STATE: Any
    H: Any
    BLOCK_B: Any
    REVERSE: Any
    SCALED: Any
    LATE: Any  # whether a step's results are stored during the next step's product; see the top of this file
    EARLY: Any  # whether registers can hold the reset states of the next two steps
    ZEROS: Any  # whether zeros in empty columns are faster
    UNITS: Any  # layout of a tile of states
    PIECES: Any  # whether sequences are cut into pieces
    TANGENT: Any  # whether the kernel runs the tangent


class _BackwardMemory(NamedTuple):
    """The shared memory of even or of odd backward steps."""

    operands: Any  # by gate
    slot: Any  # for the next bound
    sums: Any  # slots of the sums of a norm


class _BackwardCarry(NamedTuple):
    """The values that a backward step passes on to the next one; the latter is step i here."""

    dstates: Any
    saved: Any  # residuals of step i
    reset: Any  # of step i
    of_norm: Any  # of step i
    dys: Any  # gradients of the outputs of step i
    next_dys: Any  # those of step i + 1
    bound: Any  # see `_backward_step`


class _BackwardConfig(NamedTuple):
    """The compile-time values of a backward kernel."""

    GRAD_STEP: Any
    GATES: Any
    SEPARATE: Any
    NORM_WIDTH: Any
    PACKED: Any
    COUNT: Any
    STATES: Any
    H: Any
    BLOCK_B: Any
    REVERSE: Any
    SCALED: Any
    UNITS: Any  # layout of a tile of states
    TERMS: Any  # number of terms of a bound; see `_backward_step`
    PIECES: Any  # whether sequences are cut into pieces


@gluon.jit
def _load_weights(
    ptr, stride, NEXT: gl.constexpr, H: gl.constexpr, BLOCK_H: gl.constexpr, GATES: gl.constexpr,
    DTYPE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Loads the weights of all gates, whose matrices are NEXT elements apart, as register operands.

    Returns a tuple by gate, the factor that undoes the weights' scale, and the largest sum of a unit's absolute
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

    Even and odd steps have separate allocations, and the loop is unrolled by two. With one allocation indexed by the
    step, the compiler could not tell that adjacent steps access different memory, and would add barriers.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLS, BLOCK_H], DTYPE)
    operands = ()
    for _ in gl.static_range(COUNT):
        x = gl.allocate_shared_memory(DTYPE, [COLS, BLOCK_H], SHARED).permute([1, 0])
        operands += (x,)
    return operands


@gluon.jit
def _store_operand(buffer, x, scale, SCALED: gl.constexpr):
    """Stores `x`, multiplied by `scale` if SCALED, as an operand in shared memory."""
    if SCALED:
        buffer.store(to_operand(x * scale, buffer.dtype))
    else:
        buffer.store(to_operand(x, buffer.dtype))


@gluon.jit
def _allocate_slots(COUNT: gl.constexpr, COLS: gl.constexpr, ORDER: gl.constexpr):
    """Allocates COUNT arrays of one value per warp and sequence; with the order [0, 1], warps' values are adjacent."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, ORDER)
    slots = ()
    for _ in gl.static_range(COUNT):
        slots += (gl.allocate_shared_memory(gl.float32, [gl.num_warps(), COLS], PLAIN),)
    return slots


@gluon.jit
def _store_by_warp(slot, x, REDUCE: gl.constexpr):
    """Stores, for each warp and sequence, `x` reduced over the warp's units by REDUCE, `gl.sum` or `gl.max`."""
    slot.store(REDUCE(x.reshape([gl.num_warps(), 16, x.shape[1]]), axis=1))


@gluon.jit
def _load_over_warps(slot, UNITS: gl.constexpr, REDUCE: gl.constexpr):
    """Returns by sequence what `_store_by_warp` stored, reduced over all warps; a barrier must come in between."""
    SLOT: gl.constexpr = slot_layout(gl.num_warps())
    return gl.convert_layout(REDUCE(slot.load(SLOT), axis=0), gl.SliceLayout(0, UNITS), assert_trivial=True)


@gluon.jit
def _load_step(a, tile, rows, H: gl.constexpr, INPUTS: gl.constexpr):
    """Loads the inputs of a forward step: INPUTS arrays of `xp`, resets, and the statistics that a norm needs."""
    x = load_inputs(a.xp_ptr + rows[None, :] * (INPUTS * H) + tile.unit[:, None], tile.mask, H, INPUTS)
    reset = load_resets(a.reset_ptr, rows, tile.mask_q)
    return x, reset, load_statistics(a.x_norm_ptr, a.x_mean_ptr, rows, tile.mask_q)


@gluon.jit
def _store_results(i, states, saved, of_norm, a, tile, config: gl.constexpr):
    """Stores the results of step i, if there is such a step."""
    step_rows = forward_rows(tile, gl.maximum(i, 0), config.REVERSE)
    rows = step_rows[None, :]
    unit = tile.unit[:, None]
    live = runs(tile.mask & (i >= 0), tile, i, config.PIECES)
    at = rows * config.H + unit
    store_states(a.hs_ptr, a.cs_ptr, at, states, live)
    if a.local_grads_ptr is not None and not config.TANGENT:
        store_residuals(a, rows, unit, live, saved, config.H, config.COUNT)
        if a.norm_state_ptr is not None:
            gl.store(a.norm_state_ptr + at, of_norm[0], mask=live)
            gl.store(a.scale_ptr + step_rows, of_norm[1], mask=tile.mask_q & (i >= 0) & (i < tile.steps))
    last = tile.seq[None, :] * config.H + unit
    store_states(a.h_last_ptr, a.c_last_ptr, last, states, is_last_step(tile, i, config.PIECES))


@gluon.jit
def _forward_step(i, carry, memory, weights, zeros, a, tile, config: gl.constexpr):
    """Runs step i, and loads the inputs of step i + 1.

    If EARLY, loads the reset states of step i + 2, and computes the scale for step i + 1 through `slot`.

    If LATE, stores the results of step i - 1, which are in `carry`; otherwise stores those of step i. `a` are the
    arrays.
    """
    GATES: gl.constexpr = config.GATES
    NORM_WIDTH: gl.constexpr = config.NORM_WIDTH
    H: gl.constexpr = config.H
    SCALED: gl.constexpr = config.SCALED
    EARLY: gl.constexpr = config.EARLY
    UNITS: gl.constexpr = config.UNITS
    states, scale, new, after, new_scale, x, reset, statistics, saved, of_norm = carry
    next_rows = forward_rows(tile, i + 1, config.REVERSE)
    # The next inputs are loaded before the product if registers can hold the inputs of two steps: always, except in
    # float32 if the tile has sixteen sequences.
    PREFETCH_INPUTS: gl.constexpr = zeros.shape[1] <= 8 or a.xp_ptr.dtype.element_ty != gl.float32
    INPUTS: gl.constexpr = len(x)
    if PREFETCH_INPUTS:
        next_x, next_reset, next_statistics = _load_step(a, tile, next_rows, H, INPUTS)
    if config.TANGENT:
        local_grads, factors = unpack_residuals(saved, config.COUNT, False)
        saved = load_residuals(a, next_rows[None, :], tile.unit[:, None], tile.mask, H, config.COUNT, False)
    next_new = new
    next_scale = new_scale
    if EARLY:
        next_new = after
        rows = forward_rows(tile, i + 2, config.REVERSE)
        after = load_states(a.reset_h_ptr, a.reset_c_ptr, rows[None, :] * H + tile.unit[:, None], tile.mask)
        if SCALED:
            _store_by_warp(memory.slot, gl.abs(next_new[0]), gl.max)
    before = states
    if a.reset_ptr is not None:
        if config.RESET_STATE == RESET_STEPPED and not EARLY:
            rows = forward_rows(tile, i, config.REVERSE)
            at = rows[None, :] * H + tile.unit[:, None]
            of_episode = load_states(a.reset_h_ptr, a.reset_c_ptr, at, tile.mask & reset[None, :])
        else:
            of_episode = new
        before, scale = scaled_reset_states(
            states, scale, reset, of_episode, new_scale, config.RESET_STATE, EARLY, SCALED and not config.TANGENT
        )  # fmt: skip
    if config.TANGENT and SCALED:  # tangents have no bound that is known before the step
        _store_by_warp(memory.slot, gl.abs(before[0]), gl.max)
        barrier()
        scale = scale_to_float16(_load_over_warps(memory.slot, UNITS, gl.max), 14)[None, :]
    _store_operand(memory.operand, before[0], scale, SCALED)
    if NORM_WIDTH > 0:
        _store_by_warp(memory.sums[0], before[0] * before[0], gl.sum)
        if a.x_mean_ptr is not None:
            _store_by_warp(memory.sums[1], before[0], gl.sum)
    barrier()
    if config.LATE:
        _store_results(i - 1, states, saved, of_norm, a, tile, config)
    operand = memory.operand.load(gl.DotOperandLayout(1, zeros.type.layout, 2))
    started = ()  # products in the order in which they start; `product_order` is its own inverse
    for k in gl.static_range(GATES):
        started += (by_unit(mma_v2(weights.w[product_order(k, GATES)], operand, zeros), UNITS),)
    if NORM_WIDTH > 0:
        # the sum of squares of the state and, for LayerNorm, its sum
        of_state = (_load_over_warps(memory.sums[0], UNITS, gl.sum),)
        if a.x_mean_ptr is not None:
            of_state += (_load_over_warps(memory.sums[1], UNITS, gl.sum),)
        norm_scale = scale_of_norm(of_state, statistics, H, NORM_WIDTH)
    products = ()
    unscale = scale
    if SCALED:
        unscale = inverse(scale) * weights.unscale
    for gate in gl.static_range(GATES):
        product = started[product_order(gate, GATES)]
        if SCALED:
            product = product * unscale
        products += (product,)
    if not PREFETCH_INPUTS:
        next_x, next_reset, next_statistics = _load_step(a, tile, next_rows, H, INPUTS)
    if EARLY and SCALED:
        next_scale = scale_from_largest(_load_over_warps(memory.slot, UNITS, gl.max))[None, :]
    if a.x_mean_ptr is not None:
        x = subtract_mean(x, statistics[1][None, :], weights.w_sum)
    if config.TANGENT:
        states = config.STEP(products, x, before, local_grads, factors)
    else:
        gates = add_inputs(products, x, weights.b_hn, config.SEPARATE)
        if NORM_WIDTH > 0:
            normalized, gates = normalize(gates, norm_scale[None, :], weights.bias)
        states, activations = config.STEP(gates, x[GATES - 1].to(gl.float32), before, "fast")
    if config.ZEROS:
        states = states_without_empty_columns(states, config.BLOCK_B)
    if a.local_grads_ptr is not None and not config.TANGENT:
        local_grads, factors = config.RESIDUALS(activations, before)
        if NORM_WIDTH > 0:
            local_grads = with_norm_grad(local_grads, normalized)
            norm_state = normalized_state(before[0], of_state, statistics, norm_scale, H, NORM_WIDTH)
            of_norm = (norm_state.to(a.norm_state_ptr.dtype.element_ty), norm_scale)
        saved = pack_residuals(local_grads, factors, a.dc_dh_ptr)
    if not config.LATE:
        _store_results(i, states, saved, of_norm, a, tile, config)
    return _ForwardCarry(
        states, scale, next_new, after, next_scale, next_x, next_reset, next_statistics, saved, of_norm
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "pieces"], repr=names.of_loop("resident", "fwd"))
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr, reset_h_ptr,
    reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr,
    scale_ptr,
    T, B, Q, tiles, pieces,
    STEP: gl.constexpr, RESIDUALS: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, FACTORS: gl.constexpr,
    NORM_WIDTH: gl.constexpr, RESET_STATE: gl.constexpr, H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr,
    REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass or, if RESIDUALS is None, its tangent, as `streamed.forward_kernel` explains.

    The arrays are those of `arrays.Forward`.
    """
    TANGENT: gl.constexpr = RESIDUALS is None
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = columns(BLOCK_B)
    COUNT: gl.constexpr = GATES + 1 if SEPARATE or NORM_WIDTH > 0 else GATES
    LATE: gl.constexpr = (GATES < 4 and NORM_WIDTH == 0) or BLOCK_H < 128 or BLOCK_B < 8
    EARLY: gl.constexpr = (
        RESET_STATE == RESET_STEPPED and not TANGENT and (c0_ptr is None or BLOCK_H < 128 or BLOCK_B < 8)
    )
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    ZEROS: gl.constexpr = BLOCK_B == 1 or GATES < 4 or (SCALED and BLOCK_H == 128)
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_t_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    UNITS: gl.constexpr = units_layout(WARPS, COLS)
    config: gl.constexpr = _ForwardConfig(
        STEP, RESIDUALS, GATES, SEPARATE, NORM_WIDTH, COUNT, RESET_STATE, H, BLOCK_B, REVERSE, SCALED, LATE, EARLY,
        ZEROS, UNITS, pieces is not None, TANGENT,
    )  # fmt: skip
    a = arrays.Forward(
        w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr,
        reset_h_ptr, reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
        norm_state_ptr, scale_ptr,
    )  # fmt: skip
    model = (gl.program_id(0) // tiles).to(gl.int64)
    nth = gl.program_id(0) % tiles
    sizes = arrays.Sizes(T, B, Q, pieces)
    if pieces is not None:
        piece = locate_piece(model, nth, sizes, reset_ptr, REVERSE)
        if piece.steps == 0:
            return
    w, w_unscale, _ = _load_weights(
        w_hh_t_ptr + model * (GATES * H * H), H, H * H, H, BLOCK_H, GATES, DTYPE, ACC
    )  # fmt: skip

    if pieces is None:
        tile = locate_tile(model, nth, sizes, H, BLOCK_H, BLOCK_B, REVERSE, UNITS)
    else:
        tile = locate_tile_of_piece(piece, T, H, BLOCK_H, BLOCK_B, UNITS)
    unit = tile.unit
    b_hn = 0.0
    if SEPARATE and not TANGENT:
        b_hn = gl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(gl.float32)[:, None]
    bias = load_biases(bias_ptr, model, unit, H, GATES, True)
    w_sum = load_biases(w_sum_ptr, model, unit, H, GATES, True)
    weights = _Weights(w, w_unscale, b_hn, bias, w_sum)
    first = tile.seq[None, :] * H + unit[:, None]
    states = load_states(h0_ptr, c0_ptr, first, tile.mask)
    scale = gl.full([1, COLS], 1.0, gl.float32, UNITS)
    new = fixed_reset_states(reset_h_ptr, reset_c_ptr, first, tile.mask, RESET_STATE)
    after = new
    if EARLY:
        rows = forward_rows(tile, 0, REVERSE)
        new = load_states(reset_h_ptr, reset_c_ptr, rows[None, :] * H + unit[:, None], tile.mask)
        rows = forward_rows(tile, 1, REVERSE)
        after = load_states(reset_h_ptr, reset_c_ptr, rows[None, :] * H + unit[:, None], tile.mask)
    new_scale = scale
    if SCALED:
        scale = scale_from_magnitudes(gl.abs(states[0]))[None, :]
        if RESET_STATE == RESET_FIXED or EARLY:
            new_scale = scale_from_magnitudes(gl.abs(new[0]))[None, :]
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    even = _allocate_operands(1, COLS, BLOCK_H, DTYPE)
    odd = _allocate_operands(1, COLS, BLOCK_H, DTYPE)
    SUMS: gl.constexpr = 0 if NORM_WIDTH == 0 else 1 if x_mean_ptr is None else 2
    # with four warps and few sequences, sums that are adjacent in shared memory are faster
    ORDER: gl.constexpr = [0, 1] if BLOCK_H < 128 and BLOCK_B < 8 else [1, 0]
    SLOTS: gl.constexpr = 1 if (EARLY or TANGENT) and SCALED else 0
    gl.static_assert(COLS == 8 or SLOTS == 0, "the layout of a slot has eight columns")
    even_sums = _allocate_slots(SUMS, COLS, ORDER)
    odd_sums = _allocate_slots(SUMS, COLS, ORDER)
    even_slot = _allocate_slots(SLOTS, COLS, [0, 1]) + (0,)  # 0 is a placeholder if there is no slot
    odd_slot = _allocate_slots(SLOTS, COLS, [0, 1]) + (0,)
    even_memory = _ForwardMemory(even[0], even_sums, even_slot[0])
    odd_memory = _ForwardMemory(odd[0], odd_sums, odd_slot[0])

    first_rows = tile.row + step_time(0, T, REVERSE) * tile.stride
    INPUTS: gl.constexpr = len(states) if TANGENT else GATES
    x, reset, statistics = _load_step(a, tile, first_rows, H, INPUTS)
    saved = ()
    of_norm = ()
    if TANGENT:
        saved = load_residuals(a, first_rows[None, :], unit[:, None], tile.mask, H, COUNT, False)
    elif local_grads_ptr is not None:  # placeholders, which are not stored, because no step has run yet
        if NORM_WIDTH > 0:
            saved = no_residuals(states[0], dc_dh_ptr, COUNT, 1)
            of_norm = (states[0].to(norm_state_ptr.dtype.element_ty), statistics[0])
        else:
            saved = no_residuals(states[0], dc_dh_ptr, COUNT, FACTORS)
    carry = _ForwardCarry(states, scale, new, after, new_scale, x, reset, statistics, saved, of_norm)
    barrier()
    for i in range(0, tile.longest, 2):
        carry = _forward_step(i, carry, even_memory, weights, zeros, a, tile, config)
        carry = _forward_step(i + 1, carry, odd_memory, weights, zeros, a, tile, config)
    if LATE:
        steps = (tile.longest + 1) // 2 * 2  # number of steps that the loop ran, a multiple of two
        _store_results(steps - 1, carry.states, carry.saved, carry.of_norm, a, tile, config)


@gluon.jit
def _load_saved(a, tile, rows, H: gl.constexpr, COUNT: gl.constexpr, PACKED: gl.constexpr):
    """Loads what a backward step reads of the forward pass; returns the residuals, the resets, and `of_norm`."""
    of_norm = ()
    if a.norm_state_ptr is not None:
        norm_state = gl.load(a.norm_state_ptr + rows[None, :] * H + tile.unit[:, None], mask=tile.mask, other=0.0)
        of_norm = (norm_state, gl.load(a.scale_ptr + rows, mask=tile.mask_q, other=1.0))
    saved = load_residuals(a, rows[None, :], tile.unit[:, None], tile.mask, H, COUNT, PACKED)
    return saved, load_resets(a.reset_ptr, rows, tile.mask_q), of_norm


@gluon.jit
def _sum_of_magnitudes(values):
    """Returns the sum of the absolute values of a tuple's elements."""
    total = gl.abs(values[0].to(gl.float32))
    for k in gl.static_range(1, len(values)):
        total += gl.abs(values[k].to(gl.float32))
    return total


@gluon.jit
def _multiply(w, operands, zeros, GATES: gl.constexpr):
    """Returns the sum over gates of weights times operands.

    The products have independent accumulators, so that they overlap: two for four gates, otherwise one per gate.
    """
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
def _backward_step(i, carry, memory, weights, zeros, a, tile, config: gl.constexpr):
    """Runs step i, and loads the residuals of step i + 1 and the gradients of the outputs of step i + 2.

    Step 0 is the last in the order of the forward pass.

    The operands are stored in float16, and their scale must be known before them. Each step therefore computes an upper
    bound on the magnitudes of the next step's gradients: `bound`, per sequence, bounds the gradients of all states,
    including those that come from the outputs. With L = `w_bound`, the largest sum of a unit's absolute weights, the
    gradient of a state in the next step is at most the sum of these terms, each at its maximum over units:
      |gradients of the next step's outputs|, a term for each state
      |gradient that reaches the next step without a product| (`kept`)
      L |gradients of the gates|
      |y D s / n| if the cell has a norm, with the names of `streamed.py`
    A sum of maxima needs a reduction over units for each term. Each unit instead adds up its own terms, and the largest
    of these sums times the number of terms (TERMS) is an upper bound, too. Where an episode starts, only the terms of
    the outputs remain. `a` are the arrays.
    """
    GATES: gl.constexpr = config.GATES
    NORM_WIDTH: gl.constexpr = config.NORM_WIDTH
    STATES: gl.constexpr = config.STATES
    H: gl.constexpr = config.H
    SCALED: gl.constexpr = config.SCALED
    UNITS: gl.constexpr = config.UNITS
    mask = tile.mask
    w, w_unscale, w_bound = weights
    dstates, saved, this_reset, this_norm, this_dys, dys, bound = carry
    ROOMY: gl.constexpr = GATES < 4  # there are registers to overlap memory accesses with products
    live = runs(mask, tile, i, config.PIECES)  # nothing is stored for a step past the last
    local_grads, factors = unpack_residuals(saved, config.COUNT, config.PACKED)
    if ROOMY:
        next_rows = backward_rows(tile, i + 1, config.REVERSE)
        saved, reset, of_norm = _load_saved(a, tile, next_rows, H, config.COUNT, config.PACKED)
        next_rows = backward_rows(tile, i + 2, config.REVERSE)
        next_dys = load_gradients(a.dhs_ptr, a.dcs_ptr, next_rows, tile.unit, mask, H)

    dh = dstates[0] + this_dys[0].to(gl.float32)
    if NORM_WIDTH > 0:
        _store_by_warp(memory.sums[0], dh * local_grads[GATES], gl.sum)
        norm_scale = this_norm[1][None, :]
        unscaled, carried = config.GRAD_STEP((dh,), local_grads[:GATES], factors)
        grads = scaled(unscaled, norm_scale)
        kept = gl.abs(dh)
    elif STATES == 1:
        grads, carried = config.GRAD_STEP((dh,), local_grads, factors)
        kept = gl.abs(dh)
    else:
        dc = dstates[1] + dh * factors[0]
        if a.dcs_ptr is not None:
            dc += this_dys[1].to(gl.float32)
        grads, carried = config.GRAD_STEP((dh, dc), local_grads, factors)
        kept = gl.abs(carried[0])
    scale = zeros  # placeholders, which are not used unless SCALED
    unscale = zeros
    if SCALED:
        # The scaled bound is in [1, 2). float16 ends at 65504, so local gradients may exceed one: a sigmoid's may be a
        # quarter of |h| or |c|.
        if NORM_WIDTH > 0:
            scale = scale_to_float16(bound * this_norm[1], 0)[None, :]
        else:
            scale = scale_to_float16(bound, 0)[None, :]
        unscale = inverse(scale) * w_unscale
    rows = tile.row + step_time(tile.steps - 1 - i, tile.T, config.REVERSE) * tile.stride
    at = rows[None, :] * H + tile.unit[:, None]
    dxp = a.dxp_ptr + rows[None, :] * (GATES * H) + tile.unit[:, None]
    store_totals(a, at, dh, dstates, this_dys, live)
    multiplied = operands_of(grads, GATES)
    for gate in gl.static_range(GATES):
        _store_operand(memory.operands[gate], multiplied[gate], scale, SCALED)
        if not ROOMY:
            gl.store(dxp + gate * H, grads[gate].to(a.dxp_ptr.dtype.element_ty), mask=live)
    if ROOMY:
        barrier()
        product = _multiply(w, memory.operands, zeros, GATES)

    if NORM_WIDTH > 0:
        dnorm = _load_over_warps(memory.sums[0], UNITS, gl.sum)  # D in `streamed.py`; `of_state` is y D s / n
        gl.store(a.dnorm_ptr + rows, dnorm, mask=tile.mask_q & (i < tile.steps))
        of_state = this_norm[0].to(gl.float32) * (this_norm[1] * dnorm * (1.0 / NORM_WIDTH))[None, :]
    # if ROOMY, this overlaps with the product
    if SCALED:
        largest = gl.abs(multiplied[0])
        for gate in gl.static_range(1, GATES):
            largest = gl.maximum(largest, gl.abs(multiplied[gate]))
        largest = kept + w_bound * largest
        if NORM_WIDTH > 0:
            largest += gl.abs(of_state)
        if a.reset_ptr is not None:
            largest = gl.where(this_reset[None, :], 0.0, largest)
        _store_by_warp(memory.slot, largest + _sum_of_magnitudes(dys), gl.max)
        if ROOMY:
            barrier()
    if ROOMY:
        for gate in gl.static_range(GATES):
            gl.store(dxp + gate * H, grads[gate].to(a.dxp_ptr.dtype.element_ty), mask=live)
    else:
        barrier()
        product = _multiply(w, memory.operands, zeros, GATES)
        next_rows = backward_rows(tile, i + 1, config.REVERSE)
        saved, reset, of_norm = _load_saved(a, tile, next_rows, H, config.COUNT, config.PACKED)
        next_rows = backward_rows(tile, i + 2, config.REVERSE)
        next_dys = load_gradients(a.dhs_ptr, a.dcs_ptr, next_rows, tile.unit, mask, H)
    if config.SEPARATE:
        gl.store(a.dhn_ptr + at, grads[GATES].to(a.dhn_ptr.dtype.element_ty), mask=live)
    if SCALED:
        bound = without_empty_columns(config.TERMS * _load_over_warps(memory.slot, UNITS, gl.max), config.BLOCK_B)

    product = by_unit(product, UNITS)
    if SCALED:
        product = product * unscale
    if STATES == 1 and len(carried) > 0:
        product = carried[0] + product
    if NORM_WIDTH > 0:
        product -= of_state
    dstates = (product,)
    if STATES > 1:
        dstates += carried
    dstates = states_without_empty_columns(dstates, config.BLOCK_B)
    if a.reset_ptr is not None:
        dstates = reset_gradients(dstates, this_reset[None, :], a.dreset_h_ptr, a.dreset_c_ptr, at, live)
    first = tile.seq[None, :] * H + tile.unit[:, None]
    if ROOMY:
        store_states(a.dh0_ptr, a.dc0_ptr, first, dstates, is_first_step(tile, i, config.PIECES))
    elif (i == tile.steps - 1) & (tile.begin == 0):
        # without a branch, the next step's residuals would be loaded late, and their addresses computed early
        store_states(a.dh0_ptr, a.dc0_ptr, first, dstates, mask)
    return _BackwardCarry(dstates, saved, reset, of_norm, dys, next_dys, bound)


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "pieces"], repr=names.of_loop("resident", "bwd"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
    dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
    total_dh_ptr, total_dc_ptr,
    T, B, Q, tiles, pieces,
    GRAD_STEP: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, NORM_WIDTH: gl.constexpr,
    PACKED: gl.constexpr, H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; the arrays are those of `arrays.Backward`."""
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = columns(BLOCK_B)
    COUNT: gl.constexpr = GATES + 1 if SEPARATE or NORM_WIDTH > 0 else GATES
    STATES: gl.constexpr = 1 if dc0_ptr is None else 2
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    UNITS: gl.constexpr = units_layout(WARPS, COLS)
    config: gl.constexpr = _BackwardConfig(
        GRAD_STEP, GATES, SEPARATE, NORM_WIDTH, PACKED, COUNT, STATES, H, BLOCK_B, REVERSE, SCALED, UNITS,
        2.0 + STATES + (1 if NORM_WIDTH > 0 else 0), pieces is not None,
    )  # fmt: skip
    a = arrays.Backward(
        w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
        dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
        total_dh_ptr, total_dc_ptr,
    )  # fmt: skip
    model = (gl.program_id(0) // tiles).to(gl.int64)
    nth = gl.program_id(0) % tiles
    sizes = arrays.Sizes(T, B, Q, pieces)
    if pieces is not None:
        piece = locate_piece(model, nth, sizes, reset_ptr, REVERSE)
        if piece.steps == 0:
            return
    weights = _load_weights(
        w_hh_ptr + model * (GATES * H * H), GATES * H, H, H, BLOCK_H, GATES, DTYPE, ACC
    )  # fmt: skip

    if pieces is None:
        tile = locate_tile(model, nth, sizes, H, BLOCK_H, BLOCK_B, REVERSE, UNITS)
    else:
        tile = locate_tile_of_piece(piece, T, H, BLOCK_H, BLOCK_B, UNITS)
    dstates = load_states(
        dh_last_ptr, dc_last_ptr, tile.seq[None, :] * H + tile.unit[:, None], has_last_step(tile, config.PIECES)
    )
    zeros = gl.zeros([BLOCK_H, COLS], gl.float32, ACC)
    even = _allocate_operands(GATES, COLS, BLOCK_H, DTYPE)
    odd = _allocate_operands(GATES, COLS, BLOCK_H, DTYPE)
    even_slot = _allocate_slots(1, COLS, [1, 0])[0]
    odd_slot = _allocate_slots(1, COLS, [1, 0])[0]
    SUMS: gl.constexpr = 1 if NORM_WIDTH > 0 else 0
    even_sums = _allocate_slots(SUMS, COLS, [1, 0])
    odd_sums = _allocate_slots(SUMS, COLS, [1, 0])
    even_memory = _BackwardMemory(even, even_slot, even_sums)
    odd_memory = _BackwardMemory(odd, odd_slot, odd_sums)

    rows = tile.row + step_time(tile.steps - 1, T, REVERSE) * tile.stride
    saved, reset, of_norm = _load_saved(a, tile, rows, H, COUNT, PACKED)
    dys = load_gradients(dhs_ptr, dcs_ptr, rows, tile.unit, tile.mask, H)
    rows = tile.row + step_time(gl.maximum(tile.steps - 2, 0), T, REVERSE) * tile.stride
    next_dys = load_gradients(dhs_ptr, dcs_ptr, rows, tile.unit, tile.mask, H)
    if STATES == 1:
        bound = gl.max(gl.abs(dstates[0] + dys[0].to(gl.float32)), axis=0)
    else:
        bound = gl.max(_sum_of_magnitudes(dstates) + _sum_of_magnitudes(dys), axis=0)
    if config.PIECES:  # a step after which an episode starts has the bound that the loop computes for it
        bound = gl.where(tile.begin + tile.steps == T, bound, config.TERMS * bound)
    carry = _BackwardCarry(dstates, saved, reset, of_norm, dys, next_dys, bound)
    barrier()
    for i in range(0, tile.longest, 2):
        carry = _backward_step(i, carry, even_memory, weights, zeros, a, tile, config)
        carry = _backward_step(i + 1, carry, odd_memory, weights, zeros, a, tile, config)
