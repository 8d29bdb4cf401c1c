"""LSTM time loop in Gluon, for few units and compute capability 8.0 and newer.

The kernels compute what those of `lstm.py` do with SPLITS == 1. The forward kernel supports no reset state but zeros.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels.common import sigmoid, tanh
from torch_bridge.kernels.fma_common import (
    allocate_operands,
    load_gate_weights,
    load_operand,
    load_quads,
    load_reset,
    locate,
    no_loads,
    partial_row_sums,
    store_operand,
    store_quads,
    sum_rows,
    then,
    to_registers,
    unpack_quads,
)
from torch_bridge.kernels.gluon_common import backward_rows, barrier, forward_rows, load_inputs


@gluon.jit
def _load_inputs(i, xp_ptr, reset_ptr, row, T, stride, unit, mask, H: gl.constexpr, REVERSE: gl.constexpr):
    """Loads what step min(i, T - 1) reads."""
    row = forward_rows(row, i, T, stride, REVERSE)
    x_i, x_f, x_g, x_o = load_inputs(xp_ptr + row * (4 * H) + unit, mask, H, 4)
    return x_i, x_f, x_g, x_o, load_reset(reset_ptr, row)


@gluon.jit
def _sums(w, operand):
    """Returns the product of a gate's weights and an operand, one sum per unit."""
    w = to_registers(w)
    return sum_rows(partial_row_sums(w * operand), w)


