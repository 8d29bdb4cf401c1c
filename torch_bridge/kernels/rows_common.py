"""What the kernels share whose products have sequences as rows: weights on chip, operands through L2 into registers.

A program has 32 units of every gate, a warp 16 sequences. What a warp reads of another program is what the same warp of
that program wrote, and in the order in which wgmma's result and its register operand give elements to threads: of a
sequence and 32 units a thread has eight, which lie side by side. So there is no shared memory on the way, and no
barrier: a warp writes, then raises its flag, which is the number of what it wrote; it waits for the same warp's flags
of all programs. Operands lie in two buffers, written in turn: a warp writes number n + 2 after it has read n + 1 of all
the others, who wrote it after they had read n. Only for cooperative launches.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from torch_bridge.kernels.gluon_common import barrier, inverse, scale_to_float16, to_operand
from torch_bridge.kernels.split_common import load_rows, opaque_zero, repeat

# Programs whose operands are one factor of a product.
TOGETHER = gl.constexpr(4)


@gluon.constexpr_function
def _bits(count):
    return [1 << bit for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _fragments_layout(warps, blocks, elements):
    """`[warps, 32, blocks, elements]`: of every block a thread has `elements` that lie side by side."""
    registers = [*([0, 0, 0, bit] for bit in _bits(elements)), *([0, 0, bit, 0] for bit in _bits(blocks))]
    lanes = [[0, bit, 0, 0] for bit in _bits(32)]
    warp_bits = [[bit, 0, 0, 0] for bit in _bits(warps)]
    return gl.DistributedLinearLayout(registers, lanes, warp_bits, [], [warps, 32, blocks, elements])


@gluon.jit
def _offsets(BLOCKS: gl.constexpr, ELEMENTS: gl.constexpr, WARP: gl.constexpr):
    """Where `[warps, 32, BLOCKS, ELEMENTS]` lie if warps are WARP apart, and their blocks."""
    LAYOUT: gl.constexpr = _fragments_layout(gl.num_warps(), BLOCKS, ELEMENTS)
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :, None]
    element = gl.arange(0, ELEMENTS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offset = (warp * WARP)[:, None, None, None] + (lane * ELEMENTS)[None, :, None, None]
    return offset + element[None, None, None, :], block


@gluon.jit
def store_operand_rows(ptr, x, scale, tile, TILES: gl.constexpr, SCALED: gl.constexpr):
    """Stores a tile `[16 * warps, 32]` as an operand, number `tile` of TILES that a warp has side by side."""
    WARPS: gl.constexpr = gl.num_warps()
    if SCALED:
        x = x * scale
    x = to_operand(x, ptr.dtype.element_ty).reshape([WARPS, 2, 8, 2, 2, 4, 2]).permute([0, 2, 5, 3, 4, 1, 6])
    x = gl.convert_layout(x.reshape([WARPS, 32, 2, 8]), _fragments_layout(WARPS, 2, 8), assert_trivial=True)
    offset, block = _offsets(2, 8, TILES * 512)
    gl.store(ptr + tile * 512 + (offset + block * 256), x)


@gluon.jit
def load_operand_rows(ptr, tile, TILES: gl.constexpr, OPERAND: gl.constexpr):
    """Loads TOGETHER tiles as the register operand of a product, `[16 * warps, 32 * TOGETHER]`."""
    WARPS: gl.constexpr = gl.num_warps()
    offset, block = _offsets(2 * TOGETHER, 8, TILES * 512)
    x = gl.load(ptr + tile * 512 + (offset + block * 256), cache_modifier=".cg")
    x = x.reshape([WARPS, 8, 4, 2 * TOGETHER, 2, 2, 2]).permute([0, 5, 1, 3, 4, 2, 6])
    return gl.convert_layout(x.reshape([16 * WARPS, 32 * TOGETHER]), OPERAND, assert_trivial=True)


@gluon.jit
def _lanes():
    """The threads: `[32 * warps]`."""
    return gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def raise_flags(flags_ptr, worker, split, number):
    """Every warp says that what it wrote is there."""
    thread = _lanes()
    address = flags_ptr.to(gl.int64) + (((worker * gl.num_warps() + thread // 32) * 32 + split) * 4).to(gl.int64)
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
def wait_for_flags(flags_ptr, worker, number, SPLITS: gl.constexpr):
    """Every warp waits until what the same warp of each program wrote is there."""
    thread = _lanes()
    address = flags_ptr.to(gl.int64) + ((worker * gl.num_warps() * 32 + thread) * 4).to(gl.int64)
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
def box(exchange_ptr, number, workers, worker, SIZE: gl.constexpr):
    """Where a worker's operands of this number lie."""
    return exchange_ptr + ((number % 2) * workers + worker).to(gl.int64) * SIZE


