"""GRU time loop, forward and backward. Gates are ordered r, z, n; saved per step are r, z, n and W_hn h + b_hn.

A program owns BLOCK_B sequences and BLOCK_H hidden units. With SPLITS == 1 it owns all units: the weights stay on chip
and the hidden state never leaves it. Otherwise SPLITS programs share the units of a tile and meet at a barrier once a
step, exchanging `hs` (forward) or the gate gradients (backward) through L2; such a launch must be cooperative, or cover
one step (and one phase of it in the backward pass) so that the end of the launch is the barrier.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.common import (
    RESET_FIXED,
    RESET_STEPPED,
    barrier,
    first_row,
    load_previous,
    load_reset,
    load_shared_tile,
    load_tile,
    load_weight,
    operand,
    previous,
    select_reset,
    sigmoid,
    step_time,
    store_gate,
    store_tile,
    tanh,
)


@triton.jit
def _gru_fwd_tile(
    w_hh_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, reset_h_ptr, hs_ptr, h_last_ptr, gates_ptr, barrier_ptr,
    T, B, Q, t_begin, t_end, model, tile, split, arrivals,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = w_hh_ptr.dtype.element_ty
    PRECISE: tl.constexpr = DTYPE == tl.float32 and PRECISION != "tf32"
    HAS_RESETS: tl.constexpr = reset_ptr is not None
    SAVE: tl.constexpr = gates_ptr is not None
    unit = split * BLOCK_H + tl.arange(0, BLOCK_H)
    q = tile * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0 = first_row(seq, T, B)
    w_ptr = w_hh_ptr + model.to(tl.int64) * (3 * H * H)

    if SPLITS == 1:
        w_r = operand(load_weight(w_ptr, unit, unit, 0, H, 3, False), DTYPE, PRECISION)
        w_z = operand(load_weight(w_ptr, unit, unit, 1, H, 3, False), DTYPE, PRECISION)
        w_n = operand(load_weight(w_ptr, unit, unit, 2, H, 3, False), DTYPE, PRECISION)
    b_hn = tl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(tl.float32)
    b_hn = tl.broadcast_to(b_hn[:, None], (BLOCK_H, BLOCK_B))

    if t_begin == 0:
        h = load_tile(h0_ptr, seq, unit, H, mask)
    else:
        h = load_tile(h_last_ptr, seq, unit, H, mask)
    rows = row0 + step_time(t_begin, T, REVERSE) * B
    x_r = load_tile(xp_ptr, rows, unit, 3 * H, mask)
    x_z = load_tile(xp_ptr, rows, H + unit, 3 * H, mask)
    x_n = load_tile(xp_ptr, rows, 2 * H + unit, 3 * H, mask)
    if HAS_RESETS:
        reset = load_reset(reset_ptr, rows, mask_q)

    for i in range(t_begin, t_end):
        if HAS_RESETS:
            # as in jaxrnn.reference: reset first, then the step
            h = select_reset(h, reset_h_ptr, reset, seq, rows, unit, mask, H, RESET_STATE)
        if SPLITS == 1:
            h_op = operand(h, DTYPE, PRECISION)
            a_r = tl.dot(w_r, h_op, x_r, input_precision=PRECISION)
            a_z = tl.dot(w_z, h_op, x_z, input_precision=PRECISION)
            a_n = tl.dot(w_n, h_op, b_hn, input_precision=PRECISION)
        else:
            a_r, a_z, a_n = x_r, x_z, b_hn
            prev_ptr, prev = previous(hs_ptr, h0_ptr, seq, row0, i, T, B, REVERSE)
            for k0 in tl.range(0, H, BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)
                mask_k = (k < H)[:, None] & mask_q[None, :]
                h_k = load_shared_tile(prev_ptr, prev, k, H, mask_k)
                if HAS_RESETS:
                    h_k = select_reset(h_k, reset_h_ptr, reset, seq, rows, k, mask_k, H, RESET_STATE)
                h_k = operand(h_k, DTYPE, PRECISION)
                w_rk = operand(load_weight(w_ptr, unit, k, 0, H, 3, False), DTYPE, PRECISION)
                a_r = tl.dot(w_rk, h_k, a_r, input_precision=PRECISION)
                w_zk = operand(load_weight(w_ptr, unit, k, 1, H, 3, False), DTYPE, PRECISION)
                a_z = tl.dot(w_zk, h_k, a_z, input_precision=PRECISION)
                w_nk = operand(load_weight(w_ptr, unit, k, 2, H, 3, False), DTYPE, PRECISION)
                a_n = tl.dot(w_nk, h_k, a_n, input_precision=PRECISION)

        # the next step's inputs are on their way while this step computes
        this_x_n = x_n
        this_rows = rows
        rows = row0 + step_time(tl.minimum(i + 1, t_end - 1), T, REVERSE) * B
        x_r = load_tile(xp_ptr, rows, unit, 3 * H, mask)
        x_z = load_tile(xp_ptr, rows, H + unit, 3 * H, mask)
        x_n = load_tile(xp_ptr, rows, 2 * H + unit, 3 * H, mask)
        if HAS_RESETS:
            reset = load_reset(reset_ptr, rows, mask_q)

        r = sigmoid(a_r)
        z = sigmoid(a_z)
        n = tanh(this_x_n + r * a_n, PRECISE)
        h = n + z * (h - n)
        store_tile(hs_ptr, this_rows, unit, H, mask, h)
        if SAVE:
            store_gate(gates_ptr, this_rows, unit, 4 * H, mask, r)
            store_gate(gates_ptr, this_rows, H + unit, 4 * H, mask, z)
            store_gate(gates_ptr, this_rows, 2 * H + unit, 4 * H, mask, n)
            store_gate(gates_ptr, this_rows, 3 * H + unit, 4 * H, mask, a_n)
        if barrier_ptr is not None:
            arrivals += SPLITS
            barrier(barrier_ptr, arrivals)
    store_tile(h_last_ptr, seq, unit, H, mask, h)
    return arrivals


@triton.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"])
def gru_fwd_kernel(
    w_hh_ptr,  # [S, H, 3H]
    b_hn_ptr,  # [S, H]
    xp_ptr,  # [G, T, B, 3H] input projections
    h0_ptr,  # [G, B, H]
    reset_ptr,  # [G, T, B] nonzero where an episode starts at step t, or None
    reset_h_ptr,  # [G, B, H] or [G, T, B, H] by RESET_STATE, or None
    hs_ptr,  # [G, T, B, H] out, dtype of h0
    h_last_ptr,  # [G, B, H] out, float32; the carry between launches that cover a part of the steps each
    gates_ptr,  # [G, T, B, 4H] out, or None: nothing is saved
    barrier_ptr,  # [workers] int32 zeros, or None: no program waits for another
    T, B, Q, tiles, items, t_begin, t_end,  # Q sequences a model in `tiles` tiles; items = S * tiles
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if SPLITS == 1:
        _gru_fwd_tile(
            w_hh_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, reset_h_ptr, hs_ptr, h_last_ptr, gates_ptr, None,
            T, B, Q, t_begin, t_end, worker // tiles, worker % tiles, 0, 0,
            H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION,
        )  # fmt: skip
    else:
        if barrier_ptr is not None:
            barrier_ptr += worker
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _gru_fwd_tile(
                w_hh_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, reset_h_ptr, hs_ptr, h_last_ptr, gates_ptr, barrier_ptr,
                T, B, Q, t_begin, t_end, item // tiles, item % tiles, split, arrivals,
                H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION,
            )  # fmt: skip


@triton.jit
def _gru_bwd_inputs(
    gates_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, dhs_ptr, seq, row0, i, T, B, unit, mask, mask_q,
    H: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """What step i of the backward pass, step T - 1 - i of the forward pass, reads: (dy, r, z, n, h_n, h), h as it saw."""
    rows = row0 + step_time(T - 1 - i, T, REVERSE) * B
    dy = load_tile(dhs_ptr, rows, unit, H, mask)
    r = load_tile(gates_ptr, rows, unit, 4 * H, mask)
    z = load_tile(gates_ptr, rows, H + unit, 4 * H, mask)
    n = load_tile(gates_ptr, rows, 2 * H + unit, 4 * H, mask)
    h_n = load_tile(gates_ptr, rows, 3 * H + unit, 4 * H, mask)
    h = load_previous(hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, seq, row0, i, T, B, unit, mask, mask_q, H, RESET_STATE, REVERSE)  # noqa: E501
    return dy, r, z, n, h_n, h


@triton.jit
def _gru_bwd_tile(
    w_hh_ptr, gates_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, dhs_ptr, dh_last_ptr,
    dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, barrier_ptr,
    T, B, Q, t_begin, t_end, model, tile, split, arrivals,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PHASE: tl.constexpr, PRODUCT_PHASE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = w_hh_ptr.dtype.element_ty
    unit = split * BLOCK_H + tl.arange(0, BLOCK_H)
    q = tile * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_q = q < Q
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model.to(tl.int64) * Q + q
    row0 = first_row(seq, T, B)
    w_ptr = w_hh_ptr + model.to(tl.int64) * (3 * H * H)

    if SPLITS == 1:
        w_r = operand(load_weight(w_ptr, unit, unit, 0, H, 3, True), DTYPE, PRECISION)
        w_z = operand(load_weight(w_ptr, unit, unit, 1, H, 3, True), DTYPE, PRECISION)
        w_n = operand(load_weight(w_ptr, unit, unit, 2, H, 3, True), DTYPE, PRECISION)

    # between launches that cover a part of the work each, dh0 holds the carry (and dh * z between the phases of a step)
    if t_begin == 0 and GATES_PHASE:
        dh = load_tile(dh_last_ptr, seq, unit, H, mask)
    else:
        dh = load_tile(dh0_ptr, seq, unit, H, mask)
    if RESET_STATE == RESET_FIXED:
        dstate = tl.zeros((BLOCK_H, BLOCK_B), tl.float32)
        if t_begin > 0:
            dstate = load_tile(dreset_h_ptr, seq, unit, H, mask)
    if GATES_PHASE:
        dy, r, z, n, h_n, h = _gru_bwd_inputs(
            gates_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, dhs_ptr, seq, row0, t_begin, T, B, unit, mask, mask_q,
            H, RESET_STATE, REVERSE,
        )  # fmt: skip

    for i in range(t_begin, t_end):
        rows = row0 + step_time(T - 1 - i, T, REVERSE) * B
        if reset_ptr is not None:
            reset = load_reset(reset_ptr, rows, mask_q)
        if GATES_PHASE:
            dh += dy
            dn = dh * (1.0 - z) * (1.0 - n * n)
            dz = dh * (h - n) * z * (1.0 - z)
            dr = dn * h_n * r * (1.0 - r)
            dhn = dn * r
            dh = dh * z
            # the next step's inputs are on their way while this step's product runs
            dy, r, z, n, h_n, h = _gru_bwd_inputs(
                gates_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, dhs_ptr, seq, row0, tl.minimum(i + 1, t_end - 1),
                T, B, unit, mask, mask_q, H, RESET_STATE, REVERSE,
            )  # fmt: skip
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
                    barrier(barrier_ptr, arrivals)
                for k0 in tl.range(0, H, BLOCK_K, num_stages=STAGES):
                    k = k0 + tl.arange(0, BLOCK_K)
                    mask_k = (k < H)[:, None] & mask_q[None, :]
                    d_k = operand(load_shared_tile(dxp_ptr, rows, k, 3 * H, mask_k), DTYPE, PRECISION)
                    w_k = operand(load_weight(w_ptr, k, unit, 0, H, 3, True), DTYPE, PRECISION)
                    dh = tl.dot(w_k, d_k, dh, input_precision=PRECISION)
                    d_k = operand(load_shared_tile(dxp_ptr, rows, H + k, 3 * H, mask_k), DTYPE, PRECISION)
                    w_k = operand(load_weight(w_ptr, k, unit, 1, H, 3, True), DTYPE, PRECISION)
                    dh = tl.dot(w_k, d_k, dh, input_precision=PRECISION)
                    d_k = operand(load_shared_tile(dhn_ptr, rows, k, H, mask_k), DTYPE, PRECISION)
                    w_k = operand(load_weight(w_ptr, k, unit, 2, H, 3, True), DTYPE, PRECISION)
                    dh = tl.dot(w_k, d_k, dh, input_precision=PRECISION)
            if reset_ptr is not None:
                if RESET_STATE == RESET_FIXED:
                    dstate += tl.where(reset[None, :], dh, 0.0)
                if RESET_STATE == RESET_STEPPED:
                    store_tile(dreset_h_ptr, rows, unit, H, mask, tl.where(reset[None, :], dh, 0.0))
                dh = tl.where(reset[None, :], 0.0, dh)
    store_tile(dh0_ptr, seq, unit, H, mask, dh)
    if RESET_STATE == RESET_FIXED and PRODUCT_PHASE:
        store_tile(dreset_h_ptr, seq, unit, H, mask, dstate)
    return arrivals


@triton.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "t_begin", "t_end"])
def gru_bwd_kernel(
    w_hh_ptr,  # [S, H, 3H]
    gates_ptr,  # [G, T, B, 4H] r, z, n, W_hn h + b_hn
    hs_ptr,  # [G, T, B, H]
    h0_ptr,  # [G, B, H]
    reset_ptr,  # [G, T, B] or None
    reset_h_ptr,  # [G, B, H] or [G, T, B, H] by RESET_STATE, or None
    dhs_ptr,  # [G, T, B, H]
    dh_last_ptr,  # [G, B, H]
    dxp_ptr,  # [G, T, B, 3H] out: gradients of the gates before their activations
    dhn_ptr,  # [G, T, B, H] out: gradient of W_hn h + b_hn
    dh0_ptr,  # [G, B, H] out, float32
    dreset_h_ptr,  # shape of reset_h, out, float32, or None
    barrier_ptr,  # [workers] int32 zeros, or None
    T, B, Q, tiles, items, t_begin, t_end,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, RESET_STATE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PHASE: tl.constexpr, PRODUCT_PHASE: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if SPLITS == 1:
        _gru_bwd_tile(
            w_hh_ptr, gates_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, dhs_ptr, dh_last_ptr,
            dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, None,
            T, B, Q, t_begin, t_end, worker // tiles, worker % tiles, 0, 0,
            H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION, True, True,
        )  # fmt: skip
    else:
        if barrier_ptr is not None:
            barrier_ptr += worker
        arrivals = 0
        for item in range(worker, items, tl.num_programs(0) // SPLITS):
            arrivals = _gru_bwd_tile(
                w_hh_ptr, gates_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, dhs_ptr, dh_last_ptr,
                dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr, barrier_ptr,
                T, B, Q, t_begin, t_end, item // tiles, item % tiles, split, arrivals,
                H, BLOCK_H, BLOCK_B, BLOCK_K, SPLITS, STAGES, RESET_STATE, REVERSE, PRECISION,
                GATES_PHASE, PRODUCT_PHASE,
            )  # fmt: skip
