"""What the kernels for few units share: products by fused multiply-adds of float32, weights in registers.

Up to 32 units a step's products are as few as the numbers that a warp's registers hold, and no tensor core is faster:
a warp has one sequence, a thread one unit, whose weights it keeps. For 64 units there are four warps, in which two
threads share a unit's weights, for 128 eight, whose threads keep twice as many. A multiprocessor's registers just hold
those of a GRU; of the LSTM some gates' wait in shared memory, and are read at every step. The other operand goes
through shared memory, where every thread reads all that it multiplies, in two buffers written in turn. Operands of
16 bits are rounded to them, and multiplied as float32.

What a step reads is loaded four steps before, where a step takes a fifth of the time that memory does. Of 128 units it
is two steps before forward and one backward: there are few registers, and a step takes longer. The loop is unrolled by
as many steps, or two, so that nothing that is on its way is moved.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels.common import clamp_to_float16, load_weight, time_order, unpack_float16x4
from torch_bridge.kernels.gluon_common import pack


@gluon.constexpr_function
def weights_layout(block, warps):
    """`[block, block]`: a thread has as many numbers of a row as they are when all threads share them out.

    Those that share a row have eight in turn, and threads side by side have rows side by side: so no two read the same
    bank of shared memory, of operands and of weights.
    """
    lanes = 32 * warps // block
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [0, 1])


@gluon.jit
def allocate_operands(COUNT: gl.constexpr, BLOCK_H: gl.constexpr):
    """COUNT operands of even steps, and as many of odd ones.

    Of one allocation, indexed, the compiler could not tell that no barrier is missing.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    even = ()
    odd = ()
    for _ in gl.static_range(COUNT):
        even += (gl.allocate_shared_memory(gl.float32, [BLOCK_H], PLAIN),)  # type: ignore[assignment]
        odd += (gl.allocate_shared_memory(gl.float32, [BLOCK_H], PLAIN),)  # type: ignore[assignment]
    return even, odd


@gluon.jit
def no_loads():
    """What is on its way before the first load."""
    return ()


@gluon.jit
def then(loads, last):
    """What is on its way, a load later."""
    return loads + (last,)  # noqa: RUF005  # Triton has no unpacking


@gluon.jit
def _load_weights(ptr, H: gl.constexpr, STRIDE: gl.constexpr, BLOCK_H: gl.constexpr):
    """The first H numbers of the first H rows of a matrix, as `weights_layout` has them."""
    LAYOUT: gl.constexpr = weights_layout(BLOCK_H, gl.num_warps())
    row = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, BLOCK_H, gl.SliceLayout(0, LAYOUT))
    return load_weight(ptr, row, col, H, STRIDE).to(gl.float32)


@gluon.jit
def load_gate_weights(
    ptr, NEXT: gl.constexpr, H: gl.constexpr, STRIDE: gl.constexpr, BLOCK_H: gl.constexpr, GATES: gl.constexpr,
    SHARED: gl.constexpr = 0,
):  # fmt: skip
    """The weights of each gate, NEXT numbers apart: a tuple, of which the last SHARED are in shared memory."""
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    gates = ()
    for gate in gl.static_range(GATES):
        w = _load_weights(ptr + gate * NEXT, H, STRIDE, BLOCK_H)
        if gate >= GATES - SHARED:
            w = gl.allocate_shared_memory(gl.float32, [BLOCK_H, BLOCK_H], SWIZZLED, w)
        gates += (w,)  # type: ignore[assignment]
    return gates


@gluon.jit
def to_registers(w):
    """Weights of a gate, from wherever they are."""
    if isinstance(w, gl.shared_memory_descriptor):
        return w.load(weights_layout(w.shape[0], gl.num_warps()))
    else:
        return w


@gluon.jit
def store_operand(buffer, x, DTYPE: gl.constexpr):
    """Leaves an operand in shared memory, rounded to what operands are."""
    if DTYPE != gl.float32:
        x = x.to(DTYPE).to(gl.float32)
    buffer.store(x)


@gluon.jit
def load_operand(buffer, w):
    """What was left there, as a row of `w`."""
    return buffer.load(gl.SliceLayout(0, w.type.layout))[None, :]


@gluon.jit
def partial_row_sums(terms):
    """Sums of eight numbers of a row each: so a thread has sums side by side, and none waits for the one before."""
    return gl.sum(terms.reshape([terms.shape[0], terms.shape[1] // 8, 8]), axis=2)


@gluon.jit
def sum_rows(parts, w):
    """The sums of rows of `w` of which these are parts."""
    return gl.convert_layout(gl.sum(parts, axis=1), gl.SliceLayout(1, w.type.layout), assert_trivial=True)


@gluon.jit
def locate(T, B, Q, H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr):
    """Whose program this is: model, units and which there are, the sequence, its first row, a step's stride."""
    LAYOUT: gl.constexpr = weights_layout(BLOCK_H, gl.num_warps())
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    seq = gl.program_id(0).to(gl.int64)
    model = seq // Q
    row, stride = time_order((seq // B) * T * B + seq % B, model, T, B, REVERSE)
    return model, unit, unit < H, seq, row, stride


@gluon.jit
def load_reset(reset_ptr, row):
    """Whether the sequence starts an episode there; NaN counts as nonzero."""
    reset = row < 0
    if reset_ptr is not None:
        reset = gl.load(reset_ptr + row) != 0
    return reset


@gluon.jit
def _pair(a, b):
    """Two numbers in 64 bits, `a` lowest."""
    return gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,f,f", [a, b], dtype=gl.int64, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def store_quads(ptr, at, mask, a, b, c, d, DTYPE: gl.constexpr, PRECISION: gl.constexpr):
    """As `common.store_local_grads`, of units at `at`; float32 that may be TF32 is within the range of float16, too."""
    words = ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    if ptr.dtype.element_ty == gl.float16:
        gl.store(words + at, pack(a, b, c, d), mask=mask)
    else:
        if DTYPE == gl.float32 and PRECISION == "tf32":
            a, b = clamp_to_float16(a), clamp_to_float16(b)
        gl.store(words + at * 2, _pair(a, b), mask=mask)
        gl.store(words + at * 2 + 1, _pair(c, d), mask=mask)


@gluon.jit
def load_quads(ptr, at, mask):
    """What `store_quads` stored, as it lies in memory: a tuple."""
    words = ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    if ptr.dtype.element_ty == gl.float16:
        return (gl.load(words + at, mask=mask, other=0),)
    else:
        return gl.load(words + at * 2, mask=mask, other=0), gl.load(words + at * 2 + 1, mask=mask, other=0)


@gluon.jit
def _number(bits):
    return bits.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def unpack_quads(words):
    """The four numbers of what `load_quads` loaded."""
    if len(words) == 1:
        return unpack_float16x4(words[0])
    else:
        return _number(words[0]), _number(words[0] >> 32), _number(words[1]), _number(words[1] >> 32)
