"""Time loop in Triton that runs every cell and every problem. `kernels.cells` has the arithmetic of a cell.

A program owns BLOCK_B sequences and BLOCK_H hidden units. With SPLITS == 1 it owns all units: the weights and the
carried states stay on chip. Otherwise SPLITS programs share the units of a tile, read ("stream") their weights from L2
at every step, and meet at a barrier once per step. They exchange the operands of the next product, which are hidden
states (forward) or gate gradients (backward), through two buffers in L2 that are written in turn. Such a launch must be
cooperative, or cover only one step (in the backward pass, one phase of a step), so that the end of the launch is the
barrier. A program keeps the further states of its own units.

If a GRU's forward pass gets no array for the carry gate, it stores the residuals in place of the input projections, as
words (`common.pack_words`), and the backward pass stores the gradients of the gates in place of the words. Each word
depends on the projection that it overwrites, and each gradient on the word that it overwrites, so every read comes
before the write.

With NORM_WIDTH n > 0, the gates see a norm of `[x, h]`, inputs and state, of n elements: they are `s (xp + hp) + bias`,
where `s = (q / n + x_norm)^-1/2` and q is the sum of squares of h, the state before the step. With `x_mean`, the norm
is LayerNorm: the caller centers the weights, q is the sum of squares of h without its mean, and the variance also
contains the difference of the means of h and x. The caller then computes `xp` from inputs without their mean m, and the
gates are `s (xp + hp - m w_sum) + bias`: as the centered weights of inputs and state add up to zero, that is the same,
but m is not multiplied by rounded weights.
Programs that share the units exchange their parts of q with the operands. In the backward pass k, the last local
gradient, is the sum over gates of the local gradient times `s (xp + hp)`. With D the sum over units of dh k, and y the
normalized state, the gradient of h is `s (W^T dgates - y D / n)`, plus what goes straight to h. The loop stores and
multiplies `s dgates`, the gradients of `xp`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_bridge.kernels import arrays, names
from torch_bridge.kernels.common import (
    first_row,
    load_biases,
    load_local_grads,
    load_reset,
    load_weight,
    normalize,
    operand,
    operands_of,
    pack_float16x4,
    pack_words,
    rounded_product,
    scaled,
    start_afresh,
    step_time,
    store_local_grads,
    subtract_mean,
    time_order,
    unpack_words,
    with_norm_grad,
)
from torch_bridge.kernels.loops.streamed_common import (
    arrive,
    load_exchanged,
    load_tile,
    select_reset,
    store_tile,
    stream_weight,
    wait,
)


class _ForwardConfig(NamedTuple):
    """The compile-time values of a forward kernel."""

    STEP: Any
    RESIDUALS: Any
    GATES: Any
    SEPARATE: Any
    NORM_WIDTH: Any
    H: Any
    BLOCK_H: Any
    BLOCK_B: Any
    BLOCK_K: Any
    SPLITS: Any
    STAGES: Any
    RESET_STATE: Any
    REVERSE: Any
    PRECISION: Any
    TANGENT: Any  # whether the kernel runs the tangent; see `forward_kernel`


class _BackwardConfig(NamedTuple):
    """The compile-time values of a backward kernel."""

    GRAD_STEP: Any
    GATES: Any
    SEPARATE: Any
    NORM_WIDTH: Any
    PACKED: Any
    H: Any
    BLOCK_H: Any
    BLOCK_B: Any
    BLOCK_K: Any
    SPLITS: Any
    STAGES: Any
    REVERSE: Any
    PRECISION: Any
    GATES_PHASE: Any
    PRODUCT_PHASE: Any


@triton.jit
def _load_states(h_ptr, c_ptr, seq, unit, mask, H: tl.constexpr):
    """Loads the states of one step, one or two."""
    states = (load_tile(h_ptr, seq, unit, H, mask),)
    if c_ptr is not None:
        states += (load_tile(c_ptr, seq, unit, H, mask),)
    return states


@triton.jit
def _store_states(h_ptr, c_ptr, seq, unit, mask, states, H: tl.constexpr):
    store_tile(h_ptr, seq, unit, H, mask, states[0])
    if c_ptr is not None:
        store_tile(c_ptr, seq, unit, H, mask, states[1])


@triton.jit
def _load_gates(ptr, rows, unit, mask, H: tl.constexpr, GATES: tl.constexpr):
    """Loads a step's input projections; returns a tuple by gate."""
    gates = ()
    for gate in tl.static_range(GATES):
        gates += (load_tile(ptr, rows, gate * H + unit, GATES * H, mask),)
    return gates


