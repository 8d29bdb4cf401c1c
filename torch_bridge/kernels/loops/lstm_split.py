"""LSTM time loop for Hopper in Gluon: as `streamed.py` with SPLITS > 1, but with weights on chip.

Programs keep and send what they do in `gru_split.py`; each program also keeps the cell states of its own units.
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
    load_gradient,
    load_inputs,
    load_resets,
    load_residuals,
    pack_residuals,
    scale_to_float16,
    store_residuals,
    unpack_residuals,
)
from torch_bridge.kernels.loops.split_common import (
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


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("split", "fwd", "lstm"))
def forward_kernel(
    w_hh_t_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, exchange_ptr,
    T, B, Q, tiles, items,
    H: gl.constexpr, BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `streamed.forward_kernel`, but for `exchange`.

    `exchange` is int32 zeros `[2, workers, SPLITS, BLOCK_B / 2, 64, 2]`: two buffers of words and their numbers.
    """
    WIDE: gl.constexpr = gl.num_warps() // 4
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_t_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, BLOCK_B // WIDE, 16])
    EARLY: gl.constexpr = BLOCK_B // WIDE < 16  # there are registers for the inputs of two steps
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    share = allocate_weight_shard(4, SPLITS, DTYPE)
    operands = allocate_operands(SPLITS, BLOCK_B, DTYPE)
    zeros = gl.zeros([64, BLOCK_B], gl.float32, ACC)
    own = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    unit = split * 64 + own
    sent = 0
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_unscale = load_weight_shard(share, w_hh_t_ptr + model * (4 * H * H), split, H, H * H, H, 4, SPLITS, True)
        mask_q, mask, seq, row, last = locate(item, tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        row, stride = time_order(row, model, T, B, REVERSE)
        h = gl.load(h0_ptr + last, mask=mask, other=0.0).to(gl.float32)
        c = gl.load(c0_ptr + last, mask=mask, other=0.0).to(gl.float32)
        scale = gl.full([1, BLOCK_B], 1.0, gl.float32, ACC)
        if SCALED:
            scale = first_state_scale(h0_ptr, zeros, seq, own, mask_q, H, SPLITS)[None, :]
        rows = row + step_time(0, T, REVERSE) * stride
        x_i, x_f, x_g, x_o = load_inputs(xp_ptr + rows[None, :] * (4 * H) + unit[:, None], mask, H, 4)
        reset = load_resets(reset_ptr, rows, mask_q)
        sent += 1
        scale = send_state(
            exchange_ptr, h, scale, reset_ptr, reset, sent, 1, workers, worker, split, SCALED, DTYPE, SPLITS
        )
        for i in range(T):
            now = i + opaque_zero(i)  # opaque, or addresses of many steps would take registers
            next_rows = forward_rows(row, now + 1, T, stride, REVERSE)
            if EARLY:
                next_i, next_f, next_g, next_o = load_inputs(
                    xp_ptr + next_rows[None, :] * (4 * H) + unit[:, None], mask, H, 4
                )
            if reset_ptr is not None:
                c = gl.where(reset[None, :], 0.0, c)
                reset = load_reset(reset_ptr, next_rows, mask_q)
            receive_tile(operands, exchange_ptr, sent, workers, worker, DTYPE, SPLITS)
            a_i, a_f, a_g, a_o = multiply_gates(share, operands, zeros, i, 4, SPLITS)
            if SCALED:
                unscale = inverse(scale) * w_unscale
                a_i, a_f, a_g, a_o = a_i * unscale, a_f * unscale, a_g * unscale, a_o * unscale
            before = (h, c)
            gates = add_inputs((a_i, a_f, a_g, a_o), (x_i, x_f, x_g, x_o), 0.0, False)
            states, activations = step(gates, gates[3], before, "fast")
            h, c = states
            more = (i + 1 < T).to(gl.int32)
            sent += more
            scale = send_state(
                exchange_ptr, h, scale, reset_ptr, reset, sent, more, workers, worker, split, SCALED, DTYPE, SPLITS
            )
            this_rows = (row + step_time(now, T, REVERSE) * stride)[None, :]
            at = this_rows * H + unit[:, None]
            gl.store(hs_ptr + at, h.to(hs_ptr.dtype.element_ty), mask=mask)
            if cs_ptr is not None:
                gl.store(cs_ptr + at, c.to(cs_ptr.dtype.element_ty), mask=mask)
            if local_grads_ptr is not None:
                local_grads, factors = residuals(activations, before)
                saved = pack_residuals(local_grads, factors, dc_dh_ptr)
                store_residuals(
                    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, this_rows, unit[:, None], mask, saved, H, 4
                )  # fmt: skip
            if EARLY:
                x_i, x_f, x_g, x_o = next_i, next_f, next_g, next_o
            else:
                x_i, x_f, x_g, x_o = load_inputs(xp_ptr + next_rows[None, :] * (4 * H) + unit[:, None], mask, H, 4)
        gl.store(h_last_ptr + last, h, mask=mask)
        gl.store(c_last_ptr + last, c, mask=mask)


@gluon.jit
def _load_saved(
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, rows, unit, mask, mask_q, H: gl.constexpr
):  # fmt: skip
    """Loads what a backward step reads, without unpacking or converting the data."""
    saved = load_residuals(
        local_grads_ptr, dc_dh_ptr, carry_gate_ptr, rows[None, :], unit[:, None], mask, H, 4, False
    )  # fmt: skip
    reset = load_resets(reset_ptr, rows, mask_q)
    dy = load_gradient(dhs_ptr, rows, unit, mask, H)
    dcy = dy
    if dcs_ptr is not None:
        dcy = load_gradient(dcs_ptr, rows, unit, mask, H)
    return saved, reset, dy, dcy


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items"], repr=names.of_loop("split", "bwd", "lstm"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, exchange_ptr,
    T, B, Q, tiles, items,
    H: gl.constexpr, BLOCK_B: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `streamed.backward_kernel`, but for `exchange`.

    `exchange` is int32 zeros `[2, workers, SPLITS, SPLITS, BLOCK_B, 64]`: two buffers of words, by receiving program
    and then by sending program.
    """
    WIDE: gl.constexpr = gl.num_warps() // 4
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, BLOCK_B // WIDE, 16])
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    share = allocate_weight_shard(4, SPLITS, DTYPE)
    operands = allocate_operands(4, BLOCK_B, DTYPE)
    zeros = gl.zeros([64, BLOCK_B], gl.float32, ACC)
    unit = split * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    sent = 0
    for item in range(worker, items, workers):
        model = (item // tiles).to(gl.int64)
        w_unscale = load_weight_shard(share, w_hh_ptr + model * (4 * H * H), split, 4 * H, H, H, 4, SPLITS, False)
        mask_q, mask, _, row, last = locate(item, tiles, T, B, Q, unit, BLOCK_B, H, ACC)
        row, stride = time_order(row, model, T, B, REVERSE)
        dh = gl.load(dh_last_ptr + last, mask=mask, other=0.0).to(gl.float32)
        dc = gl.load(dc_last_ptr + last, mask=mask, other=0.0).to(gl.float32)
        rows = row + step_time(T - 1, T, REVERSE) * stride
        saved, reset, dy, dcy = _load_saved(
            local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, rows, unit, mask, mask_q, H
        )
        for i in range(T):
            dh += dy.to(gl.float32)
            local_grads, factors = unpack_residuals(saved, 4, False)
            dc += dh * factors[0]
            if dcs_ptr is not None:
                dc += dcy.to(gl.float32)
            grads, carried = grad_step((dh, dc), local_grads, factors)
            d_i, d_f, d_g, d_o = grads
            dc = carried[0]
            this_reset = reset
            next_rows = backward_rows(row, i + 1, T, stride, REVERSE)
            saved, reset, dy, dcy = _load_saved(
                local_grads_ptr,
                dc_dh_ptr,
                carry_gate_ptr,
                reset_ptr,
                dhs_ptr,
                dcs_ptr,
                next_rows,
                unit,
                mask,
                mask_q,
                H,
            )
            scale, unscale = zeros, zeros
            if SCALED:
                largest = gl.maximum(gl.maximum(gl.abs(d_i), gl.abs(d_f)), gl.maximum(gl.abs(d_g), gl.abs(d_o)))
                scale = scale_to_float16(gl.max(largest, axis=0), 14)[None, :]
                unscale = inverse(scale) * w_unscale
            store_operand(operands[0], d_i, scale, SCALED)
            store_operand(operands[1], d_f, scale, SCALED)
            store_operand(operands[2], d_g, scale, SCALED)
            store_operand(operands[3], d_o, scale, SCALED)
            parts = multiply_parts(share, operands, zeros, i, 4, SPLITS)
            sent += 1
            send_partial_sums(exchange_ptr, parts, unscale, sent, workers, worker, split, SPLITS, SCALED)

            rows = row + step_time(T - 1 - i, T, REVERSE) * stride
            dxp = dxp_ptr + rows[None, :] * (4 * H) + unit[:, None]
            gl.store(dxp, d_i.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + H, d_f.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + 2 * H, d_g.to(dxp_ptr.dtype.element_ty), mask=mask)
            gl.store(dxp + 3 * H, d_o.to(dxp_ptr.dtype.element_ty), mask=mask)
            dh = receive_sum(exchange_ptr, zeros, sent, workers, worker, split, SPLITS)
            if reset_ptr is not None:
                if dreset_h_ptr is not None:
                    at = rows[None, :] * H + unit[:, None]
                    gl.store(dreset_h_ptr + at, gl.where(this_reset[None, :], dh, 0.0), mask=mask)
                    gl.store(dreset_c_ptr + at, gl.where(this_reset[None, :], dc, 0.0), mask=mask)
                dh = gl.where(this_reset[None, :], 0.0, dh)
                dc = gl.where(this_reset[None, :], 0.0, dc)
        gl.store(dh0_ptr + last, dh, mask=mask)
        gl.store(dc0_ptr + last, dc, mask=mask)
