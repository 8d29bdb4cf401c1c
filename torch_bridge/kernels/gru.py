"""GRU time loop, forward and backward. Gates are ordered r, z, n.

Let h_n = W_hn h + b_hn, and let dh be the gradient of a step's output. For each step, the backward pass needs four
local gradients, which are the gradients of the gates before their activations, and of h_n, divided by dh:
  dr / dh = (1 - z) (1 - n^2) h_n r (1 - r)    dz / dh = (h - n) z (1 - z)
  dn / dh = (1 - z) (1 - n^2)                  dh_n / dh = (1 - z) (1 - n^2) r
It also needs z, the factor by which dh is passed on to h. The forward pass saves these residuals, not the gates. In
float16 the local gradients keep their relative accuracy where a gate saturates. The backward pass does not read h
again, and a step of it is five multiplications and a matmul. z multiplies dh at every step, so its rounding errors
would add up; z therefore stays in float32.

Four float16 numbers and z in float32 have as many bits as a unit's three input projections in float32. If the forward
pass gets no array for z, it therefore stores the residuals as three words in place of the projections (`local_grads`
may be `xp`), and the backward pass stores the gradients of the gates in place of the words (`dxp` may be
`local_grads`). Each word depends on the projection that it overwrites, and each gradient on the word that it
overwrites, so every read comes before the write.

A program owns BLOCK_B sequences and BLOCK_H hidden units. With SPLITS == 1 it owns all units: the weights and the
carried hidden state stay on chip. Otherwise SPLITS programs share the units of a tile and meet at a barrier once per
step. They exchange the operands of the next product, which are hidden states (forward) or gate gradients (backward),
through two buffers in L2 that are written in turn. Such a launch must be cooperative, or cover only one step (in the
backward pass, one phase of a step), so that the end of the launch is the barrier.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.common import (
    arrive,
    first_row,
    join_words,
    load_exchanged,
    load_local_grads,
    load_reset,
    load_tile,
    load_weight,
    operand,
    pack_float16x4,
    select_reset,
    sigmoid,
    split_words,
    step_time,
    store_local_grads,
    store_tile,
    stream_weight,
    tanh,
    time_order,
    wait,
)


@triton.jit
def _save(local_grads_ptr, carry_gate_ptr, rows, unit, mask, f_r, f_z, f_n, f_hn, z, H: tl.constexpr):
    """Stores a step's residuals: if there is no `carry_gate`, as words that may overwrite the input projections."""
    if carry_gate_ptr is not None:
        store_local_grads(local_grads_ptr, rows, unit, mask, f_r, f_z, f_n, f_hn, H)
        store_tile(carry_gate_ptr, rows, unit, H, mask, z)
    else:
        words_ptr = local_grads_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        first, second, third = split_words(pack_float16x4(f_r, f_z, f_n, f_hn), z)
        store_tile(words_ptr, rows, unit, 3 * H, mask, first)
        store_tile(words_ptr, rows, H + unit, 3 * H, mask, second)
        store_tile(words_ptr, rows, 2 * H + unit, 3 * H, mask, third)


@triton.jit
def _load_saved(local_grads_ptr, carry_gate_ptr, rows, unit, mask, H: tl.constexpr):
    """Loads what `_save` stored; returns the local gradients and z in the order of its arguments."""
    if carry_gate_ptr is not None:
        f_r, f_z, f_n, f_hn = load_local_grads(local_grads_ptr, rows, unit, mask, H)
        return f_r, f_z, f_n, f_hn, load_tile(carry_gate_ptr, rows, unit, H, mask)
    else:
        at = local_grads_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (rows[None, :] * (3 * H) + unit[:, None])
        first = tl.load(at, mask=mask, other=0)
        second = tl.load(at + H, mask=mask, other=0)
        return join_words(first, second, tl.load(at + 2 * H, mask=mask, other=0))


