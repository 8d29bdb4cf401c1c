"""LSTM time loop, forward and backward. Gates are ordered i, f, g, o.

Let dh and dc be the gradients of a step's hidden and cell state, c the cell state before the step and c' the one after
it. For each step, the backward pass needs the gradients of the gates before their activations, divided by dc or dh:
  di / dc = g i (1 - i)    df / dc = c f (1 - f)    dg / dc = i (1 - g^2)    do / dh = tanh(c') o (1 - o)
It also needs dc / dh = o (1 - tanh(c')^2), and f, the factor by which dc is passed on to c. As in
`torch_bridge.kernels.gru`, the forward pass saves these residuals, not the gates. Programs, their barrier and what they
exchange are the same as there, too. A program keeps the cell states of its own units.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.common import (
    arrive,
    first_row,
    load_exchanged,
    load_local_grads,
    load_reset,
    load_tile,
    load_weight,
    operand,
    select_reset,
    sigmoid,
    step_time,
    store_local_grads,
    store_tile,
    stream_weight,
    tanh,
    time_order,
    wait,
)


@triton.jit
def _lstm_fwd_tile(
    w_hh_t_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, reset_h_ptr, reset_c_ptr,
    hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, exchange_ptr, barrier_ptr,
    T, B, Q, models, t_begin, t_end, model, tile, split, arrivals,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = w_hh_t_ptr.dtype.element_ty
    PRECISE: tl.constexpr = DTYPE == tl.float32 and PRECISION != "tf32"
    HAS_RESETS: tl.constexpr = reset_ptr is not None
    EVEN: tl.constexpr = H % BLOCK_K == 0
    unit = split * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_b = tl.arange(0, BLOCK_B)
    q = tile * BLOCK_B + offs_b
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
    w_i_ptr = w_hh_t_ptr + model.to(tl.int64) * (4 * H * H)
    w_f_ptr = w_i_ptr + H * H
    w_g_ptr = w_f_ptr + H * H
    w_o_ptr = w_g_ptr + H * H

    if SPLITS == 1:
        w_i = load_weight(w_i_ptr, unit, unit, H, H)
        w_f = load_weight(w_f_ptr, unit, unit, H, H)
        w_g = load_weight(w_g_ptr, unit, unit, H, H)
        w_o = load_weight(w_o_ptr, unit, unit, H, H)
    else:
        exchange_ptr += (model.to(tl.int64) * Q + tile * BLOCK_B) * H
        buffer = models * Q * H
        # indices past the end are clamped; the results of such units and sequences are not stored
        row = tl.minimum(unit, H - 1)
        col = tl.minimum(offs_b, Q - 1 - tile * BLOCK_B).to(tl.int32)

    if t_begin == 0:
        h = load_tile(h0_ptr, seq, unit, H, mask)
        c = load_tile(c0_ptr, seq, unit, H, mask)
    else:
        h = load_tile(h_last_ptr, seq, unit, H, mask)
        c = load_tile(c_last_ptr, seq, unit, H, mask)
    rows = row0 + step_time(t_begin, T, REVERSE) * stride
    x_i = load_tile(xp_ptr, rows, unit, 4 * H, mask)
    x_f = load_tile(xp_ptr, rows, H + unit, 4 * H, mask)
    x_g = load_tile(xp_ptr, rows, 2 * H + unit, 4 * H, mask)
    x_o = load_tile(xp_ptr, rows, 3 * H + unit, 4 * H, mask)
    if HAS_RESETS:
        reset = load_reset(reset_ptr, rows, mask_q)

    if SPLITS > 1 and t_begin == 0:
        start = h
        if HAS_RESETS:
            start = select_reset(h, reset_h_ptr, reset, seq, rows, unit, mask, H, RESET_STATE)
        store_tile(exchange_ptr, offs_b, unit, H, mask, operand(start, DTYPE, PRECISION))
        if barrier_ptr is not None:
            arrivals += SPLITS
            arrive(barrier_ptr)
            wait(barrier_ptr, arrivals)

    for i in range(t_begin, t_end):
        if HAS_RESETS:
            # the reset comes before the step, as in jaxrnn.reference
            c = select_reset(c, reset_c_ptr, reset, seq, rows, unit, mask, H, RESET_STATE)
        if SPLITS == 1:
            if HAS_RESETS:
                h = select_reset(h, reset_h_ptr, reset, seq, rows, unit, mask, H, RESET_STATE)
            h_op = operand(h, DTYPE, PRECISION)
            a_i = tl.dot(w_i, h_op, x_i, input_precision=PRECISION)
            a_f = tl.dot(w_f, h_op, x_f, input_precision=PRECISION)
            a_g = tl.dot(w_g, h_op, x_g, input_precision=PRECISION)
            a_o = tl.dot(w_o, h_op, x_o, input_precision=PRECISION)
        else:
            a_i, a_f, a_g, a_o = x_i, x_f, x_g, x_o
            h_ptr = exchange_ptr + (i % 2) * buffer
            for k0 in tl.range(0, H, BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)
                h_op = load_exchanged(h_ptr, col, k, H, EVEN)
                a_i = tl.dot(stream_weight(w_i_ptr, row, k, H, EVEN), h_op, a_i, input_precision=PRECISION)
                a_f = tl.dot(stream_weight(w_f_ptr, row, k, H, EVEN), h_op, a_f, input_precision=PRECISION)
                a_g = tl.dot(stream_weight(w_g_ptr, row, k, H, EVEN), h_op, a_g, input_precision=PRECISION)
                a_o = tl.dot(stream_weight(w_o_ptr, row, k, H, EVEN), h_op, a_o, input_precision=PRECISION)

        # prefetch the next step's inputs while this step computes, or while programs wait for one another
        this_rows = rows
        rows = row0 + step_time(tl.minimum(i + 1, T - 1), T, REVERSE) * stride
        if SPLITS == 1:
            x_i = load_tile(xp_ptr, rows, unit, 4 * H, mask)
            x_f = load_tile(xp_ptr, rows, H + unit, 4 * H, mask)
            x_g = load_tile(xp_ptr, rows, 2 * H + unit, 4 * H, mask)
            x_o = load_tile(xp_ptr, rows, 3 * H + unit, 4 * H, mask)
        if HAS_RESETS:
            reset = load_reset(reset_ptr, rows, mask_q)

        g_i = sigmoid(a_i)
        g_f = sigmoid(a_f)
        g_g = tanh(a_g, PRECISE)
        g_o = sigmoid(a_o)
        c_prev = c
        c = g_f * c + g_i * g_g
        tanh_c = tanh(c, PRECISE)
        h = g_o * tanh_c
        if SPLITS > 1:
            start = h
            if HAS_RESETS:
                start = select_reset(h, reset_h_ptr, reset, seq, rows, unit, mask, H, RESET_STATE)
            store_tile(exchange_ptr + ((i + 1) % 2) * buffer, offs_b, unit, H, mask, operand(start, DTYPE, PRECISION))
            if barrier_ptr is not None:
                arrive(barrier_ptr)
        store_tile(hs_ptr, this_rows, unit, H, mask, h)
        if cs_ptr is not None:
            store_tile(cs_ptr, this_rows, unit, H, mask, c)
        if local_grads_ptr is not None:
            f_i, f_f = g_g * g_i * (1.0 - g_i), c_prev * g_f * (1.0 - g_f)
            f_g, f_o = g_i * (1.0 - g_g * g_g), tanh_c * g_o * (1.0 - g_o)
            store_local_grads(local_grads_ptr, this_rows, unit, mask, f_i, f_f, f_g, f_o, H)
            store_tile(dc_dh_ptr, this_rows, unit, H, mask, g_o * (1.0 - tanh_c * tanh_c))
            store_tile(carry_gate_ptr, this_rows, unit, H, mask, g_f)
        if SPLITS > 1:
            x_i = load_tile(xp_ptr, rows, unit, 4 * H, mask)
            x_f = load_tile(xp_ptr, rows, H + unit, 4 * H, mask)
            x_g = load_tile(xp_ptr, rows, 2 * H + unit, 4 * H, mask)
            x_o = load_tile(xp_ptr, rows, 3 * H + unit, 4 * H, mask)
            if barrier_ptr is not None:
                arrivals += SPLITS
                wait(barrier_ptr, arrivals)
    store_tile(h_last_ptr, seq, unit, H, mask, h)
    store_tile(c_last_ptr, seq, unit, H, mask, c)
    return arrivals


@triton.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"])
def lstm_fwd_kernel(
    w_hh_t_ptr,  # [S, 4H, H] transposed recurrent weights; float32 is already rounded to TF32 if PRECISION is "tf32"
    xp_ptr,  # [G, T, B, 4H] input projections
    h0_ptr,  # [G, B, H]
    c0_ptr,  # [G, B, H]
    reset_ptr,  # [G, T, B] nonzero where an episode starts at step t, or None
    reset_h_ptr,  # [G, B, H] or [G, T, B, H] by RESET_STATE, or None
    reset_c_ptr,  # like reset_h
    hs_ptr,  # [G, T, B, H] out, dtype of h0
    cs_ptr,  # [G, T, B, H] out, dtype of c0, or None
    h_last_ptr,  # [G, B, H] out, float32: the carry between launches that each run some of the steps
    c_last_ptr,  # like h_last
    local_grads_ptr,  # [G, T, B, H, 4] out: di, df and dg over dc, do over dh, or None if no residuals are saved
    dc_dh_ptr,  # [G, T, B, H] out: dc over dh, or None
    carry_gate_ptr,  # [G, T, B, H] out, float32: f, or None
    exchange_ptr,  # [2, G, B, H] of the weights' dtype, workspace, or None if SPLITS == 1
    barrier_ptr,  # [workers] int32 zeros, or None if no program waits for another
    T, B, Q, tiles, items, t_begin, t_end,  # Q sequences per model in `tiles` tiles; items = S * tiles
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if SPLITS == 1:
        _lstm_fwd_tile(
            w_hh_t_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, reset_h_ptr, reset_c_ptr,
            hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, None, None,
            T, B, Q, 0, 0, T, worker // tiles, worker % tiles, 0, 0,
            H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION,
        )  # fmt: skip
    else:
        if barrier_ptr is not None:
            barrier_ptr += worker
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _lstm_fwd_tile(
                w_hh_t_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, reset_h_ptr, reset_c_ptr,
                hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, exchange_ptr,
                barrier_ptr, T, B, Q, items // tiles, t_begin, t_end, item // tiles, item % tiles, split, arrivals,
                H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION,
            )  # fmt: skip


@triton.jit
def _lstm_bwd_inputs(local_grads_ptr, dc_dh_ptr, carry_gate_ptr, dhs_ptr, dcs_ptr, rows, unit, mask, H: tl.constexpr):
    """Loads what a step of the backward pass reads."""
    dy = load_tile(dhs_ptr, rows, unit, H, mask)
    if dcs_ptr is not None:
        dcy = load_tile(dcs_ptr, rows, unit, H, mask)
    else:
        dcy = tl.zeros_like(dy)
    f_i, f_f, f_g, f_o = load_local_grads(local_grads_ptr, rows, unit, mask, H)
    dc_dh = load_tile(dc_dh_ptr, rows, unit, H, mask)
    return dy, dcy, f_i, f_f, f_g, f_o, dc_dh, load_tile(carry_gate_ptr, rows, unit, H, mask)


@triton.jit
def _lstm_bwd_tile(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, exchange_ptr, barrier_ptr,
    T, B, Q, models, t_begin, t_end, model, tile, split, arrivals,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PHASE: tl.constexpr, PRODUCT_PHASE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = w_hh_ptr.dtype.element_ty
    EVEN: tl.constexpr = 4 * H % BLOCK_K == 0
    unit = split * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_b = tl.arange(0, BLOCK_B)
    q = tile * BLOCK_B + offs_b
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
    w_ptr = w_hh_ptr + model.to(tl.int64) * (4 * H * H)

    if SPLITS == 1:
        w_i = load_weight(w_ptr, unit, unit, H, 4 * H)
        w_f = load_weight(w_ptr + H, unit, unit, H, 4 * H)
        w_g = load_weight(w_ptr + 2 * H, unit, unit, H, 4 * H)
        w_o = load_weight(w_ptr + 3 * H, unit, unit, H, 4 * H)
    else:
        exchange_ptr += (model.to(tl.int64) * Q + tile * BLOCK_B) * (4 * H)
        buffer = models * Q * (4 * H)
        # indices past the end are clamped; the results of such units and sequences are not stored
        row = tl.minimum(unit, H - 1)
        col = tl.minimum(offs_b, Q - 1 - tile * BLOCK_B).to(tl.int32)

    # dh0 and dc0 hold the carry between launches that each do part of the work
    if t_begin == 0 and GATES_PHASE:
        dh = load_tile(dh_last_ptr, seq, unit, H, mask)
        dc = load_tile(dc_last_ptr, seq, unit, H, mask)
    else:
        dh = load_tile(dh0_ptr, seq, unit, H, mask)
        dc = load_tile(dc0_ptr, seq, unit, H, mask)
    if SPLITS == 1:
        rows = row0 + step_time(T - 1 - t_begin, T, REVERSE) * stride
        dy, dcy, f_i, f_f, f_g, f_o, dc_dh, carry_gate = _lstm_bwd_inputs(
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, dhs_ptr, dcs_ptr, rows, unit, mask, H
        )

    for i in range(t_begin, t_end):
        rows = row0 + step_time(T - 1 - i, T, REVERSE) * stride
        if reset_ptr is not None:
            reset = load_reset(reset_ptr, rows, mask_q)
        if GATES_PHASE:
            if SPLITS > 1:
                dy, dcy, f_i, f_f, f_g, f_o, dc_dh, carry_gate = _lstm_bwd_inputs(
                    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, dhs_ptr, dcs_ptr, rows, unit, mask, H
                )
            dh += dy
            dc += dcy + dh * dc_dh
            d_i, d_f, d_g, d_o = dc * f_i, dc * f_f, dc * f_g, dh * f_o
            dc = dc * carry_gate
            # a zero that is not a constant: with a constant, ptxas 12.8 unrolls the product and then uses the constant
            # as the product's result
            dh = tl.where(mask, 0.0, dh)
            if SPLITS == 1:
                # prefetch the next step's inputs while this step's product runs
                next_rows = row0 + step_time(T - 1 - tl.minimum(i + 1, t_end - 1), T, REVERSE) * stride
                dy, dcy, f_i, f_f, f_g, f_o, dc_dh, carry_gate = _lstm_bwd_inputs(
                    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, dhs_ptr, dcs_ptr, next_rows, unit, mask, H
                )
            if SPLITS > 1:
                d_ptr = exchange_ptr + (i % 2) * buffer
                store_tile(d_ptr, offs_b, unit, 4 * H, mask, operand(d_i, DTYPE, PRECISION))
                store_tile(d_ptr, offs_b, H + unit, 4 * H, mask, operand(d_f, DTYPE, PRECISION))
                store_tile(d_ptr, offs_b, 2 * H + unit, 4 * H, mask, operand(d_g, DTYPE, PRECISION))
                store_tile(d_ptr, offs_b, 3 * H + unit, 4 * H, mask, operand(d_o, DTYPE, PRECISION))
                if barrier_ptr is not None:
                    arrive(barrier_ptr)
            store_tile(dxp_ptr, rows, unit, 4 * H, mask, d_i)
            store_tile(dxp_ptr, rows, H + unit, 4 * H, mask, d_f)
            store_tile(dxp_ptr, rows, 2 * H + unit, 4 * H, mask, d_g)
            store_tile(dxp_ptr, rows, 3 * H + unit, 4 * H, mask, d_o)
        if PRODUCT_PHASE:
            if SPLITS == 1:
                dh = tl.dot(w_i, operand(d_i, DTYPE, PRECISION), dh, input_precision=PRECISION)
                dh = tl.dot(w_f, operand(d_f, DTYPE, PRECISION), dh, input_precision=PRECISION)
                dh = tl.dot(w_g, operand(d_g, DTYPE, PRECISION), dh, input_precision=PRECISION)
                dh = tl.dot(w_o, operand(d_o, DTYPE, PRECISION), dh, input_precision=PRECISION)
            else:
                if barrier_ptr is not None:
                    arrivals += SPLITS
                    wait(barrier_ptr, arrivals)
                d_ptr = exchange_ptr + (i % 2) * buffer
                for k0 in tl.range(0, 4 * H, BLOCK_K, num_stages=STAGES):
                    k = k0 + tl.arange(0, BLOCK_K)
                    d_op = load_exchanged(d_ptr, col, k, 4 * H, EVEN)
                    dh = tl.dot(stream_weight(w_ptr, row, k, 4 * H, EVEN), d_op, dh, input_precision=PRECISION)
            if reset_ptr is not None:
                if dreset_h_ptr is not None:
                    store_tile(dreset_h_ptr, rows, unit, H, mask, tl.where(reset[None, :], dh, 0.0))
                    store_tile(dreset_c_ptr, rows, unit, H, mask, tl.where(reset[None, :], dc, 0.0))
                dh = tl.where(reset[None, :], 0.0, dh)
                dc = tl.where(reset[None, :], 0.0, dc)
    store_tile(dh0_ptr, seq, unit, H, mask, dh)
    store_tile(dc0_ptr, seq, unit, H, mask, dc)
    return arrivals


@triton.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"])
def lstm_bwd_kernel(
    w_hh_ptr,  # [S, H, 4H] recurrent weights; float32 is already rounded to TF32 if PRECISION is "tf32"
    local_grads_ptr,  # [G, T, B, H, 4] di, df and dg over dc, do over dh
    dc_dh_ptr,  # [G, T, B, H] dc over dh
    carry_gate_ptr,  # [G, T, B, H] f
    reset_ptr,  # [G, T, B] or None
    dhs_ptr,  # [G, T, B, H]
    dcs_ptr,  # [G, T, B, H], or None if the cell states of the steps have no gradient
    dh_last_ptr,  # [G, B, H]
    dc_last_ptr,  # [G, B, H]
    dxp_ptr,  # [G, T, B, 4H] out: gradients of the gates before their activations
    dh0_ptr,  # [G, B, H] out, float32
    dc0_ptr,  # [G, B, H] out, float32
    dreset_h_ptr,  # [G, T, B, H] out, float32: gradient of each step's reset state, or None
    dreset_c_ptr,  # like dreset_h
    exchange_ptr,  # [2, G, B, 4H] of the weights' dtype, workspace, or None if SPLITS == 1
    barrier_ptr,  # [workers] int32 zeros, or None
    T, B, Q, tiles, items, t_begin, t_end,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PHASE: tl.constexpr, PRODUCT_PHASE: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if SPLITS == 1:
        _lstm_bwd_tile(
            w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
            dxp_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, None, None,
            T, B, Q, 0, 0, T, worker // tiles, worker % tiles, 0, 0,
            H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, REVERSE, PRECISION, True, True,
        )  # fmt: skip
    else:
        if barrier_ptr is not None:
            barrier_ptr += worker
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _lstm_bwd_tile(
                w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr,
                dh_last_ptr, dc_last_ptr, dxp_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, exchange_ptr,
                barrier_ptr, T, B, Q, items // tiles, t_begin, t_end, item // tiles, item % tiles, split, arrivals,
                H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, REVERSE, PRECISION,
                GATES_PHASE, PRODUCT_PHASE,
            )  # fmt: skip
