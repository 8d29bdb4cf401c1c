"""Shared code of the kernels whose products have sequences as rows: weights on chip, operands through L2 to registers.

A program has 32 units of every gate, a warp 16 sequences. A warp reads from another program what the same warp of that
program wrote, in the order in which wgmma's result and its register operand distribute elements over threads: of every
block of 16 sequences and 16 units a thread has eight elements, which are adjacent in memory. The exchange therefore
needs neither shared memory nor a barrier. A warp writes its operands, then sets its flag to their number; it waits for
the flags of the same warp of all programs. Operands are double-buffered: a warp writes number n + 2 after it has read n
+ 1 of all the others, who wrote it after they had read n. The kernels require a cooperative launch.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from torch_bridge.kernels.arrays import Tile
from torch_bridge.kernels.common import first_row, time_order
from torch_bridge.kernels.gluon_common import barrier, inverse, scale_to_float16, to_operand
from torch_bridge.kernels.loops.split_common import load_rows, opaque_zero, repeat

# Number of programs whose tiles together form one operand of wgmma.
TOGETHER = gl.constexpr(4)


@gluon.constexpr_function
def _bits(count):
    return [1 << bit for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _fragments_layout(warps, blocks, elements):
    """Returns the layout of `[warps, 32, blocks, elements]`: a thread has `elements` adjacent elements per block."""
    registers = [*([0, 0, 0, bit] for bit in _bits(elements)), *([0, 0, bit, 0] for bit in _bits(blocks))]
    lanes = [[0, bit, 0, 0] for bit in _bits(32)]
    warp_bits = [[bit, 0, 0, 0] for bit in _bits(warps)]
    return gl.DistributedLinearLayout(registers, lanes, warp_bits, [], [warps, 32, blocks, elements])


@gluon.jit
def _offsets(BLOCKS: gl.constexpr, ELEMENTS: gl.constexpr, WARP: gl.constexpr):
    """Returns the offsets of `[warps, 32, BLOCKS, ELEMENTS]` within a block, and the indices of the blocks.

    Warps are WARP elements apart.
    """
    LAYOUT: gl.constexpr = _fragments_layout(gl.num_warps(), BLOCKS, ELEMENTS)
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :, None]
    element = gl.arange(0, ELEMENTS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offset = (warp * WARP)[:, None, None, None] + (lane * ELEMENTS)[None, :, None, None]
    return offset + element[None, None, None, :], block


@gluon.jit
def store_operand_rows(ptr, x, scale, tile, TILES: gl.constexpr, SCALED: gl.constexpr):
    """Stores a tile `[16 * warps, 32]` as an operand.

    The tile is number `tile` of the TILES that a warp has side by side.
    """
    WARPS: gl.constexpr = gl.num_warps()
    if SCALED:
        x = x * scale
    x = to_operand(x, ptr.dtype.element_ty).reshape([WARPS, 2, 8, 2, 2, 4, 2]).permute([0, 2, 5, 3, 4, 1, 6])
    x = gl.convert_layout(x.reshape([WARPS, 32, 2, 8]), _fragments_layout(WARPS, 2, 8), assert_trivial=True)
    offset, block = _offsets(2, 8, TILES * 512)
    gl.store(ptr + tile * 512 + (offset + block * 256), x)


@gluon.jit
def load_operand_rows(ptr, tile, TILES: gl.constexpr, OPERAND: gl.constexpr):
    """Loads TOGETHER tiles, from number `tile` on, as a register operand `[16 * warps, 32 * TOGETHER]`."""
    WARPS: gl.constexpr = gl.num_warps()
    offset, block = _offsets(2 * TOGETHER, 8, TILES * 512)
    x = gl.load(ptr + tile * 512 + (offset + block * 256), cache_modifier=".cg")
    x = x.reshape([WARPS, 8, 4, 2 * TOGETHER, 2, 2, 2]).permute([0, 5, 1, 3, 4, 2, 6])
    return gl.convert_layout(x.reshape([16 * WARPS, 32 * TOGETHER]), OPERAND, assert_trivial=True)


@gluon.jit
def _lanes():
    """Returns the indices of all threads, `[32 * warps]`."""
    return gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def raise_flags(flags_ptr, place, number):
    """Sets the flag of every warp to `number`, to signal that what the warp wrote can be read."""
    thread = _lanes()
    flag = (place.worker * gl.num_warps() + thread // 32) * 32 + place.split
    address = flags_ptr.to(gl.int64) + (flag * 4).to(gl.int64)
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        bar.warp.sync 0xffffffff;
        fence.acq_rel.gpu;
        setp.eq.b32 first, $3, 0;
        @first st.relaxed.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r", [address, thread * 0 + number, thread % 32], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_flags(flags_ptr, place, number, SPLITS: gl.constexpr):
    """Waits, in every warp, until the same warp of each program has set its flag to at least `number`."""
    thread = _lanes()
    address = flags_ptr.to(gl.int64) + ((place.worker * gl.num_warps() * 32 + thread) * 4).to(gl.int64)
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 flag;
        again:
        ld.acquire.gpu.global.b32 flag, [$1];
        setp.lt.s32 p, flag, $2;
        vote.sync.any.pred p, p, 0xffffffff;
        @p bra again;
        bar.warp.sync 0xffffffff;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [address, gl.where(thread % 32 < SPLITS, number, 0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def box(exchange_ptr, number, place, SIZE: gl.constexpr):
    """Returns the address of a worker's operands with this number."""
    return exchange_ptr + ((number % 2) * place.workers + place.worker).to(gl.int64) * SIZE


