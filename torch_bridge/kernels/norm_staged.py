"""The backward pass of `torch_bridge.kernels.norm` for wide rows, in Gluon: rows in shared memory, sums in registers.

A program copies rows of x and dy from global to shared memory in chunks, as many chunks ahead as fit. As soon as a
chunk has been read for the last time, the copy of a later chunk into its place starts, so that global memory is never
idle, even if shared memory holds only one row. The float32 sums for weight and bias use the registers that the row
leaves free.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torch_bridge.kernels import names
from torch_bridge.kernels.gluon_common import async_load


@gluon.jit
def _append(items, item):
    return items + (item,)


@gluon.jit
def _load(ptr, chunk: gl.constexpr, cols, N: gl.constexpr, BLOCK: gl.constexpr, row=0):
    """Loads a chunk of a row as a tuple of one tensor; returns an empty tuple if `ptr` is None."""
    col = chunk * BLOCK + cols
    if ptr is None:
        return ()
    elif N % BLOCK == 0:
        return (gl.load(ptr + row * N + col),)
    else:
        return (gl.load(ptr + row * N + col, mask=col < N, other=0.0),)


@gluon.jit
def _copy_chunk(xs, dys, slot, x_ptr, dy_ptr, row, end, chunk: gl.constexpr, cols, N: gl.constexpr,
                BLOCK: gl.constexpr):  # fmt: skip
    col = chunk * BLOCK + cols
    mask = (col < N) & (row < end)
    async_load(xs.index(slot), x_ptr + row * N + col, mask=mask)
    async_load(dys.index(slot), dy_ptr + row * N + col, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _statistics(mean_ptr, rstd_ptr, row, CENTERED: gl.constexpr):
    rstd = gl.load(rstd_ptr + row)
    return gl.load(mean_ptr + row) if CENTERED else rstd, rstd


@gluon.jit
def _terms(xs, dys, slot, weights, mean, rstd, chunk: gl.constexpr, cols, N: gl.constexpr, BLOCK: gl.constexpr,
           CENTERED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Returns dy, dy * weight, and the normalized x of a chunk."""
    x = xs.index(slot).load(LAYOUT).to(gl.float32)
    dy = dys.index(slot).load(LAYOUT).to(gl.float32)
    if CENTERED:
        x = x - mean
    if N % BLOCK != 0:  # values past the end of a row may be NaN
        within = chunk * BLOCK + cols < N
        x = gl.where(within, x, 0.0)
        dy = gl.where(within, dy, 0.0)
    a = dy
    if len(weights) > 0:
        a = dy * weights[0].to(gl.float32)
    return dy, a, x * rstd


@gluon.jit
def _add(sums, chunk: gl.constexpr, term):
    """Returns `sums`, a tuple of one sum per chunk or an empty one, with `term` added to the sum of `chunk`."""
    added = ()
    for c in gl.static_range(len(sums)):
        added = _append(added, sums[c] + term if c == chunk else sums[c])
    return added


