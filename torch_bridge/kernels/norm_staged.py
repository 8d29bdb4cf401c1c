"""The backward pass of `torch_bridge.kernels.norm` for wide rows, in Gluon: rows in shared memory, sums in registers.

A program copies a row of x and of dy to shared memory, in chunks, and every thread reads what it copied itself. While
it computes dx of one row it has the next one copied to where it has just read, so that memory never rests. The sums for
weight and bias, float32, take the registers that the row left free.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# renamed in Triton 3.9
_async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _append(items, item):
    return items + (item,)  # noqa: RUF005  # the compiler has no starred expressions


@gluon.jit
def _load_vector(ptr, col, N: gl.constexpr, BLOCK: gl.constexpr):
    if N % BLOCK == 0:
        return gl.load(ptr + col).to(gl.float32)
    else:
        return gl.load(ptr + col, mask=col < N, other=0.0).to(gl.float32)


@gluon.jit
def _copy(buffer, ptr, col, in_range, N: gl.constexpr):
    _async_load(buffer, ptr + col, mask=(col < N) & in_range)


@gluon.jit
def _terms(x_buffer, dy_buffer, weight_ptr, mean, rstd, col, within, N: gl.constexpr, BLOCK: gl.constexpr,
           CENTERED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """dy, dy * weight, and x normalized, of a chunk."""
    x = x_buffer.load(LAYOUT).to(gl.float32)
    if CENTERED:
        x = x - mean
    # what lies there past the end of a row, or past the last one, may be no number
    x = gl.where((col < N) & within, x, 0.0)
    dy = gl.where((col < N) & within, dy_buffer.load(LAYOUT).to(gl.float32), 0.0)
    if weight_ptr is None:
        a = dy
    else:
        a = dy * _load_vector(weight_ptr, col, N, BLOCK)
    return dy, a, x * rstd


@gluon.jit
def _copy_row(xs, dys, x_ptr, dy_ptr, cols, in_range, N: gl.constexpr, BLOCK: gl.constexpr):
    for c in gl.static_range(len(xs)):
        _copy(xs[c], x_ptr, c * BLOCK + cols, in_range, N)
        _copy(dys[c], dy_ptr, c * BLOCK + cols, in_range, N)
    async_copy.commit_group()


@gluon.jit
def _differentiate_row(
    xs, dys, dweight, dbias, x_ptr, dy_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, row, next_row, end,
    cols, N: gl.constexpr, BLOCK: gl.constexpr, CENTERED: gl.constexpr, IN_PLACE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The dx of a row in `xs` and `dys`, and its part of the sums; with IN_PLACE the next row is copied there."""
    within = row < end
    rstd = gl.load(rstd_ptr + row, mask=within, other=0.0)
    mean = rstd
    if CENTERED:
        mean = gl.load(mean_ptr + row, mask=within, other=0.0)
    sum_a = gl.zeros([BLOCK], gl.float32, LAYOUT)
    sum_ax = gl.zeros([BLOCK], gl.float32, LAYOUT)
    new_dweight = ()
    new_dbias = ()
    for c in gl.static_range(len(xs)):
        col = c * BLOCK + cols
        dy, a, normalized = _terms(xs[c], dys[c], weight_ptr, mean, rstd, col, within, N, BLOCK, CENTERED, LAYOUT)
        sum_ax += a * normalized
        if CENTERED:
            sum_a += a
        if len(dweight) > 0:
            new_dweight = _append(new_dweight, dweight[c] + dy * normalized)
        if len(dbias) > 0:
            new_dbias = _append(new_dbias, dbias[c] + dy)
    mean_ax = gl.sum(sum_ax, 0) / N
    mean_a = gl.sum(sum_a, 0) / N if CENTERED else rstd
    for c in gl.static_range(len(xs)):
        col = c * BLOCK + cols
        _, a, normalized = _terms(xs[c], dys[c], weight_ptr, mean, rstd, col, within, N, BLOCK, CENTERED, LAYOUT)
        if IN_PLACE:
            _copy(xs[c], x_ptr + next_row * N, col, next_row < end, N)
            _copy(dys[c], dy_ptr + next_row * N, col, next_row < end, N)
        dx = a - normalized * mean_ax
        if CENTERED:
            dx -= mean_a
        dx *= rstd
        if dtotal_ptr is not None:
            dx += gl.load(dtotal_ptr + row * N + col, mask=(col < N) & within, other=0.0).to(gl.float32)
        gl.store(dx_ptr + row * N + col, dx.to(dx_ptr.dtype.element_ty), mask=(col < N) & within)
    if IN_PLACE:
        async_copy.commit_group()
    return new_dweight, new_dbias


