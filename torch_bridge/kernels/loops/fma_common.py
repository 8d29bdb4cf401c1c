"""Shared code of the kernels for few units: products by float32 fused multiply-adds, weights in registers.

With up to 32 units, a step has no more multiplications than a warp's registers hold numbers, and tensor cores are not
faster. A warp has one sequence, and a thread has one unit, whose weights it keeps; with up to 16 units, two threads
share a unit's weights. 64 units take four warps, in which two threads share a unit's weights; 128 units take eight
warps, whose threads keep twice as many weights. The registers of an SM just hold the weights of a GRU with 128 units.
For the LSTM with 128 units, the weights of some gates stay in shared memory and are read at every step. The other
operand goes through shared memory, where every thread reads all elements that it multiplies, in two buffers that are
written in turn. 16-bit operands are rounded to their dtype and multiplied as float32.

The inputs of a step are prefetched four steps ahead, because a step takes a fifth of the latency of memory. With 128
units they are prefetched two steps ahead in the forward pass and one step ahead in the backward pass, because there are
few registers and a step takes longer. The loop is unrolled by as many steps, but at least two, so that no data in
flight is moved between registers.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels.common import clamp_to_float16, load_weight, time_order
from torch_bridge.kernels.gluon_common import pack, packed_type, unpack


@gluon.constexpr_function
def weights_layout(block, warps):
    """Returns the layout of weights, `[block, block]`: a thread has an equal part of one row.

    Threads that share a row have eight elements of it in turn, and adjacent threads have adjacent rows. Reads of
    operands and of weights from shared memory thus have no bank conflicts.
    """
    lanes = 32 * warps // block
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [0, 1])


@gluon.jit
def allocate_operands(COUNT: gl.constexpr, BLOCK_H: gl.constexpr):
    """Allocates COUNT operands for even steps, and as many for odd steps.

    With one indexed allocation the compiler could not tell that no barrier is missing.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    even = ()
    odd = ()
    for _ in gl.static_range(COUNT):
        even += (gl.allocate_shared_memory(gl.float32, [BLOCK_H], PLAIN),)
        odd += (gl.allocate_shared_memory(gl.float32, [BLOCK_H], PLAIN),)
    return even, odd


@gluon.jit
def no_loads():
    """Returns an empty tuple of loads in flight."""
    return ()


@gluon.jit
def then(loads, last):
    """Appends a load to the tuple of loads in flight."""
    return loads + (last,)


@gluon.jit
def _load_weights(ptr, H: gl.constexpr, STRIDE: gl.constexpr, BLOCK_H: gl.constexpr):
    """Loads the first H elements of the first H rows of a matrix, as float32 in `weights_layout`."""
    LAYOUT: gl.constexpr = weights_layout(BLOCK_H, gl.num_warps())
    row = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, BLOCK_H, gl.SliceLayout(0, LAYOUT))
    return load_weight(ptr, row, col, H, STRIDE).to(gl.float32)


@gluon.jit
def load_gate_weights(
    ptr, NEXT: gl.constexpr, H: gl.constexpr, STRIDE: gl.constexpr, BLOCK_H: gl.constexpr, GATES: gl.constexpr,
    SHARED: gl.constexpr = 0,
):  # fmt: skip
    """Loads the weights of each gate, which are NEXT elements apart.

    Returns a tuple by gate; the weights of the last SHARED gates are in shared memory, the others in registers.
    """
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    gates = ()
    for gate in gl.static_range(GATES):
        w = _load_weights(ptr + gate * NEXT, H, STRIDE, BLOCK_H)
        if gate >= GATES - SHARED:
            w = gl.allocate_shared_memory(gl.float32, [BLOCK_H, BLOCK_H], SWIZZLED, w)
        gates += (w,)
    return gates


@gluon.jit
def to_registers(w):
    """Returns a gate's weights in registers; loads them if they are in shared memory."""
    if isinstance(w, gl.shared_memory_descriptor):
        return w.load(weights_layout(w.shape[0], gl.num_warps()))
    else:
        return w


@gluon.jit
def store_operand(buffer, x, DTYPE: gl.constexpr):
    """Stores an operand to shared memory as float32, rounded to DTYPE."""
    if DTYPE != gl.float32:
        x = x.to(DTYPE).to(gl.float32)
    buffer.store(x)


@gluon.jit
def load_operand(buffer, w):
    """Loads what `store_operand` stored, as a row `[1, block]` in the layout of `w`."""
    return buffer.load(gl.SliceLayout(0, w.type.layout))[None, :]