@triton.jit
def _store_gates(ptr, rows, unit, mask, values, H: tl.constexpr, GATES: tl.constexpr):
    """Stores a value per gate, `values[:GATES]`."""
    for gate in tl.static_range(GATES):
        store_tile(ptr, rows, gate * H + unit, GATES * H, mask, values[gate])


@triton.jit
def _resident_weights(ptr, unit, STRIDE: tl.constexpr, NEXT: tl.constexpr, H: tl.constexpr, GATES: tl.constexpr):
    """Loads the weights of each gate; the matrices of adjacent gates are NEXT elements apart."""
    weights = ()
    for gate in tl.static_range(GATES):
        weights += (load_weight(ptr + gate * NEXT, unit, unit, H, STRIDE),)
    return weights


@triton.jit
def _store_residuals(a, rows, tile, local_grads, factors, H: tl.constexpr, NORM_WIDTH: tl.constexpr):
    """Stores a step's residuals: if there is no array for a carry gate, as words that may overwrite the projections."""
    BOUNDED: tl.constexpr = NORM_WIDTH == 0
    unit, mask = tile.unit, tile.mask
    if len(factors) > 0 and a.carry_gate_ptr is None:
        words_ptr = a.local_grads_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        first, second, third = pack_words(pack_float16x4(*local_grads, BOUNDED), factors[0])
        store_tile(words_ptr, rows, unit, 3 * H, mask, first)
        store_tile(words_ptr, rows, H + unit, 3 * H, mask, second)
        store_tile(words_ptr, rows, 2 * H + unit, 3 * H, mask, third)
    else:
        store_local_grads(a.local_grads_ptr, rows, unit, mask, local_grads, H, BOUNDED)
        if a.dc_dh_ptr is not None:
            store_tile(a.dc_dh_ptr, rows, unit, H, mask, factors[0])
        if a.carry_gate_ptr is not None:
            store_tile(a.carry_gate_ptr, rows, unit, H, mask, factors[-1])