@gluon.jit
def send_state_rows(
    exchange_ptr, flags_ptr, h, scale, reset_ptr, reset, number, workers, worker, split,
    SPLITS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Sends the hidden state that a step starts from, which `reset` is of; returns its scale."""
    if reset_ptr is not None:
        h = gl.where(reset[:, None], 0.0, h)
        if SCALED:
            scale = gl.where(reset[:, None], 2.0**14, scale)
    share = box(exchange_ptr, number, workers, worker, h.shape[0] * SPLITS * 32)
    store_operand_rows(share, h, scale, split, SPLITS, SCALED)
    raise_flags(flags_ptr, worker, split, number)
    return scale


@gluon.constexpr_function
def parts(splits):
    """In how many parts a backward product is made: programs that each have so much of the gradients' length."""
    return next(count for count in (4, 2, 1) if splits % (count * TOGETHER.value) == 0)


@gluon.jit
def allocate_weights(GATES: gl.constexpr, SPLITS: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """A program's weights, of 32 * PARTS rows: the columns of TOGETHER programs at a time, gate after gate."""
    SHAPE: gl.constexpr = [32 * PARTS, 32 * TOGETHER]
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, DTYPE)
    return gl.allocate_shared_memory(DTYPE, [SPLITS // (PARTS * TOGETHER) * GATES, SHAPE[0], SHAPE[1]], SHARED)


@gluon.constexpr_function
def _every_warp_layout(warps):
    """`[32]`, an element a thread, in every warp."""
    return gl.DistributedLinearLayout([], [[bit] for bit in _bits(32)], [[0] for _ in _bits(warps)], [], [32])


@gluon.jit
def _largest(x):
    """The largest of `[32]`: `gl.max` over warps would keep a register from one call to the next."""
    slot = gl.allocate_shared_memory(gl.float32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]), x)
    barrier()
    return gl.max(slot.load(_every_warp_layout(gl.num_warps())), axis=0)


@gluon.jit
def fill_weights(weights, ptr, first_row, first_col, stride, gate_stride, H: gl.constexpr, GATES: gl.constexpr):
    """Brings a program's part of w_hh_t (GATES of them), or of w_hh, on chip.

    Returns what undoes their scale, and the largest sum of absolute weights that a row of it has over all gates.
    """
    PARTS: gl.constexpr = weights.shape[1] // 32
    COLS: gl.constexpr = weights.shape[2]
    SCALED: gl.constexpr = ptr.dtype.element_ty == gl.float32
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    count = weights.shape[0] + opaque_zero(first_row)  # known, it would be unrolled, and take all registers
    largest = gl.zeros([32, COLS], gl.float32, LOAD)
    row_largest = gl.zeros([32], gl.float32, gl.SliceLayout(1, LOAD))
    if SCALED:
        for part in gl.static_range(PARTS):
            total = gl.zeros([32, COLS], gl.float32, LOAD)
            for k in range(count):
                row, col = first_row + part * 32, first_col + k // GATES * COLS
                w = gl.abs(load_rows(ptr + k % GATES * gate_stride, row, col, stride, H, COLS, LOAD))
                largest = gl.maximum(largest, w)
                total += w
            row_largest = gl.maximum(row_largest, gl.sum(total, axis=1))
    scale = scale_to_float16(_largest(gl.max(largest, axis=1)), 14)
    for k in range(count):
        for part in gl.static_range(PARTS):
            row, col = first_row + part * 32, first_col + k // GATES * COLS
            w = load_rows(ptr + k % GATES * gate_stride, row, col, stride, H, COLS, LOAD)
            if SCALED:
                w = w * scale
            weights.index(k).slice(part * 32, 32).store(w.to(weights.dtype))
    fence_async_shared()
    barrier()
    return inverse(scale), _largest(row_largest)


@gluon.jit
def first_state_scale_rows(h0_ptr, zeros, seq, mask_q, H: gl.constexpr, SPLITS: gl.constexpr):
    """The scale of sequences' hidden states from the first ones, `[16 * warps, 1]`."""
    own = gl.arange(0, 32, gl.SliceLayout(0, zeros.type.layout))
    largest = zeros
    for part in range(SPLITS + opaque_zero(SPLITS)):
        unit = part * 32 + own
        mask = mask_q[:, None] & (unit < H)[None, :]
        h = gl.abs(gl.load(h0_ptr + seq[:, None] * H + unit[None, :], mask=mask, other=0.0).to(gl.float32))
        largest = gl.maximum(largest, h)
    return scale_to_float16(gl.maximum(gl.max(largest, axis=1), 1.0), 14)[:, None]


@gluon.jit
def locate_rows(item, tiles, T, B, Q, unit, ROWS: gl.constexpr, H: gl.constexpr, ACC: gl.constexpr):
    """Where a tile lies: masks of sequences and of states, the sequences, their first rows, their states.

    Of what is masked it is where a tile's first sequence lies.
    """
    q = (item % tiles) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    mask_q = q < Q
    mask = mask_q[:, None] & (unit < H)[None, :]
    q = gl.where(mask_q, q, (item % tiles) * ROWS)
    seq = (item // tiles).to(gl.int64) * Q + q
    return mask_q, mask, seq, (seq // B) * T * B + seq % B, seq[:, None] * H + unit[None, :]


@gluon.jit
def prefetch_rows(ptr, rows, first, COUNT: gl.constexpr, STRIDE: gl.constexpr, WIDTH: gl.constexpr):
    """Asks for elements of rows of WIDTH, the one at `first` and COUNT - 1 times STRIDE further on, to come to L2.

    COUNT is at most 4.

    What a step reads comes from memory while the step before runs: as soon as it were asked for into registers, loads
    of operands would wait for it.
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
    """The gradient of a step's output."""
    return gl.load(ptr + rows[:, None] * H + unit[None, :], mask=mask, other=0.0)


@gluon.jit
def multiply_states(weights, ptr, zeros, step, GATES: gl.constexpr):
    """The products of all programs' hidden states with a program's weights: a tuple by gate."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    CHUNKS: gl.constexpr = weights.shape[0] // GATES
    TILES: gl.constexpr = CHUNKS * TOGETHER
    first = opaque_zero(step)
    sums = ()
    for _ in gl.static_range(GATES):
        sums += (zeros,)  # type: ignore[assignment]
    operand = load_operand_rows(ptr, 0, TILES, OPERAND)
    for chunk in gl.static_range(CHUNKS):
        this = operand
        if chunk + 1 < CHUNKS:
            operand = load_operand_rows(ptr, (chunk + 1) * TOGETHER, TILES, OPERAND)
        products = ()
        for gate in gl.static_range(GATES):
            w = weights.index(first + chunk * GATES + gate).permute([1, 0])
            product = warpgroup_mma(this, w, sums[gate], use_acc=chunk > 0, is_async=True)
            products += (product,)  # type: ignore[assignment]
        sums = warpgroup_mma_wait(num_outstanding=0, deps=products)
    return sums


@gluon.jit
def multiply_gradients(weights, ptr, first_tile, step, TILES: gl.constexpr, GATES: gl.constexpr):
    """The product `[16 * warps, 32 * PARTS]` of all gates' gradients, from a tile on, with the weights."""
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
            # after a gate the next one of the same programs, in the order of the weights
            chunk, gate = (factor + 1) // GATES, (factor + 1) % GATES
            tile = first_tile + gate * (TILES // GATES) + chunk * TOGETHER
            operand = load_operand_rows(ptr, tile, TILES, OPERAND)
        w = weights.index(first + factor).permute([1, 0])
        product = warpgroup_mma(this, w, product, use_acc=factor > 0, is_async=True)
        product = warpgroup_mma_wait(num_outstanding=0, deps=[product])
    return product


@gluon.jit
def send_products(ptr, product, number, worker, split, SPLITS: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr):
    """Sends each other program of a group its tile of a product, but for the last bit; returns this program's own."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    part = split % PARTS
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
    box = ptr + ((worker * SPLITS + split - part).to(gl.int64) * PARTS + part) * (ROWS * 32)
    gl.store(box + offset, x, mask=block // 4 + offset * 0 != part)
    return own


@gluon.constexpr_function
def _receive_assembly(count, stride, pack):
    """Reads four words at `count` places, `stride` bytes apart, from each of `pack` addresses on, until all are new.

    Not at the place that is this program's own.
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
def receive_product(ptr, own, number, worker, split, SPLITS: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr):
    """The sum of this program's own tile and those that a group's others sent to it, always in the same order."""
    WARPS: gl.constexpr = gl.num_warps()
    box = ptr + (worker * SPLITS + split).to(gl.int64) * (PARTS * 16 * WARPS * 32)
    low = _receive_half(box, number % 2, split % PARTS, PARTS)
    high = _receive_half(box + 256, number % 2, split % PARTS, PARTS)
    product = gl.join(low, high).reshape([WARPS, 8, 4, 2, 2, 2, 2]).permute([0, 6, 1, 3, 4, 2, 5])
    return own + gl.convert_layout(product.reshape([16 * WARPS, 32]), ACC, assert_trivial=True)


@gluon.jit
def _receive_half(box, bit, part, PARTS: gl.constexpr):
    """Half of the sequences of a tile, summed over programs: `[warps, 32, 2, 2, 2]`."""
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
    """The sum over programs."""
    total = (words[first] & -2).to(gl.float32, bitcast=True)
    for part in gl.static_range(1, PARTS):
        total += (words[first + 4 * part] & -2).to(gl.float32, bitcast=True)
    return total


@gluon.constexpr_function
def _half_layout(warps):
    """`[16 * warps, 4]`, in the threads that have the sequence in a product's result."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16 * bit, 0] for bit in _bits(warps)], [], [16 * warps, 4])


@gluon.constexpr_function
def _bounds_layout(warps):
    """`[16 * warps, 32]`, in the threads that have the sequence in a product's result."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warp_bits = [[16 * bit, 0] for bit in _bits(warps)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [8, 0]], lanes, warp_bits, [], [16 * warps, 32])


@gluon.jit
def store_bounds(ptr, bound, split, ACC: gl.constexpr):
    """Stores a program's bounds of sequences, `[16 * warps]`, into its column of `[16 * warps, 32]`."""
    row = gl.arange(0, bound.shape[0], gl.SliceLayout(1, ACC))
    gl.store(ptr + row * 32 + split, bound)


@gluon.jit
def load_bounds(ptr, SPLITS: gl.constexpr, ACC: gl.constexpr):
    """The largest of all programs' bounds."""
    LAYOUT: gl.constexpr = _bounds_layout(gl.num_warps())
    row = gl.arange(0, 16 * gl.num_warps(), gl.SliceLayout(1, LAYOUT))
    program = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    at = row[:, None] * 32 + program[None, :]
    mask = row[:, None] * 0 + program[None, :] < SPLITS
    bounds = gl.max(gl.load(ptr + at, mask=mask, other=0.0, cache_modifier=".cg"), axis=1)
    return gl.convert_layout(bounds, gl.SliceLayout(1, ACC), assert_trivial=True)


@gluon.jit
def exchange_bounds(
    bounds_ptr, flags_ptr, bound, number, workers, worker, split, SPLITS: gl.constexpr, ACC: gl.constexpr
):  # fmt: skip
    """The largest of all programs' bounds of sequences, `[16 * warps]`."""
    ptr = box(bounds_ptr, number, workers, worker, bound.shape[0] * 32)
    store_bounds(ptr, bound, split, ACC)
    raise_flags(flags_ptr, worker, split, number)
    wait_for_flags(flags_ptr, worker, number, SPLITS)
    return load_bounds(ptr, SPLITS, ACC)
