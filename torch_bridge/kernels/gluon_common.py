"""What the kernels in Gluon share: weights and operands in 16 bits, scaled, activations, packed stores.

Where one program has all units (`gru_resident.py`, `lstm_resident.py`), its weights are in registers for the whole
sequence: a warp owns 16 hidden units of every gate. Only the other operand, hidden states (forward) or gate gradients
(backward), goes through shared memory, in two buffers written in turn, with no change of layout. Products are
mma.sync's, which every GPU since Ampere has: wgmma, which reads shared memory itself, would need a fence at every step,
and that fence waits for all stores before it. Where programs share the units (`*_split.py`, with `split_common.py`),
both operands are in shared memory, for wgmma.

Products of float32 are made of float16 operands, which have the ten bits of mantissa that TF32 has. Their range is
kept by powers of two, exact to apply and to undo: one scale for the weights, one a sequence for the other operand.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torch_bridge.kernels.common import load_reset, step_time, time_order

# renamed in Triton 3.9
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# renamed in Triton 3.7
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def slot_layout(warps):
    """`[warps, 8]`: every warp's value of a sequence, in the threads that wgmma's result gives the sequence to."""
    doublings = warps.bit_length() - 1
    registers = [*([1 << bit, 0] for bit in range(doublings)), [0, 1]]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * doublings, [], [warps, 8])


@gluon.constexpr_function
def units_layout(warps, block_b):
    """`[16 warps, block_b]`: what a product's result gives a thread; it has pairs of units and of sequences."""
    registers = [[1, 0], [0, 1], *([0, 8 << k] for k in range((block_b // 8).bit_length() - 1))]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << k, 0] for k in range(warps.bit_length() - 1)], [], [16 * warps, block_b]
    )


@gluon.jit
def unit_of_row(row):
    """The unit whose weights are a row of the register operand, so that rows k and k + 8 of 16 are of adjacent ones."""
    return (row & ~15) | ((row & 7) << 1) | ((row >> 3) & 1)


@gluon.constexpr_function
def columns(block_b):
    """Of the products of a tile of so many sequences: no product has fewer than eight."""
    return max(block_b, 8)


@gluon.jit
def sequence_of_column(column, BLOCK_B: gl.constexpr, COLS: gl.constexpr):
    """Which sequence of a tile a column of products is, and whether it is one.

    Of few sequences every other column is none: a thread has two columns side by side, and the compiler sees that one
    of them is never live.
    """
    if 2 * BLOCK_B <= COLS:
        return column // 2, (column % 2 == 0) & (column < 2 * BLOCK_B)
    else:
        return column, column < BLOCK_B


@gluon.jit
def locate_tile(
    model, tile, T, B, Q,
    H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, COLS: gl.constexpr, REVERSE: gl.constexpr,
    UNITS: gl.constexpr,
):  # fmt: skip
    """Where a tile of a model lies: units, masks of sequences and of states, sequences, first rows, a step's stride."""
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(1, UNITS))
    nth, taken = sequence_of_column(gl.arange(0, COLS, gl.SliceLayout(0, UNITS)), BLOCK_B, COLS)
    q = tile * BLOCK_B + nth
    mask_q = taken & (q < Q)
    mask = (unit < H)[:, None] & mask_q[None, :]
    seq = model * Q + q
    row, stride = time_order((seq // B) * T * B + seq % B, model, T, B, REVERSE)
    return unit, mask_q, mask, seq, row, stride


@gluon.jit
def forward_rows(row, i, T, stride, REVERSE: gl.constexpr):
    """Where sequences, whose rows of step time 0 are `row`, are at step `i` of the forward pass, or at its last one."""
    return row + step_time(gl.minimum(i, T - 1), T, REVERSE) * stride


@gluon.jit
def backward_rows(row, i, T, stride, REVERSE: gl.constexpr):
    """The same of the backward pass."""
    return row + step_time(T - 1 - gl.minimum(i, T - 1), T, REVERSE) * stride


@gluon.jit
def by_unit(x, UNITS: gl.constexpr):
    """The result of a product with such rows, by unit; in the same registers."""
    blocks: gl.constexpr = x.shape[0] // 16
    x = x.reshape([blocks, 2, 8, x.shape[1]]).permute([0, 2, 1, 3]).reshape([x.shape[0], x.shape[1]])
    return gl.convert_layout(x, UNITS, assert_trivial=True)


@gluon.jit
def scale_to_float16(largest, EXPONENT: gl.constexpr):
    """The power of two that brings `largest` to 2^EXPONENT or up to twice that; limited near zero and infinity."""
    exponent = gl.minimum(gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) & 0xFF, 27), 253)
    return ((127 + EXPONENT + 127 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def state_scale(h):
    """The scale of a sequence's hidden states, which are at most 1 or the largest of the first, whose sizes `h` are.

    A NaN does not count.
    """
    return scale_to_float16(gl.maximum(gl.max(h, axis=0), 1.0), 14)


@gluon.jit
def new_state_scale(scale, reset):
    """The same from a step on that starts an episode, from zeros, where `reset` says."""
    return gl.where(reset[None, :], 2.0**14, scale)


@gluon.jit
def inverse(power_of_2):
    """1 / x of a power of two."""
    return ((254 << 23) - power_of_2.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def load_weights(ptr, rows, cols, stride, mask, scale, SCALED: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr):
    """A square of weights as the register operand of a product."""
    w = gl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    if SCALED:
        w = w * scale
    return gl.convert_layout(w.to(DTYPE), layout)


@gluon.jit
def weights_scale(
    ptr, stride, gate_stride, H: gl.constexpr, BLOCK_H: gl.constexpr, GATES: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The scale of all gates' weights, and the largest sum of absolute weights that a row has."""
    cols = gl.arange(0, BLOCK_H, gl.SliceLayout(0, layout))
    largest = gl.zeros([32, BLOCK_H], gl.float32, layout)
    row_largest = gl.zeros([32], gl.float32, gl.SliceLayout(1, layout))
    for first in gl.static_range(0, BLOCK_H, 32):  # as many rows at a time as there are registers for
        rows = first + gl.arange(0, 32, gl.SliceLayout(1, layout))
        mask = (rows < H)[:, None] & (cols < H)[None, :]
        row = gl.zeros([32, BLOCK_H], gl.float32, layout)
        for gate in gl.static_range(GATES):
            w = gl.load(ptr + gate * gate_stride + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
            largest = gl.maximum(largest, gl.abs(w))
            row += gl.abs(w)
        row_largest = gl.maximum(row_largest, gl.sum(row, axis=1))
    return scale_to_float16(gl.max(gl.max(largest, axis=1), axis=0), 14), gl.max(row_largest, axis=0)


@gluon.jit
def fast_sigmoid(x):
    """The logistic function by the hardware's exponential and reciprocal, each right to one or two last bits."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
        }""",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def to_operand(x, DTYPE: gl.constexpr):
    """`x` as an operand; what float16 cannot hold as its largest."""
    if DTYPE == gl.float16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return x.to(DTYPE)


@gluon.jit
def pack(a, b, c, d):
    """As `pack_float16x4`, in two instructions a pair."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        cvt.rn.satfinite.f16x2.f32 low, $2, $1;
        cvt.rn.satfinite.f16x2.f32 high, $4, $3;
        mov.b64 $0, {low, high};
        }""",
        "=l,f,f,f,f", [a, b, c, d], dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_inputs(xp, mask, H: gl.constexpr, GATES: gl.constexpr):
    """The input projections of a step, of the first gate at `xp`: a tuple by gate."""
    inputs = ()
    for gate in gl.static_range(GATES):
        inputs += (gl.load(xp + gate * H, mask=mask, other=0.0),)  # type: ignore[assignment]
    return inputs


@gluon.jit
def load_resets(reset_ptr, rows, mask_q):
    """Which sequences start an episode at these rows, if any does."""
    reset = mask_q
    if reset_ptr is not None:
        reset = load_reset(reset_ptr, rows, mask_q)
    return reset


@gluon.jit
def load_gradient(ptr, rows, unit, mask, H: gl.constexpr):
    """The gradient of a step's output."""
    return gl.load(ptr + rows[None, :] * H + unit[:, None], mask=mask, other=0.0)
