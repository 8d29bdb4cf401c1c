"""Exchange of data between programs of one launch that share a tile's units, and products by wgmma of what they get.

There is no barrier, because each word says itself whether it has arrived. Every message has a number, counted from one,
and memory starts at zero. A word of 32 bits and its number are stored together in 64 bits, and a program that waits for
message n polls the word until its number is n. The word takes one trip through L2, instead of the three of a barrier
(write, count, read). In a float32 word the last bit is enough, which changes each time the buffer is used (`new_bit`).
Words are double-buffered: a program sends message n + 2 after it has received n + 1 from all the others, who sent it
after they had received n, so none of them still reads the buffer. Programs that exchange words must run at once, so
the kernels require a cooperative launch, or a cluster (`cluster_common`), where a word goes to the receiver's shared
memory.

A worker is the SPLITS programs that run one tile at a time. An item is a tile of one model. A box is the memory for
what one program sends to one other, or to all, in one message.

`split.py` uses most functions, and its programs have 64 units. `split_registers.py` uses those that send and receive
words.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from torch_bridge.kernels.gluon_common import (
    barrier,
    inverse,
    locate_columns,
    scale_after_zeros,
    scale_from_magnitudes,
    scale_to_float16,
    to_operand,
)


class Place(NamedTuple):
    """The place of a program among those of a launch."""

    workers: Any  # number of workers
    worker: Any  # index of the program's worker
    split: Any  # index of the program in its worker


@gluon.constexpr_function
def _receive_assembly(count, stride, pack, numbered, together, memory):
    """Returns assembly that polls `count` words at each of `pack` addresses until all have arrived.

    The words of an address are `stride` bytes apart. If `together`, the lanes of a warp leave the loop together. The
    operands are the n = `count * pack` words, `pack` addresses, and `pack` numbers to wait for. `memory` is the scope
    and the space of the addresses.
    """
    n, read, unpack, test = count * pack, [], [], []
    for element in range(pack):
        address, number = n + element, n + pack + element
        for word in range(count):
            k = word * pack + element  # the order of outputs: by word, then by address
            if numbered:
                read.append(f"ld.relaxed.{memory}.b64 w{k}, [${address} + {word * stride}];")
                unpack.append(f"mov.b64 {{${k}, n{k}}}, w{k};")
            else:
                read.append(f"ld.relaxed.{memory}.b32 ${k}, [${address} + {word * stride}];")
                unpack.append(f"and.b32 n{k}, ${k}, 1;")
            test.append(f"setp.ne.or.b32 p, n{k}, ${number}, p;")
    declared = [f".reg .b64 w<{n}>;", f".reg .b32 n<{n}>;", ".reg .pred p;"]
    vote = ["vote.sync.any.pred p, p, 0xffffffff;"] if together else []
    test = ["setp.ne.b32 p, 0, 0;", *test, *vote]
    return "\n".join(["{", *declared, "again:", *read, *unpack, *test, "@p bra again;", "}"])


@gluon.constexpr_function
def _receive_constraints(count, pack, address):
    """Returns the constraints of the operands of `_receive_assembly`, given that of an address.

    The words are written before the addresses are read for the last time ("&"): they need registers of their own.
    """
    return ",".join(["=&r"] * (count * pack) + [address] * pack + ["r"] * pack)


@gluon.constexpr_function
def repeat(x, count):
    """Returns a tuple of `count` times `x`."""
    return (x,) * count


@gluon.constexpr_function
def _addresses_at_once(count, elements, numbered):
    """Returns how many of a thread's `elements` addresses to poll at once, so that their words fit in registers.

    Each address has `count` words. A word with a number takes two registers.
    """
    limit = (16 if count * elements <= 16 else 8) if numbered else 32
    pack = 1
    while pack < elements and 2 * pack * count <= limit:
        pack *= 2
    return pack


@gluon.jit
def receive(
    address, number, COUNT: gl.constexpr, STRIDE: gl.constexpr, ELEMENTS: gl.constexpr, NUMBERED: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """Waits for COUNT words, STRIDE bytes apart, at each address, and returns them as a tuple of tensors.

    A thread has ELEMENTS addresses. `number`, in the shape of `address`, is the number to wait for or, if not NUMBERED,
    the last bit of new words. If TOGETHER, the lanes of a warp return together. Otherwise each returns by itself, and
    the lanes then run in parts what needs all of them, such as a shuffle. TOGETHER takes registers; code without such
    an operation does not need it. Addresses of 32 bits are in the program's own shared memory.
    """
    PACK: gl.constexpr = _addresses_at_once(COUNT, ELEMENTS, NUMBERED)
    IN_CLUSTER: gl.constexpr = address.dtype == gl.int32
    MEMORY: gl.constexpr = "cluster.shared::cta" if IN_CLUSTER else "gpu.global"
    return gl.inline_asm_elementwise(
        _receive_assembly(COUNT, STRIDE, PACK, NUMBERED, TOGETHER, MEMORY),
        _receive_constraints(COUNT, PACK, "r" if IN_CLUSTER else "l"),
        [address, number], dtype=repeat(gl.int32, COUNT), is_pure=False, pack=PACK,
    )  # fmt: skip


@gluon.jit
def send_numbered(address, word, number, live):
    """Sends 32-bit words with their number, where `live` is not 0; the number is in the upper half of 64 bits."""
    gl.inline_asm_elementwise(
        """{
        .reg .b64 w;
        .reg .pred p;
        setp.ne.b32 p, $4, 0;
        mov.b64 w, {$2, $3};
        @p st.relaxed.gpu.global.b64 [$1], w;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r", [address, word, number, live], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send(address, word):
    """Sends 32-bit words as they are."""
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
        "=r,l,r", [address, word], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_where(address, word, live):
    """Sends 32-bit words as they are, where `live` is not 0."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $3, 0;
        @p st.relaxed.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r", [address, word, live], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def opaque_zero(x):
    """Returns a zero that the compiler does not know to be zero.

    A value that is computed from it is not hoisted out of a loop, so it takes no registers in between.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_rows(ptr, row0, col0, stride, H: gl.constexpr, COLS: gl.constexpr, LOAD: gl.constexpr):
    """Loads 32 rows and COLS columns of a matrix, with zeros past its first H rows and columns."""
    rows = row0 + gl.arange(0, 32, gl.SliceLayout(1, LOAD))
    cols = col0 + gl.arange(0, COLS, gl.SliceLayout(0, LOAD))
    mask = (rows < H)[:, None] & (cols < H)[None, :]
    return gl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@gluon.jit
def load_weight_shard(
    shard, ptr, split, stride, gate_stride,
    H: gl.constexpr, GATES: gl.constexpr, SPLITS: gl.constexpr, OWN_ROWS: gl.constexpr,
):  # fmt: skip
    """Loads a program's weights into `shard`, `[SPLITS * GATES, 64, 64]`; returns the factor that undoes their scale.

    The weights are the rows of the program's own units (OWN_ROWS), or else the columns.
    """
    DTYPE: gl.constexpr = shard.dtype
    SCALED: gl.constexpr = ptr.dtype.element_ty == gl.float32
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    scale = 1.0
    count = SPLITS * GATES + opaque_zero(split)  # opaque: the loops would be unrolled and take all registers
    if SCALED:
        largest = gl.zeros([32, 64], gl.float32, LOAD)
        for k in range(2 * count):
            part, gate = k // 2 // GATES, k // 2 % GATES
            row, col = (split, part) if OWN_ROWS else (part, split)
            w = load_rows(ptr + gate * gate_stride, row * 64 + k % 2 * 32, col * 64, stride, H, 64, LOAD)
            largest = gl.maximum(largest, gl.abs(w))
        scale = scale_to_float16(gl.max(gl.max(largest, axis=1), axis=0), 14)
    for k in range(count):
        row, col = (split, k // GATES) if OWN_ROWS else (k // GATES, split)
        for half in gl.static_range(2):
            w = load_rows(ptr + (k % GATES) * gate_stride, row * 64 + half * 32, col * 64, stride, H, 64, LOAD)
            if SCALED:
                w = w * scale
            shard.index(k).slice(half * 32, 32).store(w.to(DTYPE))
    return inverse(scale)


@gluon.jit
def first_state_scale(h0_ptr, zeros, seq, own, mask_q, H: gl.constexpr, SPLITS: gl.constexpr):
    """Returns the scale of each sequence's first state (`scale_from_magnitudes`), over the units of all programs.

    `own` numbers the units of one program from 0 on.
    """
    largest = zeros
    for part in range(SPLITS + opaque_zero(SPLITS)):
        unit = part * own.shape[0] + own
        mask = (unit < H)[:, None] & mask_q[None, :]
        h = gl.abs(gl.load(h0_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32))
        largest = gl.maximum(largest, h)
    return scale_from_magnitudes(largest)


@gluon.jit
def box_address(exchange, number, place, box, BOXES: gl.constexpr, BYTES: gl.constexpr):
    """Returns the address of box `box`, of BOXES of BYTES each, in the buffer that message `number` uses.

    The boxes are a worker's in global memory or, if `exchange` is the address of a mailbox (`cluster_common`), there.
    """
    if exchange.dtype == gl.int32:
        return exchange + ((number % 2) * BOXES + box) * BYTES
    else:
        nth = ((number % 2) * place.workers + place.worker) * BOXES + box
        return exchange.to(gl.int64) + nth.to(gl.int64) * BYTES


@gluon.jit
def _send_tile(exchange_ptr, x, number, live, place, DTYPE: gl.constexpr, SPLITS: gl.constexpr):
    """Sends a program's tile `[64, batch]` of operands to all programs; a word holds two sequences of a unit.

    If `live` is 0, nothing is sent. A box has 8 bytes for each word and its number: `BATCH / 2 * 64 * 8 = BATCH * 256`.
    """
    BATCH: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    x = to_operand(x, DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    unit = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    batch = gl.arange(0, BATCH, gl.SliceLayout(0, LAYOUT))
    offset = (batch // 2)[None, :] * 64 + unit[:, None]
    low, high = x.reshape([64, BATCH // 2, 2]).split()
    offset, _ = offset.reshape([64, BATCH // 2, 2]).split()
    address = box_address(exchange_ptr, number, place, place.split, SPLITS, BATCH * 256) + offset * 8
    send_numbered(address, low | (high << 16), offset * 0 + number, offset * 0 + live)


@gluon.jit
def send_state(
    exchange_ptr, h, scale, reset_ptr, reset, number, live, place, SCALED: gl.constexpr, DTYPE: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Sends the hidden state before a step, with the resets of that step applied, and returns its scale.

    If `live` is 0, nothing is sent.
    """
    if reset_ptr is not None:
        h = gl.where(reset[None, :], 0.0, h)
        if SCALED:
            scale = scale_after_zeros(scale, reset)
    if SCALED:
        h = h * scale
    _send_tile(exchange_ptr, h, number, live, place, DTYPE, SPLITS)
    return scale


@gluon.jit
def receive_tile(operands, exchange_ptr, number, place, DTYPE: gl.constexpr, SPLITS: gl.constexpr):
    """Receives what `_send_tile` of all programs sent into `operands`, SPLITS buffers of `[1, batch, 64]`."""
    BATCH: gl.constexpr = operands[0].shape[1]
    LOAD: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    batch = gl.arange(0, BATCH // 2, gl.SliceLayout(1, LOAD))
    unit = gl.arange(0, 64, gl.SliceLayout(0, LOAD))
    offset = batch[:, None] * 64 + unit[None, :]
    address = box_address(exchange_ptr, number, place, 0, SPLITS, BATCH * 256) + offset * 8
    words = receive(
        address, offset * 0 + number, SPLITS, BATCH * 256, BATCH // gl.num_warps(), NUMBERED=True, TOGETHER=False
    )  # fmt: skip
    for part in gl.static_range(SPLITS):
        low = words[part].to(gl.int16).to(DTYPE, bitcast=True)
        high = (words[part] >> 16).to(gl.int16).to(DTYPE, bitcast=True)
        tile = gl.join(low, high).permute([0, 2, 1]).reshape([BATCH, 64])
        operands[part].index(0).store(tile)


@gluon.jit
def new_bit(number):
    """Returns the last bit of the words of message `number`.

    It differs from that of message number - 2, whose words were in the same buffer before.
    """
    return (number + 1) // 2 % 2


@gluon.jit
def to_word(x, number):
    """Returns float32 elements as words of 32 bits, whose last bit is replaced by `new_bit`."""
    return (x.to(gl.int32, bitcast=True) & -2) | new_bit(number)


@gluon.jit
def add_words(words):
    """Returns the sum of float32 elements, given as a tuple of words. Their last bits are cleared: zero stays zero."""
    total = (words[0] & -2).to(gl.float32, bitcast=True)
    for k in gl.static_range(1, len(words)):
        total += (words[k] & -2).to(gl.float32, bitcast=True)
    return total


@gluon.jit
def send_partial_sums(exchange_ptr, parts, unscale, number, place, SPLITS: gl.constexpr, SCALED: gl.constexpr):
    """Sends each program its float32 tile `[64, batch]`; the last bit of each element is replaced by `new_bit`.

    A box has 4 bytes for each element: `64 * BATCH * 4 = BATCH * 256`.
    """
    BATCH: gl.constexpr = parts[0].shape[1]
    LAYOUT: gl.constexpr = parts[0].type.layout
    unit = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    batch = gl.arange(0, BATCH, gl.SliceLayout(0, LAYOUT))
    offset = batch[None, :] * 64 + unit[:, None]
    for to in gl.static_range(SPLITS):
        part = parts[to]
        if SCALED:
            part = part * unscale
        box = box_address(exchange_ptr, number, place, to * SPLITS + place.split, SPLITS * SPLITS, BATCH * 256)
        send(box + offset * 4, to_word(part, number))


@gluon.jit
def receive_sum(exchange_ptr, zeros, number, place, SPLITS: gl.constexpr):
    """Returns the sum of the tiles that all programs sent to this one, always added in the same order."""
    BATCH: gl.constexpr = zeros.shape[1]
    LAYOUT: gl.constexpr = zeros.type.layout
    unit = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    batch = gl.arange(0, BATCH, gl.SliceLayout(0, LAYOUT))
    offset = batch[None, :] * 64 + unit[:, None]
    box = box_address(exchange_ptr, number, place, place.split * SPLITS, SPLITS * SPLITS, BATCH * 256)
    bit = offset * 0 + new_bit(number)
    words = receive(
        box + offset * 4, bit, SPLITS, BATCH * 256, 2 * BATCH // gl.num_warps(), NUMBERED=False, TOGETHER=False
    )  # fmt: skip
    total = zeros
    for part in gl.static_range(SPLITS):
        total += (words[part] & -2).to(gl.float32, bitcast=True)  # without the last bit, so that zero stays zero
    return total


@gluon.jit
def locate(item, tiles, sizes, reset_ptr, unit, BLOCK_B: gl.constexpr, H: gl.constexpr, REVERSE: gl.constexpr):
    """Locates the tile of an item, whose units are `unit`."""
    q = (item % tiles) * BLOCK_B + gl.arange(0, BLOCK_B, gl.SliceLayout(0, unit.type.layout.parent))
    return locate_columns((item // tiles).to(gl.int64), q, None, sizes, reset_ptr, unit, H, REVERSE)


@gluon.jit
def allocate_weight_shard(GATES: gl.constexpr, SPLITS: gl.constexpr, DTYPE: gl.constexpr):
    """Allocates the shared memory that `load_weight_shard` fills."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [SPLITS * GATES, 64, 64], SHARED)


@gluon.jit
def allocate_operands(COUNT: gl.constexpr, BATCH: gl.constexpr, DTYPE: gl.constexpr):
    """Allocates COUNT buffers `[1, BATCH, 64]`, each as an allocation of its own.

    In one allocation with an index, the compiler could not tell the buffers apart, and would add barriers.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BATCH, 64], DTYPE)
    operands = ()
    for _ in gl.static_range(COUNT):
        operands += (gl.allocate_shared_memory(DTYPE, [1, BATCH, 64], SHARED),)
    return operands


@gluon.jit
def store_operand(operand, x, scale, SCALED: gl.constexpr):
    """Stores a tile `[64, batch]` to shared memory as an operand."""
    if SCALED:
        x = x * scale
    operand.index(0).permute([1, 0]).store(to_operand(x, operand.dtype))


@gluon.jit
def multiply_gates(shard, operands, zeros, step, GATES: gl.constexpr, SPLITS: gl.constexpr):
    """Multiplies a program's weights by the operands of all programs; returns a tuple with a product per gate."""
    zero = opaque_zero(step)
    fence_async_shared()
    barrier()
    products = ()
    for _ in gl.static_range(GATES):
        products += (zeros,)
    for part in gl.static_range(SPLITS):
        operand, sums = operands[part].index(zero).permute([1, 0]), ()
        for gate in gl.static_range(GATES):
            weights = shard.index(zero + part * GATES + gate)
            product = warpgroup_mma(weights, operand, products[gate], use_acc=part > 0, is_async=True)
            sums += (product,)
        products = sums
    return warpgroup_mma_wait(num_outstanding=0, deps=products)


@gluon.jit
def multiply_parts(shard, operands, zeros, step, GATES: gl.constexpr, SPLITS: gl.constexpr):
    """Multiplies a program's weights by the operands of all gates.

    Returns a tuple with one partial sum per program, for the units of that program.
    """
    zero = opaque_zero(step)
    fence_async_shared()
    barrier()
    parts = ()
    for part in gl.static_range(SPLITS):
        product = zeros
        for gate in gl.static_range(GATES):
            operand = operands[gate].index(zero).permute([1, 0])
            weights = shard.index(zero + part * GATES + gate)
            product = warpgroup_mma(weights, operand, product, use_acc=gate > 0, is_async=True)
        parts += (product,)
    return warpgroup_mma_wait(num_outstanding=0, deps=parts)
