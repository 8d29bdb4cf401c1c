"""GRU time loop for Hopper in Gluon, for wide states.

The kernels compute what those of `streamed.py` do with SPLITS > 1, but with weights on chip, and with sequences as rows
of products.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels import names
from torch_bridge.kernels.cells.gru import grad_step, residuals, step
from torch_bridge.kernels.common import load_reset, step_time, time_order
from torch_bridge.kernels.gluon_common import (
    add_inputs,
    backward_rows,
    forward_rows,
    inverse,
    load_inputs,
    load_resets,
    load_residuals,
    pack_residuals,
    scale_to_float16,
    store_residuals,
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
from torch_bridge.kernels.loops.split_common import opaque_zero


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("rows", "fwd", "gru"))
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr,
    exchange_ptr, barrier_ptr,
    T, B, Q, tiles, items,
    H: gl.constexpr, BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `streamed.forward_kernel`, except for two.

    `exchange` is `[2, workers, BLOCK_B, SPLITS * 32]` in the dtype of the products' operands, and `barrier` is int32
    zeros `[workers, warps, 32]`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    weights = allocate_weights(3, SPLITS, 1, exchange_ptr.dtype.element_ty)
    zeros = gl.zeros([BLOCK_B, 32], gl.float32, ACC)
    unit = split * 32 + gl.arange(0, 32, gl.SliceLayout(0, ACC))
    sent = 0
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_unscale, _ = fill_weights(weights, w_hh_t_ptr + model * (3 * H * H), split * 32, 0, H, H * H, H, 3)
        mask_q, mask, seq, row, last = locate_rows(item, tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        row, stride = time_order(row, model, T, B, REVERSE)
        b_hn = gl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(gl.float32)[None, :]
        h = gl.load(h0_ptr + last, mask=mask, other=0.0).to(gl.float32)
        scale = gl.full([BLOCK_B, 1], 1.0, gl.float32, ACC)
        if SCALED:
            scale = first_state_scale_rows(h0_ptr, zeros, seq, mask_q, H, SPLITS)
        rows = row + step_time(0, T, REVERSE) * stride
        reset = load_resets(reset_ptr, rows, mask_q)
        sent += 1
        scale = send_state_rows(
            exchange_ptr, barrier_ptr, h, scale, reset_ptr, reset, sent, workers, worker, split, SPLITS, SCALED
        )
        for i in range(T):
            here = worker + opaque_zero(i)  # opaque, or addresses would stay in registers for the whole loop
            next_rows = forward_rows(row, i + 1, T, stride, REVERSE)
            first = (split + opaque_zero(i)) * 32
            prefetch_rows(xp_ptr, next_rows, first, 3, H, 3 * H)
            if reset_ptr is not None:
                h = gl.where(reset[:, None], 0.0, h)
                reset = load_reset(reset_ptr, next_rows, mask_q)
            wait_for_flags(barrier_ptr, here, sent, SPLITS)
            share = box(exchange_ptr, sent, workers, here, BLOCK_B * SPLITS * 32)
            a_r, a_z, a_n = multiply_states(weights, share, zeros, i, 3)
            x_r, x_z, x_n = load_inputs(xp_ptr + rows[:, None] * (3 * H) + unit[None, :], mask, H, 3)
            if SCALED:
                unscale = inverse(scale) * w_unscale
                a_r, a_z, a_n = a_r * unscale, a_z * unscale, a_n * unscale
            before = (h,)
            gates = add_inputs((a_r, a_z, a_n), (x_r, x_z, x_n), b_hn, True)
            states, activations = step(gates, x_n.to(gl.float32), before, "fast")
            h = states[0]
            if i + 1 < T:
                sent += 1
                scale = send_state_rows(
                    exchange_ptr, barrier_ptr, h, scale, reset_ptr, reset, sent, workers, here, split, SPLITS, SCALED
                )
            gl.store(hs_ptr + rows[:, None] * H + unit[None, :], h.to(hs_ptr.dtype.element_ty), mask=mask)
            if local_grads_ptr is not None:
                local_grads, factors = residuals(activations, before)
                saved = pack_residuals(local_grads, factors, None)
                store_residuals(local_grads_ptr, None, carry_gate_ptr, rows[:, None], unit[None, :], mask, saved, H, 4)
            rows = next_rows
        gl.store(h_last_ptr + last, h, mask=mask)


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("rows", "bwd", "gru"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dh_last_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr,
    exchange_ptr, bounds_ptr, products_ptr, barrier_ptr,
    T, B, Q, tiles, items,
    H: gl.constexpr, BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr, IN_PLACE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `streamed.backward_kernel`, except for four.

    `exchange` is `[2, workers, BLOCK_B, 3, SPLITS * 32]` in the dtype of the products' operands. `bounds` is float32
    `[2, workers, BLOCK_B, 32]`, or None if that dtype is bfloat16. `products` is int32 zeros `[workers, SPLITS, PARTS,
    BLOCK_B, 32]`, and `barrier` is int32 zeros `[workers, warps, 32]`.
    """
    PARTS: gl.constexpr = parts(SPLITS)
    LENGTH: gl.constexpr = SPLITS // PARTS
    WARPS: gl.constexpr = gl.num_warps()
    TILES: gl.constexpr = 3 * SPLITS
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    weights = allocate_weights(3, SPLITS, PARTS, exchange_ptr.dtype.element_ty)
    zeros = gl.zeros([BLOCK_B, 32], gl.float32, ACC)
    unit = split * 32 + gl.arange(0, 32, gl.SliceLayout(0, ACC))
    sent = 0
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_unscale, w_bound = fill_weights(
            weights, w_hh_ptr + model * (3 * H * H), split // PARTS * (32 * PARTS), split % PARTS * (32 * LENGTH),
            3 * H, H, H, 3,
        )  # fmt: skip
        mask_q, mask, _, row, last = locate_rows(item, tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        row, stride = time_order(row, model, T, B, REVERSE)
        dh = gl.load(dh_last_ptr + last, mask=mask, other=0.0).to(gl.float32)
        rows = backward_rows(row, 0, T, stride, REVERSE)
        saved = load_residuals(
            local_grads_ptr, None, carry_gate_ptr, rows[:, None], unit[None, :], mask, H, 4, IN_PLACE
        )
        reset = load_resets(reset_ptr, rows, mask_q)
        dy = load_gradient_rows(dhs_ptr, rows, unit, mask, H)
        dy_next = load_gradient_rows(dhs_ptr, backward_rows(row, 1, T, stride, REVERSE), unit, mask, H)
        bound = gl.max(zeros, axis=1)
        w_bounds = bound
        if SCALED:
            w_bounds = exchange_bounds(
                bounds_ptr, barrier_ptr, bound + PARTS * w_bound, sent + 1, workers, worker, split, SPLITS, ACC
            )
            bound = gl.max(gl.abs(dh + dy.to(gl.float32)), axis=1)
            bound = exchange_bounds(bounds_ptr, barrier_ptr, bound, sent + 2, workers, worker, split, SPLITS, ACC)
            sent += 2
        for i in range(T):
            here = worker + opaque_zero(i)  # opaque, or addresses would stay in registers for the whole loop
            dh += dy.to(gl.float32)
            local_grads, factors = unpack_residuals(saved, 4, IN_PLACE)
            grads, carried = grad_step((dh,), local_grads, factors)
            dr, dz, dn, dhn = grads
            sent += 1
            scale = zeros
            if SCALED:
                # 2^0 leaves headroom for local gradients above 1 (up to a quarter of |h_n| or |h|)
                scale = scale_to_float16(bound, 0)[:, None]
                largest = gl.maximum(gl.maximum(gl.abs(dr), gl.abs(dz)), gl.abs(dhn))
                largest = gl.abs(dh) + w_bounds[:, None] * largest
                if reset_ptr is not None:
                    largest = gl.where(reset[:, None], 0.0, largest)
                largest += gl.abs(dy_next.to(gl.float32))
                bounds = box(bounds_ptr, sent, workers, here, BLOCK_B * 32)
                store_bounds(bounds, gl.max(largest, axis=1), split, ACC)
            share = box(exchange_ptr, sent, workers, here, BLOCK_B * TILES * 32)
            store_operand_rows(share, dr, scale, split, TILES, SCALED)
            store_operand_rows(share, dz, scale, SPLITS + split, TILES, SCALED)
            store_operand_rows(share, dhn, scale, 2 * SPLITS + split, TILES, SCALED)
            raise_flags(barrier_ptr, here, split, sent)
            next_rows = backward_rows(row, i + 1, T, stride, REVERSE)
            first = (split + opaque_zero(i)) * 32
            if carry_gate_ptr is not None:
                prefetch_rows(local_grads_ptr, next_rows, 4 * first, 2, 64, 4 * H)
                prefetch_rows(carry_gate_ptr, next_rows, first, 1, 0, H)
            else:
                prefetch_rows(local_grads_ptr, next_rows, first, 3, H, 3 * H)
            later_rows = backward_rows(row, i + 2, T, stride, REVERSE)
            prefetch_rows(dhs_ptr, later_rows, first, 1, 0, H)
            dh = carried[0]

            rows = backward_rows(row, i, T, stride, REVERSE)
            dxp = dxp_ptr + rows[:, None] * (3 * H) + unit[None, :]
            at = rows[:, None] * H + unit[None, :]
            gl.store(dxp, dr.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + H, dz.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + 2 * H, dn.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dhn_ptr + at, dhn.to(dhn_ptr.dtype.element_ty), mask=mask)

            wait_for_flags(barrier_ptr, here, sent, SPLITS)
            product = multiply_gradients(weights, share, split % PARTS * LENGTH, i, TILES, 3)
            if SCALED:
                unscale = inverse(scale) * w_unscale
                product = product * gl.convert_layout(unscale, product.type.layout, assert_trivial=True)
            if PARTS > 1:
                product = send_products(products_ptr, product, sent, here, split, SPLITS, PARTS, ACC)
            then = i + opaque_zero(i)
            dy = dy_next
            if PARTS > 1:
                product = receive_product(products_ptr, product, sent, here, split, SPLITS, PARTS, ACC)
            if SCALED:
                bounds = box(bounds_ptr, sent, workers, worker + opaque_zero(i), BLOCK_B * 32)
                bound = 3.0 * load_bounds(bounds, SPLITS, ACC)
            dh += product
            if reset_ptr is not None:
                if dreset_h_ptr is not None:
                    at = backward_rows(row, then, T, stride, REVERSE)[:, None] * H + unit[None, :]
                    gl.store(dreset_h_ptr + at, gl.where(reset[:, None], dh, 0.0), mask=mask)
                dh = gl.where(reset[:, None], 0.0, dh)
            rows = backward_rows(row, then + 1, T, stride, REVERSE)
            saved = load_residuals(
                local_grads_ptr, None, carry_gate_ptr, rows[:, None], unit[None, :], mask, H, 4, IN_PLACE
            )
            reset = load_resets(reset_ptr, rows, mask_q)
            dy_next = load_gradient_rows(dhs_ptr, backward_rows(row, then + 2, T, stride, REVERSE), unit, mask, H)
        # located again, so that the location takes no registers during the loop
        _, mask, _, _, last = locate_rows(item + opaque_zero(item), tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        gl.store(dh0_ptr + last, dh, mask=mask)
