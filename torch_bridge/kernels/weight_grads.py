"""Gradients of all weights and biases of a recurrence, in Gluon, in one pass over the arrays that they are sums of.

    dw_ih = x^T dxp,   dw_hh = h^T dhp,   db = sum(dxp / scale),   db_hn = sum(dhn)

The sums are over all steps and sequences of a model. h is the state before a step. dhp is dxp; if the last gate is
separate, as a GRU's is, dhn replaces the last gate of dxp. `scale` is the factor of a step's norm, which dxp contains,
although the biases are added after the norm; it is 1 without a norm. For LayerNorm, x is without its mean m, which is
subtracted from h too: dw_hh is `h^T dxp - sum(m dxp)`. A program has 128 columns of gates, 128 inputs, 128 states, and
a shard of the rows. It reads its gate gradients once for both products and the sums. The states before its steps are
read from the states after the previous steps or, where an episode begins, from the reset states, or as zeros.
`sums.sum_kernel` adds up the partial sums of a model's programs.

On Hopper, the products use wgmma. With 16-bit operands, wgmma reads both operands from shared memory, where they were
copied. With TF32, wgmma needs the gate gradients contiguous along the rows, and needs both operands rounded, because it
truncates them, which would be a bias. The gate gradients therefore go through registers back to shared memory, and
wgmma takes inputs and states from registers. On other GPUs, the products use mma.sync, which takes its operands from
registers.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from torch_bridge.kernels.common import RESET_FIXED, RESET_ZEROS
from torch_bridge.kernels.gluon_common import async_load, barrier


class _Arrays(NamedTuple):
    """The arrays that the kernel reads; rows are `[G, T, B]`: groups, steps and sequences."""

    x_ptr: Any  # [S, rows, D] inputs
    hs_ptr: Any  # [S, rows, H] states after each step
    h0_ptr: Any  # [S, rows / T, H] states before the first step
    reset_ptr: Any  # [S, rows] nonzero where an episode begins, or None
    reset_h_ptr: Any  # [S, rows / T, H] or [S, rows, H] by RESET_STATE: states from which episodes begin, or None
    scale_ptr: Any  # [S, rows] float32: the factors of the norm that the gates see, or None
    x_mean_ptr: Any  # [S, rows] float32: the means of the inputs for LayerNorm, which x is without, or None
    dxp_ptr: Any  # [S, rows, W] gradients of the gates before their activations
    dhn_ptr: Any  # [S, rows, H] gradients of the last gate's hidden product; None where they equal those in dxp


class _Buffers(NamedTuple):
    """The shared memory of a program; the first four have STAGES blocks of ROWS rows."""

    xs: Any  # inputs
    ps: Any  # states before the steps
    gs: Any  # gate gradients
    ns: Any  # gradients of the last gate's hidden product, or `gs`
    gt: Any  # for wgmma with TF32, a block of `gs` contiguous along the rows
    nt: Any  # the same of `ns`


class _Tile(NamedTuple):
    """The columns and rows that a program sums."""

    T: Any  # number of steps
    B: Any  # number of sequences of a group
    first_unit: Any  # of inputs and states
    first_gate: Any
    start: Any  # first row
    end: Any  # the row after the last one


class _Config(NamedTuple):
    """The compile-time values of the kernel."""

    D: Any  # inputs
    H: Any  # states
    W: Any  # gates
    ROWS: Any  # rows of a block
    STAGES: Any
    RESET_STATE: Any
    REVERSE: Any
    WGMMA: Any  # whether the products use wgmma; otherwise they use mma.sync


@gluon.jit
def _round(x):
    """Returns `x`, changed so that the truncation to TF32 in the tensor cores rounds it.

    The NaN that arithmetic produces remains a NaN.
    """
    bits = gl.minimum(x.to(gl.int32, bitcast=True), 0x7FFFEFFF)
    return (bits + 0x1000).to(gl.float32, bitcast=True)


@gluon.jit
def _load_goes_on(reset_ptr, row, end):
    """Loads whether the episodes continue at these rows; without resets they do at all rows before `end`."""
    if reset_ptr is None:
        return row < end
    else:
        return gl.load(reset_ptr + row, mask=row < end, other=0) == 0


@gluon.jit
def _load_by_row(ptr, start, end, ROWS: gl.constexpr, SUMMED: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads numbers of ROWS rows from `start` on: a tuple of vectors of SUMMED rows, or none if `ptr` is None."""
    numbers = ()
    if ptr is not None:
        for k in gl.static_range(ROWS // SUMMED):
            row = start + k * SUMMED + gl.arange(0, SUMMED, gl.SliceLayout(1, LAYOUT))
            numbers += (gl.load(ptr + row, mask=row < end, other=1.0),)
    return numbers


@gluon.jit
def _add_to_sums(sum_x, sum_m, g, scales, means, k: gl.constexpr):
    """Adds gate gradients of the k-th rows of `_load_by_row` to the sums for biases, and times means to `sum_m`."""
    if len(scales) > 0:
        sum_x += g * (1.0 / scales[k])[:, None]
    else:
        sum_x += g
    if len(means) > 0:
        sum_m += g * means[k][:, None]
    return sum_x, sum_m


@gluon.jit
def _copy(buffers, slot, arrays, row, goes_on, tile, cols, config: gl.constexpr):
    """Starts the copies of a block of rows to `slot`: inputs, states before the steps, and gate gradients."""
    D: gl.constexpr = config.D
    H: gl.constexpr = config.H
    W: gl.constexpr = config.W
    T, B, first_unit, first_gate, _, end = tile
    live = (row < end)[:, None]
    wide_row = row.to(gl.int64)[:, None]
    unit = (first_unit + cols)[None, :]
    gate = (first_gate + cols)[None, :]
    at = row % (T * B)  # index into the [T, B] of a group
    if config.REVERSE:
        first = at >= (T - 1) * B
        before = wide_row + B
        sequence = row // (T * B) * B + at - (T - 1) * B
    else:
        first = at < B
        before = wide_row - B
        sequence = row // (T * B) * B + at
    state = gl.where(first[:, None], arrays.h0_ptr + sequence.to(gl.int64)[:, None] * H, arrays.hs_ptr + before * H)
    kept = live & (unit < H)
    if config.RESET_STATE == RESET_ZEROS:
        kept = kept & goes_on[:, None]
    else:
        new = wide_row
        if config.RESET_STATE == RESET_FIXED:
            new = (row // (T * B) * B + at % B).to(gl.int64)[:, None]
        state = gl.where(goes_on[:, None], state, arrays.reset_h_ptr + new * H)
    state = gl.multiple_of(state, [16, 16])  # the compiler loses the alignment where it selects one of two pointers
    async_load(buffers.xs.index(slot), arrays.x_ptr + wide_row * D + unit, mask=live & (unit < D))
    async_load(buffers.ps.index(slot), state + unit, mask=kept)
    async_load(buffers.gs.index(slot), arrays.dxp_ptr + wide_row * W + gate, mask=live & (gate < W))
    if arrays.dhn_ptr is not None:
        dhn = arrays.dhn_ptr + wide_row * H + (gate - (W - H))
        async_load(buffers.ns.index(slot), dhn, mask=live & (gate < W))
    async_copy.commit_group()


@gluon.jit
def _prefetch(buffers, arrays, tile, rows, cols, config: gl.constexpr):
    """Starts the copies of the first STAGES - 1 blocks of rows.

    Returns whether episodes continue at the rows of the block after them.
    """
    ROWS: gl.constexpr = config.ROWS
    STAGES: gl.constexpr = config.STAGES
    for stage in gl.static_range(STAGES - 1):
        row = tile.start + stage * ROWS + rows
        goes_on = _load_goes_on(arrays.reset_ptr, row, tile.end)
        _copy(buffers, stage, arrays, row, goes_on, tile, cols, config)
    return _load_goes_on(arrays.reset_ptr, tile.start + (STAGES - 1) * ROWS + rows, tile.end)


@gluon.jit
def _transpose(gs, slot, gt, LAYOUT: gl.constexpr):
    """Stores the gate gradients of a slot to `gt`, rounded and contiguous along the rows; returns them unrounded."""
    g = gs.index(slot).load(LAYOUT)
    gt.store(_round(g).permute([1, 0]))
    return g


@gluon.jit
def _store_tile(ptr, tile, first_row, first_col, ROWS: gl.constexpr, COLS: gl.constexpr, ACC: gl.constexpr):
    row = (first_row + gl.arange(0, 128, gl.SliceLayout(1, ACC)))[:, None]
    col = (first_col + gl.arange(0, 128, gl.SliceLayout(0, ACC)))[None, :]
    gl.store(ptr + row * COLS + col, tile, mask=(row < ROWS) & (col < COLS))


@gluon.jit
def _store(
    partial_ptr, products, sums, tile, SEPARATE: gl.constexpr, ACC: gl.constexpr, SUM: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Stores the two products and, in the programs of the first units, the sums for the biases."""
    D: gl.constexpr = config.D
    H: gl.constexpr = config.H
    W: gl.constexpr = config.W
    _store_tile(partial_ptr, products[0], tile.first_unit, tile.first_gate, D, W, ACC)
    _store_tile(partial_ptr + D * W, products[1], tile.first_unit, tile.first_gate, H, W, ACC)
    if tile.first_unit == 0:
        gate = tile.first_gate + gl.arange(0, 128, gl.SliceLayout(0, SUM))
        sums_ptr = partial_ptr + (D + H) * W
        gl.store(sums_ptr + gate, gl.sum(sums[0], 0), mask=gate < W)
        if SEPARATE:
            gl.store(sums_ptr + H + gate, gl.sum(sums[1], 0), mask=gate < W)


@gluon.jit
def _multiply(
    buffers, slot, k, product_x, product_h, SEPARATE: gl.constexpr, DEPTH: gl.constexpr, ACC: gl.constexpr
):  # fmt: skip
    """Adds the products of DEPTH rows of a slot, from row k on, by mma.sync: operands go through registers."""
    xs, ps, gs, ns, _, _ = buffers
    WIDE: gl.constexpr = xs.dtype == gl.float32
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 1 if WIDE else 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 1 if WIDE else 2)
    x = xs.index(slot).slice(k, DEPTH, 0).permute([1, 0]).load(LEFT)
    h = ps.index(slot).slice(k, DEPTH, 0).permute([1, 0]).load(LEFT)
    g = gs.index(slot).slice(k, DEPTH, 0).load(RIGHT)
    n = g
    if SEPARATE:
        n = ns.index(slot).slice(k, DEPTH, 0).load(RIGHT)
    if WIDE:
        x, h, g, n = _round(x), _round(h), _round(g), _round(n)
    product_x = mma_v2(x, g, product_x, input_precision="tf32" if WIDE else None)
    product_h = mma_v2(h, n, product_h, input_precision="tf32" if WIDE else None)
    return product_x, product_h


@gluon.jit
def _add_up(buffers, arrays, partial_ptr, tile, config: gl.constexpr):
    """Computes the sums over a program's shard of the rows, and stores them from `partial_ptr` on."""
    ROWS: gl.constexpr = config.ROWS
    STAGES: gl.constexpr = config.STAGES
    WGMMA: gl.constexpr = config.WGMMA
    xs, ps, gs, ns, gt, nt = buffers
    start, end = tile.start, tile.end
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = xs.dtype == gl.float32
    TRANSPOSES: gl.constexpr = WIDE and WGMMA
    SEPARATE: gl.constexpr = arrays.dhn_ptr is not None
    DEPTH: gl.constexpr = 16  # rows of one product by mma.sync, the fewest that Triton allows
    ACC: gl.constexpr = (
        gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 8 if WIDE else 16])
        if WGMMA
        else gl.NVMMADistributedLayout([2, 0], [WARPS // 2, 2], [16, 8])
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    LOAD: gl.constexpr = gl.BlockedLayout(
        [1, 4] if WIDE else [1, 8], [1, 32] if WIDE else [2, 16], [WARPS, 1], [1, 0]
    )  # fmt: skip
    # layout of the sums: where data is transposed, that of the transposed data, without bank conflicts
    SUM: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1]) if TRANSPOSES else LOAD
    SUMMED: gl.constexpr = ROWS if TRANSPOSES else WARPS if WIDE else 2 * WARPS
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    cols = gl.arange(0, 128, gl.SliceLayout(0, LOAD))
    product_x = gl.zeros([128, 128], gl.float32, ACC)
    product_h = gl.zeros([128, 128], gl.float32, ACC)
    sum_x = gl.zeros([SUMMED, 128], gl.float32, SUM)
    sum_h = gl.zeros([SUMMED, 128], gl.float32, SUM)
    sum_m = sum_h
    goes_on = _prefetch(buffers, arrays, tile, rows, cols, config)
    scales = _load_by_row(arrays.scale_ptr, start, end, ROWS, SUMMED, SUM)
    means = _load_by_row(arrays.x_mean_ptr, start, end, ROWS, SUMMED, SUM)
    slot = 0
    for at in range(start, end, ROWS):
        async_copy.wait_group(STAGES - 2)
        if WGMMA and not WIDE:
            fence_async_shared()
        barrier()  # the copies of all threads are visible, and all threads have read the slot that is copied to next
        row = at + (STAGES - 1) * ROWS + rows
        into = slot + STAGES - 1
        into = gl.where(into >= STAGES, into - STAGES, into)
        if TRANSPOSES:
            sum_x, sum_m = _add_to_sums(sum_x, sum_m, _transpose(gs, slot, gt, SUM), scales, means, 0)
            if SEPARATE:
                sum_h += _transpose(ns, slot, nt, SUM)
        elif WGMMA:
            product_x = warpgroup_mma(xs.index(slot).permute([1, 0]), gs.index(slot), product_x, is_async=True)
            product_h = warpgroup_mma(ps.index(slot).permute([1, 0]), ns.index(slot), product_h, is_async=True)
        _copy(buffers, into, arrays, row, goes_on, tile, cols, config)
        goes_on = _load_goes_on(arrays.reset_ptr, row + ROWS, end)
        if TRANSPOSES:
            fence_async_shared()
            barrier()
            x = _round(xs.index(slot).permute([1, 0]).load(OPERAND))
            product_x = warpgroup_mma(x, gt.permute([1, 0]), product_x, is_async=True)
            h = _round(ps.index(slot).permute([1, 0]).load(OPERAND))
            product_h = warpgroup_mma(h, nt.permute([1, 0]), product_h, is_async=True)
        else:
            if not WGMMA:
                for k in gl.static_range(0, ROWS, DEPTH):
                    product_x, product_h = _multiply(buffers, slot, k, product_x, product_h, SEPARATE, DEPTH, ACC)
            for k in gl.static_range(ROWS // SUMMED):
                g = gs.index(slot).slice(k * SUMMED, SUMMED, 0).load(SUM).to(gl.float32)
                sum_x, sum_m = _add_to_sums(sum_x, sum_m, g, scales, means, k)
                if SEPARATE:
                    sum_h += ns.index(slot).slice(k * SUMMED, SUMMED, 0).load(SUM).to(gl.float32)
        scales = _load_by_row(arrays.scale_ptr, at + ROWS, end, ROWS, SUMMED, SUM)
        means = _load_by_row(arrays.x_mean_ptr, at + ROWS, end, ROWS, SUMMED, SUM)
        if WGMMA:
            product_x, product_h = warpgroup_mma_wait(num_outstanding=0, deps=[product_x, product_h])
        slot = gl.where(slot + 1 >= STAGES, 0, slot + 1)
    async_copy.wait_group(0)
    if arrays.x_mean_ptr is not None:
        gl.static_assert(not SEPARATE)  # the gradients that multiply states are then dxp
        product_h -= gl.convert_layout(gl.sum(sum_m, 0), gl.SliceLayout(0, ACC))[None, :]
    _store(partial_ptr, (product_x, product_h), (sum_x, sum_h), tile, SEPARATE, ACC, SUM, config)


@gluon.jit
def _locate(partial_ptr, rows, shard_rows, programs, T, B, SEPARATE: gl.constexpr, config: gl.constexpr):
    """Locates the tile of this program, and where its sums go."""
    D: gl.constexpr = config.D
    H: gl.constexpr = config.H
    W: gl.constexpr = config.W
    unit_tiles: gl.constexpr = ((D if D > H else H) + 127) // 128
    tiles: gl.constexpr = unit_tiles * ((W + 127) // 128)
    tile = gl.program_id(0) % tiles
    program = gl.program_id(0) // tiles
    model = program // programs
    start = model * rows + program % programs * shard_rows
    TOTAL: gl.constexpr = (D + H + 1) * W + (H if SEPARATE else 0)
    end = gl.minimum(start + shard_rows, (model + 1) * rows)
    first_unit, first_gate = tile % unit_tiles * 128, tile // unit_tiles * 128
    partial_ptr += program.to(gl.int64) * TOTAL
    return _Tile(T.to(gl.int32), B.to(gl.int32), first_unit, first_gate, start, end), partial_ptr


@gluon.jit(do_not_specialize=["rows", "shard_rows", "programs", "T", "B"])
def weight_grads_kernel(
    x_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, scale_ptr, x_mean_ptr, dxp_ptr, dhn_ptr,
    partial_ptr,  # [S, programs, (D + H) W + W (+ H)] float32 out: dw_ih, dw_hh, db (and db_hn) of a program's shard
    rows,         # rows of a model
    shard_rows,   # rows of a program, a multiple of ROWS
    programs,     # programs per tile of gates and units, per model
    T, B,
    D: gl.constexpr, H: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    RESET_STATE: gl.constexpr, REVERSE: gl.constexpr, WGMMA: gl.constexpr,
):  # fmt: skip
    """Computes the sums of a shard of the rows; the arrays that it reads are those of `_Arrays`."""
    TYPE: gl.constexpr = x_ptr.dtype.element_ty
    WIDE: gl.constexpr = TYPE == gl.float32
    TRANSPOSES: gl.constexpr = WIDE and WGMMA
    SEPARATE: gl.constexpr = dhn_ptr is not None
    # These layouts avoid bank conflicts. A thread reads float32 from two adjacent rows or, to transpose gate gradients,
    # from four. wgmma or ldmatrix reads 16-bit operands.
    STATE_LAYOUT: gl.constexpr = (
        gl.SwizzledSharedLayout(8, 1, 4, [1, 0]) if WIDE else gl.NVMMASharedLayout.get_default_for([ROWS, 128], TYPE)
    )
    GRAD_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(4, 4, 8, [1, 0]) if TRANSPOSES else STATE_LAYOUT
    config: gl.constexpr = _Config(D, H, W, ROWS, STAGES, RESET_STATE, REVERSE, WGMMA)
    tile, partial_ptr = _locate(partial_ptr, rows, shard_rows, programs, T, B, SEPARATE, config)
    arrays = _Arrays(x_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, scale_ptr, x_mean_ptr, dxp_ptr, dhn_ptr)
    # without dhn: what a program reads whose columns do not belong to a separate last gate
    others = _Arrays(x_ptr, hs_ptr, h0_ptr, reset_ptr, reset_h_ptr, scale_ptr, x_mean_ptr, dxp_ptr, None)
    xs = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, 128], STATE_LAYOUT)
    ps = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, 128], STATE_LAYOUT)
    gs = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, 128], GRAD_LAYOUT)
    gt = gs
    if TRANSPOSES:
        gt = gl.allocate_shared_memory(TYPE, [128, ROWS], gl.NVMMASharedLayout.get_default_for([128, ROWS], TYPE))
    if SEPARATE:
        ns = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, 128], GRAD_LAYOUT)
        nt = ns
        if TRANSPOSES:
            nt = gl.allocate_shared_memory(TYPE, [128, ROWS], gl.NVMMASharedLayout.get_default_for([128, ROWS], TYPE))
        if tile.first_gate >= W - H:
            _add_up(_Buffers(xs, ps, gs, ns, gt, nt), arrays, partial_ptr, tile, config)
        else:
            _add_up(_Buffers(xs, ps, gs, gs, gt, gt), others, partial_ptr, tile, config)
    else:
        _add_up(_Buffers(xs, ps, gs, gs, gt, gt), others, partial_ptr, tile, config)
