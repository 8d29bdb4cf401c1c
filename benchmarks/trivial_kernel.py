"""The Triton kernel of the suite `dispatch`; `benchmarks.scans.native_call` does the same."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(
    x_ptr,  # [SIZE]
    y_ptr,  # [SIZE] out
    SIZE: tl.constexpr,
):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, 0.99 * tl.load(x_ptr + at))