@gluon.jit
def partial_row_sums(terms):
    """Returns the sums of each eight adjacent elements of a row.

    A thread thus has several independent sums, none of which waits for the one before.
    """
    return gl.sum(terms.reshape([terms.shape[0], terms.shape[1] // 8, 8]), axis=2)


@gluon.jit
def sum_rows(parts, w):
    """Adds up the results of `partial_row_sums`; returns one sum per row of `w`."""
    return gl.convert_layout(gl.sum(parts, axis=1), gl.SliceLayout(1, w.type.layout), assert_trivial=True)


@gluon.jit
def locate(T, B, Q, H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr):
    """Locates the sequence of this program.

    Returns the model, the units and their mask, the sequence, its row of step time 0, and the number of rows from one
    step time to the next.
    """
    LAYOUT: gl.constexpr = weights_layout(BLOCK_H, gl.num_warps())
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    seq = gl.program_id(0).to(gl.int64)
    model = seq // Q
    row, stride = time_order((seq // B) * T * B + seq % B, model, T, B, REVERSE)
    return model, unit, unit < H, seq, row, stride


@gluon.jit
def load_reset(reset_ptr, row):
    """Returns whether the sequence starts an episode at this row; NaN counts as nonzero."""
    reset = row < 0
    if reset_ptr is not None:
        reset = gl.load(reset_ptr + row) != 0
    return reset


@gluon.jit
def _pair(a, b):
    """Packs two float32 numbers into 64 bits, `a` in the lowest."""
    return gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,f,f", [a, b], dtype=gl.int64, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def store_local_grads(ptr, at, mask, values, DTYPE: gl.constexpr, PRECISION: gl.constexpr):
    """Stores local gradients, a tuple, as `common.store_local_grads` does, for the units at `at`.

    If TF32 is allowed, float32 numbers are clamped to the range of float16, too.
    """
    COUNT: gl.constexpr = len(values)
    if ptr.dtype.element_ty == gl.float16:
        packed = pack(values)
        gl.store(ptr.to(gl.pointer_type(packed.dtype), bitcast=True) + at, packed, mask=mask)
    else:
        bounded = values
        if DTYPE == gl.float32 and PRECISION == "tf32":  # the others are at most one
            bounded = (clamp_to_float16(values[0]),)
            if COUNT > 1:
                bounded += (clamp_to_float16(values[1]),)
                bounded += values[2:]
        if COUNT == 1:
            gl.store(ptr + at, bounded[0], mask=mask)
        else:
            words = ptr.to(gl.pointer_type(gl.int64), bitcast=True)
            if COUNT == 2:
                gl.store(words + at, _pair(bounded[0], bounded[1]), mask=mask)
            else:
                gl.store(words + at * 2, _pair(bounded[0], bounded[1]), mask=mask)
                last = bounded[2] * 0.0 if COUNT == 3 else bounded[COUNT - 1]
                gl.store(words + at * 2 + 1, _pair(bounded[2], last), mask=mask)


@gluon.jit
def load_local_grads(ptr, at, mask, COUNT: gl.constexpr):
    """Loads the COUNT local gradients that `store_local_grads` stored, without unpacking the data; returns a tuple."""
    if ptr.dtype.element_ty == gl.float16:
        PACKED: gl.constexpr = packed_type(COUNT)
        words = (gl.load(ptr.to(gl.pointer_type(PACKED), bitcast=True) + at, mask=mask, other=0),)
    elif COUNT == 1:
        words = (gl.load(ptr + at, mask=mask, other=0.0),)
    else:
        pairs = ptr.to(gl.pointer_type(gl.int64), bitcast=True)
        if COUNT == 2:
            words = (gl.load(pairs + at, mask=mask, other=0),)
        else:
            low = gl.load(pairs + at * 2, mask=mask, other=0)
            words = (low, gl.load(pairs + at * 2 + 1, mask=mask, other=0))
    return words


@gluon.jit
def _number(bits):
    return bits.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def unpack_local_grads(words, COUNT: gl.constexpr):
    """Unpacks what `load_local_grads` loaded; returns a tuple of float32."""
    if len(words) == 2:
        values = (_number(words[0]), _number(words[0] >> 32), _number(words[1]), _number(words[1] >> 32))[:COUNT]
    elif COUNT == 1 and words[0].dtype == gl.float32:
        values = words
    elif COUNT == 2 and words[0].dtype == gl.int64:
        values = (_number(words[0]), _number(words[0] >> 32))
    else:
        values = unpack(words[0], COUNT)
    return values
