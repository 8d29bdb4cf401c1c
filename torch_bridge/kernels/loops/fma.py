"""Time loop in Gluon, for compute capability 8.0 and newer: one program per sequence, products in full float32.

The kernels compute what those of `streamed.py` do with SPLITS == 1. `fma_common` explains where weights and operands
are kept.

With NORM_WIDTH > 0, the gates see a norm, as `streamed.py` explains.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels import arrays, names
from torch_bridge.kernels.common import (
    load_biases,
    normalize,
    operands_of,
    rounded_product,
    scaled,
    subtract_mean,
    with_norm_grad,
)
from torch_bridge.kernels.gluon_common import (
    add_input,
    backward_rows,
    barrier,
    fixed_reset_states,
    forward_rows,
    has_last_step,
    in_float32,
    is_first_step,
    is_last_step,
    load_factors,
    load_inputs,
    load_statistics,
    normalized_state,
    product_order,
    reset_gradients,
    reset_states,
    runs,
    scale_of_norm,
    step_gradients,
    store_states,
    store_totals,
)
from torch_bridge.kernels.loops.fma_common import (
    allocate_operands,
    load_gate_weights,
    load_local_grads,
    load_operand,
    load_reset,
    locate,
    no_loads,
    partial_row_sums,
    store_local_grads,
    store_operand,
    sum_rows,
    then,
    to_registers,
    unpack_local_grads,
)


class _Weights(NamedTuple):
    """The weights of a forward program."""

    w: Any  # by gate, in registers or shared memory
    b_hn: Any
    bias: Any  # by gate
    w_sum: Any  # by gate


class _ForwardConfig(NamedTuple):
    """The compile-time values of a forward kernel."""

    STEP: Any
    RESIDUALS: Any
    GATES: Any
    SEPARATE: Any
    NORM_WIDTH: Any
    RESET_STATE: Any
    H: Any
    REVERSE: Any
    PRECISION: Any
    DTYPE: Any  # of the weights
    DEPTH: Any  # number of steps that inputs are prefetched ahead
    PIECES: Any  # whether sequences are cut into pieces
    TANGENT: Any  # whether the kernel runs the tangent


class _BackwardConfig(NamedTuple):
    """The compile-time values of a backward kernel."""

    GRAD_STEP: Any
    GATES: Any
    SEPARATE: Any
    NORM_WIDTH: Any
    COUNT: Any  # number of local gradients
    STATES: Any
    H: Any
    REVERSE: Any
    DTYPE: Any  # of the weights
    DEPTH: Any  # number of steps that residuals are prefetched ahead
    PIECES: Any  # whether sequences are cut into pieces


@gluon.constexpr_function
def _count(config):
    """Returns the number of local gradients of a cell without a norm."""
    return config.GATES + 1 if config.SEPARATE else config.GATES


@gluon.jit
def _load_step(i, a, tile, config: gl.constexpr):
    """Loads what step min(i, steps - 1) reads: input projections by gate, resets, and the statistics of a norm.

    For a tangent, loads an input for each state, and also the residuals.
    """
    H: gl.constexpr = config.H
    STATES: gl.constexpr = 1 if a.c0_ptr is None else 2
    INPUTS: gl.constexpr = STATES if config.TANGENT else config.GATES
    row = forward_rows(tile, i, config.REVERSE)
    x = load_inputs(a.xp_ptr + row * (INPUTS * H) + tile.unit, tile.mask, H, INPUTS)
    saved = ()
    if config.TANGENT:
        at = row * H + tile.unit
        local_grads = load_local_grads(a.local_grads_ptr, at, tile.mask, _count(config))
        saved = (local_grads, load_factors(a, at, tile.mask))
    return x, load_reset(a.reset_ptr, row), load_statistics(a.x_norm_ptr, a.x_mean_ptr, row, row >= 0), saved


@gluon.jit
def _row_sums(w, operand):
    """Returns the product of a gate's weights and an operand, one sum per unit."""
    w = to_registers(w)
    return sum_rows(partial_row_sums(w * operand), w)