@gluon.jit
def send_state_rows(
    exchange_ptr, flags_ptr, h, scale, reset_ptr, reset, number, place, SPLITS: gl.constexpr, SCALED: gl.constexpr
):  # fmt: skip
    """Sends the hidden state that a step starts from and returns its scale; `reset` belongs to that step."""
    if reset_ptr is not None:
        h = gl.where(reset[:, None], 0.0, h)
        if SCALED:
            scale = gl.where(reset[:, None], 2.0**14, scale)
    share = box(exchange_ptr, number, place, h.shape[0] * SPLITS * 32)
    store_operand_rows(share, h, scale, place.split, SPLITS, SCALED)
    raise_flags(flags_ptr, place, number)
    return scale


@gluon.constexpr_function
def parts(splits):
    """Returns the number of programs that split a backward product along its reduction axis, the gate gradients.

    The number is the largest of 4, 2 and 1 that leaves each program a multiple of TOGETHER tiles of each gate.
    """
    return next(count for count in (4, 2, 1) if splits % (count * TOGETHER.value) == 0)


@gluon.jit
def allocate_weights(GATES: gl.constexpr, SPLITS: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """Allocates shared memory for a program's weights, which have 32 * PARTS rows.

    A block holds the columns of TOGETHER programs for one gate; the gates of the same columns are in adjacent blocks.
    """
    SHAPE: gl.constexpr = [32 * PARTS, 32 * TOGETHER]
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, DTYPE)
    return gl.allocate_shared_memory(DTYPE, [SPLITS // (PARTS * TOGETHER) * GATES, SHAPE[0], SHAPE[1]], SHARED)


@gluon.constexpr_function
def _every_warp_layout(warps):
    """Returns the layout of `[32]` with one element per thread, replicated in every warp."""
    return gl.DistributedLinearLayout([], [[bit] for bit in _bits(32)], [[0] for _ in _bits(warps)], [], [32])


@gluon.jit
def _largest(x):
    """Returns the largest of `[32]` elements.

    `gl.max` over warps would occupy a register from one call to the next.
    """
    slot = gl.allocate_shared_memory(gl.float32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]), x)
    barrier()
    return gl.max(slot.load(_every_warp_layout(gl.num_warps())), axis=0)


@gluon.jit
def fill_weights(weights, ptr, row0, col0, stride, gate_stride, H: gl.constexpr, GATES: gl.constexpr):
    """Loads a program's shard of w_hh_t (GATES matrices), or of w_hh, into shared memory.

    Returns the factor that undoes the weights' scale, and the largest sum of absolute weights that a row of the shard
    has over all gates.
    """
    PARTS: gl.constexpr = weights.shape[1] // 32
    COLS: gl.constexpr = weights.shape[2]
    SCALED: gl.constexpr = ptr.dtype.element_ty == gl.float32
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    count = weights.shape[0] + opaque_zero(row0)  # opaque, or unrolled loops would take all registers
    largest = gl.zeros([32, COLS], gl.float32, LOAD)
    row_largest = gl.zeros([32], gl.float32, gl.SliceLayout(1, LOAD))
    if SCALED:
        for part in gl.static_range(PARTS):
            total = gl.zeros([32, COLS], gl.float32, LOAD)
            for k in range(count):
                row, col = row0 + part * 32, col0 + k // GATES * COLS
                w = gl.abs(load_rows(ptr + k % GATES * gate_stride, row, col, stride, H, COLS, LOAD))
                largest = gl.maximum(largest, w)
                total += w
            row_largest = gl.maximum(row_largest, gl.sum(total, axis=1))
    scale = scale_to_float16(_largest(gl.max(largest, axis=1)), 14)
    for k in range(count):
        for part in gl.static_range(PARTS):
            row, col = row0 + part * 32, col0 + k // GATES * COLS
            w = load_rows(ptr + k % GATES * gate_stride, row, col, stride, H, COLS, LOAD)
            if SCALED:
                w = w * scale
            weights.index(k).slice(part * 32, 32).store(w.to(weights.dtype))
    fence_async_shared()
    barrier()
    return inverse(scale), _largest(row_largest)


