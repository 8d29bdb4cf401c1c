"""Normalization of rows, RMSNorm and LayerNorm: forward, backward, and the sums for the gradients of weight and bias.

A program keeps BLOCK_R whole rows in registers, in their dtype in memory. It reads each row once, issues all loads
before it uses the first value, and converts elements to float32 at each use. If BLOCK_N is smaller than a row, because
the row is too wide for registers, the program goes over the row twice in chunks, the second time mostly from L2. Only
the partial chunk at the end of a row needs a column mask.

With x^ = (x - mean) * rstd (for RMSNorm: x * rstd), y = x^ * weight + bias and a = dy * weight:

    dx = (a - mean(a) - x^ * mean(a * x^)) * rstd    (for RMSNorm without the second term)
    dweight = sum over rows of dy * x^               dbias = sum over rows of dy

The sums over rows are computed in two stages, in a fixed order: each program sums its rows, then one kernel sums the
partial sums of the programs.

S models have R rows of N columns each; a tile is BLOCK_R rows. The functions share these arguments:

    arrays         `Forward` or `Backward`; an array that is absent is None
    CENTERED       LayerNorm if true, else RMSNorm, which has no mean
    WHOLE          no column of the chunk is past the end of a row, so columns need no mask
    mean_a         mean(a) of each row; unused by RMSNorm
    mean_ax        mean(a * x^) of each row
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_bridge.kernels import names
from torch_bridge.kernels.common import rounded_product
from torch_bridge.kernels.sums import add_up, block_of_columns, launch_dependents, wait_for_dependencies


class Forward(NamedTuple):
    """The arrays of a forward kernel; its functions get those of a model's weight and bias."""

    x_ptr: Any  # [S, R, N]
    residual_ptr: Any  # [S, R, N] added to x before normalization, or None
    weight_ptr: Any  # [S, N] or None
    bias_ptr: Any  # [S, N] or None
    y_ptr: Any  # [S, R, N] out
    total_ptr: Any  # [S, R, N] out: x + residual, or None without a residual
    mean_ptr: Any  # [S, R] out, float32, or None
    rstd_ptr: Any  # [S, R] out, float32, or None


class Backward(NamedTuple):
    """The arrays of a backward kernel; its functions get those of a model's weight."""

    dy_ptr: Any  # [S, R, N]
    x_ptr: Any  # [S, R, N]
    dtotal_ptr: Any  # [S, R, N] added to dx, or None
    weight_ptr: Any  # [S, N] or None
    mean_ptr: Any  # [S, R] float32, or None for RMSNorm
    rstd_ptr: Any  # [S, R] float32
    dx_ptr: Any  # [S, R, N] out
    partial_weight_ptr: Any  # [S, programs, N] out, float32, or None
    partial_bias_ptr: Any  # [S, programs, N] out, float32, or None


class _Chunk(NamedTuple):
    """The place of a chunk of a tile in the arrays."""

    start: Any  # [BLOCK_R, 1] offset of each row's first element
    mask_r: Any  # [BLOCK_R] the rows that exist
    first: Any  # the chunk has the columns `first + cols`
    cols: Any  # [BLOCK_N]


@triton.jit
def _hide_from_compiler(x, OPAQUE: tl.constexpr):
    """Returns `x` unchanged: with OPAQUE, through an instruction that hides 16-bit elements from the compiler.

    Otherwise the compiler would keep the float32 conversions of `x` in registers instead of `x`.
    """
    if OPAQUE and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def _row_load(ptr, col, N: tl.constexpr, WHOLE: tl.constexpr = False):
    """Loads `[BLOCK_N]` elements of a vector, with 0 past its end; returns 0 if `ptr` is None."""
    if ptr is None:
        return 0.0
    elif WHOLE:
        return tl.load(ptr + col)
    else:
        return tl.load(ptr + col, mask=col < N, other=0.0)


@triton.jit
def _product(a, b, ONE_EACH: tl.constexpr):
    """Returns `a * b`, to be added up over a row, of which a thread has one element if ONE_EACH."""
    if ONE_EACH:
        return rounded_product(a, b)
    else:
        return a * b


@triton.jit
def _scale(x, weight_ptr, weight, ONE_EACH: tl.constexpr = False):
    """Returns `x * weight` in float32, or `x` if there is no weight; ONE_EACH as in `_product`."""
    if weight_ptr is None:
        return x
    else:
        return _product(x, weight.to(tl.float32)[None, :], ONE_EACH)


