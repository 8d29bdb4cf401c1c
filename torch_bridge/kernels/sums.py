"""Sums over programs, each of which leaves its own.

A kernel adds them up in the order of their indices, so that two runs give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def launch_dependents(EARLY: tl.constexpr):
    """The kernel that adds up what this one leaves may come onto multiprocessors, where it waits."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_dependencies(EARLY: tl.constexpr):
    """Waits until the kernel before is over, and all that it wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def add_up(partial_ptr, sums_ptr, model, col, programs, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of a model, the columns `col` of `[S, programs, N]` added up in float32 to those of `[S, N]`, of any dtype."""
    model = model.to(tl.int64)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)
        mask = (program < programs)[:, None] & (col < N)[None, :]
        total += tl.load(partial_ptr + (model * programs + program)[:, None] * N + col[None, :], mask=mask, other=0.0)
    tl.store(sums_ptr + model * N + col, tl.sum(total, 0).to(sums_ptr.dtype.element_ty), mask=col < N)


@triton.jit
def block_of_columns(N: tl.constexpr, BLOCK_C: tl.constexpr):
    """The columns of a program that adds up a block of N, and which N they are of."""
    blocks = tl.cdiv(N, BLOCK_C)
    return (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(0) // blocks


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    partial_ptr,  # [S, programs, N] float32
    sums_ptr,     # [S, N] float32
    programs,
    N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds up what the programs of each model added up; a program for each block of columns of a model."""
    wait_for_dependencies(EARLY)
    col, model = block_of_columns(N, BLOCK_C)
    add_up(partial_ptr, sums_ptr, model, col, programs, N, BLOCK_P, BLOCK_C)
