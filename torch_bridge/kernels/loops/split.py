"""Time loop for Hopper in Gluon: SPLITS programs of 64 units each run a tile of BLOCK_B sequences together.

The kernels compute what those of `streamed.py` do with SPLITS > 1. A worker is a group of SPLITS programs. It runs its
items, which are tiles of a model, one after the other. A program keeps the weights of its own 64 units in shared
memory, in 16 bits, and the states of these units in registers. In the forward pass, a program receives the hidden state
of all units and sends that of its own units. In the backward pass, a program multiplies the gate gradients of its own
units by its weights, and sends to every program the part of the gradient that belongs to that program's units. The gate
gradients, and the scale of their float16 operands, are not exchanged. The forward kernel supports only zeros as reset
state. Neither kernel supports a norm.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels import arrays, names
from torch_bridge.kernels.common import load_reset, operands_of, scaled, start_afresh, step_time
from torch_bridge.kernels.gluon_common import (
    add_inputs,
    backward_rows,
    forward_rows,
    gradients_before,
    inverse,
    largest_magnitude,
    load_inputs,
    load_resets,
    load_saved,
    load_states,
    pack_residuals,
    reset_gradients,
    scale_to_float16,
    step_gradients,
    store_residuals,
    store_states,
    unpack_residuals,
)
from torch_bridge.kernels.loops.split_common import (
    Place,
    allocate_operands,
    allocate_weight_shard,
    first_state_scale,
    load_weight_shard,
    locate,
    multiply_gates,
    multiply_parts,
    opaque_zero,
    receive_sum,
    receive_tile,
    send_partial_sums,
    send_state,
    store_operand,
)


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("split", "fwd"))
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr,
    dc_dh_ptr, carry_gate_ptr, exchange_ptr,
    T, B, Q, tiles, items,
    STEP: gl.constexpr, RESIDUALS: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, H: gl.constexpr,
    BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; the arrays are those of `arrays.Forward`, but for `exchange`.

    `exchange` is int32 zeros `[2, workers, SPLITS, BLOCK_B / 2, 64, 2]`: two buffers, used in turn.
    A word holds two sequences of a unit. The number of the send follows it, by which a receiver recognizes a new word.
    """
    WARPGROUPS: gl.constexpr = gl.num_warps() // 4  # side by side along the sequences
    COUNT: gl.constexpr = GATES + 1 if SEPARATE else GATES  # of local gradients
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_t_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPGROUPS], [16, BLOCK_B // WARPGROUPS, 16])
    a = arrays.Forward(
        w_hh_t_ptr, b_hn_ptr, None, None, xp_ptr, None, None, h0_ptr, c0_ptr, reset_ptr, None, None, hs_ptr, cs_ptr,
        h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, None, None,
    )  # fmt: skip
    # In these cases the registers can hold the inputs of two steps.
    PREFETCH_INPUTS: gl.constexpr = GATES < 4 or BLOCK_B // WARPGROUPS < 16
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    place = Place(workers, worker, split)
    weights = allocate_weight_shard(GATES, SPLITS, DTYPE)
    operands = allocate_operands(SPLITS, BLOCK_B, DTYPE)
    zeros = gl.zeros([64, BLOCK_B], gl.float32, ACC)
    own = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    unit = split * 64 + own
    sent = 0  # number of the latest send
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_ptr = w_hh_t_ptr + model * (GATES * H * H)
        w_unscale = load_weight_shard(weights, w_ptr, split, H, H * H, H, GATES, SPLITS, True)
        tile = locate(item, tiles, arrays.Sizes(T, B, Q, None), reset_ptr, unit, BLOCK_B, H, REVERSE)
        mask_q, mask, seq = tile.mask_q, tile.mask, tile.seq
        last = seq[None, :] * H + unit[:, None]
        b_hn = 0.0
        if SEPARATE:
            b_hn = gl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(gl.float32)[:, None]
        states = load_states(h0_ptr, c0_ptr, last, mask)
        scale = gl.full([1, BLOCK_B], 1.0, gl.float32, ACC)
        if SCALED:
            scale = first_state_scale(h0_ptr, zeros, seq, own, mask_q, H, SPLITS)[None, :]
        rows = tile.row + step_time(0, T, REVERSE) * tile.stride
        x = load_inputs(xp_ptr + rows[None, :] * (GATES * H) + unit[:, None], mask, H, GATES)
        reset = load_resets(reset_ptr, rows, mask_q)
        sent += 1
        scale = send_state(exchange_ptr, states[0], scale, reset_ptr, reset, sent, 1, place, SCALED, DTYPE, SPLITS)
        for i in range(T):
            # equals i, which the compiler cannot tell: else addresses of many steps would take registers
            opaque_i = i + opaque_zero(i)
            next_rows = forward_rows(tile, opaque_i + 1, REVERSE)
            if PREFETCH_INPUTS:
                next_x = load_inputs(xp_ptr + next_rows[None, :] * (GATES * H) + unit[:, None], mask, H, GATES)
            before = states
            if reset_ptr is not None:
                before = start_afresh(states, reset[None, :])
                reset = load_reset(reset_ptr, next_rows, mask_q)
            receive_tile(operands, exchange_ptr, sent, place, DTYPE, SPLITS)
            products = multiply_gates(weights, operands, zeros, i, GATES, SPLITS)
            if SCALED:
                products = scaled(products, inverse(scale) * w_unscale)
            gates = add_inputs(products, x, b_hn, SEPARATE)
            states, activations = STEP(gates, x[GATES - 1].to(gl.float32), before, "fast")
            more = (i + 1 < T).to(gl.int32)
            sent += more
            scale = send_state(
                exchange_ptr, states[0], scale, reset_ptr, reset, sent, more, place, SCALED, DTYPE, SPLITS
            )
            this_rows = (tile.row + step_time(opaque_i, T, REVERSE) * tile.stride)[None, :]
            store_states(hs_ptr, cs_ptr, this_rows * H + unit[:, None], states, mask)
            if local_grads_ptr is not None:
                local_grads, factors = RESIDUALS(activations, before)
                saved = pack_residuals(local_grads, factors, dc_dh_ptr)
                store_residuals(a, this_rows, unit[:, None], mask, saved, H, COUNT)
            if PREFETCH_INPUTS:
                x = next_x
            else:
                x = load_inputs(xp_ptr + next_rows[None, :] * (GATES * H) + unit[:, None], mask, H, GATES)
        store_states(h_last_ptr, c_last_ptr, last, states, mask)


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("split", "bwd"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dhn_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, exchange_ptr,
    T, B, Q, tiles, items,
    GRAD_STEP: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, H: gl.constexpr, BLOCK_B: gl.constexpr,
    SPLITS: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; the arrays are those of `arrays.Backward`, but for `exchange`.

    `exchange` is int32 zeros `[2, workers, SPLITS, SPLITS, BLOCK_B, 64]`: two buffers, used in turn, by receiving and
    then by sending program. A word is a float32 partial sum. Its last bit tells whether it is new.
    """
    WARPGROUPS: gl.constexpr = gl.num_warps() // 4  # side by side along the sequences
    COUNT: gl.constexpr = GATES + 1 if SEPARATE else GATES  # of local gradients
    STATES: gl.constexpr = 1 if dc0_ptr is None else 2
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPGROUPS], [16, BLOCK_B // WARPGROUPS, 16])
    a = arrays.Backward(
        w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, None, None, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr,
        dc_last_ptr, dxp_ptr, dhn_ptr, None, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
    )  # fmt: skip
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    place = Place(workers, worker, split)
    weights = allocate_weight_shard(GATES, SPLITS, DTYPE)
    operands = allocate_operands(GATES, BLOCK_B, DTYPE)
    zeros = gl.zeros([64, BLOCK_B], gl.float32, ACC)
    unit = split * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    sent = 0  # number of the latest send
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_ptr = w_hh_ptr + model * (GATES * H * H)
        w_unscale = load_weight_shard(weights, w_ptr, split, GATES * H, H, H, GATES, SPLITS, False)
        tile = locate(item, tiles, arrays.Sizes(T, B, Q, None), reset_ptr, unit, BLOCK_B, H, REVERSE)
        mask, row, stride = tile.mask, tile.row, tile.stride
        last = tile.seq[None, :] * H + unit[:, None]
        dstates = load_states(dh_last_ptr, dc_last_ptr, last, mask)
        rows = row + step_time(T - 1, T, REVERSE) * stride
        saved, reset, dys = load_saved(a, tile, rows, H, COUNT, PACKED)
        for i in range(T):
            dh = dstates[0] + dys[0].to(gl.float32)
            local_grads, factors = unpack_residuals(saved, COUNT, PACKED)
            grads, carried = step_gradients(dh, dstates, dys, local_grads, factors, dcs_ptr, GRAD_STEP)
            this_reset = reset
            next_rows = backward_rows(tile, i + 1, REVERSE)
            saved, reset, dys = load_saved(a, tile, next_rows, H, COUNT, PACKED)
            multiplied = operands_of(grads, GATES)
            scale, unscale = zeros, zeros
            if SCALED:
                scale = scale_to_float16(gl.max(largest_magnitude(multiplied), axis=0), 14)[None, :]
                unscale = inverse(scale) * w_unscale
            for gate in gl.static_range(GATES):
                store_operand(operands[gate], multiplied[gate], scale, SCALED)
            parts = multiply_parts(weights, operands, zeros, i, GATES, SPLITS)
            sent += 1
            send_partial_sums(exchange_ptr, parts, unscale, sent, place, SPLITS, SCALED)

            rows = row + step_time(T - 1 - i, T, REVERSE) * stride
            dxp = dxp_ptr + rows[None, :] * (GATES * H) + unit[:, None]
            at = rows[None, :] * H + unit[:, None]
            for gate in gl.static_range(GATES):
                gl.store(dxp + gate * H, grads[gate].to(dxp_ptr.dtype.element_ty), mask=mask)
            if SEPARATE:
                gl.store(dhn_ptr + at, grads[GATES].to(dhn_ptr.dtype.element_ty), mask=mask)
            product = receive_sum(exchange_ptr, zeros, sent, place, SPLITS)
            dstates = gradients_before(product, carried, STATES)
            if reset_ptr is not None:
                dstates = reset_gradients(dstates, this_reset[None, :], dreset_h_ptr, dreset_c_ptr, at, mask)
        store_states(dh0_ptr, dc0_ptr, last, dstates, mask)
