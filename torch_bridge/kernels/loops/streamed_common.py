"""Device functions of the streamed loop.

They load and store tiles, read weights, select reset states and synchronize the programs of a launch. Tiles are
`[hidden, batch]`, as `torch_bridge.kernels.common` explains.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.common import RESET_FIXED, RESET_ZEROS


@triton.jit
def load_tile(ptr, rows, cols, width, mask):
    """Loads a `[hidden, batch]` tile of a row-major array as float32: rows are sequences, cols are hidden units."""
    return tl.load(ptr + rows[None, :] * width + cols[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_exchanged(ptr, offs_b, cols, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Loads a `[cols, batch]` operand that programs of this launch wrote, from L2 instead of this SM's own L1."""
    offs = offs_b[None, :] * WIDTH + cols[:, None]
    if EVEN:
        return tl.load(ptr + offs, cache_modifier=".cg")
    return tl.load(ptr + offs, mask=(cols < WIDTH)[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def store_tile(ptr, rows, cols, width, mask, value):
    tl.store(ptr + rows[None, :] * width + cols[:, None], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def stream_weight(w_ptr, rows, cols, COLS: tl.constexpr, EVEN: tl.constexpr):
    """Loads a tile of a row-major matrix of COLS columns.

    Elements past the last column are zero; EVEN says that the tile has none.
    """
    offs = rows[:, None] * COLS + cols[None, :]
    if EVEN:
        return tl.load(w_ptr + offs)
    return tl.load(w_ptr + offs, mask=(cols < COLS)[None, :], other=0.0)


@triton.jit
def select_reset(h, state_ptr, reset, seq, rows, cols, mask, H: tl.constexpr, RESET_STATE: tl.constexpr):
    """Returns the reset state where an episode starts, and `h` elsewhere.

    The result is a select, so that a NaN in `h` does not leak into it. The reset state is read only where `reset` is
    true; `rows` are those of this step.
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
    """Counts this program as arrived at a barrier; programs that `wait` there see all of its writes before this call.

    Writes that no program waits for should come after this call. All programs must belong to one cooperative launch.
    The counter starts at zero and only grows, so that no program can reset it too early.
    """
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait(counter_ptr, target):
    """Waits until the counter has reached `target` arrivals; each program arrives once per barrier."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()