@triton.jit
def _gru_fwd_tile(
    w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, reset_h_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr,
    exchange_ptr, barrier_ptr,
    T, B, Q, models, t_begin, t_end, model, tile, split, arrivals,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = w_hh_t_ptr.dtype.element_ty
    PRECISE: tl.constexpr = DTYPE == tl.float32 and PRECISION != "tf32"
    HAS_RESETS: tl.constexpr = reset_ptr is not None
    SAVE: tl.constexpr = local_grads_ptr is not None
    EVEN: tl.constexpr = H % BLOCK_K == 0
    unit = split * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_b = tl.arange(0, BLOCK_B)
    q = tile * BLOCK_B + offs_b
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
    w_r_ptr = w_hh_t_ptr + model.to(tl.int64) * (3 * H * H)
    w_z_ptr = w_r_ptr + H * H
    w_n_ptr = w_z_ptr + H * H

    if SPLITS == 1:
        w_r = load_weight(w_r_ptr, unit, unit, H, H)
        w_z = load_weight(w_z_ptr, unit, unit, H, H)
        w_n = load_weight(w_n_ptr, unit, unit, H, H)
    else:
        exchange_ptr += (model.to(tl.int64) * Q + tile * BLOCK_B) * H
        buffer = models * Q * H
        # indices past the end are clamped; the results of such units and sequences are not stored
        row = tl.minimum(unit, H - 1)
        col = tl.minimum(offs_b, Q - 1 - tile * BLOCK_B).to(tl.int32)
    b_hn = tl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(tl.float32)

    if t_begin == 0:
        h = load_tile(h0_ptr, seq, unit, H, mask)
    else:
        h = load_tile(h_last_ptr, seq, unit, H, mask)
    rows = row0 + step_time(t_begin, T, REVERSE) * stride
    x_r = load_tile(xp_ptr, rows, unit, 3 * H, mask)
    x_z = load_tile(xp_ptr, rows, H + unit, 3 * H, mask)
    x_n = load_tile(xp_ptr, rows, 2 * H + unit, 3 * H, mask)
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
            h = select_reset(h, reset_h_ptr, reset, seq, rows, unit, mask, H, RESET_STATE)
        if SPLITS == 1:
            h_op = operand(h, DTYPE, PRECISION)
            a_r = tl.dot(w_r, h_op, x_r, input_precision=PRECISION)
            a_z = tl.dot(w_z, h_op, x_z, input_precision=PRECISION)
            a_n = tl.dot(w_n, h_op, input_precision=PRECISION)
        else:
            a_r, a_z, a_n = x_r, x_z, tl.zeros((BLOCK_H, BLOCK_B), tl.float32)
            h_ptr = exchange_ptr + (i % 2) * buffer
            for k0 in tl.range(0, H, BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)
                h_op = load_exchanged(h_ptr, col, k, H, EVEN)
                a_r = tl.dot(stream_weight(w_r_ptr, row, k, H, EVEN), h_op, a_r, input_precision=PRECISION)
                a_z = tl.dot(stream_weight(w_z_ptr, row, k, H, EVEN), h_op, a_z, input_precision=PRECISION)
                a_n = tl.dot(stream_weight(w_n_ptr, row, k, H, EVEN), h_op, a_n, input_precision=PRECISION)

        # prefetch the next step's inputs while this step computes, or while programs wait for one another
        this_x_n = x_n
        this_rows = rows
        rows = row0 + step_time(tl.minimum(i + 1, T - 1), T, REVERSE) * stride
        if SPLITS == 1:
            x_r = load_tile(xp_ptr, rows, unit, 3 * H, mask)
            x_z = load_tile(xp_ptr, rows, H + unit, 3 * H, mask)
            x_n = load_tile(xp_ptr, rows, 2 * H + unit, 3 * H, mask)
        if HAS_RESETS:
            reset = load_reset(reset_ptr, rows, mask_q)

        a_n += b_hn[:, None]
        r = sigmoid(a_r)
        z = sigmoid(a_z)
        n = tanh(this_x_n + r * a_n, PRECISE)
        h_prev = h
        h = n + z * (h - n)
        if SPLITS > 1:
            start = h
            if HAS_RESETS:
                start = select_reset(h, reset_h_ptr, reset, seq, rows, unit, mask, H, RESET_STATE)
            store_tile(exchange_ptr + ((i + 1) % 2) * buffer, offs_b, unit, H, mask, operand(start, DTYPE, PRECISION))
            if barrier_ptr is not None:
                arrive(barrier_ptr)
        store_tile(hs_ptr, this_rows, unit, H, mask, h)
        if SAVE:
            f_n = (1.0 - z) * (1.0 - n * n)
            f_r = f_n * a_n * r * (1.0 - r)
            f_z = (h_prev - n) * z * (1.0 - z)
            _save(local_grads_ptr, carry_gate_ptr, this_rows, unit, mask, f_r, f_z, f_n, f_n * r, z, H)
        if SPLITS > 1:
            x_r = load_tile(xp_ptr, rows, unit, 3 * H, mask)
            x_z = load_tile(xp_ptr, rows, H + unit, 3 * H, mask)
            x_n = load_tile(xp_ptr, rows, 2 * H + unit, 3 * H, mask)
            if barrier_ptr is not None:
                arrivals += SPLITS
                wait(barrier_ptr, arrivals)
    store_tile(h_last_ptr, seq, unit, H, mask, h)
    return arrivals


@triton.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"])
def gru_fwd_kernel(
    w_hh_t_ptr,  # [S, 3H, H] transposed recurrent weights; float32 is already rounded to TF32 if PRECISION is "tf32"
    b_hn_ptr,  # [S, H]
    xp_ptr,  # [G, T, B, 3H] input projections
    h0_ptr,  # [G, B, H]
    reset_ptr,  # [G, T, B] nonzero where an episode starts at step t, or None
    reset_h_ptr,  # [G, B, H] or [G, T, B, H] by RESET_STATE, or None
    hs_ptr,  # [G, T, B, H] out, dtype of h0
    h_last_ptr,  # [G, B, H] out, float32: the carry between launches that each run some of the steps
    local_grads_ptr,  # [G, T, B, H, 4] out: dr, dz, dn and dh_n over dh, or None if no residuals are saved
    carry_gate_ptr,  # [G, T, B, H] out, float32: z, or None: local_grads is then words, [G, T, B, 3, H], and may be xp
    exchange_ptr,  # [2, G, B, H] of the weights' dtype, workspace, or None if SPLITS == 1
    barrier_ptr,  # [workers] int32 zeros, or None if no program waits for another
    T, B, Q, tiles, items, t_begin, t_end,  # Q sequences per model in `tiles` tiles; items = S * tiles
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if SPLITS == 1:
        _gru_fwd_tile(
            w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, reset_h_ptr, hs_ptr, h_last_ptr, local_grads_ptr,
            carry_gate_ptr, None, None,
            T, B, Q, 0, 0, T, worker // tiles, worker % tiles, 0, 0,
            H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION,
        )  # fmt: skip
    else:
        if barrier_ptr is not None:
            barrier_ptr += worker
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _gru_fwd_tile(
                w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, reset_h_ptr, hs_ptr, h_last_ptr, local_grads_ptr,
                carry_gate_ptr, exchange_ptr, barrier_ptr,
                T, B, Q, items // tiles, t_begin, t_end, item // tiles, item % tiles, split, arrivals,
                H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION,
            )  # fmt: skip


@triton.jit
def _gru_bwd_inputs(local_grads_ptr, carry_gate_ptr, dhs_ptr, rows, unit, mask, H: tl.constexpr):
    """Loads what a step of the backward pass reads."""
    dy = load_tile(dhs_ptr, rows, unit, H, mask)
    f_r, f_z, f_n, f_hn, carry_gate = _load_saved(local_grads_ptr, carry_gate_ptr, rows, unit, mask, H)
    return dy, f_r, f_z, f_n, f_hn, carry_gate


@triton.jit
def _gru_bwd_tile(
    w_hh_ptr, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dh_last_ptr,
    dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, exchange_ptr, barrier_ptr,
    T, B, Q, models, t_begin, t_end, model, tile, split, arrivals,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PHASE: tl.constexpr, PRODUCT_PHASE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = w_hh_ptr.dtype.element_ty
    EVEN: tl.constexpr = 3 * H % BLOCK_K == 0
    unit = split * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_b = tl.arange(0, BLOCK_B)
    q = tile * BLOCK_B + offs_b
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
    w_ptr = w_hh_ptr + model.to(tl.int64) * (3 * H * H)

    if SPLITS == 1:
        w_r = load_weight(w_ptr, unit, unit, H, 3 * H)
        w_z = load_weight(w_ptr + H, unit, unit, H, 3 * H)
        w_n = load_weight(w_ptr + 2 * H, unit, unit, H, 3 * H)
    else:
        exchange_ptr += (model.to(tl.int64) * Q + tile * BLOCK_B) * (3 * H)
        buffer = models * Q * (3 * H)
        # indices past the end are clamped; the results of such units and sequences are not stored
        row = tl.minimum(unit, H - 1)
        col = tl.minimum(offs_b, Q - 1 - tile * BLOCK_B).to(tl.int32)

    # dh0 holds the carry between launches that each do part of the work (dh * z between the two phases of a step)
    if t_begin == 0 and GATES_PHASE:
        dh = load_tile(dh_last_ptr, seq, unit, H, mask)
    else:
        dh = load_tile(dh0_ptr, seq, unit, H, mask)
    if SPLITS == 1:
        rows = row0 + step_time(T - 1 - t_begin, T, REVERSE) * stride
        dy, f_r, f_z, f_n, f_hn, carry_gate = _gru_bwd_inputs(
            local_grads_ptr, carry_gate_ptr, dhs_ptr, rows, unit, mask, H
        )

    for i in range(t_begin, t_end):
        rows = row0 + step_time(T - 1 - i, T, REVERSE) * stride
        if reset_ptr is not None:
            reset = load_reset(reset_ptr, rows, mask_q)
        if GATES_PHASE:
            if SPLITS > 1:
                dy, f_r, f_z, f_n, f_hn, carry_gate = _gru_bwd_inputs(
                    local_grads_ptr, carry_gate_ptr, dhs_ptr, rows, unit, mask, H
                )
            dh += dy
            dr, dz, dn, dhn = dh * f_r, dh * f_z, dh * f_n, dh * f_hn
            dh = dh * carry_gate
            if SPLITS == 1:
                # prefetch the next step's inputs while this step's product runs
                next_rows = row0 + step_time(T - 1 - tl.minimum(i + 1, t_end - 1), T, REVERSE) * stride
                dy, f_r, f_z, f_n, f_hn, carry_gate = _gru_bwd_inputs(
                    local_grads_ptr, carry_gate_ptr, dhs_ptr, next_rows, unit, mask, H
                )
            if SPLITS > 1:
                d_ptr = exchange_ptr + (i % 2) * buffer
                store_tile(d_ptr, offs_b, unit, 3 * H, mask, operand(dr, DTYPE, PRECISION))
                store_tile(d_ptr, offs_b, H + unit, 3 * H, mask, operand(dz, DTYPE, PRECISION))
                store_tile(d_ptr, offs_b, 2 * H + unit, 3 * H, mask, operand(dhn, DTYPE, PRECISION))
                if barrier_ptr is not None:
                    arrive(barrier_ptr)
            store_tile(dxp_ptr, rows, unit, 3 * H, mask, dr)
            store_tile(dxp_ptr, rows, H + unit, 3 * H, mask, dz)
            store_tile(dxp_ptr, rows, 2 * H + unit, 3 * H, mask, dn)
            store_tile(dhn_ptr, rows, unit, H, mask, dhn)
        if PRODUCT_PHASE:
            if SPLITS == 1:
                dh = tl.dot(w_r, operand(dr, DTYPE, PRECISION), dh, input_precision=PRECISION)
                dh = tl.dot(w_z, operand(dz, DTYPE, PRECISION), dh, input_precision=PRECISION)
                dh = tl.dot(w_n, operand(dhn, DTYPE, PRECISION), dh, input_precision=PRECISION)
            else:
                if barrier_ptr is not None:
                    arrivals += SPLITS
                    wait(barrier_ptr, arrivals)
                d_ptr = exchange_ptr + (i % 2) * buffer
                for k0 in tl.range(0, 3 * H, BLOCK_K, num_stages=STAGES):
                    k = k0 + tl.arange(0, BLOCK_K)
                    d_op = load_exchanged(d_ptr, col, k, 3 * H, EVEN)
                    dh = tl.dot(stream_weight(w_ptr, row, k, 3 * H, EVEN), d_op, dh, input_precision=PRECISION)
            if reset_ptr is not None:
                if dreset_h_ptr is not None:
                    store_tile(dreset_h_ptr, rows, unit, H, mask, tl.where(reset[None, :], dh, 0.0))
                dh = tl.where(reset[None, :], 0.0, dh)
    store_tile(dh0_ptr, seq, unit, H, mask, dh)
    return arrivals


@triton.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"])
def gru_bwd_kernel(
    w_hh_ptr,  # [S, H, 3H] recurrent weights; float32 is already rounded to TF32 if PRECISION is "tf32"
    local_grads_ptr,  # [G, T, B, H, 4] dr, dz, dn and dh_n over dh
    carry_gate_ptr,  # [G, T, B, H] z, or None: local_grads is then words, [G, T, B, 3, H], and may be dxp
    reset_ptr,  # [G, T, B] or None
    dhs_ptr,  # [G, T, B, H]
    dh_last_ptr,  # [G, B, H]
    dxp_ptr,  # [G, T, B, 3H] out: gradients of the gates before their activations
    dhn_ptr,  # [G, T, B, H] out: gradient of W_hn h + b_hn
    dh0_ptr,  # [G, B, H] out, float32
    dreset_h_ptr,  # [G, T, B, H] out, float32: gradient of each step's reset state, or None
    exchange_ptr,  # [2, G, B, 3H] of the weights' dtype, workspace, or None if SPLITS == 1
    barrier_ptr,  # [workers] int32 zeros, or None
    T, B, Q, tiles, items, t_begin, t_end,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PHASE: tl.constexpr, PRODUCT_PHASE: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if SPLITS == 1:
        _gru_bwd_tile(
            w_hh_ptr, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dh_last_ptr,
            dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, None, None,
            T, B, Q, 0, 0, T, worker // tiles, worker % tiles, 0, 0,
            H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, REVERSE, PRECISION, True, True,
        )  # fmt: skip
    else:
        if barrier_ptr is not None:
            barrier_ptr += worker
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _gru_bwd_tile(
                w_hh_ptr, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dh_last_ptr,
                dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, exchange_ptr, barrier_ptr,
                T, B, Q, items // tiles, t_begin, t_end, item // tiles, item % tiles, split, arrivals,
                H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, REVERSE, PRECISION,
                GATES_PHASE, PRODUCT_PHASE,
            )  # fmt: skip
