"""How programs of one launch that share a tile's units exchange 32-bit words: with no barrier, the word is the signal.

A word travels with its number in one 64-bit store: who waits for number n reads the word until n comes with it. One
trip through L2 in place of the three that a barrier takes (write, count, read). Words lie in two buffers, written in
turn: a program sends number n + 2 after it has received n + 1 from all the others, who sent it after they had received
n. The memory starts at zero and numbers at one. All programs must run at once: only for cooperative launches.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from torch_bridge.kernels.common_sm90 import inverse, scale_to_float16, to_operand


@gluon.constexpr_function
def _receive_assembly(count, stride, pack):
    """Reads `count` words, `stride` bytes apart, at each of `pack` addresses until all have their number."""
    n, loads, tests = count * pack, [], []
    for element in range(pack):
        for word in range(count):
            k = word * pack + element  # outputs lie word by word
            loads.append(f"ld.relaxed.gpu.global.b64 w{k}, [${n + element} + {word * stride}];")
            loads.append(f"mov.b64 {{${k}, n{k}}}, w{k};")
            tests.append(f"setp.ne.or.b32 p, n{k}, ${n + pack + element}, p;")
    order = [line for line in loads if line.startswith("ld")] + [line for line in loads if line.startswith("mov")]
    return "\n".join(
        ["{", f".reg .b64 w<{n}>;", f".reg .b32 n<{n}>;", ".reg .pred p;", "again:", *order]
        + ["setp.ne.b32 p, 0, 0;", *tests, "@p bra again;", "}"]
    )


@gluon.constexpr_function
def _receive_constraints(count, pack):
    return ",".join(["=&r"] * (count * pack) + ["l"] * pack + ["r"] * pack)


@gluon.constexpr_function
def _repeat(x, count):
    return (x,) * count


@gluon.jit
def receive(address, number, COUNT: gl.constexpr, STRIDE: gl.constexpr, PACK: gl.constexpr):
    """Waits for COUNT int32 words, STRIDE bytes apart, at each of the addresses (int64): a tuple of tensors.

    PACK addresses of a thread are waited for at once; `number` has the shape of `address`.
    """
    return gl.inline_asm_elementwise(
        _receive_assembly(COUNT, STRIDE, PACK), _receive_constraints(COUNT, PACK), [address, number],
        dtype=_repeat(gl.int32, COUNT), is_pure=False, pack=PACK,
    )  # fmt: skip


@gluon.jit
def send(address, word, number, live):
    """Sends 32-bit words with their number, where `live` is not 0."""
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


@gluon.constexpr_function
def at_once(count, elements):
    """How many of a thread's `elements` addresses to wait for at once, with `count` words at each: 16 words or so."""
    pack = 1
    while pack < elements and 2 * pack * count <= 16:
        pack *= 2
    return pack


@gluon.jit
def _load_square(ptr, first_row, first_col, stride, H: gl.constexpr, LOAD: gl.constexpr):
    """64 rows and columns of a matrix of at least H each."""
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, LOAD))
    cols = first_col + gl.arange(0, 64, gl.SliceLayout(0, LOAD))
    mask = (rows < H)[:, None] & (cols < H)[None, :]
    return gl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@gluon.jit