@gluon.jit
def first_state_scale_rows(h0_ptr, zeros, seq, mask_q, H: gl.constexpr, SPLITS: gl.constexpr):
    """Returns the scale of each sequence's hidden states, `[16 * warps, 1]`, from the initial states."""
    own = gl.arange(0, 32, gl.SliceLayout(0, zeros.type.layout))
    largest = zeros
    for part in range(SPLITS + opaque_zero(SPLITS)):
        unit = part * 32 + own
        mask = mask_q[:, None] & (unit < H)[None, :]
        h = gl.abs(gl.load(h0_ptr + seq[:, None] * H + unit[None, :], mask=mask, other=0.0).to(gl.float32))
        largest = gl.maximum(largest, h)
    return scale_to_float16(gl.maximum(gl.max(largest, axis=1), 1.0), 14)[:, None]


@gluon.jit
def locate_rows(
    item, tiles, sizes, unit, ROWS: gl.constexpr, H: gl.constexpr, REVERSE: gl.constexpr, ACC: gl.constexpr
):  # fmt: skip
    """Locates the tile of an item. Masked sequences get the location of the tile's first sequence."""
    T, B, Q, _ = sizes
    q = (item % tiles) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    mask_q = q < Q
    mask = mask_q[:, None] & (unit < H)[None, :]
    q = gl.where(mask_q, q, (item % tiles) * ROWS)
    model = (item // tiles).to(gl.int64)
    seq = model * Q + q
    row, stride = time_order(first_row(seq, T, B), model, T, B, REVERSE)
    return Tile(T, seq, row, stride, unit, mask, mask_q, T, T, 0)


@gluon.jit
def prefetch_rows(ptr, rows, first, COUNT: gl.constexpr, STRIDE: gl.constexpr, WIDTH: gl.constexpr):
    """Prefetches elements of rows of WIDTH into L2: the one at `first` and COUNT - 1 more, STRIDE apart.

    COUNT is at most 4.

    What a step reads is fetched from memory while the previous step runs. Loads into registers, issued as early, would
    delay the loads of operands, which would wait for them.
    """
    LAYOUT: gl.constexpr = _half_layout(gl.num_warps())
    rows = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    which = gl.minimum(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)), COUNT - 1)
    column = gl.minimum(first + which * STRIDE, WIDTH - 1)
    address = (ptr + (rows[:, None] * WIDTH + column[None, :])).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_gradient_rows(ptr, rows, unit, mask, H: gl.constexpr):
    """Loads the gradient of a step's output."""
    return gl.load(ptr + rows[:, None] * H + unit[None, :], mask=mask, other=0.0)