@gluon.jit
def _forward_step(i, states, inputs, buffers, weights, fixed, a, tile, config: gl.constexpr):
    """Runs step i and prefetches what step i + DEPTH reads."""
    GATES: gl.constexpr = config.GATES
    NORM_WIDTH: gl.constexpr = config.NORM_WIDTH
    H: gl.constexpr = config.H
    DTYPE: gl.constexpr = config.DTYPE
    unit, mask = tile.unit, tile.mask
    ACCURACY: gl.constexpr = "precise" if DTYPE == gl.float32 else "plain"
    x, reset, statistics, saved = inputs
    if a.x_mean_ptr is not None:
        x = subtract_mean(x, statistics[1], weights.w_sum)
    before = states
    if a.reset_ptr is not None:
        stepped_at = forward_rows(tile, i, config.REVERSE) * H + unit
        before = reset_states(states, reset, fixed, a.reset_h_ptr, a.reset_c_ptr, stepped_at, mask, config.RESET_STATE)
    store_operand(buffers[0], before[0], DTYPE)
    barrier()
    operand = load_operand(buffers[0], weights.w[0])
    started = ()
    for k in gl.static_range(GATES):  # inputs are added at once, not after the last product: fewer registers spill
        product = _row_sums(weights.w[product_order(k, GATES)], operand)
        if not config.TANGENT:
            product = add_input(
                product, x[product_order(k, GATES)], weights.b_hn,
                config.SEPARATE and product_order(k, GATES) == GATES - 1,
            )  # fmt: skip
        started += (product,)
    gates = ()
    for gate in gl.static_range(GATES):
        gates += (started[product_order(gate, GATES)],)
    if NORM_WIDTH > 0:
        sums = (gl.sum(rounded_product(before[0], before[0]), axis=0),)
        if a.x_mean_ptr is not None:
            sums += (gl.sum(before[0], axis=0),)
        scale = scale_of_norm(sums, statistics, H, NORM_WIDTH)
        normalized, gates = normalize(gates, scale, weights.bias)
    inputs = _load_step(i + config.DEPTH, a, tile, config)
    if config.TANGENT:
        local_grads = unpack_local_grads(saved[0], _count(config))
        states = config.STEP(gates, x, before, local_grads, in_float32(saved[1]))
    else:
        states, activations = config.STEP(gates, x[GATES - 1].to(gl.float32), before, ACCURACY)
    live = runs(tile.mask, tile, i, config.PIECES)  # nothing is stored for a step past the last
    at = forward_rows(tile, i, config.REVERSE) * H + unit
    store_states(a.hs_ptr, a.cs_ptr, at, states, live)
    if a.local_grads_ptr is not None and not config.TANGENT:
        local_grads, factors = config.RESIDUALS(activations, before)
        if NORM_WIDTH > 0:
            local_grads = with_norm_grad(local_grads, normalized)
            norm_state = normalized_state(before[0], sums, statistics, scale, H, NORM_WIDTH)
            gl.store(a.norm_state_ptr + at, norm_state.to(a.norm_state_ptr.dtype.element_ty), mask=live)
            gl.store(a.scale_ptr + forward_rows(tile, i, config.REVERSE), scale, mask=i < tile.steps)
        store_local_grads(a.local_grads_ptr, at, live, local_grads, DTYPE, config.PRECISION, NORM_WIDTH == 0)
        if a.dc_dh_ptr is not None:
            gl.store(a.dc_dh_ptr + at, factors[0].to(a.dc_dh_ptr.dtype.element_ty), mask=live)
        if a.carry_gate_ptr is not None:
            gl.store(a.carry_gate_ptr + at, factors[-1], mask=live)
    store_states(a.h_last_ptr, a.c_last_ptr, tile.seq * H + unit, states, is_last_step(tile, i, config.PIECES))
    return states, inputs