@gluon.jit
def _add_chunk(
    xs, dys, slot, weights, mean, rstd, sum_a, sum_ax, dweight, dbias, chunk: gl.constexpr, cols, N: gl.constexpr,
    BLOCK: gl.constexpr, CENTERED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds a further chunk to the sums of a row, and to those for weight and bias."""
    dy, a, normalized = _terms(xs, dys, slot, weights, mean, rstd, chunk, cols, N, BLOCK, CENTERED, LAYOUT)
    sum_ax += a * normalized
    sum_a += a
    return sum_a, sum_ax, _add(dweight, chunk, dy * normalized), _add(dbias, chunk, dy)


@gluon.jit
def _mean(total, N: gl.constexpr):
    return gl.sum(total, 0) / N


@gluon.jit
def _store_dx(dx_ptr, dtotals, row, a, normalized, rstd, mean_a, mean_ax, chunk: gl.constexpr, cols, N: gl.constexpr,
              BLOCK: gl.constexpr, CENTERED: gl.constexpr):  # fmt: skip
    col = chunk * BLOCK + cols
    dx = a - normalized * mean_ax
    if CENTERED:
        dx -= mean_a
    dx *= rstd
    if len(dtotals) > 0:
        dx += dtotals[0].to(gl.float32)
    gl.store(dx_ptr + row * N + col, dx.to(dx_ptr.dtype.element_ty), mask=col < N)


@gluon.jit(do_not_specialize=["R", "tiles", "programs"], repr=names.of_norm("bwd_staged"))
def norm_bwd_kernel(
    dy_ptr, x_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_weight_ptr, partial_bias_ptr,
    R, tiles, programs, N: gl.constexpr, BLOCK_N: gl.constexpr, CENTERED: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Computes dx and the partial sums; its arrays are those of `torch_bridge.kernels.norm.norm_bwd_kernel`.

    BLOCK_N is the width of a chunk. Shared memory holds SLOTS chunks of x and of dy: those of the
    current row and those that follow. An iteration computes dx of one chunk, starts the copy of a later chunk into its
    place, and adds the same chunk of the next row to the sums.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_N // (32 * gl.num_warps())], [32], [gl.num_warps()], [0])
    CHUNKS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    model = (gl.program_id(0) // programs).to(gl.int64)
    program = gl.program_id(0) % programs
    if weight_ptr is not None:
        weight_ptr += model * N
    cols = gl.arange(0, BLOCK_N, LAYOUT)
    end = (model + 1) * R
    row = model * R + program
    first = 0
    dweight = ()
    dbias = ()
    for _ in gl.static_range(CHUNKS):
        if partial_weight_ptr is not None:
            dweight = _append(dweight, gl.zeros([BLOCK_N], gl.float32, LAYOUT))
        if partial_bias_ptr is not None:
            dbias = _append(dbias, gl.zeros([BLOCK_N], gl.float32, LAYOUT))
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, BLOCK_N], FLAT)
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, BLOCK_N], FLAT)
    for s in gl.static_range(SLOTS):
        _copy_chunk(xs, dys, s, x_ptr, dy_ptr, row + s // CHUNKS * programs, end, s % CHUNKS, cols, N, BLOCK_N)

    mean, rstd = _statistics(mean_ptr, rstd_ptr, row, CENTERED)
    weights = _load(weight_ptr, 0, cols, N, BLOCK_N)
    sum_a = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
    sum_ax = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
    for c in gl.static_range(CHUNKS):
        next_weights = _load(weight_ptr, (c + 1) % CHUNKS, cols, N, BLOCK_N)
        async_copy.wait_group(SLOTS - 1 - c)
        sum_a, sum_ax, dweight, dbias = _add_chunk(
            xs, dys, c, weights, mean, rstd, sum_a, sum_ax, dweight, dbias, c, cols, N, BLOCK_N, CENTERED, LAYOUT
        )  # fmt: skip
        weights = next_weights
    mean_ax = _mean(sum_ax, N)
    mean_a = _mean(sum_a, N) if CENTERED else mean_ax

    for _ in range(program, tiles - programs, programs):
        next_mean, next_rstd = _statistics(mean_ptr, rstd_ptr, row + programs, CENTERED)
        sum_a = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
        sum_ax = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
        for c in gl.static_range(CHUNKS):
            # in flight while this chunk is computed
            next_weights = _load(weight_ptr, (c + 1) % CHUNKS, cols, N, BLOCK_N)
            dtotals = _load(dtotal_ptr, c, cols, N, BLOCK_N, row)
            slot = (first + c) % SLOTS
            _, a, normalized = _terms(xs, dys, slot, weights, mean, rstd, c, cols, N, BLOCK_N, CENTERED, LAYOUT)
            ahead = row + (c + SLOTS) // CHUNKS * programs
            _copy_chunk(xs, dys, slot, x_ptr, dy_ptr, ahead, end, (c + SLOTS) % CHUNKS, cols, N, BLOCK_N)
            _store_dx(
                dx_ptr, dtotals, row, a, normalized, rstd, mean_a, mean_ax, c, cols, N, BLOCK_N, CENTERED
            )  # fmt: skip
            async_copy.wait_group(SLOTS - CHUNKS)
            slot = (first + CHUNKS + c) % SLOTS
            sum_a, sum_ax, dweight, dbias = _add_chunk(
                xs, dys, slot, weights, next_mean, next_rstd, sum_a, sum_ax, dweight, dbias, c, cols, N, BLOCK_N,
                CENTERED, LAYOUT,
            )  # fmt: skip
            weights = next_weights
        mean_ax = _mean(sum_ax, N)
        mean_a = _mean(sum_a, N) if CENTERED else mean_ax
        mean = next_mean
        rstd = next_rstd
        first = (first + CHUNKS) % SLOTS
        row += programs

    for c in gl.static_range(CHUNKS):
        next_weights = _load(weight_ptr, (c + 1) % CHUNKS, cols, N, BLOCK_N)
        dtotals = _load(dtotal_ptr, c, cols, N, BLOCK_N, row)
        slot = (first + c) % SLOTS
        _, a, normalized = _terms(xs, dys, slot, weights, mean, rstd, c, cols, N, BLOCK_N, CENTERED, LAYOUT)
        _store_dx(dx_ptr, dtotals, row, a, normalized, rstd, mean_a, mean_ax, c, cols, N, BLOCK_N, CENTERED)
        weights = next_weights
    async_copy.wait_group(0)
    at = (model * programs + program) * N
    for c in gl.static_range(CHUNKS):
        col = c * BLOCK_N + cols
        if partial_weight_ptr is not None:
            gl.store(partial_weight_ptr + at + col, dweight[c], mask=col < N)
        if partial_bias_ptr is not None:
            gl.store(partial_bias_ptr + at + col, dbias[c], mask=col < N)
