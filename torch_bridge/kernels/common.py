"""What the recurrent kernels share: activations, operand rounding, row addressing, the barrier between programs.

Every kernel sees its sequence arrays as `[G, T, B, W]`: G groups of B sequences, each group time first. A batch-major
array `[N, T, W]` is G=N groups of one sequence, so one addressing serves both. The S models take G/S consecutive
groups each. Tiles are `[hidden, batch]`: the product is `W @ h^T`, whose large side fills the tensor cores also when
the batch tile is small.
"""

import triton
import triton.language as tl

# How a kernel finds the state an episode starts from.
RESET_ZEROS = tl.constexpr(0)  # zeros
RESET_FIXED = tl.constexpr(1)  # [G, B, H]
RESET_STEPPED = tl.constexpr(2)  # [G, T, B, H]
# REVERSE of a launch whose models of odd index run in reverse time, the others forward; True and False are of all.
BIDIRECTIONAL = tl.constexpr("bidirectional")


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    if PRECISE:
        # near zero the difference above cancels: an odd polynomial keeps the relative error at float32's
        x2 = x * x
        p = x2 * (x2 * (x2 * (x2 * (62.0 / 2835.0) - 17.0 / 315.0) + 2.0 / 15.0) - 1.0 / 3.0)
        y = tl.where(x2 < 0.0225, x + x * p, y)
    return y


@triton.jit
def operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """`x` as a matmul operand: float32 is rounded to TF32 here, since the tensor core would truncate it (a bias).

    It would truncate a NaN too, one of low bits alone to infinity: what arithmetic gives for it has the highest.
    """
    x = x.to(DTYPE)
    if DTYPE == tl.float32 and PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < float("inf"), rounded, x + x)
    return x


