"""LSTM time loop for Hopper in Gluon, for wide states.

The kernels compute what those of `lstm.py` do, with weights on chip and sequences as rows of products. Programs keep
and exchange what they do in `gru_rows.py`; each program also keeps the cell states of its own units.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels import names
from torch_bridge.kernels.cells.lstm import grad_step, residuals, step
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


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("rows", "fwd", "lstm"))
def forward_kernel(
    w_hh_t_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, exchange_ptr, barrier_ptr,
    T, B, Q, tiles, items,
    H: gl.constexpr, BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `streamed.forward_kernel`, except for two.

    `exchange` and `barrier` are as in `gru_rows.py`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    weights = allocate_weights(4, SPLITS, 1, exchange_ptr.dtype.element_ty)
    zeros = gl.zeros([BLOCK_B, 32], gl.float32, ACC)
    unit = split * 32 + gl.arange(0, 32, gl.SliceLayout(0, ACC))
    sent = 0
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_unscale, _ = fill_weights(weights, w_hh_t_ptr + model * (4 * H * H), split * 32, 0, H, H * H, H, 4)
        mask_q, mask, seq, row, last = locate_rows(item, tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        row, stride = time_order(row, model, T, B, REVERSE)
        h = gl.load(h0_ptr + last, mask=mask, other=0.0).to(gl.float32)
        c = gl.load(c0_ptr + last, mask=mask, other=0.0).to(gl.float32)
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
            prefetch_rows(xp_ptr, next_rows, first, 4, H, 4 * H)
            if reset_ptr is not None:
                c = gl.where(reset[:, None], 0.0, c)
                reset = load_reset(reset_ptr, next_rows, mask_q)
            wait_for_flags(barrier_ptr, here, sent, SPLITS)
            share = box(exchange_ptr, sent, workers, here, BLOCK_B * SPLITS * 32)
            a_i, a_f, a_g, a_o = multiply_states(weights, share, zeros, i, 4)
            x_i, x_f, x_g, x_o = load_inputs(xp_ptr + rows[:, None] * (4 * H) + unit[None, :], mask, H, 4)
            if SCALED:
                unscale = inverse(scale) * w_unscale
                a_i, a_f, a_g, a_o = a_i * unscale, a_f * unscale, a_g * unscale, a_o * unscale
            before = (h, c)
            gates = add_inputs((a_i, a_f, a_g, a_o), (x_i, x_f, x_g, x_o), 0.0, False)
            states, activations = step(gates, gates[3], before, "fast")
            h, c = states
            if i + 1 < T:
                sent += 1
                scale = send_state_rows(
                    exchange_ptr, barrier_ptr, h, scale, reset_ptr, reset, sent, workers, here, split, SPLITS, SCALED
                )
            at = rows[:, None] * H + unit[None, :]
            gl.store(hs_ptr + at, h.to(hs_ptr.dtype.element_ty), mask=mask)
            if cs_ptr is not None:
                gl.store(cs_ptr + at, c.to(cs_ptr.dtype.element_ty), mask=mask)
            if local_grads_ptr is not None:
                local_grads, factors = residuals(activations, before)
                saved = pack_residuals(local_grads, factors, dc_dh_ptr)
                store_residuals(
                    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, rows[:, None], unit[None, :], mask, saved, H, 4
                )  # fmt: skip
            rows = next_rows
        gl.store(h_last_ptr + last, h, mask=mask)
        gl.store(c_last_ptr + last, c, mask=mask)


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("rows", "bwd", "lstm"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, exchange_ptr, bounds_ptr, products_ptr, barrier_ptr,
    T, B, Q, tiles, items,
    H: gl.constexpr, BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `streamed.backward_kernel`, except for four.

    `exchange`, for four gates, `bounds`, `products` and `barrier` are as in `gru_rows.py`.
    """
    PARTS: gl.constexpr = parts(SPLITS)
    LENGTH: gl.constexpr = SPLITS // PARTS
    WARPS: gl.constexpr = gl.num_warps()
    TILES: gl.constexpr = 4 * SPLITS
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    weights = allocate_weights(4, SPLITS, PARTS, exchange_ptr.dtype.element_ty)
    zeros = gl.zeros([BLOCK_B, 32], gl.float32, ACC)
    unit = split * 32 + gl.arange(0, 32, gl.SliceLayout(0, ACC))
    sent = 0
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_unscale, w_bound = fill_weights(
            weights, w_hh_ptr + model * (4 * H * H), split // PARTS * (32 * PARTS), split % PARTS * (32 * LENGTH),
            4 * H, H, H, 4,
        )  # fmt: skip
        mask_q, mask, _, row, last = locate_rows(item, tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        row, stride = time_order(row, model, T, B, REVERSE)
        dh = gl.load(dh_last_ptr + last, mask=mask, other=0.0).to(gl.float32)
        dc = gl.load(dc_last_ptr + last, mask=mask, other=0.0).to(gl.float32)
        rows = backward_rows(row, 0, T, stride, REVERSE)
        saved = load_residuals(
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, rows[:, None], unit[None, :], mask, H, 4, False
        )  # fmt: skip
        reset = load_resets(reset_ptr, rows, mask_q)
        dcy = zeros
        if dcs_ptr is not None:
            dcy = load_gradient_rows(dcs_ptr, rows, unit, mask, H).to(gl.float32)
        dy = load_gradient_rows(dhs_ptr, rows, unit, mask, H)
        next_rows = backward_rows(row, 1, T, stride, REVERSE)
        dy_next = load_gradient_rows(dhs_ptr, next_rows, unit, mask, H)
        bound = gl.max(zeros, axis=1)
        w_bounds = bound
        if SCALED:
            w_bounds = exchange_bounds(
                bounds_ptr, barrier_ptr, bound + PARTS * w_bound, sent + 1, workers, worker, split, SPLITS, ACC
            )
            largest = gl.abs(dh) + gl.abs(dy.to(gl.float32)) + gl.abs(dc)
            if dcs_ptr is not None:
                largest += gl.abs(dcy)
            bound = gl.max(largest, axis=1)
            bound = exchange_bounds(bounds_ptr, barrier_ptr, bound, sent + 2, workers, worker, split, SPLITS, ACC)
            sent += 2
        if dcs_ptr is not None:
            dc += dcy
        for i in range(T):
            here = worker + opaque_zero(i)  # opaque, or addresses would stay in registers for the whole loop
            dh += dy.to(gl.float32)
            local_grads, factors = unpack_residuals(saved, 4, False)
            dc += dh * factors[0]
            grads = grad_step((dh, dc), local_grads, factors)[0]
            d_i, d_f, d_g, d_o = grads
            sent += 1
            scale = zeros
            next_rows = backward_rows(row, i + 1, T, stride, REVERSE)
            if dcs_ptr is not None:
                dcy = load_gradient_rows(dcs_ptr, next_rows, unit, mask & (i + 1 < T), H).to(gl.float32)
            if SCALED:
                # 2^0 leaves headroom for local gradients above 1 (up to a quarter of |c|)
                scale = scale_to_float16(bound, 0)[:, None]
                largest = gl.maximum(gl.maximum(gl.abs(d_i), gl.abs(d_f)), gl.maximum(gl.abs(d_g), gl.abs(d_o)))
                largest = gl.abs(dc) + w_bounds[:, None] * largest
                if reset_ptr is not None:
                    largest = gl.where(reset[:, None], 0.0, largest)
                largest += gl.abs(dy_next.to(gl.float32))
                if dcs_ptr is not None:
                    largest += gl.abs(dcy)
                bounds = box(bounds_ptr, sent, workers, here, BLOCK_B * 32)
                store_bounds(bounds, gl.max(largest, axis=1), split, ACC)
            share = box(exchange_ptr, sent, workers, here, BLOCK_B * TILES * 32)
            store_operand_rows(share, d_i, scale, split, TILES, SCALED)
            store_operand_rows(share, d_f, scale, SPLITS + split, TILES, SCALED)
            store_operand_rows(share, d_g, scale, 2 * SPLITS + split, TILES, SCALED)
            store_operand_rows(share, d_o, scale, 3 * SPLITS + split, TILES, SCALED)
            raise_flags(barrier_ptr, here, split, sent)
            first = (split + opaque_zero(i)) * 32
            prefetch_rows(local_grads_ptr, next_rows, 4 * first, 2, 64, 4 * H)
            prefetch_rows(carry_gate_ptr, next_rows, first, 1, 0, H)
            prefetch_rows(dc_dh_ptr, next_rows, first, 1, 0, H)
            later_rows = backward_rows(row, i + 2, T, stride, REVERSE)
            prefetch_rows(dhs_ptr, later_rows, first, 1, 0, H)
            dc = dc * factors[1]  # as `grad_step` returns it, but not before dc is read for the last time
            if reset_ptr is not None:
                if dreset_c_ptr is not None:
                    at = backward_rows(row, i, T, stride, REVERSE)[:, None] * H + unit[None, :]
                    gl.store(dreset_c_ptr + at, gl.where(reset[:, None], dc, 0.0), mask=mask)
                dc = gl.where(reset[:, None], 0.0, dc)
            if dcs_ptr is not None:
                dc += dcy

            rows = backward_rows(row, i, T, stride, REVERSE)
            dxp = dxp_ptr + rows[:, None] * (4 * H) + unit[None, :]
            gl.store(dxp, d_i.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + H, d_f.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + 2 * H, d_g.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + 3 * H, d_o.to(dxp_ptr.dtype.element_ty), mask=mask)

            wait_for_flags(barrier_ptr, here, sent, SPLITS)
            dh = multiply_gradients(weights, share, split % PARTS * LENGTH, i, TILES, 4)
            if SCALED:
                unscale = inverse(scale) * w_unscale
                dh = dh * gl.convert_layout(unscale, dh.type.layout, assert_trivial=True)
            if PARTS > 1:
                dh = send_products(products_ptr, dh, sent, here, split, SPLITS, PARTS, ACC)
            then = i + opaque_zero(i)
            dy = dy_next
            if PARTS > 1:
                dh = receive_product(products_ptr, dh, sent, here, split, SPLITS, PARTS, ACC)
            if SCALED:
                bounds = box(bounds_ptr, sent, workers, worker + opaque_zero(i), BLOCK_B * 32)
                bound = 4.0 * load_bounds(bounds, SPLITS, ACC)
            if reset_ptr is not None:
                if dreset_h_ptr is not None:
                    at = backward_rows(row, then, T, stride, REVERSE)[:, None] * H + unit[None, :]
                    gl.store(dreset_h_ptr + at, gl.where(reset[:, None], dh, 0.0), mask=mask)
                dh = gl.where(reset[:, None], 0.0, dh)
            rows = backward_rows(row, then + 1, T, stride, REVERSE)
            saved = load_residuals(
                local_grads_ptr, dc_dh_ptr, carry_gate_ptr, rows[:, None], unit[None, :], mask, H, 4, False
            )  # fmt: skip
            reset = load_resets(reset_ptr, rows, mask_q)
            dy_next = load_gradient_rows(dhs_ptr, backward_rows(row, then + 2, T, stride, REVERSE), unit, mask, H)
        # located again, so that the location takes no registers during the loop
        _, mask, _, _, last = locate_rows(item + opaque_zero(item), tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        gl.store(dh0_ptr + last, dh, mask=mask)
        gl.store(dc0_ptr + last, dc, mask=mask)
