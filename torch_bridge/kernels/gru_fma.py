"""GRU time loop in Gluon, for few units and compute capability 8.0 and newer.

The kernels compute what those of `gru.py` do with SPLITS == 1. The forward kernel supports no reset state but zeros.
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
    unpack_quads,
)
from torch_bridge.kernels.gluon_common import backward_rows, barrier, forward_rows, load_inputs


@gluon.jit
def _load_inputs(i, xp_ptr, reset_ptr, row, T, stride, unit, mask, H: gl.constexpr, REVERSE: gl.constexpr):
    """Loads what step min(i, T - 1) reads."""
    row = forward_rows(row, i, T, stride, REVERSE)
    x_r, x_z, x_n = load_inputs(xp_ptr + row * (3 * H) + unit, mask, H, 3)
    return x_r, x_z, x_n, load_reset(reset_ptr, row)


@gluon.jit
def _forward_step(
    i, h, inputs, buffers, w_r, w_z, w_n, b_hn,
    xp_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr, seq, row, T, stride, unit, mask,
    H: gl.constexpr, DEPTH: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """Runs step i and prefetches what step i + DEPTH reads."""
    x_r, x_z, x_n, reset = inputs
    if reset_ptr is not None:
        h = gl.where(reset, 0.0, h)
    store_operand(buffers[0], h, DTYPE)
    barrier()
    operand = load_operand(buffers[0], w_r)
    a_r = sum_rows(partial_row_sums(w_r * operand), w_r) + x_r.to(gl.float32)
    a_n = sum_rows(partial_row_sums(w_n * operand), w_n) + b_hn
    a_z = sum_rows(partial_row_sums(w_z * operand), w_z) + x_z.to(gl.float32)
    inputs = _load_inputs(i + DEPTH, xp_ptr, reset_ptr, row, T, stride, unit, mask, H, REVERSE)
    r, z = sigmoid(a_r), sigmoid(a_z)
    n = tanh(x_n.to(gl.float32) + r * a_n, DTYPE == gl.float32)
    new_h = n + z * (h - n)
    live = mask & (i < T)  # nothing is stored for a step past the last
    at = forward_rows(row, i, T, stride, REVERSE) * H + unit
    gl.store(hs_ptr + at, new_h.to(hs_ptr.dtype.element_ty), mask=live)
    if local_grads_ptr is not None:
        f_n = (1.0 - z) * (1.0 - n * n)
        f_r, f_z = f_n * a_n * r * (1.0 - r), (h - n) * z * (1.0 - z)
        store_quads(local_grads_ptr, at, live, f_r, f_z, f_n, f_n * r, DTYPE, PRECISION)
        gl.store(carry_gate_ptr + at, z, mask=live)
    gl.store(h_last_ptr + seq * H + unit, new_h, mask=mask & (i == T - 1))
    return new_h, inputs


@gluon.jit(do_not_specialize=["T", "B", "Q"])
def fwd_kernel(
    w_hh_t_ptr, b_hn_ptr, xp_ptr, h0_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr,
    T, B, Q,
    H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; arguments are those of `torch_bridge.kernels.gru.gru_fwd_kernel`."""
    DTYPE: gl.constexpr = w_hh_t_ptr.dtype.element_ty
    model, unit, mask, seq, row, stride = locate(T, B, Q, H, BLOCK_H, REVERSE)
    DEPTH: gl.constexpr = 4 if BLOCK_H <= 64 else 2
    inputs = no_loads()
    for k in gl.static_range(DEPTH):
        inputs = then(inputs, _load_inputs(k, xp_ptr, reset_ptr, row, T, stride, unit, mask, H, REVERSE))
    w_ptr = w_hh_t_ptr + model * (3 * H * H)
    w_r, w_z, w_n = load_gate_weights(w_ptr, H * H, H, H, BLOCK_H, 3)
    b_hn = gl.load(b_hn_ptr + model * H + unit, mask=mask, other=0.0).to(gl.float32)
    h = gl.load(h0_ptr + seq * H + unit, mask=mask, other=0.0).to(gl.float32)
    buffers = allocate_operands(1, BLOCK_H)
    for i in range(0, T, DEPTH):
        for k in gl.static_range(DEPTH):
            h, next_inputs = _forward_step(
                i + k, h, inputs[0], buffers[k % 2], w_r, w_z, w_n, b_hn,
                xp_ptr, reset_ptr, hs_ptr, h_last_ptr, local_grads_ptr, carry_gate_ptr, seq, row, T, stride, unit, mask,
                H, DEPTH, DTYPE, REVERSE, PRECISION,
            )  # fmt: skip
            inputs = then(inputs[1:], next_inputs)


