"""The input projection of a recurrence, `x @ w_ih + bias`, where the bias would take another pass over memory.

For 16-bit inputs, a library writes the products in float32 and adds the bias in a separate pass, which moves four times
the bytes that remain if the loop reads float16. For float32 inputs, multiplied in TF32, XLA fuses the bias with the
product, but only if the bias is an argument of the compiled program or is carried by a loop. A bias that is assembled
from several arrays, as the Flax modules assemble it from the biases of their gates, takes a separate pass too.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.common import operand

# Number of row tiles whose programs go through all columns before the programs of the next row tiles.
GROUP = tl.constexpr(8)


@triton.jit
def _store(xp_ptr, xp, row, col, live, W: tl.constexpr):
    if xp_ptr.dtype.element_ty == tl.float16:
        xp = tl.clamp(xp, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(xp_ptr + row * W + col[None, :], xp.to(xp_ptr.dtype.element_ty), mask=live & (col < W)[None, :])


@triton.jit(do_not_specialize=["rows", "tiles", "programs"])
def projection_kernel(
    x_ptr,      # [S, rows, D]
    w_ih_t_ptr, # [S, W, D] weights, transposed; float32 weights are rounded to TF32
    bias_ptr,   # [S, W] float32
    xp_ptr,     # [S, rows, W] out: float32, or float16 with values clamped to its range
    rows,       # rows of a model
    tiles,      # tiles of rows
    programs,   # programs per model and block of columns; each takes tiles of rows in turn
    D: tl.constexpr, W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(W, BLOCK_W)
    block = tl.program_id(0) % blocks  # varies fastest, so that programs that read the same inputs run side by side
    program = tl.program_id(0) // blocks % programs
    model = tl.program_id(0) // (blocks * programs)
    col = block * BLOCK_W + tl.arange(0, BLOCK_W)
    unit = tl.arange(0, BLOCK_D)
    at = (model * W + col).to(tl.int64)[:, None] * D + unit[None, :]
    w = tl.load(w_ih_t_ptr + at, mask=(col < W)[:, None] & (unit < D)[None, :], other=0.0).T
    bias = tl.load(bias_ptr + model * W + col, mask=col < W, other=0.0)
    first = model.to(tl.int64) * rows
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        live = (row < rows)[:, None]
        row = (first + row)[:, None]
        x = tl.load(x_ptr + row * D + unit[None, :], mask=live & (unit < D)[None, :], other=0.0)
        _store(
            xp_ptr, tl.dot(operand(x, x.dtype, "tf32"), w, input_precision="tf32") + bias[None, :], row, col, live, W
        )


@triton.jit(do_not_specialize=["rows", "tiles"])
def wide_projection_kernel(
    x_ptr,      # arguments as in projection_kernel; inputs and weights have 16 bits
    w_ih_t_ptr,
    bias_ptr,
    xp_ptr,
    rows,
    tiles,
    D: tl.constexpr, W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Computes what `projection_kernel` does, for inputs that do not fit on chip beside the weights.

    A program has one tile, and reads the inputs in blocks of BLOCK_D.
    """
    blocks = tl.cdiv(W, BLOCK_W)
    # programs of GROUP tiles of rows and all columns run side by side, so that both operands stay in L2
    together = GROUP * blocks
    of_model = tl.program_id(0) % (tiles * blocks)
    model = tl.program_id(0) // (tiles * blocks)
    first_tile = of_model // together * GROUP
    height = tl.minimum(tiles - first_tile, GROUP)
    tile = first_tile + of_model % together % height
    block = of_model % together // height
    col = block * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    live = (row < rows)[:, None]
    row = (model.to(tl.int64) * rows + row)[:, None]
    unit = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + row * D + unit[None, :]
    w_ptrs = w_ih_t_ptr + (model * W + col).to(tl.int64)[:, None] * D + unit[None, :]
    xp = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        within = (first + unit < D)[None, :]
        x = tl.load(x_ptrs + first, mask=live & within, other=0.0)
        w = tl.load(w_ptrs + first, mask=(col < W)[:, None] & within, other=0.0)
        xp = tl.dot(x, w.T, xp)
    bias = tl.load(bias_ptr + model * W + col, mask=col < W, other=0.0)
    _store(xp_ptr, xp + bias[None, :], row, col, live, W)
