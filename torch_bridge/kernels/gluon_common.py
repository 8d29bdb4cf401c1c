"""Shared code of the kernels in Gluon: 16-bit weights and operands, their scales, activations, packed stores.

Where the weights are, and with which instruction a product is computed, depends on the loop:

- "resident": one program has all units. Its weights stay in registers for the whole sequence: a warp owns 16 hidden
  units of every gate. Only the other operand, which is hidden states (forward) or gate gradients (backward), goes
  through shared memory, in two buffers that are written in turn, without a change of layout. Products use mma.sync,
  which every GPU since Ampere has. wgmma, which reads shared memory itself, would need a fence at every step, and that
  fence waits for all stores before it.
- "split_registers": programs share the units. Their weights stay in registers, and products use mma.sync.
- "split" and "rows": programs share the units. Both operands are in shared memory, for wgmma.
- "fma": one program has all units, and multiplies in float32 without tensor cores. It uses the loads, residuals, resets
  and norms of this module.

Products of float32 on tensor cores use float16 operands, whose mantissa has ten bits like that of TF32. Scales that are
powers of two, which are exact to apply and to undo, keep the operands within the range of float16: one scale for the
weights, and one per sequence for the other operand.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torch_bridge.kernels.arrays import Piece, Tile
from torch_bridge.kernels.common import (
    BIDIRECTIONAL,
    RESET_FIXED,
    RESET_ZEROS,
    first_row,
    load_reset,
    pack_words,
    start_afresh,
    step_time,
    time_order,
    unpack_float16,
    unpack_float16x4,
    unpack_words,
)

# Triton 3.9 renamed this function
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# Triton 3.7 renamed this function
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def slot_layout(warps):
    """Returns the layout of a value per warp and sequence, `[warps, 8]`.

    A thread has the values of all warps for the sequences that it has in a product's result (`units_layout`).
    """
    doublings = warps.bit_length() - 1
    registers = [*([1 << bit, 0] for bit in range(doublings)), [0, 1]]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * doublings, [], [warps, 8])


@gluon.constexpr_function
def units_layout(warps, block_b):
    """Returns the layout of a product's result, `[16 * warps, block_b]`; a thread has pairs of units and sequences."""
    registers = [[1, 0], [0, 1], *([0, 8 << k] for k in range((block_b // 8).bit_length() - 1))]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << k, 0] for k in range(warps.bit_length() - 1)], [], [16 * warps, block_b]
    )


@gluon.jit
def unit_of_row(row):
    """Returns the unit whose weights are a row of the register operand.

    Rows k and k + 8 of each 16 rows have the weights of adjacent units.
    """
    return (row & ~15) | ((row & 7) << 1) | ((row >> 3) & 1)


@gluon.constexpr_function
def columns(block_b):
    """Returns the number of columns in products of a tile of `block_b` sequences: MMA's N dimension is at least 8."""
    return max(block_b, 8)


@gluon.jit
def sequence_of_column(column, BLOCK_B: gl.constexpr, COLS: gl.constexpr):
    """Returns the sequence of a tile that a column of a product belongs to, and whether it belongs to any.

    If a tile has few sequences, every other column belongs to none: a thread has two adjacent columns, and the compiler
    sees that it loads and stores nothing for one of them. `without_empty_columns` removes the computation, too.
    """
    if 2 * BLOCK_B <= COLS:
        return column // 2, (column % 2 == 0) & (column < 2 * BLOCK_B)
    else:
        return column, column < BLOCK_B


@gluon.jit
def without_empty_columns(x, BLOCK_B: gl.constexpr):
    """Returns `x`, `[units, columns]` or `[columns]`, with zeros in odd columns if these are always empty.

    The compiler sees the zeros, and removes what a thread would compute for such a column.
    """
    COLS: gl.constexpr = x.shape[len(x.shape) - 1]
    if 2 * BLOCK_B <= COLS:
        if len(x.shape) == 2:
            column = gl.arange(0, COLS, gl.SliceLayout(0, x.type.layout))[None, :]
        else:
            column = gl.arange(0, COLS, x.type.layout)
        x = gl.where(column % 2 == 0, x, 0.0)
    return x


@gluon.jit
def states_without_empty_columns(states, BLOCK_B: gl.constexpr):
    """Returns a tuple of states, or of gradients of states, as `without_empty_columns` does."""
    after = ()
    for k in gl.static_range(len(states)):
        after += (without_empty_columns(states[k], BLOCK_B),)
    return after


@gluon.jit
def locate_tile(
    model, nth, sizes, H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, REVERSE: gl.constexpr,
    UNITS: gl.constexpr,
):  # fmt: skip
    """Locates the tile of this number of a model, for a program that has all units of whole sequences."""
    COLS: gl.constexpr = columns(BLOCK_B)
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(1, UNITS))
    sequence, taken = sequence_of_column(gl.arange(0, COLS, gl.SliceLayout(0, UNITS)), BLOCK_B, COLS)
    return locate_columns(model, nth * BLOCK_B + sequence, taken, sizes, None, unit, H, REVERSE)


@gluon.jit
def locate_tile_of_piece(piece, T, H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, UNITS: gl.constexpr):
    """Locates the tile whose sequence is a piece that `locate_piece` found, for a program that has all units."""
    gl.static_assert(BLOCK_B == 1, "a program has a piece of one sequence")
    COLS: gl.constexpr = columns(BLOCK_B)
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(1, UNITS))
    COLUMNS: gl.constexpr = gl.SliceLayout(0, UNITS)
    _, taken = sequence_of_column(gl.arange(0, COLS, COLUMNS), BLOCK_B, COLS)
    seq = gl.full([COLS], piece.seq, gl.int64, COLUMNS)
    row = gl.full([COLS], piece.row, gl.int64, COLUMNS)
    mask = (unit < H)[:, None] & taken[None, :]
    return Tile(T, seq, row, piece.stride, unit, mask, taken, piece.steps, piece.steps, piece.begin)


@gluon.jit
def locate_columns(model, q, taken, sizes, reset_ptr, unit, H: gl.constexpr, REVERSE: gl.constexpr):
    """Locates the tile whose columns are the sequences `q` of a model or, with pieces, the pieces of these numbers.

    Piece s of sequence q has the number `s * Q + q`. `taken` tells which columns have a whole sequence, or is None for
    all.
    """
    T, B, Q, pieces = sizes
    if pieces is None:
        mask_q = q < Q
        if taken is not None:
            mask_q = taken & mask_q
        mask = (unit < H)[:, None] & mask_q[None, :]
        seq = model * Q + q
        row, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
        return Tile(T, seq, row, stride, unit, mask, mask_q, T, T, 0)
    else:
        seq = model * Q + q % Q
        row, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
        offset = gl.arange(0, unit.shape[0], unit.type.layout)[:, None]
        begin, end = find_piece(reset_ptr, row, stride, (q // Q).to(gl.int32), pieces, T, offset, REVERSE)
        mask_q = begin < end
        longest = gl.max(gl.where(mask_q, end - begin, 0), axis=0)
        mask = (unit < H)[:, None] & mask_q[None, :]
        row = row_of_piece(row, begin, stride, REVERSE)
        return Tile(T, seq, row, stride, unit, mask, mask_q, gl.maximum(end - begin, 1), longest, begin)


@gluon.jit
def row_of_piece(row, begin, stride, REVERSE: gl.constexpr):
    """Returns `Tile.row` of a piece that begins with step `begin`, given that of its sequence."""
    if REVERSE == BIDIRECTIONAL or not REVERSE:
        return row + begin * stride
    else:
        return row - begin * stride


# Steps that a program (`find_piece`) or each warp by itself (`locate_piece`) looks at in a turn of the search, which
# waits for memory once. With few, a search takes a few percent of a loop without resets: in `fma`, steps take 0.3 us.
_STEPS_OF_TURN = gl.constexpr(512)
_STEPS_OF_WARP = gl.constexpr(128)


@gluon.jit
def _chunk_of_piece(piece, pieces, T):
    """Returns the first step of the chunk of time in which a piece begins, and the one before which the chunk ends.

    Time is cut into `pieces` chunks. A piece begins with the first step of its chunk at which an episode starts, the
    first one with step 0, and ends where the next one begins. Of a chunk without such a step there is no piece. A step
    is thus run by one piece, after all that it depends on.
    """
    size = (T + pieces - 1) // pieces
    start = gl.minimum(piece * size, T)
    return start, gl.minimum(start + size, T)


@gluon.jit
def _first_reset(reset_ptr, row, stride, start, stop, T, offset, REVERSE: gl.constexpr):
    """Returns the first step at which an episode starts, of those from `start` on and before `stop`; otherwise `stop`.

    `start`, `stop` and `row` are `[columns]`. `offset`, `[steps, 1]`, numbers steps.
    """
    STEPS: gl.constexpr = offset.shape[0]
    LOOKS: gl.constexpr = _STEPS_OF_TURN // STEPS
    found = stop
    looking = start < stop
    looked = 0
    more = 1
    while more > 0:
        for look in gl.static_range(LOOKS):
            step = (start + looked)[None, :] + offset
            live = looking[None, :] & (step < stop[None, :])
            at = row[None, :] + step_time(step, T, REVERSE) * stride
            seen = gl.where(load_reset(reset_ptr, at, live), step, T)
            if look == 0:
                first = seen
            else:
                first = gl.minimum(first, seen)
            looked += STEPS
        found = gl.minimum(found, gl.min(first, axis=0))
        looking = looking & (found == stop) & (start + looked < stop)
        more = gl.max(looking.to(gl.int32), axis=0)
    return found


@gluon.jit
def find_piece(reset_ptr, row, stride, piece, pieces, T, offset, REVERSE: gl.constexpr):
    """Returns the steps with which pieces begin, and those before which they end; 0 and 0 where there is no piece.

    `_chunk_of_piece` defines a piece. The other arguments are those of `_first_reset`.
    """
    start, stop = _chunk_of_piece(piece, pieces, T)
    begin = _first_reset(reset_ptr, row, stride, gl.where(piece == 0, stop, start), stop, T, offset, REVERSE)
    begin = gl.where(piece == 0, 0, begin)
    exists = begin < stop
    end = _first_reset(reset_ptr, row, stride, gl.where(exists, stop, T), stop * 0 + T, T, offset, REVERSE)
    return gl.where(exists, begin, 0), gl.where(exists, end, 0)


@gluon.constexpr_function
def _steps_layout(steps, warps):
    """Returns the layout of a value per step, `[steps]`, of which every warp has all."""
    registers = [[32 << bit] for bit in range((steps // 32).bit_length() - 1)]
    lanes = [[1 << bit] for bit in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[0]] * (warps.bit_length() - 1), [], [steps])


@gluon.jit
def locate_piece(model, number, sizes, reset_ptr, REVERSE: gl.constexpr):
    """Locates the piece of this number of a model, for a program that runs one: piece s of sequence q is s * Q + q.

    `_chunk_of_piece` defines a piece. Every warp finds its bounds by itself, as minima over its lanes, without a
    barrier. ptxas sees that such a minimum is the same for all lanes, and compiles the loop over steps as if its length
    were an argument of the kernel. If lanes could leave that loop one by one, a step would take 20 to 50 cycles more.
    """
    T, B, Q, pieces = sizes
    sequences = Q.to(gl.int32)
    seq = model * Q + number % sequences
    row, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
    start, stop = _chunk_of_piece(number // sequences, pieces, T)
    offset = gl.arange(0, _STEPS_OF_WARP, _steps_layout(_STEPS_OF_WARP, gl.num_warps()))
    begin = gl.where(start == 0, 0, T)
    end = T
    looked = start
    more = start < T
    while more:
        step = looked + offset
        found = load_reset(reset_ptr, row + step_time(step, T, REVERSE) * stride, step < T)
        begin = gl.minimum(begin, gl.min(gl.where(found & (step < stop), step, T), axis=0))
        end = gl.minimum(end, gl.min(gl.where(found & (step >= stop), step, T), axis=0))
        looked += _STEPS_OF_WARP
        more = (looked < T) & (end == T)
    end = gl.where(begin < stop, end, begin)
    return Piece(seq, row_of_piece(row, begin, stride, REVERSE), stride, begin, end - begin)


@gluon.jit
def _of_columns(mask, condition):
    """Returns which of the states in `mask` belong to columns for which a condition holds, which may be a scalar."""
    if len(mask.shape) == 2 and len(condition.shape) == 1:
        condition = condition[None, :]
    return mask & condition


@gluon.jit
def runs(mask, tile, i, PIECES: gl.constexpr):
    """Returns which of the states in `mask` have a step i; for the others, a program runs steps past the last."""
    if PIECES:
        return _of_columns(mask, i < tile.steps)
    else:
        return mask & (i < tile.T)


@gluon.jit
def is_last_step(tile, i, PIECES: gl.constexpr):
    """Returns the states for which step i is the last step of the sequence."""
    if PIECES:
        return _of_columns(tile.mask, (i == tile.steps - 1) & (tile.begin + tile.steps == tile.T))
    else:
        return tile.mask & (i == tile.T - 1)


@gluon.jit
def is_first_step(tile, i, PIECES: gl.constexpr):
    """Returns the states for which step i of the backward pass is the first step of the sequence."""
    if PIECES:
        return _of_columns(tile.mask, (i == tile.steps - 1) & (tile.begin == 0))
    else:
        return tile.mask & (i == tile.T - 1)


@gluon.jit
def has_last_step(tile, PIECES: gl.constexpr):
    """Returns the states of the sequences, or pieces, that end with the last step of the sequence."""
    if PIECES:
        return _of_columns(tile.mask, tile.begin + tile.steps == tile.T)
    else:
        return tile.mask


@gluon.jit
def forward_rows(tile, i, REVERSE: gl.constexpr):
    """Returns the rows of sequences at step min(i, steps - 1) of the forward pass."""
    return tile.row + step_time(gl.minimum(i, tile.steps - 1), tile.T, REVERSE) * tile.stride


@gluon.jit
def backward_rows(tile, i, REVERSE: gl.constexpr):
    """Returns the rows of sequences at step min(i, steps - 1) of the backward pass."""
    return tile.row + step_time(tile.steps - 1 - gl.minimum(i, tile.steps - 1), tile.T, REVERSE) * tile.stride


@gluon.jit
def by_unit(x, UNITS: gl.constexpr):
    """Reorders the rows of a product's result by unit (see `unit_of_row`); every element stays in its register."""
    blocks: gl.constexpr = x.shape[0] // 16
    x = x.reshape([blocks, 2, 8, x.shape[1]]).permute([0, 2, 1, 3]).reshape([x.shape[0], x.shape[1]])
    return gl.convert_layout(x, UNITS, assert_trivial=True)


@gluon.jit
def scale_to_float16(largest, EXPONENT: gl.constexpr):
    """Returns the power of two that scales `largest` to at least 2^EXPONENT and less than twice that.

    The exponent of `largest` is clamped near zero and infinity.
    """
    exponent = gl.minimum(gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) & 0xFF, 27), 253)
    return ((127 + EXPONENT + 127 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scale_from_magnitudes(h):
    """Returns the scale of each sequence's hidden states, given the magnitudes `h` of its first hidden state.

    No later state exceeds the larger of 1 and the largest of `h`: a new hidden state is a tanh times at most 1, or lies
    between the state before and a tanh. NaNs are ignored.
    """
    return scale_from_largest(gl.max(h, axis=0))


@gluon.jit
def scale_from_largest(largest):
    """Returns the scale of each sequence's hidden states, given the largest magnitude of its first hidden state."""
    return scale_to_float16(gl.maximum(largest, 1.0), 14)


@gluon.jit
def scale_after_zeros(scale, reset):
    """Returns `scale`, or where an episode starts 2^14, which is the scale of hidden states that start from zeros."""
    return gl.where(reset[None, :], 2.0**14, scale)


@gluon.jit
def select_states(condition, chosen, otherwise):
    """Returns `chosen` where the condition holds, and elsewhere `otherwise`; both are tuples."""
    selected = ()
    for k in gl.static_range(len(chosen)):
        selected += (gl.where(condition, chosen[k], otherwise[k]),)
    return selected


@gluon.jit
def fixed_reset_states(reset_h_ptr, reset_c_ptr, at, mask, RESET_STATE: gl.constexpr):
    """Loads the states of new episodes, a tuple, if they are the same at every step; otherwise returns none."""
    if RESET_STATE == RESET_FIXED:
        return load_states(reset_h_ptr, reset_c_ptr, at, mask)
    else:
        return ()


@gluon.jit
def reset_states(
    states, reset, fixed, reset_h_ptr, reset_c_ptr, stepped_at, mask, RESET_STATE: gl.constexpr
):  # fmt: skip
    """Returns the states from which a step starts, a tuple: where `reset` is true, those of a new episode.

    The states of a new episode are zeros, `fixed`, or those at the offsets `stepped_at`, which are read only where they
    are needed. The result is a select, so that a NaN in `states` does not leak into it.
    """
    if RESET_STATE == RESET_ZEROS:
        return start_afresh(states, reset)
    elif RESET_STATE == RESET_FIXED:
        return select_states(reset, fixed, states)
    else:
        return select_states(reset, load_states(reset_h_ptr, reset_c_ptr, stepped_at, mask & reset), states)


@gluon.jit
def scaled_reset_states(
    states, scale, reset, new, new_scale, RESET_STATE: gl.constexpr, EARLY: gl.constexpr, SCALED: gl.constexpr
):  # fmt: skip
    """Returns the states from which a step starts, and the scale of each sequence's hidden states from then on.

    Where `reset`, by sequence, is true, a new episode starts from the states `new`, or from zeros if RESET_STATE says
    so. `new_scale` is the scale after a reset to `new`. It is used for fixed reset states and, if EARLY, for those of
    each step, because the caller computed it a step ahead. Otherwise this function computes the scale.
    """
    if RESET_STATE == RESET_ZEROS:
        if SCALED:
            scale = scale_after_zeros(scale, reset)
        return start_afresh(states, reset[None, :]), scale
    elif RESET_STATE == RESET_FIXED or EARLY:
        if SCALED:
            scale = gl.where(reset[None, :], new_scale, scale)
        return select_states(reset[None, :], new, states), scale
    else:
        # skipped if no sequence resets: the scale needs a maximum over the units of all warps, which costs a barrier
        if gl.max(reset.to(gl.int32), axis=0) > 0:
            if SCALED:
                scale = gl.where(reset[None, :], scale_from_magnitudes(gl.abs(new[0]))[None, :], scale)
            states = select_states(reset[None, :], new, states)
        return states, scale


@gluon.jit
def inverse(power_of_2):
    """Returns the reciprocal of a power of two."""
    return ((254 << 23) - power_of_2.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def load_weights(ptr, rows, cols, stride, mask, scale, SCALED: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Loads a square matrix of weights, scaled if SCALED, as the register operand of a product."""
    w = gl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    if SCALED:
        w = w * scale
    return gl.convert_layout(w.to(DTYPE), layout)


@gluon.jit
def weights_scale(
    ptr, stride, gate_stride, H: gl.constexpr, BLOCK_H: gl.constexpr, GATES: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Returns the scale of all gates' weights, and the largest sum over a row of absolute weights of all gates."""
    cols = gl.arange(0, BLOCK_H, gl.SliceLayout(0, layout))
    largest = gl.zeros([32, BLOCK_H], gl.float32, layout)
    row_largest = gl.zeros([32], gl.float32, gl.SliceLayout(1, layout))
    for first in gl.static_range(0, BLOCK_H, 32):  # as many rows at a time as registers can hold
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
def to_operand(x, DTYPE: gl.constexpr):
    """Converts `x` to an operand; a value beyond the range of float16 is clamped to it."""
    if DTYPE == gl.float16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return x.to(DTYPE)


@gluon.jit
def _pack_pair(a, b):
    """Packs two numbers as float16 into 32 bits, `a` in the lower half."""
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _pack_quad(a, b, c, d):
    """Packs four numbers as `common.pack_float16x4` does, with one instruction per pair."""
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
def pack(values):
    """Packs a tuple of one to four numbers as float16: into 16 or 32 bits or, if there are more than two, 64."""
    COUNT: gl.constexpr = len(values)
    if COUNT == 1:
        packed = _pack_pair(values[0], values[0]).to(gl.int16)
    elif COUNT == 2:
        packed = _pack_pair(values[0], values[1])
    elif COUNT == 3:
        packed = _pack_quad(values[0], values[1], values[2], values[2] * 0.0)
    else:
        packed = _pack_quad(values[0], values[1], values[2], values[3])
    return packed


@gluon.jit
def unpack(packed, COUNT: gl.constexpr):
    """Inverts `pack`: returns a tuple of COUNT numbers as float32."""
    if COUNT == 1:
        values = (unpack_float16(packed),)
    elif COUNT == 2:
        values = (unpack_float16(packed), unpack_float16(packed >> 16))
    else:
        values = unpack_float16x4(packed)[:COUNT]
    return values


@gluon.constexpr_function
def packed_type(count):
    """Returns the integer type that holds `count` local gradients in float16."""
    return gl.int16 if count == 1 else gl.int32 if count == 2 else gl.int64


@gluon.jit
def pack_residuals(local_grads, factors, dc_dh_ptr):
    """Returns the residuals of a step as a tuple that takes the fewest registers until `store_residuals`."""
    saved = (pack(local_grads),)
    if dc_dh_ptr is not None:
        saved += (factors[0].to(dc_dh_ptr.dtype.element_ty),)
        saved += factors[1:]
    else:
        saved += factors
    return saved


@gluon.jit
def no_residuals(state, dc_dh_ptr, COUNT: gl.constexpr, FACTORS: gl.constexpr):
    """Returns a placeholder in the format of `pack_residuals`, for COUNT local gradients and FACTORS factors.

    It depends on `state`: with constants, LLVM computes the addresses of a step's stores before its barrier.
    """
    local_grads = ()
    for _ in gl.static_range(COUNT):
        local_grads += (state,)
    factors = ()
    for _ in gl.static_range(FACTORS):
        factors += (state,)
    return pack_residuals(local_grads, factors, dc_dh_ptr)


@gluon.jit
def store_residuals(a, rows, unit, mask, saved, H: gl.constexpr, COUNT: gl.constexpr):
    """Stores what `pack_residuals` returned: if there is no array for a carry gate, as words (`common.pack_words`).

    `rows` and `unit` broadcast to a tile, whose axes are sequences and units in either order. COUNT is the number of
    local gradients, and `a` are the arrays.
    """
    if len(saved) > 1 and a.carry_gate_ptr is None:
        at = a.local_grads_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (rows * (3 * H) + unit)
        first, second, third = pack_words(saved[0], saved[1])
        gl.store(at, first, mask=mask)
        gl.store(at + H, second, mask=mask)
        gl.store(at + 2 * H, third, mask=mask)
    else:
        TYPE: gl.constexpr = packed_type(COUNT)
        at = rows * H + unit
        gl.store(a.local_grads_ptr.to(gl.pointer_type(TYPE), bitcast=True) + at, saved[0], mask=mask)
        if a.dc_dh_ptr is not None:
            gl.store(a.dc_dh_ptr + at, saved[1], mask=mask)
        if a.carry_gate_ptr is not None:
            gl.store(a.carry_gate_ptr + at, saved[-1], mask=mask)


@gluon.jit
def load_factors(a, at, mask):
    """Loads the residuals after the local gradients; returns a tuple."""
    factors = ()
    if a.dc_dh_ptr is not None:
        factors += (gl.load(a.dc_dh_ptr + at, mask=mask, other=0.0),)
    if a.carry_gate_ptr is not None:
        factors += (gl.load(a.carry_gate_ptr + at, mask=mask, other=0.0),)
    return factors


@gluon.jit
def in_float32(values):
    """Returns a tuple's elements in float32."""
    converted = ()
    for k in gl.static_range(len(values)):
        converted += (values[k].to(gl.float32),)
    return converted


@gluon.jit
def load_residuals(a, rows, unit, mask, H: gl.constexpr, COUNT: gl.constexpr, PACKED: gl.constexpr):
    """Loads what `store_residuals` stored, without unpacking the data; returns a tuple."""
    if PACKED:
        at = a.local_grads_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (rows * (3 * H) + unit)
        saved = load_inputs(at, mask, H, 3)
    else:
        TYPE: gl.constexpr = packed_type(COUNT)
        at = rows * H + unit
        saved = (gl.load(a.local_grads_ptr.to(gl.pointer_type(TYPE), bitcast=True) + at, mask=mask, other=0),)
        saved += load_factors(a, at, mask)
    return saved


@gluon.jit
def unpack_residuals(saved, COUNT: gl.constexpr, PACKED: gl.constexpr):
    """Unpacks what `load_residuals` loaded; returns COUNT local gradients, and the factors, in float32."""
    if PACKED:
        a, b, c, d, carry_gate = unpack_words(saved[0], saved[1], saved[2])
        local_grads = (a, b, c, d)
        factors = (carry_gate,)
    else:
        local_grads = unpack(saved[0], COUNT)
        factors = in_float32(saved[1:])
    return local_grads, factors


@gluon.constexpr_function
def product_order(k, gates):
    """Returns the gate whose product a forward step issues as its k-th one. The order is its own inverse.

    Gates 0 and 2 come first, because the tanh of gate 2 depends on both in a GRU.
    """
    return (0, 2, 1, 3)[k] if gates > 2 else k


@gluon.jit
def add_input(product, x, b_hn, IS_SEPARATE: gl.constexpr):
    """Returns a gate before its activation: product plus input projection or, if it is separate, plus `b_hn`."""
    if IS_SEPARATE:
        gate = product + b_hn
    else:
        gate = product + x.to(gl.float32)
    return gate


@gluon.jit
def add_inputs(products, x, b_hn, SEPARATE: gl.constexpr):
    """Returns the gates before their activations, a tuple, given products and input projections by gate.

    If the last gate is SEPARATE, it is the product plus the bias `b_hn`.
    """
    GATES: gl.constexpr = len(products)
    gates = ()
    for gate in gl.static_range(GATES):
        gates += (add_input(products[gate], x[gate], b_hn, SEPARATE and gate == GATES - 1),)
    return gates


@gluon.jit
def largest_magnitude(values):
    """Returns the elementwise maximum of the absolute values of a tuple of one to four tensors."""
    COUNT: gl.constexpr = len(values)
    largest = gl.abs(values[0])
    if COUNT > 1:
        largest = gl.maximum(largest, gl.abs(values[1]))
    if COUNT == 3:
        largest = gl.maximum(largest, gl.abs(values[2]))
    if COUNT == 4:
        largest = gl.maximum(largest, gl.maximum(gl.abs(values[2]), gl.abs(values[3])))
    return largest


@gluon.jit
def load_inputs(xp, mask, H: gl.constexpr, GATES: gl.constexpr):
    """Loads a step's input projections, where `xp` points to those of the first gate; returns a tuple by gate."""
    inputs = ()
    for gate in gl.static_range(GATES):
        inputs += (gl.load(xp + gate * H, mask=mask, other=0.0),)
    return inputs


@gluon.jit
def load_states(h_ptr, c_ptr, at, mask):
    """Loads the states at the offsets `at` as float32, or their gradients; returns a tuple, of one without `c_ptr`."""
    states = (gl.load(h_ptr + at, mask=mask, other=0.0).to(gl.float32),)
    if c_ptr is not None:
        states += (gl.load(c_ptr + at, mask=mask, other=0.0).to(gl.float32),)
    return states


@gluon.jit
def store_states(h_ptr, c_ptr, at, states, mask):
    """Stores a tuple of states or of gradients of states; without `c_ptr`, only the first."""
    gl.store(h_ptr + at, states[0].to(h_ptr.dtype.element_ty), mask=mask)
    if c_ptr is not None:
        gl.store(c_ptr + at, states[1].to(c_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def reset_gradients(dstates, reset, dreset_h_ptr, dreset_c_ptr, at, mask):
    """Returns the gradients of the states before a reset; those of the states that replace them are stored, if at all.

    `reset` broadcasts to a tile. All gradients are tuples.
    """
    if dreset_h_ptr is not None:
        gl.store(dreset_h_ptr + at, gl.where(reset, dstates[0], 0.0), mask=mask)
    if dreset_c_ptr is not None:
        gl.store(dreset_c_ptr + at, gl.where(reset, dstates[1], 0.0), mask=mask)
    return start_afresh(dstates, reset)


@gluon.jit
def load_resets(reset_ptr, rows, mask_q):
    """Returns which sequences start an episode at these rows; without `reset_ptr`, a placeholder that is not used."""
    reset = mask_q
    if reset_ptr is not None:
        reset = load_reset(reset_ptr, rows, mask_q)
    return reset


@gluon.jit
def load_gradients(dhs_ptr, dcs_ptr, rows, unit, mask, H: gl.constexpr):
    """Loads the gradients of a step's outputs; returns a tuple."""
    gradients = (gl.load(dhs_ptr + rows[None, :] * H + unit[:, None], mask=mask, other=0.0),)
    if dcs_ptr is not None:
        gradients += (gl.load(dcs_ptr + rows[None, :] * H + unit[:, None], mask=mask, other=0.0),)
    return gradients


@gluon.jit
def step_gradients(dh, dstates, dys, local_grads, factors, dcs_ptr, GRAD_STEP: gl.constexpr):
    """Returns what the cell's `grad_step` does, given the gradient `dh` of a step's hidden state.

    `dstates` are the gradients that come from the next step, and `dys` those of the step's outputs; both are tuples.
    """
    if len(dstates) == 1:
        return GRAD_STEP((dh,), local_grads, factors)
    else:
        dc = dstates[1] + dh * factors[0]
        if dcs_ptr is not None:
            dc += dys[1].to(gl.float32)
        return GRAD_STEP((dh, dc), local_grads, factors)


@gluon.jit
def store_totals(a, at, dh, dstates, dys, mask):
    """Stores the gradients of a step's states, if there are arrays for them: `dh` and, of c, what does not come from h.

    `dstates` and `dys` are those of `step_gradients`, and `a` are the arrays.
    """
    if a.total_dh_ptr is not None:
        gl.store(a.total_dh_ptr + at, dh, mask=mask)
    if a.total_dc_ptr is not None:
        dc = dstates[1]
        if a.dcs_ptr is not None:
            dc += dys[1].to(gl.float32)
        gl.store(a.total_dc_ptr + at, dc, mask=mask)


@gluon.jit
def gradients_before(product, carried, STATES: gl.constexpr):
    """Returns the gradients of the states before a step, a tuple, given the product and what `grad_step` carries."""
    if STATES == 1 and len(carried) > 0:
        product = carried[0] + product
    dstates = (product,)
    if STATES > 1:
        dstates += carried
    return dstates


@gluon.jit
def load_saved(a, tile, rows, H: gl.constexpr, COUNT: gl.constexpr, PACKED: gl.constexpr):
    """Loads what a backward step reads, without unpacking or converting the data.

    Returns the residuals, which sequences start an episode there, and the gradients of the step's outputs, a tuple.
    """
    saved = load_residuals(a, rows[None, :], tile.unit[:, None], tile.mask, H, COUNT, PACKED)
    reset = load_resets(a.reset_ptr, rows, tile.mask_q)
    return saved, reset, load_gradients(a.dhs_ptr, a.dcs_ptr, rows, tile.unit, tile.mask, H)


@gluon.jit
def load_statistics(x_norm_ptr, x_mean_ptr, rows, mask_q):
    """Loads what a norm needs of a step's inputs: a part of variance + epsilon and, for LayerNorm, the mean.

    Returns a tuple, which is empty without a norm.
    """
    statistics = ()
    if x_norm_ptr is not None:
        statistics += (gl.load(x_norm_ptr + rows, mask=mask_q, other=1.0),)
    if x_mean_ptr is not None:
        statistics += (gl.load(x_mean_ptr + rows, mask=mask_q, other=0.0),)
    return statistics


@gluon.jit
def scale_of_norm(sums, statistics, H: gl.constexpr, NORM_WIDTH: gl.constexpr):
    """Returns the factor `s` of a step's norm, given what `load_statistics` returned.

    `sums` are the sum of squares of the state and, for LayerNorm, its sum.
    """
    variance = statistics[0]
    if len(sums) == 1:
        variance += sums[0] * (1.0 / NORM_WIDTH)
    else:
        difference = sums[1] * (1.0 / H) - statistics[1]
        variance += (sums[0] - sums[1] * (sums[1] * (1.0 / H))) * (1.0 / NORM_WIDTH)
        variance += difference * difference * (H * (NORM_WIDTH - H) / (NORM_WIDTH * NORM_WIDTH))
    return 1.0 / gl.sqrt(variance)


@gluon.jit
def mean_of_norm(sums, statistics, H: gl.constexpr, NORM_WIDTH: gl.constexpr):
    """Returns the mean of inputs and state for LayerNorm; the arguments are those of `scale_of_norm`."""
    return statistics[1] + (sums[1] * (1.0 / H) - statistics[1]) * (H / NORM_WIDTH)


@gluon.jit
def normalized_state(h, sums, statistics, scale, H: gl.constexpr, NORM_WIDTH: gl.constexpr):
    """Returns the normalized state `(h - mean) * scale`, where the mean is 0 for RMSNorm.

    `h` is `[units, batch]`, or `[units]` of one sequence. The other arguments are those of `scale_of_norm`, and what it
    returned.
    """
    if len(statistics) > 1:
        mean = mean_of_norm(sums, statistics, H, NORM_WIDTH)
        if len(h.shape) == 2:
            mean = mean[None, :]
        h -= mean
    if len(h.shape) == 2:
        scale = scale[None, :]
    return h * scale
