"""Shared code of the recurrent kernels: operand rounding, row addressing, residuals, norms, resets.

Every kernel sees its sequence arrays as `[G, T, B, W]`: G groups of B sequences, with time as the first axis of each
group. A batch-major array `[N, T, W]` consists of G=N groups of one sequence, so the same addressing handles both. Each
of the S models owns G/S consecutive groups. Tiles are `[hidden, batch]`: the product is `W @ h^T`, whose large side
(hidden) fills the tensor cores even if the batch tile is small.
"""

import triton
import triton.language as tl

# Values of RESET_STATE, indices into `torch_bridge.tiling.RESET_STATES`: where a kernel finds the state from which an
# episode starts.
RESET_ZEROS = tl.constexpr(0)  # zeros
RESET_FIXED = tl.constexpr(1)  # [G, B, H]
RESET_STEPPED = tl.constexpr(2)  # [G, T, B, H]
# The value of REVERSE if models of odd index run in reverse time and the others forward; True and False apply to all.
BIDIRECTIONAL = tl.constexpr("bidirectional")


@triton.jit
def operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Converts `x` to a matmul operand; rounds float32 to the ten bits of TF32's mantissa, ties away from zero.

    The tensor core would truncate float32, which is biased. The rounding in integer arithmetic is valid for finite
    numbers only: it turns some NaNs into infinity or -0. `x + x` keeps infinities, and returns a NaN that truncation
    keeps, because the highest bit of its mantissa is set. With PRECISION "tf32x3", Triton rounds, and only the NaNs are
    replaced here.
    """
    x = x.to(DTYPE)
    if DTYPE == tl.float32:
        rounded = x
        if PRECISION == "tf32":
            rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < float("inf"), rounded, x + x)
    return x


@triton.jit
def rounded_product(a, b):
    """Returns `a * b`, which the compiler does not fuse with an addition as it does with `a * b` itself.

    Sums over threads need it if a thread has one product. Otherwise each thread may fuse its own product, which is
    then not rounded, with the sum of the others, and the threads get sums that differ in the last bit.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def first_row(seq, T, B):
    """Returns the row of step 0 of sequence `seq` in a `[G, T, B]` array; step t is `t * B` rows further.

    Sequences are counted over all groups.
    """
    return (seq // B) * T * B + seq % B


@triton.jit
def time_order(row0, model, T, B, REVERSE: tl.constexpr):
    """Returns the row of time index 0 of each sequence, and the number of rows from one time index to the next.

    `row0` are the rows of step 0. A time index is a step, except if REVERSE is BIDIRECTIONAL and the index of the model
    is odd: index 0 is then the last step.
    """
    if REVERSE == BIDIRECTIONAL:
        odd = model % 2
        return row0 + odd * (T - 1) * B, B - 2 * odd * B
    else:
        return row0, B


@triton.jit
def step_time(i, T, REVERSE: tl.constexpr):
    """Returns the time index, as in `time_order`, of the i-th step that runs."""
    if REVERSE == BIDIRECTIONAL:
        return i
    elif REVERSE:
        return T - 1 - i
    else:
        return i


@triton.jit
def clamp_to_float16(x):
    """Clamps `x` to the range of float16; a NaN stays a NaN."""
    return tl.where(tl.abs(x) > 65504.0, tl.where(x > 0, 65504.0, -65504.0), x)


@triton.jit
def float16_bits(x, BOUNDED: tl.constexpr):
    """Returns the 16 bits of `x` in float16, clamped to its range unless BOUNDED says that `x` is within."""
    if not BOUNDED:
        x = clamp_to_float16(x)
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _pack_float16x2(a, b, BOUNDED: tl.constexpr):
    """Packs two values as float16 into 32 bits, `a` in the lower half; BOUNDED as in `float16_bits`."""
    return float16_bits(a, BOUNDED) | (float16_bits(b, BOUNDED) << 16)


@triton.jit
def pack_float16x4(a, b, c, d, BOUNDED: tl.constexpr):
    """Packs four values as float16 into 64 bits, `a` in the lowest; BOUNDED: `c` and `d` are within float16's range."""
    low, high = _pack_float16x2(a, b, False), _pack_float16x2(c, d, BOUNDED)
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def unpack_float16(bits):
    """Returns, as float32, the float16 value in the low 16 of 32 bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack_float16x4(bits):
    """Returns the four values that `pack_float16x4` packed, as float32."""
    low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
    return unpack_float16(low), unpack_float16(low >> 16), unpack_float16(high), unpack_float16(high >> 16)


@triton.jit
def store_local_grads(ptr, rows, cols, mask, values, H: tl.constexpr, BOUNDED: tl.constexpr):
    """Stores the local gradients of each unit, a tuple, side by side: `[..., H, 1]`, `[..., H, 2]` or `[..., H, 4]`.

    Three of them are followed by a zero. float16 is clamped to its range, so that gradients stay finite. BOUNDED: the
    third and the fourth are within that range.
    """
    COUNT: tl.constexpr = len(values)
    at = rows[None, :] * H + cols[:, None]
    if ptr.dtype.element_ty == tl.float16:
        if COUNT == 1:
            tl.store(ptr + at, clamp_to_float16(values[0]).to(tl.float16), mask=mask)
        elif COUNT == 2:
            pair = _pack_float16x2(*values, False)
            tl.store(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, pair, mask=mask)
        else:
            quad = values
            if COUNT == 3:
                quad = values + (tl.zeros_like(values[0]),)
            tl.store(ptr.to(tl.pointer_type(tl.int64), bitcast=True) + at, pack_float16x4(*quad, BOUNDED), mask=mask)
    else:
        WIDTH: tl.constexpr = 4 if COUNT > 2 else COUNT
        for k in tl.static_range(COUNT):
            tl.store(ptr + at * WIDTH + k, values[k], mask=mask)
        if COUNT == 3:
            tl.store(ptr + at * WIDTH + COUNT, tl.zeros_like(values[0]), mask=mask)


@triton.jit
def load_local_grads(ptr, rows, cols, mask, H: tl.constexpr, COUNT: tl.constexpr):
    """Loads the COUNT local gradients that `store_local_grads` stored; returns a tuple of float32."""
    at = rows[None, :] * H + cols[:, None]
    if ptr.dtype.element_ty == tl.float16:
        if COUNT == 1:
            return (tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32),)
        elif COUNT == 2:
            pair = tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask=mask, other=0)
            return unpack_float16(pair), unpack_float16(pair >> 16)
        else:
            quad = unpack_float16x4(tl.load(ptr.to(tl.pointer_type(tl.int64), bitcast=True) + at, mask=mask, other=0))
            return quad[:COUNT]
    else:
        WIDTH: tl.constexpr = 4 if COUNT > 2 else COUNT
        values = ()
        for k in tl.static_range(COUNT):
            values += (tl.load(ptr + at * WIDTH + k, mask=mask, other=0.0),)
        return values


@triton.jit
def pack_words(local_grads, carry_gate):
    """Packs the result of `pack_float16x4` and a float32 value, `carry_gate`, into three 32-bit words.

    `a` to `d` are the arguments of `pack_float16x4`. The high and low halves of the words are: `a` and `d`; `b` and the
    low half of `carry_gate`; `c` and the high half of `carry_gate`. A word is a float32 NaN only if `a`, `b` or `c` is
    a NaN.
    """
    low, high, bits = local_grads.to(tl.int32), (local_grads >> 32).to(tl.int32), carry_gate.to(tl.int32, bitcast=True)
    return (
        ((high >> 16) & 0xFFFF) | (low << 16),
        (bits & 0xFFFF) | (low & -0x10000),
        ((bits >> 16) & 0xFFFF) | (high << 16),
    )


@triton.jit
def unpack_words(first, second, third):
    """Inverts `pack_words`: returns `a`, `b`, `c`, `d` and `carry_gate` as float32."""
    carry_gate = ((second & 0xFFFF) | (third << 16)).to(tl.float32, bitcast=True)
    return (
        unpack_float16(first >> 16),
        unpack_float16(second >> 16),
        unpack_float16(third >> 16),
        unpack_float16(first),
        carry_gate,
    )


@triton.jit
def load_reset_value(reset_ptr, rows, mask):
    """Loads what is nonzero, NaN included, for sequences that start an episode at these rows.

    A kernel can compare it with zero later, so that it does not wait for memory here.
    """
    if reset_ptr.dtype.element_ty == tl.int1:  # a load would compare
        reset_ptr = reset_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    return tl.load(reset_ptr + rows, mask=mask, other=0)


@triton.jit
def load_reset(reset_ptr, rows, mask):
    """Returns which sequences start an episode at these rows; NaN counts as nonzero."""
    return load_reset_value(reset_ptr, rows, mask) != 0


@triton.jit
def start_afresh(states, reset):
    """Returns the states, or gradients of states, with zeros where an episode starts; all are tuples."""
    after = ()
    for k in tl.static_range(len(states)):
        after += (tl.where(reset, 0.0, states[k]),)
    return after


@triton.jit
def scaled(values, factor):
    """Returns the products of a tuple's elements and a factor."""
    products = ()
    for k in tl.static_range(len(values)):
        products += (values[k] * factor,)
    return products


@triton.jit
def operands_of(grads, GATES: tl.constexpr):
    """Returns, by gate, the gradients that are multiplied by the recurrent weights, given those from `grad_step`."""
    if len(grads) > GATES:  # the last gate is separate
        return grads[: GATES - 1] + grads[GATES:]
    else:
        return grads


@triton.jit
def load_biases(bias_ptr, model, unit, H: tl.constexpr, GATES: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads `[S, GATES * H]`, biases or sums of weights: a tuple by gate, or none without them.

    An element is `[units]` or, with COLUMNS, `[units, 1]`.
    """
    biases = ()
    if bias_ptr is not None:
        for gate in tl.static_range(GATES):
            at = bias_ptr + (model * GATES + gate) * H + unit
            bias = tl.load(at, mask=unit < H, other=0.0).to(tl.float32)
            biases += (bias[:, None] if COLUMNS else bias,)
    return biases


@triton.jit
def subtract_mean(xs, mean, sums):
    """Returns input projections by gate, in float32, minus the mean of the inputs times the sums of weights by gate."""
    rest = ()
    for gate in tl.static_range(len(xs)):
        rest += (xs[gate].to(tl.float32) - mean * sums[gate],)
    return rest


@triton.jit
def normalize(gates, scale, bias):
    """Returns `(xp + hp) * scale` by gate, and the same plus `bias`; `gates` are the sums `xp + hp`."""
    GATES: tl.constexpr = len(gates)
    normalized = ()
    biased = ()
    for gate in tl.static_range(GATES):
        one = gates[gate] * scale
        normalized += (one,)
        biased += (one + bias[gate],)
    return normalized, biased


@triton.jit
def with_norm_grad(local_grads, normalized):
    """Appends the local gradient of the norm to those of the gates."""
    total = local_grads[0] * normalized[0]
    for gate in tl.static_range(1, len(normalized)):
        total += local_grads[gate] * normalized[gate]
    return local_grads + (total,)


@triton.jit
def load_weight(w_ptr, rows, cols, H: tl.constexpr, STRIDE: tl.constexpr):
    """Loads a tile of an `[H, H]` matrix whose rows are STRIDE elements apart, with zeros outside of it."""
    mask = (rows < H)[:, None] & (cols < H)[None, :]
    return tl.load(w_ptr + rows[:, None] * STRIDE + cols[None, :], mask=mask, other=0.0)