@triton.jit
def _load_residuals(a, rows, tile, H: tl.constexpr, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """Loads what `_store_residuals` stored: COUNT local gradients, and the factors."""
    unit, mask = tile.unit, tile.mask
    if PACKED:
        words_ptr = a.local_grads_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        at = words_ptr + (rows[None, :] * (3 * H) + unit[:, None])
        first = tl.load(at, mask=mask, other=0)
        second = tl.load(at + H, mask=mask, other=0)
        third = tl.load(at + 2 * H, mask=mask, other=0)
        a, b, c, d, carry_gate = unpack_words(first, second, third)
        return (a, b, c, d), (carry_gate,)
    else:
        local_grads = load_local_grads(a.local_grads_ptr, rows, unit, mask, H, COUNT)
        factors = ()
        if a.dc_dh_ptr is not None:
            factors += (load_tile(a.dc_dh_ptr, rows, unit, H, mask),)
        if a.carry_gate_ptr is not None:
            factors += (load_tile(a.carry_gate_ptr, rows, unit, H, mask),)
        return local_grads, factors


@triton.jit
def _sums_of_states(h, unit, mask_q, H: tl.constexpr, CENTERED: tl.constexpr):
    """Returns what a norm needs of the state, summed over this program's units: sum of squares, and sum if CENTERED."""
    h = tl.where((unit < H)[:, None] & mask_q[None, :], h, 0.0)
    sums = (tl.sum(rounded_product(h, h), axis=0),)
    if CENTERED:
        sums += (tl.sum(h, axis=0),)
    return sums


@triton.jit
def _store_sums(ptr, offs_b, mask_q, split, sums, SPLITS: tl.constexpr):
    """Stores this program's sums by sequence in an array `[B, len(sums), SPLITS]`."""
    COUNT: tl.constexpr = len(sums)
    for k in tl.static_range(COUNT):
        tl.store(ptr + (offs_b * COUNT + k) * SPLITS + split, sums[k], mask=mask_q)


@triton.jit
def _load_sums(ptr, offs_b, mask_q, COUNT: tl.constexpr, SPLITS: tl.constexpr):
    """Returns the sums over all programs that `_store_sums` stored, added in the same order by every program."""
    sums = ()
    for k in tl.static_range(COUNT):
        total = tl.zeros_like(offs_b).to(tl.float32)
        for split in range(SPLITS):
            at = ptr + (offs_b * COUNT + k) * SPLITS + split
            total += tl.load(at, mask=mask_q, other=0.0, cache_modifier=".cg")
        sums += (total,)
    return sums


@triton.jit
def _scale_and_mean(x_norm_ptr, x_mean_ptr, rows, mask_q, sums, H: tl.constexpr, NORM_WIDTH: tl.constexpr):
    """Returns the factor `s` of a step's norm, and the mean of inputs and state, which is zero without `x_mean`."""
    variance = tl.load(x_norm_ptr + rows, mask=mask_q, other=1.0)
    if x_mean_ptr is None:
        variance += sums[0] / NORM_WIDTH
        mean = tl.zeros_like(variance)
    else:
        INPUTS: tl.constexpr = NORM_WIDTH - H
        x_mean = tl.load(x_mean_ptr + rows, mask=mask_q, other=0.0)
        apart = sums[1] / H - x_mean
        variance += (sums[0] - sums[1] * (sums[1] / H)) / NORM_WIDTH
        variance += apart * apart * (H * INPUTS / (NORM_WIDTH * NORM_WIDTH))
        mean = x_mean + apart * (H / NORM_WIDTH)
    return 1.0 / tl.sqrt(variance), mean


@triton.jit
def _select_resets(states, a, reset, rows, tile, H: tl.constexpr, RESET_STATE: tl.constexpr):
    """Returns the states that a step sees: reset states where an episode starts."""
    seq, unit, mask = tile.seq, tile.unit, tile.mask
    new = (select_reset(states[0], a.reset_h_ptr, reset, seq, rows, unit, mask, H, RESET_STATE),)
    if len(states) > 1:
        new += (select_reset(states[1], a.reset_c_ptr, reset, seq, rows, unit, mask, H, RESET_STATE),)
    return new


@triton.jit
def _forward_tile(
    a, T, B, Q, models, t_begin, t_end, model, nth, split, arrivals, config: tl.constexpr
):  # fmt: skip
    """Runs the steps from `t_begin` to `t_end` of tile `nth` of a model; returns the arrivals at the barrier so far.

    `a` are the arrays.
    """
    GATES: tl.constexpr = config.GATES
    NORM_WIDTH: tl.constexpr = config.NORM_WIDTH
    H: tl.constexpr = config.H
    SPLITS: tl.constexpr = config.SPLITS
    DTYPE: tl.constexpr = a.w_hh_t_ptr.dtype.element_ty
    ACCURACY: tl.constexpr = "precise" if DTYPE == tl.float32 and config.PRECISION != "tf32" else "plain"
    HAS_RESETS: tl.constexpr = a.reset_ptr is not None
    EVEN: tl.constexpr = H % config.BLOCK_K == 0
    CENTERED: tl.constexpr = a.x_mean_ptr is not None
    SUMS: tl.constexpr = 2 if CENTERED else 1
    unit = split * config.BLOCK_H + tl.arange(0, config.BLOCK_H)
    offs_b = tl.arange(0, config.BLOCK_B)
    q = nth * config.BLOCK_B + offs_b
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0, stride = time_order(first_row(seq, T, B), model, T, B, config.REVERSE)
    tile = arrays.Tile(T, seq, row0, stride, unit, mask, mask_q, T, T, 0)
    w_ptr = a.w_hh_t_ptr + model.to(tl.int64) * (GATES * H * H)

    if SPLITS == 1:
        w = _resident_weights(w_ptr, unit, H, H * H, H, GATES)
    else:
        exchange_ptr = a.exchange_ptr + (model.to(tl.int64) * Q + nth * config.BLOCK_B) * H
        buffer = models * Q * H
        if NORM_WIDTH > 0:
            sums_ptr = a.sums_ptr + (model.to(tl.int64) * Q + nth * config.BLOCK_B) * (SUMS * SPLITS)
            sums_buffer = models * Q * (SUMS * SPLITS)
        # indices past the end are clamped; the results of such units and sequences are not stored
        row = tl.minimum(unit, H - 1)
        col = tl.minimum(offs_b, Q - 1 - nth * config.BLOCK_B).to(tl.int32)
    ADDS_BIAS: tl.constexpr = config.SEPARATE and not config.TANGENT
    if ADDS_BIAS:
        b_hn = tl.load(a.b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(tl.float32)
    bias = load_biases(a.bias_ptr, model, unit, H, GATES, True)
    w_sum = load_biases(a.w_sum_ptr, model, unit, H, GATES, True)

    if t_begin == 0:
        states = _load_states(a.h0_ptr, a.c0_ptr, seq, unit, mask, H)
    else:
        states = _load_states(a.h_last_ptr, a.c_last_ptr, seq, unit, mask, H)
    rows = row0 + step_time(t_begin, T, config.REVERSE) * stride
    INPUTS: tl.constexpr = len(states) if config.TANGENT else GATES
    x = _load_gates(a.xp_ptr, rows, unit, mask, H, INPUTS)
    if HAS_RESETS:
        reset = load_reset(a.reset_ptr, rows, mask_q)

    if SPLITS > 1 and t_begin == 0:
        start = states[0]
        if HAS_RESETS:
            start = select_reset(start, a.reset_h_ptr, reset, seq, rows, unit, mask, H, config.RESET_STATE)
        store_tile(exchange_ptr, offs_b, unit, H, mask, operand(start, DTYPE, config.PRECISION))
        if NORM_WIDTH > 0:
            _store_sums(sums_ptr, offs_b, mask_q, split, _sums_of_states(start, unit, mask_q, H, CENTERED), SPLITS)
        if a.barrier_ptr is not None:
            arrivals += SPLITS
            arrive(a.barrier_ptr)
            wait(a.barrier_ptr, arrivals)

    for i in range(t_begin, t_end):
        if HAS_RESETS:
            # the reset comes before the step
            states = _select_resets(states, a, reset, rows, tile, H, config.RESET_STATE)
        if NORM_WIDTH > 0:
            if SPLITS == 1:
                norm_sums = _sums_of_states(states[0], unit, mask_q, H, CENTERED)
            else:
                norm_sums = _load_sums(sums_ptr + (i % 2) * sums_buffer, offs_b, mask_q, SUMS, SPLITS)
            scale, mean = _scale_and_mean(a.x_norm_ptr, a.x_mean_ptr, rows, mask_q, norm_sums, H, NORM_WIDTH)
        x_last = x if config.TANGENT else x[GATES - 1]
        tl.static_assert(NORM_WIDTH == 0 or not config.SEPARATE)
        accumulators = x  # what the products are added to
        if CENTERED:
            x_mean = tl.load(a.x_mean_ptr + rows, mask=mask_q, other=0.0)
            accumulators = subtract_mean(x, x_mean[None, :], w_sum)
        if config.TANGENT:
            accumulators = ()
            for _ in tl.static_range(GATES):
                accumulators += (tl.zeros((config.BLOCK_H, config.BLOCK_B), tl.float32),)
            local_grads, factors = _load_residuals(a, rows, tile, H, GATES + 1 if config.SEPARATE else GATES, False)
        elif config.SEPARATE:
            accumulators = x[: GATES - 1] + (tl.zeros((config.BLOCK_H, config.BLOCK_B), tl.float32),)
        gates = ()
        if SPLITS == 1:
            h_op = operand(states[0], DTYPE, config.PRECISION)
            for gate in tl.static_range(GATES):
                gates += (tl.dot(w[gate], h_op, accumulators[gate], input_precision=config.PRECISION),)
        else:
            gates = accumulators
            h_ptr = exchange_ptr + (i % 2) * buffer
            for k0 in tl.range(0, H, config.BLOCK_K, num_stages=config.STAGES):
                k = k0 + tl.arange(0, config.BLOCK_K)
                h_op = load_exchanged(h_ptr, col, k, H, EVEN)
                sums = ()
                for gate in tl.static_range(GATES):
                    w_gate = stream_weight(w_ptr + gate * H * H, row, k, H, EVEN)
                    sums += (tl.dot(w_gate, h_op, gates[gate], input_precision=config.PRECISION),)
                gates = sums

        # prefetch the next step's inputs while this step computes, or while programs wait for one another
        this_rows = rows
        rows = row0 + step_time(tl.minimum(i + 1, T - 1), T, config.REVERSE) * stride
        if SPLITS == 1:
            x = _load_gates(a.xp_ptr, rows, unit, mask, H, INPUTS)
        if HAS_RESETS:
            reset = load_reset(a.reset_ptr, rows, mask_q)

        if ADDS_BIAS:
            gates = gates[: GATES - 1] + (gates[GATES - 1] + b_hn[:, None],)
        if NORM_WIDTH > 0:
            normalized, gates = normalize(gates, scale[None, :], bias)
        before = states
        if config.TANGENT:
            states = config.STEP(gates, x_last, before, local_grads, factors)
        else:
            states, activations = config.STEP(gates, x_last, before, ACCURACY)
        if SPLITS > 1:
            start = states[0]
            if HAS_RESETS:
                start = select_reset(start, a.reset_h_ptr, reset, seq, rows, unit, mask, H, config.RESET_STATE)
            store_tile(
                exchange_ptr + ((i + 1) % 2) * buffer, offs_b, unit, H, mask, operand(start, DTYPE, config.PRECISION)
            )
            if NORM_WIDTH > 0:
                next_sums = _sums_of_states(start, unit, mask_q, H, CENTERED)
                _store_sums(sums_ptr + ((i + 1) % 2) * sums_buffer, offs_b, mask_q, split, next_sums, SPLITS)
            if a.barrier_ptr is not None:
                arrive(a.barrier_ptr)
        _store_states(a.hs_ptr, a.cs_ptr, this_rows, unit, mask, states, H)
        if a.local_grads_ptr is not None and not config.TANGENT:
            local_grads, factors = config.RESIDUALS(activations, before)
            if NORM_WIDTH > 0:
                local_grads = with_norm_grad(local_grads, normalized)
                store_tile(a.norm_state_ptr, this_rows, unit, H, mask, (before[0] - mean[None, :]) * scale[None, :])
                if split == 0:
                    tl.store(a.scale_ptr + this_rows, scale, mask=mask_q)
            _store_residuals(a, this_rows, tile, local_grads, factors, H, NORM_WIDTH)
        if SPLITS > 1:
            x = _load_gates(a.xp_ptr, rows, unit, mask, H, INPUTS)
            if a.barrier_ptr is not None:
                arrivals += SPLITS
                wait(a.barrier_ptr, arrivals)
    _store_states(a.h_last_ptr, a.c_last_ptr, seq, unit, mask, states, H)
    return arrivals


@triton.jit(
    do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"], repr=names.of_loop("streamed", "fwd")
)
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr, reset_h_ptr,
    reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr,
    scale_ptr, exchange_ptr, sums_ptr, barrier_ptr,
    T, B, Q, tiles, items, t_begin, t_end,
    STEP: tl.constexpr, RESIDUALS: tl.constexpr, GATES: tl.constexpr, SEPARATE: tl.constexpr, NORM_WIDTH: tl.constexpr,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Runs the forward pass of a cell, whose arithmetic is STEP and RESIDUALS.

    The arrays are those of `arrays.Forward`. A model has Q sequences in `tiles` tiles; `items` are the tiles of all.

    If RESIDUALS is None, the kernel instead runs the tangent of the pass, which is linear in the states: STEP is then
    `tangent_step`, the residuals are read, states are tangents, and `xp` is what each step adds to those after it,
    `[G, T, B, H]` or, of two states, `[G, T, B, 2 * H]`.
    """
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    config: tl.constexpr = _ForwardConfig(
        STEP, RESIDUALS, GATES, SEPARATE, NORM_WIDTH, H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE,
        REVERSE, PRECISION, RESIDUALS is None,
    )  # fmt: skip
    if barrier_ptr is not None:
        barrier_ptr += worker
    a = arrays.Forward(
        w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr,
        reset_h_ptr, reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
        norm_state_ptr, scale_ptr, exchange_ptr, sums_ptr, barrier_ptr,
    )  # fmt: skip
    if SPLITS == 1:
        _forward_tile(a, T, B, Q, 0, 0, T, worker // tiles, worker % tiles, 0, 0, config)
    else:
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _forward_tile(
                a, T, B, Q, items // tiles, t_begin, t_end, item // tiles, item % tiles, split, arrivals, config
            )  # fmt: skip


@triton.jit
def _load_step(a, rows, tile, H: tl.constexpr, COUNT: tl.constexpr, PACKED: tl.constexpr, STATES: tl.constexpr):
    """Loads what a step of the backward pass reads: gradients of its outputs, and its residuals."""
    gradients = (load_tile(a.dhs_ptr, rows, tile.unit, H, tile.mask),)
    if STATES > 1:
        if a.dcs_ptr is not None:
            gradients += (load_tile(a.dcs_ptr, rows, tile.unit, H, tile.mask),)
        else:
            gradients += (tl.zeros_like(gradients[0]),)
    local_grads, factors = _load_residuals(a, rows, tile, H, COUNT, PACKED)
    return gradients, local_grads, factors


@triton.jit
def _backward_tile(
    a, T, B, Q, models, t_begin, t_end, model, nth, split, arrivals, config: tl.constexpr
):  # fmt: skip
    """Runs steps of a tile as `_forward_tile` does; step 0 is the last in the order of the forward pass."""
    GATES: tl.constexpr = config.GATES
    NORM_WIDTH: tl.constexpr = config.NORM_WIDTH
    H: tl.constexpr = config.H
    SPLITS: tl.constexpr = config.SPLITS
    DTYPE: tl.constexpr = a.w_hh_ptr.dtype.element_ty
    WIDTH: tl.constexpr = GATES * H
    EVEN: tl.constexpr = WIDTH % config.BLOCK_K == 0
    COUNT: tl.constexpr = GATES + 1 if config.SEPARATE or NORM_WIDTH > 0 else GATES
    STATES: tl.constexpr = 1 if a.dc0_ptr is None else 2
    unit = split * config.BLOCK_H + tl.arange(0, config.BLOCK_H)
    offs_b = tl.arange(0, config.BLOCK_B)
    q = nth * config.BLOCK_B + offs_b
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0, stride = time_order(first_row(seq, T, B), model, T, B, config.REVERSE)
    tile = arrays.Tile(T, seq, row0, stride, unit, mask, mask_q, T, T, 0)
    w_ptr = a.w_hh_ptr + model.to(tl.int64) * (WIDTH * H)

    if SPLITS == 1:
        w = _resident_weights(w_ptr, unit, WIDTH, H, H, GATES)
    else:
        exchange_ptr = a.exchange_ptr + (model.to(tl.int64) * Q + nth * config.BLOCK_B) * WIDTH
        buffer = models * Q * WIDTH
        if NORM_WIDTH > 0:
            sums_ptr = a.sums_ptr + (model.to(tl.int64) * Q + nth * config.BLOCK_B) * SPLITS
            sums_buffer = models * Q * SPLITS
        # indices past the end are clamped; the results of such units and sequences are not stored
        row = tl.minimum(unit, H - 1)
        col = tl.minimum(offs_b, Q - 1 - nth * config.BLOCK_B).to(tl.int32)

    # dh0 and dc0 hold the carry between launches that each do part of the work
    if t_begin == 0 and config.GATES_PHASE:
        dstates = _load_states(a.dh_last_ptr, a.dc_last_ptr, seq, unit, mask, H)
    else:
        dstates = _load_states(a.dh0_ptr, a.dc0_ptr, seq, unit, mask, H)
    if SPLITS == 1:
        rows = row0 + step_time(T - 1 - t_begin, T, config.REVERSE) * stride
        gradients, local_grads, factors = _load_step(a, rows, tile, H, COUNT, config.PACKED, STATES)

        if NORM_WIDTH > 0:
            scale = tl.load(a.scale_ptr + rows, mask=mask_q, other=1.0)

    for i in range(t_begin, t_end):
        rows = row0 + step_time(T - 1 - i, T, config.REVERSE) * stride
        if a.reset_ptr is not None:
            reset = load_reset(a.reset_ptr, rows, mask_q)
        if config.GATES_PHASE:
            if SPLITS > 1:
                gradients, local_grads, factors = _load_step(a, rows, tile, H, COUNT, config.PACKED, STATES)
            dh = dstates[0] + gradients[0]
            if a.total_dh_ptr is not None:
                store_tile(a.total_dh_ptr, rows, unit, H, mask, dh)
            if a.total_dc_ptr is not None:
                store_tile(a.total_dc_ptr, rows, unit, H, mask, dstates[1] + gradients[1])
            if NORM_WIDTH > 0:
                dnorm = tl.sum(tl.where(mask, dh * local_grads[GATES], 0.0), axis=0)
                if SPLITS > 1:
                    scale = tl.load(a.scale_ptr + rows, mask=mask_q, other=1.0)
                dgates, carried = config.GRAD_STEP((dh,), local_grads[:GATES], factors)
                dgates = scaled(dgates, scale[None, :])
            elif STATES == 1:
                dgates, carried = config.GRAD_STEP((dh,), local_grads, factors)
            else:
                dc = dstates[1] + (gradients[1] + dh * factors[0])
                dgates, carried = config.GRAD_STEP((dh, dc), local_grads, factors)
            if STATES == 1 and len(carried) > 0:
                dstates = carried
            else:
                # a zero that is not a constant: with a constant, ptxas 12.8 unrolls the product and then uses the
                # constant as the product's result
                dstates = (tl.where(mask, 0.0, dh),) + carried
            d_ops = operands_of(dgates, GATES)
            if SPLITS == 1:
                # prefetch the next step's inputs while this step's product runs
                next_rows = row0 + step_time(T - 1 - tl.minimum(i + 1, t_end - 1), T, config.REVERSE) * stride
                gradients, local_grads, factors = _load_step(a, next_rows, tile, H, COUNT, config.PACKED, STATES)
                if NORM_WIDTH > 0:
                    this_scale = scale
                    scale = tl.load(a.scale_ptr + next_rows, mask=mask_q, other=1.0)
            else:
                d_ptr = exchange_ptr + (i % 2) * buffer
                for gate in tl.static_range(GATES):
                    sent = operand(d_ops[gate], DTYPE, config.PRECISION)
                    store_tile(d_ptr, offs_b, gate * H + unit, WIDTH, mask, sent)
                if NORM_WIDTH > 0:
                    _store_sums(sums_ptr + (i % 2) * sums_buffer, offs_b, mask_q, split, (dnorm,), SPLITS)
                if a.barrier_ptr is not None:
                    arrive(a.barrier_ptr)
            _store_gates(a.dxp_ptr, rows, unit, mask, dgates, H, GATES)
            if config.SEPARATE:
                store_tile(a.dhn_ptr, rows, unit, H, mask, dgates[GATES])
        if config.PRODUCT_PHASE:
            dh = dstates[0]
            if NORM_WIDTH > 0:
                if SPLITS > 1:
                    this_scale = tl.load(a.scale_ptr + rows, mask=mask_q, other=1.0)
                norm_state = load_tile(a.norm_state_ptr, rows, unit, H, mask)
            if SPLITS == 1:
                for gate in tl.static_range(GATES):
                    dh = tl.dot(
                        w[gate], operand(d_ops[gate], DTYPE, config.PRECISION), dh, input_precision=config.PRECISION
                    )
            else:
                if a.barrier_ptr is not None:
                    arrivals += SPLITS
                    wait(a.barrier_ptr, arrivals)
                d_ptr = exchange_ptr + (i % 2) * buffer
                for k0 in tl.range(0, WIDTH, config.BLOCK_K, num_stages=config.STAGES):
                    k = k0 + tl.arange(0, config.BLOCK_K)
                    d_op = load_exchanged(d_ptr, col, k, WIDTH, EVEN)
                    dh = tl.dot(stream_weight(w_ptr, row, k, WIDTH, EVEN), d_op, dh, input_precision=config.PRECISION)
            if NORM_WIDTH > 0:
                if SPLITS > 1:
                    (dnorm,) = _load_sums(sums_ptr + (i % 2) * sums_buffer, offs_b, mask_q, 1, SPLITS)
                if split == 0:
                    tl.store(a.dnorm_ptr + rows, dnorm, mask=mask_q)
                dh -= norm_state * (this_scale * dnorm / NORM_WIDTH)[None, :]
            dstates = (dh,) + dstates[1:]
            if a.reset_ptr is not None:
                if a.dreset_h_ptr is not None:
                    store_tile(a.dreset_h_ptr, rows, unit, H, mask, tl.where(reset[None, :], dh, 0.0))
                    if STATES > 1:
                        store_tile(a.dreset_c_ptr, rows, unit, H, mask, tl.where(reset[None, :], dstates[1], 0.0))
                dstates = start_afresh(dstates, reset[None, :])
    _store_states(a.dh0_ptr, a.dc0_ptr, seq, unit, mask, dstates, H)
    return arrivals


@triton.jit(
    do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"], repr=names.of_loop("streamed", "bwd")
)
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
    dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, total_dh_ptr,
    total_dc_ptr, exchange_ptr, sums_ptr, barrier_ptr,
    T, B, Q, tiles, items, t_begin, t_end,
    GRAD_STEP: tl.constexpr, GATES: tl.constexpr, SEPARATE: tl.constexpr, NORM_WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PHASE: tl.constexpr, PRODUCT_PHASE: tl.constexpr,
):  # fmt: skip
    """Runs the backward pass of a cell, whose arithmetic is GRAD_STEP; the arrays are those of `arrays.Backward`."""
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    config: tl.constexpr = _BackwardConfig(
        GRAD_STEP, GATES, SEPARATE, NORM_WIDTH, PACKED, H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, REVERSE,
        PRECISION, SPLITS == 1 or GATES_PHASE, SPLITS == 1 or PRODUCT_PHASE,
    )  # fmt: skip
    if barrier_ptr is not None:
        barrier_ptr += worker
    a = arrays.Backward(
        w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
        dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
        total_dh_ptr, total_dc_ptr, exchange_ptr, sums_ptr, barrier_ptr,
    )  # fmt: skip
    if SPLITS == 1:
        _backward_tile(a, T, B, Q, 0, 0, T, worker // tiles, worker % tiles, 0, 0, config)
    else:
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _backward_tile(
                a, T, B, Q, items // tiles, t_begin, t_end, item // tiles, item % tiles, split, arrivals, config
            )  # fmt: skip