@triton.jit
def _shift(x, bias_ptr, bias):
    """Returns `x + bias` in float32, or `x` if there is no bias."""
    if bias_ptr is None:
        return x
    else:
        return x + bias.to(tl.float32)[None, :]


@triton.jit
def _load_sum(arrays, offs, mask):
    """Loads the rows to normalize: x or, with a residual, x + residual, rounded and stored to `total`."""
    x = tl.load(arrays.x_ptr + offs, mask=mask, other=0.0)
    if arrays.residual_ptr is not None:
        residual = tl.load(arrays.residual_ptr + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(arrays.total_ptr.dtype.element_ty)
        tl.store(arrays.total_ptr + offs, x, mask=mask)
    return x


@triton.jit
def _mean(total, N: tl.constexpr):
    """Returns `total / N` as a correctly rounded division.

    The compiler would fuse a product by 1 / N with the operations that follow it, in some places and not in others.
    """
    return tl.div_rn(total, tl.full(total.shape, N, tl.float32))


@triton.jit
def _inverse_root(x):
    """Returns `1 / sqrt(x)`, both operations correctly rounded."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))


@triton.jit
def _columns(chunk, N: tl.constexpr, WHOLE: tl.constexpr):
    """Returns the columns of a chunk, and the mask of its elements that exist."""
    col = chunk.first + chunk.cols
    mask = chunk.mask_r[:, None]
    if not WHOLE:
        mask = mask & (col < N)[None, :]
    return col, mask


@triton.jit
def _moments_of_chunk(
    arrays, chunk, mean, squares, N: tl.constexpr, BLOCK_N: tl.constexpr, CENTERED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Returns the mean and the sum of squared differences from it of all columns up to the last of this chunk.

    `mean` and `squares` are those of the columns before the chunk. With a residual, x + residual is also stored.

    For RMSNorm the differences are from 0.
    """
    first = chunk.first
    col, mask = _columns(chunk, N, WHOLE)
    x = _load_sum(arrays, chunk.start + col[None, :], mask).to(tl.float32)
    if CENTERED:  # Chan, Golub, LeVeque 1983: combines the moments of two parts
        count = tl.minimum(N - first, BLOCK_N).to(tl.float32)
        part = tl.sum(x, 1) / count
        centered = _centered(x, part, col, N, WHOLE, CENTERED)
        away = part - mean
        mean += away * (count / (first + count))
        # in this order: the square of a large mean overflows, and inf * 0 in the first chunk would be NaN
        squares += tl.sum(centered * centered, 1) + away * (away * (count * first / (first + count)))
    else:
        squares += tl.sum(x * x, 1)
    return mean, squares


@triton.jit
def _normalize_chunk(
    arrays, read_ptr, chunk, mean, rstd, N: tl.constexpr, CENTERED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Stores the results y of a chunk, reading the rows, with their residual added, from `read_ptr`."""
    col, mask = _columns(chunk, N, WHOLE)
    x = tl.load(read_ptr + chunk.start + col[None, :], mask=mask, other=0.0)
    y = _centered(x, mean, col, N, WHOLE, CENTERED) * rstd[:, None]
    y = _scale(y, arrays.weight_ptr, _row_load(arrays.weight_ptr, col, N, WHOLE))
    y = _shift(y, arrays.bias_ptr, _row_load(arrays.bias_ptr, col, N, WHOLE))
    tl.store(arrays.y_ptr + chunk.start + col[None, :], y.to(arrays.y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _terms_of_chunk(arrays, chunk, mean, N: tl.constexpr, CENTERED: tl.constexpr, WHOLE: tl.constexpr):
    """Returns dy * weight and, for LayerNorm, x - mean (for RMSNorm: x) of a chunk."""
    col, mask = _columns(chunk, N, WHOLE)
    x = tl.load(arrays.x_ptr + chunk.start + col[None, :], mask=mask, other=0.0)
    dy = tl.load(arrays.dy_ptr + chunk.start + col[None, :], mask=mask, other=0.0)
    a = _scale(dy.to(tl.float32), arrays.weight_ptr, _row_load(arrays.weight_ptr, col, N, WHOLE))
    return a, _centered(x, mean, col, N, WHOLE, CENTERED)


@triton.jit
def _centered(x, mean, col, N: tl.constexpr, WHOLE: tl.constexpr, CENTERED: tl.constexpr):
    """Returns `x - mean` in float32 (for RMSNorm: x in float32).

    For LayerNorm the result is 0 past the end of a row, unless the columns are WHOLE.
    """
    x = x.to(tl.float32)
    if CENTERED:
        x -= mean[:, None]
        if not WHOLE:
            x = tl.where((col < N)[None, :], x, 0.0)
    return x


@triton.jit(do_not_specialize=["R", "tiles", "epsilon"], repr=names.of_norm("fwd"))
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr,
    R, tiles, epsilon,
    N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, CENTERED: tl.constexpr, OPAQUE: tl.constexpr,
    ONE_EACH: tl.constexpr,
):  # fmt: skip
    """Normalizes BLOCK_R rows of a model, from row tile * BLOCK_R on; the grid has S * tiles programs.

    The arrays are those of `Forward`.
    """
    model = (tl.program_id(0) // tiles).to(tl.int64)
    nth = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = nth < R
    row = model * R + nth
    start = row[:, None] * N
    weight_ptr = weight_ptr if weight_ptr is None else weight_ptr + model * N
    bias_ptr = bias_ptr if bias_ptr is None else bias_ptr + model * N
    arrays = Forward(x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr)
    cols = tl.arange(0, BLOCK_N)
    LAST: tl.constexpr = N // BLOCK_N * BLOCK_N  # where the partial chunk begins
    mean = tl.zeros([BLOCK_R], tl.float32)
    if BLOCK_N >= N:
        mask = mask_r[:, None] & (cols < N)[None, :]
        x = _load_sum(arrays, start + cols[None, :], mask)
        if CENTERED:
            mean = _mean(tl.sum(x.to(tl.float32), 1), N)
        centered = _centered(_hide_from_compiler(x, OPAQUE), mean, cols, N, N % BLOCK_N == 0, CENTERED)
        rstd = _inverse_root(_mean(tl.sum(_product(centered, centered, ONE_EACH), 1), N) + epsilon)
        y = _centered(_hide_from_compiler(x, OPAQUE), mean, cols, N, N % BLOCK_N == 0, CENTERED) * rstd[:, None]
        # loaded only here: during the reduction the registers are needed for x alone
        y = _scale(y, weight_ptr, _row_load(weight_ptr, cols, N))
        y = _shift(y, bias_ptr, _row_load(bias_ptr, cols, N))
        tl.store(y_ptr + start + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK_R], tl.float32)
        for first in range(0, LAST, BLOCK_N):
            chunk = _Chunk(start, mask_r, first, cols)
            mean, squares = _moments_of_chunk(arrays, chunk, mean, squares, N, BLOCK_N, CENTERED, True)
        if LAST < N:
            chunk = _Chunk(start, mask_r, LAST, cols)
            mean, squares = _moments_of_chunk(arrays, chunk, mean, squares, N, BLOCK_N, CENTERED, False)
        rstd = _inverse_root(_mean(squares, N) + epsilon)
        read_ptr = x_ptr
        if residual_ptr is not None:
            read_ptr = total_ptr
            tl.debug_barrier()  # other threads may have written what this one reads
        for first in range(0, LAST, BLOCK_N):
            chunk = _Chunk(start, mask_r, first, cols)
            _normalize_chunk(arrays, read_ptr, chunk, mean, rstd, N, CENTERED, True)
        if LAST < N:
            chunk = _Chunk(start, mask_r, LAST, cols)
            _normalize_chunk(arrays, read_ptr, chunk, mean, rstd, N, CENTERED, False)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=mask_r)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=mask_r)


@triton.jit
def _load_statistics(mean_ptr, rstd_ptr, row, mask_r, CENTERED: tl.constexpr):
    """Returns mean and rstd of rows. RMSNorm has no mean, which no caller then reads, and rstd takes its place."""
    rstd = tl.load(rstd_ptr + row, mask=mask_r, other=0.0)
    if CENTERED:
        return tl.load(mean_ptr + row, mask=mask_r, other=0.0), rstd
    else:
        return rstd, rstd


@triton.jit
def _store_dx(arrays, offs, mask, a, normalized, mean_a, mean_ax, rstd, N: tl.constexpr, CENTERED: tl.constexpr):
    """Stores dx of a tile or chunk, with the gradient of `total` added; `normalized` is x^."""
    dx = a - normalized * mean_ax[:, None]
    if CENTERED:
        dx -= mean_a[:, None]
        if N == 1:  # dx is zero, and what is left is the rounding error of `a`
            dx *= 0.0
    dx *= rstd[:, None]
    if arrays.dtotal_ptr is not None:
        dx += tl.load(arrays.dtotal_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(arrays.dx_ptr + offs, dx.to(arrays.dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_chunk(
    arrays, chunk, mean, sum_a, sum_ax, N: tl.constexpr, CENTERED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Adds a further chunk to each row's sums of a and of a * (x - mean), without the factor rstd."""
    a, centered = _terms_of_chunk(arrays, chunk, mean, N, CENTERED, WHOLE)
    return sum_a + tl.sum(a, 1), sum_ax + tl.sum(a * centered, 1)


@triton.jit
def _differentiate_chunk(
    arrays, chunk, mean, rstd, mean_a, mean_ax, N: tl.constexpr, CENTERED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Stores dx of a chunk, given the means over whole rows."""
    a, centered = _terms_of_chunk(arrays, chunk, mean, N, CENTERED, WHOLE)
    col, mask = _columns(chunk, N, WHOLE)
    offs = chunk.start + col[None, :]
    _store_dx(arrays, offs, mask, a, centered * rstd[:, None], mean_a, mean_ax, rstd, N, CENTERED)


@triton.jit
def _load_tile(ptrs, mask, YIELD: tl.constexpr):
    """Loads rows of x or dy; with YIELD, L2 evicts them first to make room for the results."""
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first" if YIELD else "")


@triton.jit(do_not_specialize=["R", "tiles", "programs"], repr=names.of_norm("bwd"))
def norm_bwd_kernel(
    dy_ptr, x_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_weight_ptr, partial_bias_ptr,
    R, tiles, programs,
    N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, CENTERED: tl.constexpr, OPAQUE: tl.constexpr,
    YIELD: tl.constexpr, EARLY: tl.constexpr, ONE_EACH: tl.constexpr,
):  # fmt: skip
    """Differentiates every `programs`-th tile of BLOCK_R rows of a model; the grid has S * programs programs.

    The arrays are those of `Backward`. If whole rows are in registers, the loads of the next tile are in flight
    meanwhile.
    """
    launch_dependents(EARLY)
    model = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    weight_ptr = weight_ptr if weight_ptr is None else weight_ptr + model * N
    arrays = Backward(
        dy_ptr, x_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_weight_ptr, partial_bias_ptr
    )
    cols = tl.arange(0, BLOCK_N)
    LAST: tl.constexpr = N // BLOCK_N * BLOCK_N  # where the partial chunk begins
    nth = program.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    if BLOCK_N >= N:
        mask_n = (cols < N)[None, :]
        weight = _row_load(weight_ptr, cols, N)
        dweight = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        dbias = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        mask_r = nth < R
        row = model * R + nth
        x = _load_tile(x_ptr + row[:, None] * N + cols[None, :], mask_r[:, None] & mask_n, YIELD)
        dy = _load_tile(dy_ptr + row[:, None] * N + cols[None, :], mask_r[:, None] & mask_n, YIELD)
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, mask_r, CENTERED)
        for _ in range(program, tiles, programs):
            next_nth = nth + programs.to(tl.int64) * BLOCK_R
            next_r = next_nth < R
            next_row = model * R + next_nth
            next_offs = next_row[:, None] * N + cols[None, :]
            next_x = _load_tile(x_ptr + next_offs, next_r[:, None] & mask_n, YIELD)
            next_dy = _load_tile(dy_ptr + next_offs, next_r[:, None] & mask_n, YIELD)
            next_mean, next_rstd = _load_statistics(mean_ptr, rstd_ptr, next_row, next_r, CENTERED)

            normalized = _centered(x, mean, cols, N, N % BLOCK_N == 0, CENTERED) * rstd[:, None]
            d = dy.to(tl.float32)
            if partial_weight_ptr is not None:
                dweight += d * normalized
            if partial_bias_ptr is not None:
                dbias += d
            a = _scale(d, weight_ptr, weight, ONE_EACH)
            mean_a = tl.sum(a, 1) / N if CENTERED else rstd
            mean_ax = tl.sum(_product(a, normalized, ONE_EACH), 1) / N
            # computed again rather than kept: registers hold x and dy in their dtype in memory
            normalized = (
                _centered(_hide_from_compiler(x, OPAQUE), mean, cols, N, N % BLOCK_N == 0, CENTERED) * rstd[:, None]
            )
            a = _scale(_hide_from_compiler(dy, OPAQUE).to(tl.float32), weight_ptr, weight)
            offs = row[:, None] * N + cols[None, :]
            _store_dx(arrays, offs, mask_r[:, None] & mask_n, a, normalized, mean_a, mean_ax, rstd, N, CENTERED)
            x, dy, mean, rstd, nth, row, mask_r = next_x, next_dy, next_mean, next_rstd, next_nth, next_row, next_r
        at = (model * programs + program) * N + cols
        if partial_weight_ptr is not None:
            tl.store(partial_weight_ptr + at, tl.sum(dweight, 0), mask=cols < N)
        if partial_bias_ptr is not None:
            tl.store(partial_bias_ptr + at, tl.sum(dbias, 0), mask=cols < N)
    else:
        for _ in range(program, tiles, programs):
            mask_r = nth < R
            row = model * R + nth
            start = row[:, None] * N
            mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, mask_r, CENTERED)
            # sums over columns until all chunks are added, then means
            mean_a = tl.zeros([BLOCK_R], tl.float32)
            mean_ax = tl.zeros([BLOCK_R], tl.float32)
            for first in range(0, LAST, BLOCK_N):
                chunk = _Chunk(start, mask_r, first, cols)
                mean_a, mean_ax = _add_chunk(arrays, chunk, mean, mean_a, mean_ax, N, CENTERED, True)
            if LAST < N:
                chunk = _Chunk(start, mask_r, LAST, cols)
                mean_a, mean_ax = _add_chunk(arrays, chunk, mean, mean_a, mean_ax, N, CENTERED, False)
            mean_a /= N
            mean_ax = mean_ax * rstd / N
            for first in range(0, LAST, BLOCK_N):
                chunk = _Chunk(start, mask_r, first, cols)
                _differentiate_chunk(arrays, chunk, mean, rstd, mean_a, mean_ax, N, CENTERED, True)
            if LAST < N:
                chunk = _Chunk(start, mask_r, LAST, cols)
                _differentiate_chunk(arrays, chunk, mean, rstd, mean_a, mean_ax, N, CENTERED, False)
            nth += programs.to(tl.int64) * BLOCK_R


@triton.jit(do_not_specialize=["R", "tiles", "programs"], repr=names.of_norm("bwd_columns"))
def norm_columns_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, partial_weight_ptr, partial_bias_ptr,
    R, tiles, programs,
    N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CENTERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes the partial sums for weight and bias of rows that are too wide for `norm_bwd_kernel` to keep these sums.

    A program has BLOCK_C columns and every `programs`-th tile of rows. The arrays are those of `Backward`.
    """
    launch_dependents(EARLY)
    blocks = tl.cdiv(N, BLOCK_C)
    col = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    program = (tl.program_id(0) // blocks) % programs
    model = (tl.program_id(0) // blocks // programs).to(tl.int64)
    nth = program.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dweight = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    dbias = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for _ in range(program, tiles, programs):
        row = model * R + nth
        offs = row[:, None] * N + col[None, :]
        mask = (nth < R)[:, None] & (col < N)[None, :]
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if partial_weight_ptr is not None:
            x = tl.load(x_ptr + offs, mask=mask, other=0.0)
            mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, nth < R, CENTERED)
            dweight += dy * (_centered(x, mean, col, N, N % BLOCK_C == 0, CENTERED) * rstd[:, None])
        if partial_bias_ptr is not None:
            dbias += dy
        nth += programs.to(tl.int64) * BLOCK_R
    at = (model * programs + program) * N + col
    if partial_weight_ptr is not None:
        tl.store(partial_weight_ptr + at, tl.sum(dweight, 0), mask=col < N)
    if partial_bias_ptr is not None:
        tl.store(partial_bias_ptr + at, tl.sum(dbias, 0), mask=col < N)


@triton.jit(do_not_specialize=["programs"])
def norm_sum_kernel(
    partial_weight_ptr, partial_bias_ptr,
    dweight_ptr,  # [S, N], or None
    dbias_ptr,    # [S, N], or None
    programs,
    N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums the partial sums of the programs; one program per block of columns, gradient and model."""
    wait_for_dependencies(EARLY)
    col, nth = block_of_columns(N, BLOCK_C)
    if partial_bias_ptr is None:
        add_up(partial_weight_ptr, dweight_ptr, nth, col, programs, N, BLOCK_P, BLOCK_C)
    elif partial_weight_ptr is None:
        add_up(partial_bias_ptr, dbias_ptr, nth, col, programs, N, BLOCK_P, BLOCK_C)
    elif nth % 2 == 0:
        add_up(partial_weight_ptr, dweight_ptr, nth // 2, col, programs, N, BLOCK_P, BLOCK_C)
    else:
        add_up(partial_bias_ptr, dbias_ptr, nth // 2, col, programs, N, BLOCK_P, BLOCK_C)