@gluon.jit
def multiply_states(weights, ptr, zeros, step, GATES: gl.constexpr):
    """Multiplies the hidden states of all programs by a program's weights; returns a tuple with a product per gate."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    CHUNKS: gl.constexpr = weights.shape[0] // GATES
    TILES: gl.constexpr = CHUNKS * TOGETHER
    first = opaque_zero(step)
    sums = ()
    for _ in gl.static_range(GATES):
        sums += (zeros,)
    operand = load_operand_rows(ptr, 0, TILES, OPERAND)
    for chunk in gl.static_range(CHUNKS):
        this = operand
        if chunk + 1 < CHUNKS:
            operand = load_operand_rows(ptr, (chunk + 1) * TOGETHER, TILES, OPERAND)
        products = ()
        for gate in gl.static_range(GATES):
            w = weights.index(first + chunk * GATES + gate).permute([1, 0])
            product = warpgroup_mma(this, w, sums[gate], use_acc=chunk > 0, is_async=True)
            products += (product,)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=products)
    return sums


@gluon.jit
def multiply_gradients(weights, ptr, first_tile, step, TILES: gl.constexpr, GATES: gl.constexpr):
    """Multiplies the gradients of all gates, from a tile on, by the weights; returns `[16 * warps, 32 * PARTS]`."""
    WARPS: gl.constexpr = gl.num_warps()
    UNITS: gl.constexpr = weights.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, UNITS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FACTORS: gl.constexpr = weights.shape[0]
    first = opaque_zero(step)
    product = gl.zeros([16 * WARPS, UNITS], gl.float32, ACC)
    operand = load_operand_rows(ptr, first_tile, TILES, OPERAND)
    for factor in gl.static_range(FACTORS):
        this = operand
        if factor + 1 < FACTORS:
            # the next gate of the same programs, or the first gate of the next ones: the order of the weights
            chunk, gate = (factor + 1) // GATES, (factor + 1) % GATES
            tile = first_tile + gate * (TILES // GATES) + chunk * TOGETHER
            operand = load_operand_rows(ptr, tile, TILES, OPERAND)
        w = weights.index(first + factor).permute([1, 0])
        product = warpgroup_mma(this, w, product, use_acc=factor > 0, is_async=True)
        product = warpgroup_mma_wait(num_outstanding=0, deps=[product])
    return product


@gluon.jit
def send_products(ptr, product, number, place, SPLITS: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr):
    """Sends to each other program of a group its tile of the product; returns this program's own tile.

    The last bit of each element sent is replaced by that of `number`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    part = place.split % PARTS
    own = product.reshape([ROWS, PARTS, 32])
    if PARTS == 4:
        even, odd = own.reshape([ROWS, 2, 2, 32]).permute([0, 1, 3, 2]).split()
        own = gl.where(part % 2 == 0, even, odd)
    low, high = own.permute([0, 2, 1]).split()
    own = gl.convert_layout(gl.where(part < PARTS // 2, low, high), ACC, assert_trivial=True)
    x = (product.to(gl.int32, bitcast=True) & -2) | number % 2
    x = x.reshape([WARPS, 2, 8, PARTS, 2, 2, 4, 2]).permute([0, 2, 6, 3, 1, 4, 5, 7])
    LAYOUT: gl.constexpr = _fragments_layout(WARPS, 4 * PARTS, 4)
    x = gl.convert_layout(x.reshape([WARPS, 32, 4 * PARTS, 4]), LAYOUT, assert_trivial=True)
    offset, block = _offsets(4 * PARTS, 4, 512)
    offset += block // 4 * (PARTS * ROWS * 32) + block % 4 * 128
    box = ptr + ((place.worker * SPLITS + place.split - part).to(gl.int64) * PARTS + part) * (ROWS * 32)
    gl.store(box + offset, x, mask=block // 4 + offset * 0 != part)
    return own


@gluon.constexpr_function
def _receive_assembly(count, stride, pack):
    """Returns assembly that polls four words at each of `count` places until all are new, from `pack` addresses on.

    Places are `stride` bytes apart. The place of this program itself is skipped.
    """
    outputs, lines = 4 * count * pack, ["{", ".reg .pred old;", ".reg .b32 bits;"]
    lines += [f".reg .pred wanted{place};" for place in range(count)]
    lines += [f"setp.ne.s32 wanted{place}, ${outputs + pack}, {place};" for place in range(count)]
    lines += [f"mov.b32 ${k}, ${outputs + 2 * pack};" for k in range(outputs)]
    groups = [
        (place, n, [(4 * place + word) * pack + n for word in range(4)]) for place in range(count) for n in range(pack)
    ]
    lines += ["again:"]
    for place, n, words in groups:
        registers = ", ".join(f"${k}" for k in words)
        address = f"[${outputs + n} + {place * stride}]"
        lines += [f"@wanted{place} ld.relaxed.gpu.global.v4.b32 {{{registers}}}, {address};"]
    lines += ["mov.b32 bits, 0;"]
    # bits | (word ^ bit)
    lines += [f"lop3.b32 bits, bits, ${k}, ${outputs + 2 * pack}, 0xF6;" for *_, words in groups for k in words]
    lines += ["and.b32 bits, bits, 1;", "setp.ne.b32 old, bits, 0;", "vote.sync.any.pred old, old, 0xffffffff;"]
    return "\n".join([*lines, "@old bra again;", "}"])


@gluon.constexpr_function
def _receive_constraints(count, pack):
    return ",".join(["=&r"] * (4 * count * pack) + ["l"] * pack + ["r"] * (2 * pack))


@gluon.jit
def receive_product(ptr, own, number, place, SPLITS: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr):
    """Returns this program's own tile plus those that the group's others sent, always added in the same order."""
    WARPS: gl.constexpr = gl.num_warps()
    box = ptr + (place.worker * SPLITS + place.split).to(gl.int64) * (PARTS * 16 * WARPS * 32)
    low = _receive_half(box, number % 2, place.split % PARTS, PARTS)
    high = _receive_half(box + 256, number % 2, place.split % PARTS, PARTS)
    product = gl.join(low, high).reshape([WARPS, 8, 4, 2, 2, 2, 2]).permute([0, 6, 1, 3, 4, 2, 5])
    return own + gl.convert_layout(product.reshape([16 * WARPS, 32]), ACC, assert_trivial=True)


@gluon.jit
def _receive_half(box, bit, part, PARTS: gl.constexpr):
    """Receives half of a tile's sequences and sums them over programs: `[warps, 32, 2, 2, 2]`."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.SliceLayout(3, _fragments_layout(WARPS, 2, 1))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    block = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    offset = (warp * 2048)[:, None, None] + (lane * 16)[None, :, None] + (block * 512)[None, None, :]
    words = gl.inline_asm_elementwise(
        _receive_assembly(PARTS, WARPS * 2048, 2), _receive_constraints(PARTS, 2),
        [box.to(gl.int64) + offset, offset * 0 + part, offset * 0 + bit],
        dtype=repeat(gl.int32, 4 * PARTS), is_pure=False, pack=2,
    )  # fmt: skip
    a, b, c, d = _total(words, 0, PARTS), _total(words, 1, PARTS), _total(words, 2, PARTS), _total(words, 3, PARTS)
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _total(words, first, PARTS: gl.constexpr):
    """Returns the sum over programs of word `first`, with the last bits cleared."""
    total = (words[first] & -2).to(gl.float32, bitcast=True)
    for part in gl.static_range(1, PARTS):
        total += (words[first + 4 * part] & -2).to(gl.float32, bitcast=True)
    return total


@gluon.constexpr_function
def _half_layout(warps):
    """Returns the layout of `[16 * warps, 4]` in which threads have the sequences that a wgmma result gives them."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16 * bit, 0] for bit in _bits(warps)], [], [16 * warps, 4])


@gluon.constexpr_function
def _bounds_layout(warps):
    """Returns the layout of `[16 * warps, 32]` in which threads have the sequences that a wgmma result gives them."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warp_bits = [[16 * bit, 0] for bit in _bits(warps)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [8, 0]], lanes, warp_bits, [], [16 * warps, 32])


@gluon.jit
def store_bounds(ptr, bound, split, ACC: gl.constexpr):
    """Stores a program's upper bounds, one per sequence, `[16 * warps]`, into its column of `[16 * warps, 32]`."""
    row = gl.arange(0, bound.shape[0], gl.SliceLayout(1, ACC))
    gl.store(ptr + row * 32 + split, bound)


@gluon.jit
def load_bounds(ptr, SPLITS: gl.constexpr, ACC: gl.constexpr):
    """Loads the upper bounds of all programs and returns the largest for each sequence."""
    LAYOUT: gl.constexpr = _bounds_layout(gl.num_warps())
    row = gl.arange(0, 16 * gl.num_warps(), gl.SliceLayout(1, LAYOUT))
    program = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    at = row[:, None] * 32 + program[None, :]
    mask = row[:, None] * 0 + program[None, :] < SPLITS
    bounds = gl.max(gl.load(ptr + at, mask=mask, other=0.0, cache_modifier=".cg"), axis=1)
    return gl.convert_layout(bounds, gl.SliceLayout(1, ACC), assert_trivial=True)


@gluon.jit
def exchange_bounds(bounds_ptr, flags_ptr, bound, number, place, SPLITS: gl.constexpr, ACC: gl.constexpr):
    """Exchanges the programs' upper bounds, one per sequence, and returns the largest ones, `[16 * warps]`."""
    ptr = box(bounds_ptr, number, place, bound.shape[0] * 32)
    store_bounds(ptr, bound, place.split, ACC)
    raise_flags(flags_ptr, place, number)
    wait_for_flags(flags_ptr, place, number, SPLITS)
    return load_bounds(ptr, SPLITS, ACC)