@gluon.jit
def _load_saved(
    i, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, row, T, stride, unit, mask, H: gl.constexpr,
    REVERSE: gl.constexpr,
):  # fmt: skip
    """Loads what step min(i, T - 1) of the backward pass reads."""
    row = backward_rows(row, i, T, stride, REVERSE)
    at = row * H + unit
    carry_gate = gl.load(carry_gate_ptr + at, mask=mask, other=0.0)
    dy = gl.load(dhs_ptr + at, mask=mask, other=0.0)
    return load_quads(local_grads_ptr, at, mask), carry_gate, dy, load_reset(reset_ptr, row)


@gluon.jit
def _backward_step(
    i, dh, saved, buffers, w_r, w_z, w_n,
    local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr,
    seq, row, T, stride, unit, mask,
    H: gl.constexpr, DEPTH: gl.constexpr, DTYPE: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs step i and prefetches what step i + DEPTH reads."""
    local_grads, carry_gate, dy, reset = saved
    f_r, f_z, f_n, f_hn = unpack_quads(local_grads)
    dh += dy.to(gl.float32)
    dr, dz, dhn, dn = dh * f_r, dh * f_z, dh * f_hn, dh * f_n
    store_operand(buffers[0], dr, DTYPE)
    store_operand(buffers[1], dz, DTYPE)
    store_operand(buffers[2], dhn, DTYPE)
    barrier()
    parts = partial_row_sums(w_r * load_operand(buffers[0], w_r)) + partial_row_sums(
        w_z * load_operand(buffers[1], w_z)
    )
    parts += partial_row_sums(w_n * load_operand(buffers[2], w_n))
    saved = _load_saved(
        i + DEPTH, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, row, T, stride, unit, mask, H, REVERSE
    )
    live = mask & (i < T)  # nothing is stored for a step past the last
    row = backward_rows(row, i, T, stride, REVERSE)
    at = row * H + unit
    dxp = dxp_ptr + row * (3 * H) + unit
    gl.store(dxp, dr.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dxp + H, dz.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dxp + 2 * H, dn.to(dxp_ptr.dtype.element_ty), mask=live)
    gl.store(dhn_ptr + at, dhn.to(dhn_ptr.dtype.element_ty), mask=live)
    dh = dh * carry_gate + sum_rows(parts, w_r)
    if reset_ptr is not None:
        if dreset_h_ptr is not None:
            gl.store(dreset_h_ptr + at, gl.where(reset, dh, 0.0), mask=live)
        dh = gl.where(reset, 0.0, dh)
    gl.store(dh0_ptr + seq * H + unit, dh, mask=mask & (i == T - 1))
    return dh, saved


@gluon.jit(do_not_specialize=["T", "B", "Q"])
def bwd_kernel(
    w_hh_ptr, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dh_last_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr,
    T, B, Q,
    H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; arguments are those of `torch_bridge.kernels.gru.gru_bwd_kernel`."""
    DTYPE: gl.constexpr = w_hh_ptr.dtype.element_ty
    model, unit, mask, seq, row, stride = locate(T, B, Q, H, BLOCK_H, REVERSE)
    UNROLL: gl.constexpr = 4 if BLOCK_H <= 64 else 2
    DEPTH: gl.constexpr = 4 if BLOCK_H <= 64 else 1
    saved = no_loads()
    for k in gl.static_range(DEPTH):
        first = _load_saved(
            k, local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, row, T, stride, unit, mask, H, REVERSE
        )
        saved = then(saved, first)
    w_ptr = w_hh_ptr + model * (3 * H * H)
    w_r, w_z, w_n = load_gate_weights(w_ptr, H, H, 3 * H, BLOCK_H, 3)
    dh = gl.load(dh_last_ptr + seq * H + unit, mask=mask, other=0.0).to(gl.float32)
    buffers = allocate_operands(3, BLOCK_H)
    for i in range(0, T, UNROLL):
        for k in gl.static_range(UNROLL):
            dh, next_saved = _backward_step(
                i + k, dh, saved[0], buffers[k % 2], w_r, w_z, w_n,
                local_grads_ptr, carry_gate_ptr, reset_ptr, dhs_ptr, dxp_ptr, dhn_ptr, dh0_ptr, dreset_h_ptr,
                seq, row, T, stride, unit, mask, H, DEPTH, DTYPE, REVERSE,
            )  # fmt: skip
            saved = then(saved[1:], next_saved)
