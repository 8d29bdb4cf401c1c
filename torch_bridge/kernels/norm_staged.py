"""The backward pass of `torch_bridge.kernels.norm` for wide rows, in Gluon: rows in shared memory, sums in registers.

A program copies a row of x and of dy to shared memory, in chunks, and every thread reads what it copied itself. While
it computes dx of one row it has the next one copied to where it has just read, so that memory never rests. The sums for
weight and bias, float32, take the registers that the row left free.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy


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
    async_copy.async_copy_global_to_shared(buffer, ptr + col, mask=(col < N) & in_range)


@gluon.jit
def _terms(x_buffer, dy_buffer, weight_ptr, mean, rstd, col, N: gl.constexpr, BLOCK: gl.constexpr,
           CENTERED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """dy, dy * weight, and x normalized, of a chunk."""
    x = x_buffer.load(LAYOUT).to(gl.float32)
    dy = dy_buffer.load(LAYOUT).to(gl.float32)
    if N % BLOCK:  # what lies there past the end of a row is no number
        x = gl.where(col < N, x, 0.0)
        dy = gl.where(col < N, dy, 0.0)
    if CENTERED:
        x = x - mean
    if weight_ptr is None:
        a = dy
    else:
        a = dy * _load_vector(weight_ptr, col, N, BLOCK)
    return dy, a, x * rstd


@gluon.jit(do_not_specialize=["R", "tiles", "programs"])
def norm_bwd_kernel(
    dy_ptr, x_ptr, dtotal_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_weight_ptr, partial_bias_ptr,
    R, tiles, programs, N: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr, CENTERED: gl.constexpr,
    OPAQUE: gl.constexpr,
):  # fmt: skip
    """Arguments as of `torch_bridge.kernels.norm.norm_bwd_kernel`; BLOCK_R is 1 and BLOCK_N a chunk."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_N // (32 * gl.num_warps())], [32], [gl.num_warps()], [0])
    CHUNKS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    model = (gl.program_id(0) // programs).to(gl.int64)
    program = gl.program_id(0) % programs
    if weight_ptr is not None:
        weight_ptr += model * N
    cols = gl.arange(0, BLOCK_N, LAYOUT)
    xs = ()
    dys = ()
    dweight = ()
    dbias = ()
    row = (model * R + program) * N
    for c in gl.static_range(CHUNKS):  # buffers of their own: between those of one the compiler would put barriers
        x_buffer = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [BLOCK_N], FLAT)
        dy_buffer = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [BLOCK_N], FLAT)
        _copy(x_buffer, x_ptr + row, c * BLOCK_N + cols, program < R, N)
        _copy(dy_buffer, dy_ptr + row, c * BLOCK_N + cols, program < R, N)
        xs = _append(xs, x_buffer)
        dys = _append(dys, dy_buffer)
        if partial_weight_ptr is not None:
            dweight = _append(dweight, gl.zeros([BLOCK_N], gl.float32, LAYOUT))
        if partial_bias_ptr is not None:
            dbias = _append(dbias, gl.zeros([BLOCK_N], gl.float32, LAYOUT))
    async_copy.commit_group()
    nth = program.to(gl.int64)
    for _ in range(program, tiles, programs):
        row = (model * R + nth) * N
        rstd = gl.load(rstd_ptr + model * R + nth)
        mean = rstd
        if CENTERED:
            mean = gl.load(mean_ptr + model * R + nth)
        sum_a = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
        sum_ax = gl.zeros([BLOCK_N], gl.float32, LAYOUT)
        async_copy.wait_group(0)
        new_dweight = ()
        new_dbias = ()
        for c in gl.static_range(CHUNKS):
            col = c * BLOCK_N + cols
            dy, a, normalized = _terms(xs[c], dys[c], weight_ptr, mean, rstd, col, N, BLOCK_N, CENTERED, LAYOUT)
            sum_ax += a * normalized
            if CENTERED:
                sum_a += a
            if partial_weight_ptr is not None:
                new_dweight = _append(new_dweight, dweight[c] + dy * normalized)
            if partial_bias_ptr is not None:
                new_dbias = _append(new_dbias, dbias[c] + dy)
        dweight = new_dweight
        dbias = new_dbias
        mean_ax = gl.sum(sum_ax, 0) / N
        mean_a = gl.sum(sum_a, 0) / N if CENTERED else rstd
        nth += programs
        next_row = (model * R + nth) * N
        for c in gl.static_range(CHUNKS):
            col = c * BLOCK_N + cols
            _, a, normalized = _terms(xs[c], dys[c], weight_ptr, mean, rstd, col, N, BLOCK_N, CENTERED, LAYOUT)
            _copy(xs[c], x_ptr + next_row, col, nth < R, N)
            _copy(dys[c], dy_ptr + next_row, col, nth < R, N)
            dx = a - normalized * mean_ax
            if CENTERED:
                dx -= mean_a
            dx *= rstd
            if dtotal_ptr is not None:
                dx += _load_vector(dtotal_ptr + row, col, N, BLOCK_N)
            gl.store(dx_ptr + row + col, dx.to(dx_ptr.dtype.element_ty), mask=col < N)
        async_copy.commit_group()
    async_copy.wait_group(0)
    at = (model * programs + program) * N
    for c in gl.static_range(CHUNKS):
        col = c * BLOCK_N + cols
        if partial_weight_ptr is not None:
            gl.store(partial_weight_ptr + at + col, dweight[c], mask=col < N)
        if partial_bias_ptr is not None:
            gl.store(partial_bias_ptr + at + col, dbias[c], mask=col < N)
