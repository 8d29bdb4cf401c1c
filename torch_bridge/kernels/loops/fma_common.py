"""Code shared by the kernels for few units: products by float32 fused multiply-adds, weights in registers.

A program runs one sequence. With up to 32 units, one warp's registers hold all recurrent weights, and tensor cores are
not faster. The weights of a unit are in one thread, or in two threads that each have half of them:

    units  warps  threads per unit
       16      1                 2
       32      1                 1
       64      4                 2
      128      8                 2

The registers of an SM just hold the weights of a GRU with 128 units. For the LSTM with 128 units, the weights of some
gates stay in shared memory and are read at every step.

The other operand, which is hidden states (forward) or gate gradients (backward), goes through shared memory, where
every thread reads all elements that it multiplies. Even and odd steps use different buffers. With 16-bit weights, this
operand is rounded to their dtype; products are always computed in float32.

The inputs of a step are prefetched four steps ahead, because a step takes a fifth of the latency of memory. With 128
units they are prefetched two steps ahead in the forward pass and one step ahead in the backward pass, because there are
few registers and a step takes longer. The loop is unrolled by as many steps as it prefetches, and at least by two, so
that prefetched data is not moved between registers.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels.arrays import Tile
from torch_bridge.kernels.common import clamp_to_float16, first_row, load_weight, time_order
from torch_bridge.kernels.gluon_common import locate_piece, pack, packed_type, unpack


@gluon.constexpr_function
def weights_layout(block, warps):
    """Returns the layout of weights, `[block, block]`: each row is in one thread, or split evenly over several.

    The threads of a row take turns: each has every n-th group of eight elements, for n threads. Adjacent threads have
    adjacent rows. Reads of operands and of weights from shared memory thus have no bank conflicts.
    """
    lanes = 32 * warps // block
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [0, 1])


@gluon.jit
def allocate_operands(COUNT: gl.constexpr, BLOCK_H: gl.constexpr):
    """Allocates COUNT operands in shared memory for even steps, and as many for odd steps.

    With one allocation indexed by the step, the compiler could not tell that adjacent steps access different memory,
    and would add barriers.
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
    """Returns an empty queue of prefetched data, a tuple.

    This is a function because type checkers infer from `()` that the tuple stays empty.
    """
    return ()


@gluon.jit
def then(loads, last):
    """Returns a queue of prefetched data with one more entry at the end; a function for the reason in `no_loads`."""
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
    """Loads the weights of each gate, whose matrices are NEXT elements apart; returns a tuple by gate.

    The weights of the last SHARED gates are in shared memory, the others in registers.
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
    """Loads what `store_operand` stored, as a row `[1, block]` in the layout of the weights `w`."""
    return buffer.load(gl.SliceLayout(0, w.type.layout))[None, :]


@gluon.jit
def partial_row_sums(terms):
    """Returns the sum of each group of eight adjacent elements of a row, `[block, block / 8]`.

    A thread thus has several independent chains of additions, whose latencies overlap.
    """
    return gl.sum(terms.reshape([terms.shape[0], terms.shape[1] // 8, 8]), axis=2)


@gluon.jit
def sum_rows(parts, w):
    """Adds up the results of `partial_row_sums`; returns one sum per row of `w`."""
    return gl.convert_layout(gl.sum(parts, axis=1), gl.SliceLayout(1, w.type.layout), assert_trivial=True)


@gluon.jit
def locate(sizes, reset_ptr, H: gl.constexpr, BLOCK_H: gl.constexpr, REVERSE: gl.constexpr):
    """Locates the sequence of this program, or its piece of one, in arrays of rows `[G, T, B]`.

    Returns the model, and the tile that is the sequence; it has no step if there is no such piece.
    """
    T, B, Q, pieces = sizes
    LAYOUT: gl.constexpr = weights_layout(BLOCK_H, gl.num_warps())
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    if pieces is None:
        seq = gl.program_id(0).to(gl.int64)
        model = seq // Q
        row, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
        return model, Tile(T, seq, row, stride, unit, unit < H, True, T, T, 0)
    else:
        programs = Q.to(gl.int32) * pieces
        model = (gl.program_id(0) // programs).to(gl.int64)
        piece = locate_piece(model, gl.program_id(0) % programs, sizes, reset_ptr, REVERSE)
        return model, Tile(
            T, piece.seq, piece.row, piece.stride, unit, unit < H, True, piece.steps, piece.steps, piece.begin
        )  # fmt: skip


@gluon.jit
def load_reset(reset_ptr, row):
    """Returns whether the sequence starts an episode at this row; NaN counts as nonzero. Without resets, never."""
    reset = row < 0  # always false
    if reset_ptr is not None:
        reset = gl.load(reset_ptr + row) != 0
    return reset


@gluon.jit
def _pair(a, b):
    """Packs two float32 values into 64 bits, `a` in the lower half."""
    return gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,f,f", [a, b], dtype=gl.int64, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def store_local_grads(
    ptr, at, mask, values, DTYPE: gl.constexpr, PRECISION: gl.constexpr, BOUNDED: gl.constexpr
):  # fmt: skip
    """Stores local gradients, a tuple, in the format of `common.store_local_grads`; `at` are indices of units.

    If PRECISION is "tf32", float32 values are clamped to the range of float16, as in the kernels that store them in
    float16. BOUNDED: the third and the fourth are within that range.
    """
    COUNT: gl.constexpr = len(values)
    if ptr.dtype.element_ty == gl.float16:
        packed = pack(values)
        gl.store(ptr.to(gl.pointer_type(packed.dtype), bitcast=True) + at, packed, mask=mask)
    else:
        bounded = values
        if DTYPE == gl.float32 and PRECISION == "tf32":
            bounded = ()
            for k in gl.static_range(COUNT):
                bounded += (values[k] if k > 1 and BOUNDED else clamp_to_float16(values[k]),)
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
    """Returns the float32 value in the low 32 bits."""
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