@gluon.jit
def _forward_step(
    i, h, c, inputs, buffers, w,
    xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
    seq, row, T, stride, unit, mask,
    H: gl.constexpr, DEPTH: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """Runs step i and prefetches what step i + DEPTH reads."""
    x_i, x_f, x_g, x_o, reset = inputs
    if reset_ptr is not None:
        h = gl.where(reset, 0.0, h)
        c = gl.where(reset, 0.0, c)
    store_operand(buffers[0], h, DTYPE)
    barrier()
    w_i, w_f, w_g, w_o = w
    operand = load_operand(buffers[0], w_i)
    a_i = _sums(w_i, operand) + x_i.to(gl.float32)
    a_g = _sums(w_g, operand) + x_g.to(gl.float32)
    a_f = _sums(w_f, operand) + x_f.to(gl.float32)
    a_o = _sums(w_o, operand) + x_o.to(gl.float32)
    inputs = _load_inputs(i + DEPTH, xp_ptr, reset_ptr, row, T, stride, unit, mask, H, REVERSE)
    g_i, g_f, g_o = sigmoid(a_i), sigmoid(a_f), sigmoid(a_o)
    g_g = tanh(a_g, DTYPE == gl.float32)
    new_c = g_f * c + g_i * g_g
    tanh_c = tanh(new_c, DTYPE == gl.float32)
    new_h = g_o * tanh_c
    live = mask & (i < T)  # nothing is stored for a step past the last
    at = forward_rows(row, i, T, stride, REVERSE) * H + unit
    gl.store(hs_ptr + at, new_h.to(hs_ptr.dtype.element_ty), mask=live)
    if cs_ptr is not None:
        gl.store(cs_ptr + at, new_c.to(cs_ptr.dtype.element_ty), mask=live)
    if local_grads_ptr is not None:
        f_i, f_f = g_g * g_i * (1.0 - g_i), c * g_f * (1.0 - g_f)
        f_g, f_o = g_i * (1.0 - g_g * g_g), tanh_c * g_o * (1.0 - g_o)
        store_quads(local_grads_ptr, at, live, f_i, f_f, f_g, f_o, DTYPE, PRECISION)
        dc_dh = g_o * (1.0 - tanh_c * tanh_c)
        gl.store(dc_dh_ptr + at, dc_dh.to(dc_dh_ptr.dtype.element_ty), mask=live)
        gl.store(carry_gate_ptr + at, g_f, mask=live)
    last = seq * H + unit
    gl.store(h_last_ptr + last, new_h, mask=mask & (i == T - 1))
    gl.store(c_last_ptr + last, new_c, mask=mask & (i == T - 1))
    return new_h, new_c, inputs


@gluon.jit(do_not_specialize=["T", "B", "Q"])
def fwd_kernel(
    w_hh_t_ptr, xp_ptr, h0_ptr, c0_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
    T, B, Q,
    H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr, PRECISION: gl.constexpr, SHARED_GATES: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `torch_bridge.kernels.lstm.lstm_fwd_kernel`, and SHARED_GATES.

    SHARED_GATES is the number of gates whose weights are in shared memory.
    """
    DTYPE: gl.constexpr = w_hh_t_ptr.dtype.element_ty
    model, unit, mask, seq, row, stride = locate(T, B, Q, H, BLOCK_H, REVERSE)
    DEPTH: gl.constexpr = 4 if BLOCK_H <= 64 else 2
    inputs = no_loads()
    for k in gl.static_range(DEPTH):
        inputs = then(inputs, _load_inputs(k, xp_ptr, reset_ptr, row, T, stride, unit, mask, H, REVERSE))
    w_ptr = w_hh_t_ptr + model * (4 * H * H)
    w = load_gate_weights(w_ptr, H * H, H, H, BLOCK_H, 4, SHARED_GATES)
    h = gl.load(h0_ptr + seq * H + unit, mask=mask, other=0.0).to(gl.float32)
    c = gl.load(c0_ptr + seq * H + unit, mask=mask, other=0.0).to(gl.float32)
    buffers = allocate_operands(1, BLOCK_H)
    for i in range(0, T, DEPTH):
        for k in gl.static_range(DEPTH):
            h, c, next_inputs = _forward_step(
                i + k, h, c, inputs[0], buffers[k % 2], w,
                xp_ptr, reset_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
                seq, row, T, stride, unit, mask, H, DEPTH, DTYPE, REVERSE, PRECISION,
            )  # fmt: skip
            inputs = then(inputs[1:], next_inputs)


@gluon.jit
def _load_saved(
    i, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, row, T, stride, unit, mask,
    H: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Loads what step min(i, T - 1) of the backward pass reads."""
    row = backward_rows(row, i, T, stride, REVERSE)
    at = row * H + unit
    dc_dh = gl.load(dc_dh_ptr + at, mask=mask, other=0.0)
    carry_gate = gl.load(carry_gate_ptr + at, mask=mask, other=0.0)
    dy = gl.load(dhs_ptr + at, mask=mask, other=0.0)
    dcy = dy
    if dcs_ptr is not None:
        dcy = gl.load(dcs_ptr + at, mask=mask, other=0.0)
    return load_quads(local_grads_ptr, at, mask), dc_dh, carry_gate, dy, dcy, load_reset(reset_ptr, row)


@gluon.jit
def _backward_step(
    i, dh, dc, saved, buffers, w,
    local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dh0_ptr, dc0_ptr,
    dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask,
    H: gl.constexpr, DEPTH: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs step i and prefetches what step i + DEPTH reads."""
    local_grads, dc_dh, carry_gate, dy, dcy, reset = saved
    f_i, f_f, f_g, f_o = unpack_quads(local_grads)
    dh += dy.to(gl.float32)
    dc += dh * dc_dh.to(gl.float32)
    if dcs_ptr is not None:
        dc += dcy.to(gl.float32)
    di, df, dg, do = dc * f_i, dc * f_f, dc * f_g, dh * f_o
    store_operand(buffers[0], di, DTYPE)
    store_operand(buffers[1], df, DTYPE)
    store_operand(buffers[2], dg, DTYPE)
    store_operand(buffers[3], do, DTYPE)
    barrier()
    parts = partial_row_sums(w[0] * load_operand(buffers[0], w[0]))
    for gate in gl.static_range(1, 4):
        w_gate = to_registers(w[gate])
        parts += partial_row_sums(w_gate * load_operand(buffers[gate], w_gate))
    saved = _load_saved(
        i + DEPTH, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, row, T, stride, unit, mask,
        H, REVERSE,
    )  # fmt: skip
    live = mask & (i < T)  # nothing is stored for a step past the last
    row = backward_rows(row, i, T, stride, REVERSE)
    at = row * H + unit
    dxp = dxp_ptr + row * (4 * H) + unit
    gl.store(dxp, di.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dxp + H, df.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dxp + 2 * H, dg.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dxp + 3 * H, do.to(dxp_ptr.dtype.element_ty), mask=live)
    dh = sum_rows(parts, w[0])
    dc = dc * carry_gate
    if reset_ptr is not None:
        if dreset_h_ptr is not None:
            gl.store(dreset_h_ptr + at, gl.where(reset, dh, 0.0), mask=live)
        if dreset_c_ptr is not None:
            gl.store(dreset_c_ptr + at, gl.where(reset, dc, 0.0), mask=live)
        dh = gl.where(reset, 0.0, dh)
        dc = gl.where(reset, 0.0, dc)
    last = seq * H + unit
    gl.store(dh0_ptr + last, dh, mask=mask & (i == T - 1))
    gl.store(dc0_ptr + last, dc, mask=mask & (i == T - 1))
    return dh, dc, saved


@gluon.jit(do_not_specialize=["T", "B", "Q"])
def bwd_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dh_last_ptr, dc_last_ptr,
    dxp_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
    T, B, Q,
    H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr, SHARED_GATES: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `torch_bridge.kernels.lstm.lstm_bwd_kernel`, and SHARED_GATES.

    SHARED_GATES is the number of gates whose weights are in shared memory.
    """
    DTYPE: gl.constexpr = w_hh_ptr.dtype.element_ty
    model, unit, mask, seq, row, stride = locate(T, B, Q, H, BLOCK_H, REVERSE)
    UNROLL: gl.constexpr = 4 if BLOCK_H <= 64 else 2
    DEPTH: gl.constexpr = 4 if BLOCK_H <= 64 else 1
    saved = no_loads()
    for k in gl.static_range(DEPTH):
        first = _load_saved(
            k,
            local_grads_ptr,
            dc_dh_ptr,
            carry_gate_ptr,
            reset_ptr,
            dhs_ptr,
            dcs_ptr,
            row,
            T,
            stride,
            unit,
            mask,
            H,
            REVERSE,
        )
        saved = then(saved, first)
    w_ptr = w_hh_ptr + model * (4 * H * H)
    w = load_gate_weights(w_ptr, H, H, 4 * H, BLOCK_H, 4, SHARED_GATES)
    dh = gl.load(dh_last_ptr + seq * H + unit, mask=mask, other=0.0).to(gl.float32)
    dc = gl.load(dc_last_ptr + seq * H + unit, mask=mask, other=0.0).to(gl.float32)
    buffers = allocate_operands(4, BLOCK_H)
    for i in range(0, T, UNROLL):
        for k in gl.static_range(UNROLL):
            dh, dc, next_saved = _backward_step(
                i + k, dh, dc, saved[0], buffers[k % 2], w,
                local_grads_ptr, dc_dh_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dcs_ptr, dxp_ptr, dh0_ptr, dc0_ptr,
                dreset_h_ptr, dreset_c_ptr, seq, row, T, stride, unit, mask, H, DEPTH, DTYPE, REVERSE,
            )  # fmt: skip
            saved = then(saved[1:], next_saved)
