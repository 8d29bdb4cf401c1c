"""Sums over programs, each of which stores its own partial sums.

A kernel adds the partial sums in a fixed order, so that two runs give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def launch_dependents(EARLY: tl.constexpr):
    """Lets the kernel that adds up this kernel's partial sums start early on the SMs and wait there."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_dependencies(EARLY: tl.constexpr):
    """Waits until the previous kernel has finished and everything that it wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def add_up(partial_ptr, sums_ptr, model, col, programs, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums columns `col` of `[S, programs, N]` over the programs of a model, and stores the results to `[S, N]`.

    The accumulator is float32; the results may have any dtype.
    """
    model = model.to(tl.int64)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)
        mask = (program < programs)[:, None] & (col < N)[None, :]
        total += tl.load(partial_ptr + (model * programs + program)[:, None] * N + col[None, :], mask=mask, other=0.0)
    tl.store(sums_ptr + model * N + col, tl.sum(total, 0).to(sums_ptr.dtype.element_ty), mask=col < N)


@triton.jit
def block_of_columns(N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the block of columns that this program sums, and the index of the array `[N]` that it belongs to."""
    blocks = tl.cdiv(N, BLOCK_C)
    return (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(0) // blocks


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    partial_ptr,  # [S, programs, N] float32
    sums_ptr,     # [S, N] float32
    programs,
    N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums the partial sums of each model's programs; one program per block of columns and model."""
    wait_for_dependencies(EARLY)
    col, model = block_of_columns(N, BLOCK_C)
    add_up(partial_ptr, sums_ptr, model, col, programs, N, BLOCK_P, BLOCK_C)