@triton.jit
def first_row(seq, T, B):
    """Row of step 0 of sequence `seq` (counted over all groups) in a `[G, T, B]` array; step t is `t * B` further."""
    return (seq // B) * T * B + seq % B


@triton.jit
def time_order(row0, model, T, B, REVERSE: tl.constexpr):
    """Where step time 0 of a model's sequences is, and how many rows further the next; `row0` are rows of step 0."""
    if REVERSE == BIDIRECTIONAL:
        odd = model % 2
        return row0 + odd * (T - 1) * B, B - 2 * odd * B
    else:
        return row0, B


@triton.jit
def step_time(i, T, REVERSE: tl.constexpr):
    """The time of the i-th step taken, counted in the order of `time_order`."""
    if REVERSE == BIDIRECTIONAL:
        return i
    elif REVERSE:
        return T - 1 - i
    else:
        return i


@triton.jit
def load_tile(ptr, rows, cols, width, mask):
    """A `[hidden, batch]` tile in float32 of a row-major array: rows are sequences, cols hidden units."""
    return tl.load(ptr + rows[None, :] * width + cols[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_exchanged(ptr, offs_b, cols, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """A `[cols, batch]` operand that programs of this launch wrote: read from L2, past this SM's own L1."""
    offs = offs_b[None, :] * WIDTH + cols[:, None]
    if EVEN:
        return tl.load(ptr + offs, cache_modifier=".cg")
    return tl.load(ptr + offs, mask=(cols < WIDTH)[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def store_tile(ptr, rows, cols, width, mask, value):
    tl.store(ptr + rows[None, :] * width + cols[:, None], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def clamp_to_float16(x):
    """`x`, beyond the range of float16 the largest of its sign."""
    return tl.where(tl.abs(x) > 65504.0, tl.where(x > 0, 65504.0, -65504.0), x)


@triton.jit
def float16_bits(x, BOUNDED: tl.constexpr):
    """The 16 bits of `x` in float16, `clamp_to_float16` unless BOUNDED says that it is."""
    if not BOUNDED:
        x = clamp_to_float16(x)
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def pack_float16x4(a, b, c, d):
    """Four float16 numbers in 64 bits, `a` lowest; `c` and `d` are at most 1."""
    low = float16_bits(a, False) | (float16_bits(b, False) << 16)
    high = float16_bits(c, True) | (float16_bits(d, True) << 16)
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def unpack_float16(bits):
    """The number in the low 16 of 32 bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack_float16x4(bits):
    """What `pack_float16x4` packed."""
    low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
    return unpack_float16(low), unpack_float16(low >> 16), unpack_float16(high), unpack_float16(high >> 16)


@triton.jit
def store_local_grads(ptr, rows, cols, mask, a, b, c, d, H: tl.constexpr):
    """Stores to `[..., H, 4]`, in float16 (what it cannot hold as its largest: gradients stay finite) or float32."""
    at = rows[None, :] * H + cols[:, None]
    if ptr.dtype.element_ty == tl.float16:
        tl.store(ptr.to(tl.pointer_type(tl.int64), bitcast=True) + at, pack_float16x4(a, b, c, d), mask=mask)
    else:
        tl.store(ptr + at * 4, a, mask=mask)
        tl.store(ptr + at * 4 + 1, b, mask=mask)
        tl.store(ptr + at * 4 + 2, c, mask=mask)
        tl.store(ptr + at * 4 + 3, d, mask=mask)


@triton.jit
def load_local_grads(ptr, rows, cols, mask, H: tl.constexpr):
    """What `store_local_grads` stored."""
    at = rows[None, :] * H + cols[:, None]
    if ptr.dtype.element_ty == tl.float16:
        return unpack_float16x4(tl.load(ptr.to(tl.pointer_type(tl.int64), bitcast=True) + at, mask=mask, other=0))
    else:
        a = tl.load(ptr + at * 4, mask=mask, other=0.0)
        b = tl.load(ptr + at * 4 + 1, mask=mask, other=0.0)
        c = tl.load(ptr + at * 4 + 2, mask=mask, other=0.0)
        d = tl.load(ptr + at * 4 + 3, mask=mask, other=0.0)
        return a, b, c, d


@triton.jit
def split_words(local_grads, carry_gate):
    """What `pack_float16x4` packed, and a float32 number, as three words.

    The high and low halves of the words: `a` and `d`, `b` and the low half of `carry_gate`, `c` and its high half. A
    word is a float32 NaN only if `a`, `b` or `c` is one.
    """
    low, high, bits = local_grads.to(tl.int32), (local_grads >> 32).to(tl.int32), carry_gate.to(tl.int32, bitcast=True)
    return (
        ((high >> 16) & 0xFFFF) | (low << 16),
        (bits & 0xFFFF) | (low & -0x10000),
        ((bits >> 16) & 0xFFFF) | (high << 16),
    )


@triton.jit
def join_words(first, second, third):
    """The five numbers of which `split_words` made three words."""
    carry_gate = ((second & 0xFFFF) | (third << 16)).to(tl.float32, bitcast=True)
    return (
        unpack_float16(first >> 16),
        unpack_float16(second >> 16),
        unpack_float16(third >> 16),
        unpack_float16(first),
        carry_gate,
    )


@triton.jit
def load_reset(reset_ptr, rows, mask):
    """Which sequences start an episode at these rows; NaN counts as nonzero."""
    return tl.load(reset_ptr + rows, mask=mask, other=0) != 0


@triton.jit
def load_weight(w_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of a row-major matrix of `COLS` columns, zero outside of its first ROWS rows and columns."""
    mask = (rows < ROWS)[:, None] & (cols < ROWS)[None, :]
    return tl.load(w_ptr + rows[:, None] * COLS + cols[None, :], mask=mask, other=0.0)


@triton.jit
def stream_weight(w_ptr, rows, cols, COLS: tl.constexpr, EVEN: tl.constexpr):
    """A tile of a row-major matrix of `COLS` columns, zero past them unless EVEN says that none are."""
    offs = rows[:, None] * COLS + cols[None, :]
    if EVEN:
        return tl.load(w_ptr + offs)
    return tl.load(w_ptr + offs, mask=(cols < COLS)[None, :], other=0.0)


@triton.jit
def select_reset(h, state_ptr, reset, seq, rows, cols, mask, H: tl.constexpr, RESET_STATE: tl.constexpr):
    """`h` where no episode starts, the reset state where one does: a select, so that a NaN in `h` does not leak.

    The state is read only where `reset` holds; `rows` are those of this step.
    """
    if RESET_STATE == RESET_ZEROS:
        state = tl.zeros_like(h)
    elif RESET_STATE == RESET_FIXED:
        state = load_tile(state_ptr, seq, cols, H, mask & reset[None, :])
    else:
        state = load_tile(state_ptr, rows, cols, H, mask & reset[None, :])
    return tl.where(reset[None, :], state, h)


@triton.jit
def arrive(counter_ptr):
    """Counts this program as arrived at a barrier: all see what it wrote before. What no one waits for follows.

    Only for programs of one cooperative launch. The counter starts at zero and only grows, so no one resets it early.
    """
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait(counter_ptr, target):
    """Waits until `target` arrivals were counted, each program arriving once a barrier."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()