def load_share(
    share, ptr, split, stride, gate_stride,
    H: gl.constexpr, GATES: gl.constexpr, SPLITS: gl.constexpr, OWN_ROWS: gl.constexpr,
):  # fmt: skip
    """Brings a program's weights into `share`, `[SPLITS * GATES, 64, 64]`; returns what undoes their scale.

    They are the rows of its own units (OWN_ROWS), or the columns.
    """
    DTYPE: gl.constexpr = share.dtype
    SCALED: gl.constexpr = ptr.dtype.element_ty == gl.float32
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    scale = 1.0
    if SCALED:
        largest = gl.zeros([64, 64], gl.float32, LOAD)
        for k in range(SPLITS * GATES):
            part, gate = k // GATES, k % GATES
            row, col = (split, part) if OWN_ROWS else (part, split)
            w = _load_square(ptr + gate * gate_stride, row * 64, col * 64, stride, H, LOAD)
            largest = gl.maximum(largest, gl.abs(w))
        scale = scale_to_float16(gl.max(gl.max(largest, axis=1), axis=0), 14)
    for k in range(SPLITS * GATES):
        row, col = (split, k // GATES) if OWN_ROWS else (k // GATES, split)
        w = _load_square(ptr + (k % GATES) * gate_stride, row * 64, col * 64, stride, H, LOAD)
        if SCALED:
            w = w * scale
        share.index(k).store(w.to(DTYPE))
    return inverse(scale)


@gluon.jit
def state_scale(h0_ptr, seq, own, mask_q, H: gl.constexpr, SPLITS: gl.constexpr):
    """The scale of a sequence's hidden states, which are at most 1 or the largest of its first state."""
    largest = gl.zeros_like(own[:, None] * mask_q[None, :].to(gl.int32)).to(gl.float32)
    for part in range(SPLITS):
        unit = part * 64 + own
        mask = (unit < H)[:, None] & mask_q[None, :]
        h = gl.abs(gl.load(h0_ptr + seq[None, :] * H + unit[:, None], mask=mask, other=0.0).to(gl.float32))
        largest = gl.maximum(largest, gl.where(h < float("inf"), h, 0.0))
    return scale_to_float16(gl.maximum(gl.max(largest, axis=0), 1.0), 14)


@gluon.jit
def _mailbox(exchange_ptr, number, workers, worker, box, BOXES: gl.constexpr, WORDS: gl.constexpr):
    """Address of one of a worker's BOXES of WORDS words."""
    first = (((number % 2) * workers + worker) * BOXES + box).to(gl.int64) * (WORDS * 8)
    return exchange_ptr.to(gl.int64) + first


@gluon.jit
def send_tile(exchange_ptr, x, number, live, workers, worker, split, DTYPE: gl.constexpr, SPLITS: gl.constexpr):
    """Sends a program's tile `[64, batch]` of operands to all: two sequences of a unit in a word."""
    BATCH: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    x = to_operand(x, DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    unit = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    batch = gl.arange(0, BATCH, gl.SliceLayout(0, LAYOUT))
    offset = (batch // 2)[None, :] * 64 + unit[:, None]
    low, high = x.reshape([64, BATCH // 2, 2]).split()
    offset, _ = offset.reshape([64, BATCH // 2, 2]).split()
    address = _mailbox(exchange_ptr, number, workers, worker, split, SPLITS, BATCH * 32) + offset * 8
    send(address, low | (high << 16), offset * 0 + number, offset * 0 + live)


@gluon.jit
def receive_tile(operands, exchange_ptr, number, workers, worker, DTYPE: gl.constexpr, SPLITS: gl.constexpr):
    """Receives the tiles of all programs into `operands`, `[SPLITS, batch, 64]`."""
    BATCH: gl.constexpr = operands.shape[1]
    LOAD: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    batch = gl.arange(0, BATCH // 2, gl.SliceLayout(1, LOAD))
    unit = gl.arange(0, 64, gl.SliceLayout(0, LOAD))
    offset = batch[:, None] * 64 + unit[None, :]
    address = _mailbox(exchange_ptr, number, workers, worker, 0, SPLITS, BATCH * 32) + offset * 8
    PACK: gl.constexpr = at_once(SPLITS, BATCH // 4)
    words = receive(address, offset * 0 + number, SPLITS, BATCH * 32 * 8, PACK)
    for part in gl.static_range(SPLITS):
        low = words[part].to(gl.int16).to(DTYPE, bitcast=True)
        high = (words[part] >> 16).to(gl.int16).to(DTYPE, bitcast=True)
        tile = gl.join(low, high).permute([0, 2, 1]).reshape([BATCH, 64])
        operands.index(part).store(tile)


@gluon.jit
def send_part(exchange_ptr, x, number, workers, worker, to, split, SPLITS: gl.constexpr):
    """Sends a tile `[64, batch]` of float32 to one program."""
    BATCH: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    unit = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    batch = gl.arange(0, BATCH, gl.SliceLayout(0, LAYOUT))
    offset = batch[None, :] * 64 + unit[:, None]
    box = _mailbox(exchange_ptr, number, workers, worker, to * SPLITS + split, SPLITS * SPLITS, BATCH * 64)
    send(box + offset * 8, x.to(gl.int32, bitcast=True), offset * 0 + number, offset * 0 + 1)


@gluon.jit
def receive_sum(exchange_ptr, zeros, number, workers, worker, split, SPLITS: gl.constexpr):
    """The sum of the tiles that all programs sent to this one, always in the same order."""
    BATCH: gl.constexpr = zeros.shape[1]
    LAYOUT: gl.constexpr = zeros.type.layout
    unit = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    batch = gl.arange(0, BATCH, gl.SliceLayout(0, LAYOUT))
    offset = batch[None, :] * 64 + unit[:, None]
    box = _mailbox(exchange_ptr, number, workers, worker, split * SPLITS, SPLITS * SPLITS, BATCH * 64)
    PACK: gl.constexpr = at_once(SPLITS, BATCH // 2)
    words = receive(box + offset * 8, offset * 0 + number, SPLITS, BATCH * 64 * 8, PACK)
    total = zeros
    for part in gl.static_range(SPLITS):
        total += words[part].to(gl.float32, bitcast=True)
    return total
