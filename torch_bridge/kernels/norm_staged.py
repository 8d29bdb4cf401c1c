"""The backward pass of `torch_bridge.kernels.norm` for wide rows, in Gluon: rows in shared memory, sums in registers.

A program copies rows of x and dy from global to shared memory in chunks, as many chunks ahead as fit. As soon as a
chunk has been read for the last time, the copy of a later chunk into its place starts, so that global memory is never
idle, even if shared memory holds only one row. The float32 sums for weight and bias use the registers that the row
leaves free.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torch_bridge.kernels import names
from torch_bridge.kernels.gluon_common import async_load
from torch_bridge.kernels.norm import Backward


class _Staged(NamedTuple):
    """The chunks in shared memory, `[SLOTS, BLOCK_N]`."""

    xs: Any
    dys: Any


class _Config(NamedTuple):
    """The compile-time values of the kernel."""

    N: Any
    BLOCK_N: Any  # width of a chunk
    CENTERED: Any
    LAYOUT: Any  # of a chunk


@gluon.jit
def _append(items, item):
    return items + (item,)


@gluon.jit
def _load(ptr, chunk: gl.constexpr, cols, config: gl.constexpr, row=0):
    """Loads a chunk of a row as a tuple of one tensor; returns an empty tuple if `ptr` is None."""
    N: gl.constexpr = config.N
    col = chunk * config.BLOCK_N + cols
    if ptr is None:
        return ()
    elif N % config.BLOCK_N == 0:
        return (gl.load(ptr + row * N + col),)
    else:
        return (gl.load(ptr + row * N + col, mask=col < N, other=0.0),)


@gluon.jit
def _copy_chunk(staged, slot, arrays, row, end, chunk: gl.constexpr, cols, config: gl.constexpr):
    """Starts the copies of a chunk of x and of dy to a slot."""
    N: gl.constexpr = config.N
    col = chunk * config.BLOCK_N + cols
    mask = (col < N) & (row < end)
    async_load(staged.xs.index(slot), arrays.x_ptr + row * N + col, mask=mask)
    async_load(staged.dys.index(slot), arrays.dy_ptr + row * N + col, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _statistics(mean_ptr, rstd_ptr, row, CENTERED: gl.constexpr):
    rstd = gl.load(rstd_ptr + row)
    return gl.load(mean_ptr + row) if CENTERED else rstd, rstd


@gluon.jit
def _terms(staged, slot, weights, mean, rstd, chunk: gl.constexpr, cols, config: gl.constexpr):
    """Returns dy, dy * weight, and the normalized x of a chunk."""
    x = staged.xs.index(slot).load(config.LAYOUT).to(gl.float32)
    dy = staged.dys.index(slot).load(config.LAYOUT).to(gl.float32)
    if config.CENTERED:
        x = x - mean
    if config.N % config.BLOCK_N != 0:  # values past the end of a row may be NaN
        within = chunk * config.BLOCK_N + cols < config.N
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
    staged, slot, weights, mean, rstd, sum_a, sum_ax, dweight, dbias, chunk: gl.constexpr, cols, config: gl.constexpr
):  # fmt: skip
    """Adds a further chunk to the sums of a row, and to those for weight and bias."""
    dy, a, normalized = _terms(staged, slot, weights, mean, rstd, chunk, cols, config)
    sum_ax += a * normalized
    sum_a += a
    return sum_a, sum_ax, _add(dweight, chunk, dy * normalized), _add(dbias, chunk, dy)


@gluon.jit
def _mean(total, N: gl.constexpr):
    return gl.sum(total, 0) / N


@gluon.jit
def _store_dx(
    dx_ptr, dtotals, row, a, normalized, rstd, mean_a, mean_ax, chunk: gl.constexpr, cols, config: gl.constexpr
):  # fmt: skip
    """Stores dx of a chunk, with that of `total` added if the tuple `dtotals` has it."""
    N: gl.constexpr = config.N
    col = chunk * config.BLOCK_N + cols
    dx = a - normalized * mean_ax
    if config.CENTERED:
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
    """Computes dx and the partial sums; its arrays are those of `norm.Backward`.

    Shared memory holds SLOTS chunks of x and of dy: those of the current row and those that follow. An iteration
    computes dx of one chunk, starts the copy of a later chunk into its place, and adds the same chunk of the next row
    to the sums.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_N // (32 * gl.num_warps())], [32], [gl.num_warps()], [0])
    CHUNKS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    model = (gl.program_id(0) // programs).to(gl.int64)
    program = gl.program_id(0) % programs
    if weight_ptr is not None:
        weight_ptr += model * N
    config: gl.constexpr = _Config(N, BLOCK_N, CENTERED, LAYOUT)
    arrays = Backward(
        dy_ptr, x_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_weight_ptr, partial_bias_ptr
    )
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
    staged = _Staged(xs, dys)
    for s in gl.static_range(SLOTS):
        _copy_chunk(staged, s, arrays, row + s // CHUNKS * programs, end, s % CHUNKS, cols, config)

    mean, rstd = _statistics(mean_ptr, rstd_ptr, row, CENTERED)
    weights = _load(weight_ptr, 0, cols, config)
    sum_a = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
    sum_ax = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
    for c in gl.static_range(CHUNKS):
        next_weights = _load(weight_ptr, (c + 1) % CHUNKS, cols, config)
        async_copy.wait_group(SLOTS - 1 - c)
        sum_a, sum_ax, dweight, dbias = _add_chunk(
            staged, c, weights, mean, rstd, sum_a, sum_ax, dweight, dbias, c, cols, config
        )
        weights = next_weights
    mean_ax = _mean(sum_ax, N)
    mean_a = _mean(sum_a, N) if CENTERED else mean_ax

    for _ in range(program, tiles - programs, programs):
        next_mean, next_rstd = _statistics(mean_ptr, rstd_ptr, row + programs, CENTERED)
        sum_a = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
        sum_ax = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
        for c in gl.static_range(CHUNKS):
            # in flight while this chunk is computed
            next_weights = _load(weight_ptr, (c + 1) % CHUNKS, cols, config)
            dtotals = _load(dtotal_ptr, c, cols, config, row)
            slot = (first + c) % SLOTS
            _, a, normalized = _terms(staged, slot, weights, mean, rstd, c, cols, config)
            ahead = row + (c + SLOTS) // CHUNKS * programs
            _copy_chunk(staged, slot, arrays, ahead, end, (c + SLOTS) % CHUNKS, cols, config)
            _store_dx(dx_ptr, dtotals, row, a, normalized, rstd, mean_a, mean_ax, c, cols, config)
            async_copy.wait_group(SLOTS - CHUNKS)
            slot = (first + CHUNKS + c) % SLOTS
            sum_a, sum_ax, dweight, dbias = _add_chunk(
                staged, slot, weights, next_mean, next_rstd, sum_a, sum_ax, dweight, dbias, c, cols, config
            )
            weights = next_weights
        mean_ax = _mean(sum_ax, N)
        mean_a = _mean(sum_a, N) if CENTERED else mean_ax
        mean = next_mean
        rstd = next_rstd
        first = (first + CHUNKS) % SLOTS
        row += programs

    for c in gl.static_range(CHUNKS):
        next_weights = _load(weight_ptr, (c + 1) % CHUNKS, cols, config)
        dtotals = _load(dtotal_ptr, c, cols, config, row)
        slot = (first + c) % SLOTS
        _, a, normalized = _terms(staged, slot, weights, mean, rstd, c, cols, config)
        _store_dx(dx_ptr, dtotals, row, a, normalized, rstd, mean_a, mean_ax, c, cols, config)
        weights = next_weights
    async_copy.wait_group(0)
    at = (model * programs + program) * N
    for c in gl.static_range(CHUNKS):
        col = c * BLOCK_N + cols
        if partial_weight_ptr is not None:
            gl.store(partial_weight_ptr + at + col, dweight[c], mask=col < N)
        if partial_bias_ptr is not None:
            gl.store(partial_bias_ptr + at + col, dbias[c], mask=col < N)