@gluon.jit(do_not_specialize=["R", "tiles", "programs"])
def norm_bwd_kernel(
    dy_ptr, x_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_weight_ptr, partial_bias_ptr,
    R, tiles, programs, N: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr, CENTERED: gl.constexpr,
    OPAQUE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Arguments as of `torch_bridge.kernels.norm.norm_bwd_kernel`; BLOCK_R is 1 and BLOCK_N a chunk.

    With two STAGES the next row comes to other buffers, from the start of a row on; with one as chunks become free.
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
    xs = ()
    dys = ()
    other_xs = ()
    other_dys = ()
    dweight = ()
    dbias = ()
    for _ in gl.static_range(CHUNKS):  # buffers of their own: between those of one the compiler would put barriers
        xs = _append(xs, gl.allocate_shared_memory(x_ptr.dtype.element_ty, [BLOCK_N], FLAT))
        dys = _append(dys, gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [BLOCK_N], FLAT))
        if STAGES == 2:
            other_xs = _append(other_xs, gl.allocate_shared_memory(x_ptr.dtype.element_ty, [BLOCK_N], FLAT))
            other_dys = _append(other_dys, gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [BLOCK_N], FLAT))
        if partial_weight_ptr is not None:
            dweight = _append(dweight, gl.zeros([BLOCK_N], gl.float32, LAYOUT))
        if partial_bias_ptr is not None:
            dbias = _append(dbias, gl.zeros([BLOCK_N], gl.float32, LAYOUT))
    _copy_row(xs, dys, x_ptr + row * N, dy_ptr + row * N, cols, row < end, N, BLOCK_N)
    for _ in range(program, tiles, programs * STAGES):
        next_row = row + programs
        if STAGES == 1:
            async_copy.wait_group(0)
            dweight, dbias = _differentiate_row(
                xs, dys, dweight, dbias, x_ptr, dy_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, row,
                next_row, end, cols, N, BLOCK_N, CENTERED, True, LAYOUT,
            )  # fmt: skip
            row = next_row
        else:
            _copy_row(
                other_xs, other_dys, x_ptr + next_row * N, dy_ptr + next_row * N, cols, next_row < end, N, BLOCK_N
            )
            async_copy.wait_group(1)
            dweight, dbias = _differentiate_row(
                xs, dys, dweight, dbias, x_ptr, dy_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, row,
                next_row, end, cols, N, BLOCK_N, CENTERED, False, LAYOUT,
            )  # fmt: skip
            row = next_row + programs
            _copy_row(xs, dys, x_ptr + row * N, dy_ptr + row * N, cols, row < end, N, BLOCK_N)
            async_copy.wait_group(1)
            dweight, dbias = _differentiate_row(
                other_xs, other_dys, dweight, dbias, x_ptr, dy_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr,
                next_row, row, end, cols, N, BLOCK_N, CENTERED, False, LAYOUT,
            )  # fmt: skip
    async_copy.wait_group(0)
    at = (model * programs + program) * N
    for c in gl.static_range(CHUNKS):
        col = c * BLOCK_N + cols
        if partial_weight_ptr is not None:
            gl.store(partial_weight_ptr + at + col, dweight[c], mask=col < N)
        if partial_bias_ptr is not None:
            gl.store(partial_bias_ptr + at + col, dbias[c], mask=col < N)
