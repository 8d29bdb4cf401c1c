"""Time loop for Hopper in Gluon, for wide states: SPLITS programs of 32 units each run a tile of BLOCK_B sequences.

The kernels compute what those of `streamed.py` do with SPLITS > 1. A worker is a group of SPLITS programs. It runs its
items, which are tiles of a model, one after the other. The weights are in shared memory. In a product, sequences are
the rows and units the columns. `rows_common` explains the exchange between programs. Each program keeps the states of
its own units in registers. The forward kernel supports only zeros as reset state. Neither kernel supports a norm.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels import arrays, names
from torch_bridge.kernels.common import load_reset, operands_of, scaled, start_afresh, step_time
from torch_bridge.kernels.gluon_common import (
    add_inputs,
    backward_rows,
    forward_rows,
    inverse,
    largest_magnitude,
    load_inputs,
    load_resets,
    load_residuals,
    load_states,
    pack_residuals,
    scale_to_float16,
    store_residuals,
    store_states,
    unpack_residuals,
)
from torch_bridge.kernels.loops.rows_common import (
    allocate_weights,
    box,
    exchange_bounds,
    fill_weights,
    first_state_scale_rows,
    load_bounds,
    load_gradient_rows,
    locate_rows,
    multiply_gradients,
    multiply_states,
    parts,
    prefetch_rows,
    raise_flags,
    receive_product,
    send_products,
    send_state_rows,
    store_bounds,
    store_operand_rows,
    wait_for_flags,
)
from torch_bridge.kernels.loops.split_common import Place, opaque_zero


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("rows", "fwd"))
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr,
    dc_dh_ptr, carry_gate_ptr, exchange_ptr, barrier_ptr,
    T, B, Q, tiles, items,
    STEP: gl.constexpr, RESIDUALS: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, H: gl.constexpr,
    BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; the arrays are those of `arrays.Forward`, except for two.

    `exchange` is `[2, workers, BLOCK_B, SPLITS * 32]` in the dtype of the products' operands. `barrier` holds flags,
    int32 zeros `[workers, warps, 32]`: one for each warp of each program. The shape of `exchange` only gives its size;
    `rows_common` defines the order of its elements.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COUNT: gl.constexpr = GATES + 1 if SEPARATE else GATES  # of local gradients
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    a = arrays.Forward(
        w_hh_t_ptr, b_hn_ptr, None, None, xp_ptr, None, None, h0_ptr, c0_ptr, reset_ptr, None, None, hs_ptr, cs_ptr,
        h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, None, None,
    )  # fmt: skip
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    place = Place(workers, worker, split)
    weights = allocate_weights(GATES, SPLITS, 1, exchange_ptr.dtype.element_ty)
    zeros = gl.zeros([BLOCK_B, 32], gl.float32, ACC)
    unit = split * 32 + gl.arange(0, 32, gl.SliceLayout(0, ACC))
    sent = 0  # number of the latest send
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_ptr = w_hh_t_ptr + model * (GATES * H * H)
        w_unscale, _ = fill_weights(weights, w_ptr, split * 32, 0, H, H * H, H, GATES)
        tile = locate_rows(item, tiles, arrays.Sizes(T, B, Q, None), unit, BLOCK_B, H, REVERSE, ACC)
        mask_q, mask, seq = tile.mask_q, tile.mask, tile.seq
        last = seq[:, None] * H + unit[None, :]
        b_hn = 0.0
        if SEPARATE:
            b_hn = gl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(gl.float32)[None, :]
        states = load_states(h0_ptr, c0_ptr, last, mask)
        scale = gl.full([BLOCK_B, 1], 1.0, gl.float32, ACC)
        if SCALED:
            scale = first_state_scale_rows(h0_ptr, zeros, seq, mask_q, H, SPLITS)
        rows = tile.row + step_time(0, T, REVERSE) * tile.stride
        reset = load_resets(reset_ptr, rows, mask_q)
        sent += 1
        scale = send_state_rows(
            exchange_ptr, barrier_ptr, states[0], scale, reset_ptr, reset, sent, place, SPLITS, SCALED
        )
        for i in range(T):
            # equals `place`, which the compiler cannot tell: else addresses would stay in registers for the whole loop
            opaque_place = Place(workers, worker + opaque_zero(i), split)
            next_rows = forward_rows(tile, i + 1, REVERSE)
            first = (split + opaque_zero(i)) * 32
            prefetch_rows(xp_ptr, next_rows, first, GATES, H, GATES * H)
            before = states
            if reset_ptr is not None:
                before = start_afresh(states, reset[:, None])
                reset = load_reset(reset_ptr, next_rows, mask_q)
            wait_for_flags(barrier_ptr, opaque_place, sent, SPLITS)
            operands = box(exchange_ptr, sent, opaque_place, BLOCK_B * SPLITS * 32)
            products = multiply_states(weights, operands, zeros, i, GATES)
            x = load_inputs(xp_ptr + rows[:, None] * (GATES * H) + unit[None, :], mask, H, GATES)
            if SCALED:
                products = scaled(products, inverse(scale) * w_unscale)
            gates = add_inputs(products, x, b_hn, SEPARATE)
            states, activations = STEP(gates, x[GATES - 1].to(gl.float32), before, "fast")
            if i + 1 < T:
                sent += 1
                scale = send_state_rows(
                    exchange_ptr, barrier_ptr, states[0], scale, reset_ptr, reset, sent, opaque_place, SPLITS, SCALED
                )
            store_states(hs_ptr, cs_ptr, rows[:, None] * H + unit[None, :], states, mask)
            if local_grads_ptr is not None:
                local_grads, factors = RESIDUALS(activations, before)
                saved = pack_residuals(local_grads, factors, dc_dh_ptr)
                store_residuals(a, rows[:, None], unit[None, :], mask, saved, H, COUNT)
            rows = next_rows
        store_states(h_last_ptr, c_last_ptr, last, states, mask)


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("rows", "bwd"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dhn_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, exchange_ptr, bounds_ptr, products_ptr, barrier_ptr,
    T, B, Q, tiles, items,
    GRAD_STEP: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, H: gl.constexpr, BLOCK_B: gl.constexpr,
    SPLITS: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; the arrays are those of `arrays.Backward`, except for four.

    `exchange` is `[2, workers, BLOCK_B, GATES, SPLITS * 32]` in the dtype of the products' operands. `bounds` is
    float32 `[2, workers, BLOCK_B, 32]`, or None if that dtype is bfloat16. `products` is int32 zeros `[workers, SPLITS,
    PARTS, BLOCK_B, 32]`. `barrier` holds flags, int32 zeros `[workers, warps, 32]`: one for each warp of each program.
    The shapes of `exchange` and `products` only give their sizes; `rows_common` defines the order of their elements.

    float32 products use float16 operands, whose scale must be known before the gradients of the gates. `bound` is an
    upper bound, per sequence, on the magnitudes of the gradients of a step's states, outputs included. The previous
    step computes it. Each unit adds up |gradients of the next step's outputs| + `kept` + `w_bounds` * |largest gate
    gradient|. `kept` bounds the gradient that reaches the next step without a product. `w_bounds` bounds the sum of a
    unit's absolute weights. TERMS times the largest of these sums over units is the new bound; `resident.py` derives
    it. Where an episode starts, only the terms of the outputs remain.
    """
    PARTS: gl.constexpr = parts(SPLITS)  # programs that divide the gate gradients of a product among them
    LENGTH: gl.constexpr = SPLITS // PARTS  # tiles of each gate that one of them multiplies
    WARPS: gl.constexpr = gl.num_warps()
    TILES: gl.constexpr = GATES * SPLITS  # a tile is one gate of one program
    COUNT: gl.constexpr = GATES + 1 if SEPARATE else GATES  # of local gradients
    STATES: gl.constexpr = 1 if dc0_ptr is None else 2
    TERMS: gl.constexpr = 2.0 + STATES  # of the upper bound `bound`
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    a = arrays.Backward(
        w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, None, None, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr,
        dc_last_ptr, dxp_ptr, dhn_ptr, None, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
    )  # fmt: skip
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    place = Place(workers, worker, split)
    weights = allocate_weights(GATES, SPLITS, PARTS, exchange_ptr.dtype.element_ty)
    zeros = gl.zeros([BLOCK_B, 32], gl.float32, ACC)
    unit = split * 32 + gl.arange(0, 32, gl.SliceLayout(0, ACC))
    sent = 0  # number of the latest send
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_unscale, w_bound = fill_weights(
            weights, w_hh_ptr + model * (GATES * H * H), split // PARTS * (32 * PARTS), split % PARTS * (32 * LENGTH),
            GATES * H, H, H, GATES,
        )  # fmt: skip
        tile = locate_rows(item, tiles, arrays.Sizes(T, B, Q, None), unit, BLOCK_B, H, REVERSE, ACC)
        mask_q, mask = tile.mask_q, tile.mask
        last = tile.seq[:, None] * H + unit[None, :]
        dh = gl.load(dh_last_ptr + last, mask=mask, other=0.0).to(gl.float32)
        dc = zeros
        if STATES > 1:
            dc = gl.load(dc_last_ptr + last, mask=mask, other=0.0).to(gl.float32)
        rows = backward_rows(tile, 0, REVERSE)
        saved = load_residuals(a, rows[:, None], unit[None, :], mask, H, COUNT, PACKED)
        reset = load_resets(reset_ptr, rows, mask_q)
        dc_out = zeros
        if dcs_ptr is not None:
            dc_out = load_gradient_rows(dcs_ptr, rows, unit, mask, H).to(gl.float32)
        dh_out = load_gradient_rows(dhs_ptr, rows, unit, mask, H)
        dh_out_next = load_gradient_rows(dhs_ptr, backward_rows(tile, 1, REVERSE), unit, mask, H)
        bound = gl.max(zeros, axis=1)
        w_bounds = bound
        if SCALED:
            w_bounds = exchange_bounds(bounds_ptr, barrier_ptr, bound + PARTS * w_bound, sent + 1, place, SPLITS, ACC)
            if STATES == 1:
                largest = gl.abs(dh + dh_out.to(gl.float32))
            else:
                largest = gl.abs(dh) + gl.abs(dh_out.to(gl.float32)) + gl.abs(dc)
            if dcs_ptr is not None:
                largest += gl.abs(dc_out)
            bound = gl.max(largest, axis=1)
            bound = exchange_bounds(bounds_ptr, barrier_ptr, bound, sent + 2, place, SPLITS, ACC)
            sent += 2
        if dcs_ptr is not None:
            dc += dc_out
        # A step starts with the gradient of its output c in `dc`, and adds that of its output h to `dh` itself.
        for i in range(T):
            # equals `place`, which the compiler cannot tell: else addresses would stay in registers for the whole loop
            opaque_place = Place(workers, worker + opaque_zero(i), split)
            dh += dh_out.to(gl.float32)
            local_grads, factors = unpack_residuals(saved, COUNT, PACKED)
            if STATES == 1:
                grads, carried = GRAD_STEP((dh,), local_grads, factors)
                kept = gl.abs(dh)
            else:
                dc += dh * factors[0]
                grads = GRAD_STEP((dh, dc), local_grads, factors)[0]
                kept = gl.abs(dc)
            multiplied = operands_of(grads, GATES)
            sent += 1
            scale = zeros
            next_rows = backward_rows(tile, i + 1, REVERSE)
            if dcs_ptr is not None:
                dc_out = load_gradient_rows(dcs_ptr, next_rows, unit, mask & (i + 1 < T), H).to(gl.float32)
            if SCALED:
                # The scaled bound is in [1, 2). float16 ends at 65504, so local gradients may exceed one: that of a
                # sigmoid may be a quarter of |h| or |c|.
                scale = scale_to_float16(bound, 0)[:, None]
                largest = kept + w_bounds[:, None] * largest_magnitude(multiplied)
                if reset_ptr is not None:
                    largest = gl.where(reset[:, None], 0.0, largest)
                largest += gl.abs(dh_out_next.to(gl.float32))
                if dcs_ptr is not None:
                    largest += gl.abs(dc_out)
                bounds = box(bounds_ptr, sent, opaque_place, BLOCK_B * 32)
                store_bounds(bounds, gl.max(largest, axis=1), split, ACC)
            operands = box(exchange_ptr, sent, opaque_place, BLOCK_B * TILES * 32)
            for gate in gl.static_range(GATES):
                store_operand_rows(operands, multiplied[gate], scale, gate * SPLITS + split, TILES, SCALED)
            raise_flags(barrier_ptr, opaque_place, sent)
            first = (split + opaque_zero(i)) * 32
            if PACKED:
                prefetch_rows(local_grads_ptr, next_rows, first, 3, H, 3 * H)
            else:
                prefetch_rows(local_grads_ptr, next_rows, 4 * first, 2, 64, 4 * H)
                prefetch_rows(carry_gate_ptr, next_rows, first, 1, 0, H)
            if dc_dh_ptr is not None:
                prefetch_rows(dc_dh_ptr, next_rows, first, 1, 0, H)
            prefetch_rows(dhs_ptr, backward_rows(tile, i + 2, REVERSE), first, 1, 0, H)
            if STATES > 1:
                # called again, so that what is carried takes no registers while `dc` is still needed
                dc = GRAD_STEP((dh, dc), local_grads, factors)[1][0]
                if reset_ptr is not None:
                    if dreset_c_ptr is not None:
                        at = backward_rows(tile, i, REVERSE)[:, None] * H + unit[None, :]
                        gl.store(dreset_c_ptr + at, gl.where(reset[:, None], dc, 0.0), mask=mask)
                    dc = gl.where(reset[:, None], 0.0, dc)
                if dcs_ptr is not None:
                    dc += dc_out

            rows = backward_rows(tile, i, REVERSE)
            dxp = dxp_ptr + rows[:, None] * (GATES * H) + unit[None, :]
            for gate in gl.static_range(GATES):
                gl.store(dxp + gate * H, grads[gate].to(dxp_ptr.dtype.element_ty), mask=mask)
            if SEPARATE:
                at = rows[:, None] * H + unit[None, :]
                gl.store(dhn_ptr + at, grads[GATES].to(dhn_ptr.dtype.element_ty), mask=mask)

            wait_for_flags(barrier_ptr, opaque_place, sent, SPLITS)
            product = multiply_gradients(weights, operands, split % PARTS * LENGTH, i, TILES, GATES)
            if SCALED:
                unscale = inverse(scale) * w_unscale
                product = product * gl.convert_layout(unscale, product.type.layout, assert_trivial=True)
            if PARTS > 1:
                product = send_products(products_ptr, product, sent, opaque_place, SPLITS, PARTS, ACC)
            opaque_i = i + opaque_zero(i)
            dh_out = dh_out_next
            if PARTS > 1:
                product = receive_product(products_ptr, product, sent, opaque_place, SPLITS, PARTS, ACC)
            if SCALED:
                bounds = box(bounds_ptr, sent, Place(workers, worker + opaque_zero(i), split), BLOCK_B * 32)
                bound = TERMS * load_bounds(bounds, SPLITS, ACC)
            dh = product
            if STATES == 1 and len(carried) > 0:
                dh = carried[0] + product
            if reset_ptr is not None:
                if dreset_h_ptr is not None:
                    at = backward_rows(tile, opaque_i, REVERSE)[:, None] * H + unit[None, :]
                    gl.store(dreset_h_ptr + at, gl.where(reset[:, None], dh, 0.0), mask=mask)
                dh = gl.where(reset[:, None], 0.0, dh)
            rows = backward_rows(tile, opaque_i + 1, REVERSE)
            saved = load_residuals(a, rows[:, None], unit[None, :], mask, H, COUNT, PACKED)
            reset = load_resets(reset_ptr, rows, mask_q)
            dh_out_next = load_gradient_rows(dhs_ptr, backward_rows(tile, opaque_i + 2, REVERSE), unit, mask, H)
        # located again, so that the location takes no registers during the loop
        again = item + opaque_zero(item)
        tile = locate_rows(again, tiles, arrays.Sizes(T, B, Q, None), unit, BLOCK_B, H, REVERSE, ACC)
        last = tile.seq[:, None] * H + unit[None, :]
        gl.store(dh0_ptr + last, dh, mask=tile.mask)
        if dc0_ptr is not None:
            gl.store(dc0_ptr + last, dc, mask=tile.mask)