@gluon.jit(do_not_specialize=["T", "B", "Q", "pieces"], repr=names.of_loop("fma", "fwd"))
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr, reset_h_ptr,
    reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr,
    scale_ptr,
    T, B, Q, pieces,
    STEP: gl.constexpr, RESIDUALS: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, NORM_WIDTH: gl.constexpr,
    RESET_STATE: gl.constexpr, H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr, PRECISION: gl.constexpr,
    SHARED_GATES: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass or, if RESIDUALS is None, its tangent, as `streamed.forward_kernel` explains.

    The arrays are those of `arrays.Forward`. SHARED_GATES is the number of gates whose weights are in shared memory.
    """
    DTYPE: gl.constexpr = w_hh_t_ptr.dtype.element_ty
    DEPTH: gl.constexpr = 4 if BLOCK_H <= 64 else 2
    config: gl.constexpr = _ForwardConfig(
        STEP, RESIDUALS, GATES, SEPARATE, NORM_WIDTH, RESET_STATE, H, REVERSE, PRECISION, DTYPE, DEPTH,
        pieces is not None, RESIDUALS is None,
    )  # fmt: skip
    a = arrays.Forward(
        w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr,
        reset_h_ptr, reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
        norm_state_ptr, scale_ptr,
    )  # fmt: skip
    model, tile = locate(arrays.Sizes(T, B, Q, pieces), reset_ptr, H, BLOCK_H, REVERSE)
    if pieces is not None:  # noqa: SIM102 - with `and`, whole sequences would have this branch, too
        if tile.steps == 0:
            return
    unit, mask = tile.unit, tile.mask
    inputs = no_loads()
    for k in gl.static_range(DEPTH):
        inputs = then(inputs, _load_step(k, a, tile, config))
    w = load_gate_weights(w_hh_t_ptr + model * (GATES * H * H), H * H, H, H, BLOCK_H, GATES, SHARED_GATES)
    b_hn = 0.0
    if SEPARATE and not config.TANGENT:
        b_hn = gl.load(b_hn_ptr + model * H + unit, mask=mask, other=0.0).to(gl.float32)
    bias = load_biases(bias_ptr, model, unit, H, GATES, False)
    w_sum = load_biases(w_sum_ptr, model, unit, H, GATES, False)
    weights = _Weights(w, b_hn, bias, w_sum)
    # not `load_states`: it adds these addresses up in another order, with which ptxas spills for an LSTM of 127 units
    states = (gl.load(h0_ptr + tile.seq * H + unit, mask=mask, other=0.0).to(gl.float32),)
    if c0_ptr is not None:
        states += (gl.load(c0_ptr + tile.seq * H + unit, mask=mask, other=0.0).to(gl.float32),)
    fixed = fixed_reset_states(reset_h_ptr, reset_c_ptr, tile.seq * H + unit, mask, RESET_STATE)
    buffers = allocate_operands(1, BLOCK_H)
    for i in range(0, tile.longest, DEPTH):
        for k in gl.static_range(DEPTH):
            states, next_inputs = _forward_step(
                i + k, states, inputs[0], buffers[k % 2], weights, fixed, a, tile, config
            )  # fmt: skip
            inputs = then(inputs[1:], next_inputs)


@gluon.jit
def _load_saved(i, a, tile, config: gl.constexpr):
    """Loads what step min(i, steps - 1) of the backward pass reads."""
    mask = tile.mask
    row = backward_rows(tile, i, config.REVERSE)
    at = row * config.H + tile.unit
    factors = load_factors(a, at, mask)
    dys = (gl.load(a.dhs_ptr + at, mask=mask, other=0.0),)
    if a.dcs_ptr is not None:
        dys += (gl.load(a.dcs_ptr + at, mask=mask, other=0.0),)
    of_norm = ()
    if a.norm_state_ptr is not None:
        of_norm = (gl.load(a.norm_state_ptr + at, mask=mask, other=0.0), gl.load(a.scale_ptr + row))
    local_grads = load_local_grads(a.local_grads_ptr, at, mask, config.COUNT)
    return local_grads, factors, dys, load_reset(a.reset_ptr, row), of_norm


@gluon.jit
def _backward_step(i, dstates, saved, buffers, w, a, tile, config: gl.constexpr):
    """Runs step i and prefetches what step i + DEPTH reads."""
    GATES: gl.constexpr = config.GATES
    NORM_WIDTH: gl.constexpr = config.NORM_WIDTH
    H: gl.constexpr = config.H
    DTYPE: gl.constexpr = config.DTYPE
    unit = tile.unit
    packed, stored_factors, dys, reset, of_norm = saved
    local_grads = unpack_local_grads(packed, config.COUNT)
    factors = in_float32(stored_factors)
    dh = dstates[0] + dys[0].to(gl.float32)
    if NORM_WIDTH > 0:
        dnorm = gl.sum(rounded_product(dh, local_grads[GATES]), axis=0)
        unscaled, carried = config.GRAD_STEP((dh,), local_grads[:GATES], factors)
        grads = scaled(unscaled, of_norm[1])
    else:
        grads, carried = step_gradients(dh, dstates, dys, local_grads, factors, a.dcs_ptr, config.GRAD_STEP)
    multiplied = operands_of(grads, GATES)
    for gate in gl.static_range(GATES):
        store_operand(buffers[gate], multiplied[gate], DTYPE)
    barrier()
    parts = partial_row_sums(to_registers(w[0]) * load_operand(buffers[0], w[0]))
    for gate in gl.static_range(1, GATES):
        w_gate = to_registers(w[gate])
        parts += partial_row_sums(w_gate * load_operand(buffers[gate], w_gate))
    saved = _load_saved(i + config.DEPTH, a, tile, config)
    live = runs(tile.mask, tile, i, config.PIECES)  # nothing is stored for a step past the last
    row = backward_rows(tile, i, config.REVERSE)
    at = row * H + unit
    dxp = a.dxp_ptr + row * (GATES * H) + unit
    for gate in gl.static_range(GATES):
        gl.store(dxp + gate * H, grads[gate].to(a.dxp_ptr.dtype.element_ty), mask=live)
    if config.SEPARATE:
        gl.store(a.dhn_ptr + at, grads[GATES].to(a.dhn_ptr.dtype.element_ty), mask=live)
    store_totals(a, at, dh, dstates, dys, live)
    product = sum_rows(parts, w[0])
    if config.STATES == 1 and len(carried) > 0:
        product = carried[0] + product
    if NORM_WIDTH > 0:
        gl.store(a.dnorm_ptr + row, dnorm, mask=i < tile.steps)
        product -= of_norm[0].to(gl.float32) * (of_norm[1] * dnorm * (1.0 / NORM_WIDTH))
    dstates = (product,)
    if config.STATES > 1:
        dstates += carried
    if a.reset_ptr is not None:
        dstates = reset_gradients(dstates, reset, a.dreset_h_ptr, a.dreset_c_ptr, at, live)
    store_states(a.dh0_ptr, a.dc0_ptr, tile.seq * H + unit, dstates, is_first_step(tile, i, config.PIECES))
    return dstates, saved


@gluon.jit(do_not_specialize=["T", "B", "Q", "pieces"], repr=names.of_loop("fma", "bwd"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
    dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
    total_dh_ptr, total_dc_ptr,
    T, B, Q, pieces,
    GRAD_STEP: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, NORM_WIDTH: gl.constexpr,
    H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr, SHARED_GATES: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; the arrays are those of `arrays.Backward`.

    SHARED_GATES is the number of gates whose weights are in shared memory.
    """
    DTYPE: gl.constexpr = w_hh_ptr.dtype.element_ty
    COUNT: gl.constexpr = GATES + 1 if SEPARATE or NORM_WIDTH > 0 else GATES
    STATES: gl.constexpr = 1 if dc0_ptr is None else 2
    UNROLL: gl.constexpr = 4 if BLOCK_H <= 64 else 2
    DEPTH: gl.constexpr = 4 if BLOCK_H <= 64 else 1
    config: gl.constexpr = _BackwardConfig(
        GRAD_STEP, GATES, SEPARATE, NORM_WIDTH, COUNT, STATES, H, REVERSE, DTYPE, DEPTH, pieces is not None
    )  # fmt: skip
    a = arrays.Backward(
        w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
        dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
        total_dh_ptr, total_dc_ptr,
    )  # fmt: skip
    model, tile = locate(arrays.Sizes(T, B, Q, pieces), reset_ptr, H, BLOCK_H, REVERSE)
    if pieces is not None:  # noqa: SIM102 - with `and`, whole sequences would have this branch, too
        if tile.steps == 0:
            return
    unit = tile.unit
    saved = no_loads()
    for k in gl.static_range(DEPTH):
        saved = then(saved, _load_saved(k, a, tile, config))
    w = load_gate_weights(w_hh_ptr + model * (GATES * H * H), H, H, GATES * H, BLOCK_H, GATES, SHARED_GATES)
    ends = has_last_step(tile, config.PIECES)
    dstates = (gl.load(dh_last_ptr + tile.seq * H + unit, mask=ends, other=0.0).to(gl.float32),)
    if STATES > 1:
        dstates += (gl.load(dc_last_ptr + tile.seq * H + unit, mask=ends, other=0.0).to(gl.float32),)
    buffers = allocate_operands(GATES, BLOCK_H)
    for i in range(0, tile.longest, UNROLL):
        for k in gl.static_range(UNROLL):
            dstates, next_saved = _backward_step(i + k, dstates, saved[0], buffers[k % 2], w, a, tile, config)
            saved = then(saved[1:], next_saved)
