"""Time loop in Gluon: SPLITS programs of BLOCK_H units each run a tile of sequences together, weights in registers.

The kernels compute what those of `streamed.py` do with SPLITS > 1, for compute capability 8.0 and newer. A worker is a
group of SPLITS programs. It runs its items, which are tiles of a model, one after the other. A program keeps the
weights of its own units in registers, in 16 bits, and exchanges data with the others as `split_common` explains. A
launch without the array `exchange` has clusters of SPLITS programs, and exchanges as `cluster_common` explains.

Forward, a program receives the hidden state of all units and multiplies it by the rows of its own units. Its warps
share the units of the state: each group of warps multiplies its part of them, and the products of the groups are added
through shared memory. Backward, a program multiplies the gate gradients of its own units by its weights, which are
columns, and sends to every program the part of the gradient that belongs to that program's units. The gate gradients,
and the scale of their float16 operands, are not exchanged.

With NORM_WIDTH > 0, the gates see a norm, as `streamed.py` explains. Forward, its sums over units are those of the
received states, which are rounded as operands of the product; the saved normalized state is that of the unrounded
state. Backward, each program sends the sum over its own units to all programs.

A thread computes two adjacent units of a sequence, and a warp every eighth sequence. With fewer than 64 units, several
lanes compute the same. BLOCK_K is the number of units of all programs, rounded up to a power of two.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_bridge.kernels import arrays, names
from torch_bridge.kernels.common import (
    RESET_FIXED,
    RESET_STEPPED,
    load_biases,
    load_reset_value,
    normalize,
    operands_of,
    rounded_product,
    scaled,
    step_time,
    subtract_mean,
    with_norm_grad,
)
from torch_bridge.kernels.gluon_common import (
    add_inputs,
    backward_rows,
    barrier,
    fixed_reset_states,
    forward_rows,
    gradients_before,
    has_last_step,
    inverse,
    is_first_step,
    is_last_step,
    largest_magnitude,
    load_inputs,
    load_saved,
    load_states,
    load_statistics,
    normalized_state,
    pack_residuals,
    reset_gradients,
    runs,
    scale_of_norm,
    scale_to_float16,
    scaled_reset_states,
    select_states,
    step_gradients,
    store_residuals,
    store_states,
    store_totals,
    to_operand,
    unpack_residuals,
)
from torch_bridge.kernels.loops.cluster_common import (
    close_mailbox,
    columns_of,
    has_column,
    in_pairs,
    open_mailbox,
    send_numbered_to,
    send_pairs_to,
    send_to_all,
)
from torch_bridge.kernels.loops.split_common import (
    Place,
    add_words,
    box_address,
    first_state_scale,
    locate,
    new_bit,
    opaque_zero,
    receive,
    send,
    send_numbered,
    send_where,
    to_word,
)


@gluon.constexpr_function
def _parts_layout(block_h, warps):
    """Returns the layout of the terms of a sum, `[terms, units, sequences]`.

    A thread has two adjacent units of a sequence. The lanes that are left over share the terms.
    """
    lanes = block_h // 2
    return gl.BlockedLayout([1, 2, 1], [32 // lanes, lanes, 1], [1, 1, warps], [1, 0, 2])


@gluon.constexpr_function
def _forward_layout(groups, warps):
    """Returns the layout of a batched product: `groups` of warps multiply a part of the units each."""
    return gl.NVMMADistributedLayout([2, 0], [groups, warps // groups, 1], [1, 16, 8])


@gluon.constexpr_function
def _operand_layout(block_h):
    """Returns the layout in shared memory of 16-bit rows of `block_h` elements, without conflicts between banks."""
    return gl.SwizzledSharedLayout(8, 64 // block_h, block_h // 8, [1, 0])


@gluon.constexpr_function
def _tile_layout(columns, warps):
    """Returns the layout in which a tile of weights of so many columns is read."""
    lanes = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _load_tile(
    ptr, gate_stride, gate, k, split, stride, H: gl.constexpr, BLOCK_H: gl.constexpr, OWN_ROWS: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """Loads tile k, `[ROWS, COLS]`, of a program's weights of a gate, with zeros past the first H rows and columns.

    With OWN_ROWS, the program has the rows of its own units, else the columns.
    """
    LOAD: gl.constexpr = _tile_layout(COLS, gl.num_warps())
    if OWN_ROWS:
        HIGH: gl.constexpr = BLOCK_H // ROWS  # tiles one below the other
        row, col = split * BLOCK_H + k % HIGH * ROWS, k // HIGH * COLS
    else:
        row, col = k * ROWS, split * BLOCK_H
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, LOAD))
    mask = (rows < H)[:, None] & (cols < H)[None, :]
    return gl.load(ptr + gate * gate_stride + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@gluon.jit
def _load_shard(
    ptr, split, stride, gate_stride, H: gl.constexpr, BLOCK_H: gl.constexpr, GATES: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUPS: gl.constexpr, DTYPE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Loads a program's weights as register operands, one gate after the other through shared memory.

    Returns a tuple by gate, and the factor that undoes the weights' scale. With GROUPS of warps, the weights are the
    rows of the program's own units, `[GROUPS, BLOCK_H, BLOCK_K / GROUPS]`. With GROUPS == 0, they are the columns,
    `[BLOCK_K, BLOCK_H]`.
    """
    SCALED: gl.constexpr = ptr.dtype.element_ty == gl.float32
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OWN_ROWS: gl.constexpr = GROUPS > 0
    ROWS: gl.constexpr = min(BLOCK_H, 32) if OWN_ROWS else 4096 // BLOCK_H
    COLS: gl.constexpr = BLOCK_K // GROUPS if OWN_ROWS else BLOCK_H
    TILES: gl.constexpr = BLOCK_K * BLOCK_H // (ROWS * COLS)
    HIGH: gl.constexpr = BLOCK_H // ROWS if OWN_ROWS else 1
    if OWN_ROWS:
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        share = gl.allocate_shared_memory(DTYPE, [GROUPS, BLOCK_H, COLS], LAYOUT)
    else:
        PLAIN: gl.constexpr = _operand_layout(BLOCK_H)
        share = gl.allocate_shared_memory(DTYPE, [BLOCK_K, BLOCK_H], PLAIN)
    scale = 1.0
    if SCALED:
        largest = gl.zeros([ROWS, COLS], gl.float32, _tile_layout(COLS, gl.num_warps()))
        for n in range(GATES * TILES + opaque_zero(split)):  # opaque, or an unrolled loop would take all registers
            w = _load_tile(
                ptr, gate_stride, n // TILES, n % TILES, split, stride, H, BLOCK_H, OWN_ROWS, ROWS, COLS
            )  # fmt: skip
            largest = gl.maximum(largest, gl.abs(w))
        scale = scale_to_float16(gl.max(gl.max(largest, axis=1), axis=0), 14)
    weights = ()
    for gate in gl.static_range(GATES):
        for k in gl.static_range(TILES):
            first = gate + opaque_zero(split)  # opaque, so that addresses are not computed before this tile
            w = _load_tile(ptr, gate_stride, first, k, split, stride, H, BLOCK_H, OWN_ROWS, ROWS, COLS)
            if SCALED:
                w = w * scale
            if OWN_ROWS:
                part = share.slice(k // HIGH, 1, 0).slice(k % HIGH * ROWS, ROWS, 1)
                part.store(w.to(DTYPE).reshape([1, ROWS, COLS]))
            else:
                share.slice(k * ROWS, ROWS).store(w.to(DTYPE))
        weights += (share.load(OPERAND),)
    barrier()  # what the caller allocates may lie where the weights were: else it would wait at every step
    return weights, inverse(scale)


@gluon.jit
def _load_resets(reset_ptr, rows, mask_q, lane_rows, lane_mask, RESET_STATE: gl.constexpr):
    """Loads the resets at `rows`, and the same by lane if the reset states are per step, for `_start_episodes`."""
    resets, by_lane = mask_q, lane_mask
    if reset_ptr is not None:
        resets = load_reset_value(reset_ptr, rows, mask_q)
        if RESET_STATE == RESET_STEPPED:
            by_lane = load_reset_value(reset_ptr, lane_rows, lane_mask)
    return resets, by_lane


@gluon.jit
def _start_episodes(loaded):
    """Returns which sequences start an episode, and the same by lane, given what `_load_resets` returned."""
    return loaded[0] != 0, loaded[1] != 0


@gluon.jit
def _start_step(
    states, scale, fixed, fixed_scale, resets, rows, a, tile,
    RESET_STATE: gl.constexpr, H: gl.constexpr, SPLITS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Returns the states from which the step at `rows` starts, and the scale of each sequence's hidden states.

    `resets` are what `_start_episodes` returned for this step. `fixed_scale` is the scale after a reset to the states
    `fixed`. `a` are the arrays.
    """
    SHAPE: gl.constexpr = states[0].shape
    LAYOUT: gl.constexpr = states[0].type.layout
    reset, by_lane = resets
    if a.reset_ptr is not None:
        if RESET_STATE == RESET_STEPPED:
            # a branch, because the scale of new states is a maximum over the units of all programs
            if gl.max(by_lane.to(gl.int32), axis=0) > 0:
                at = rows[None, :] * H + tile.unit[:, None]
                fresh = load_states(a.reset_h_ptr, a.reset_c_ptr, at, tile.mask & reset[None, :])
                if SCALED:
                    nothing = gl.zeros(SHAPE, gl.float32, LAYOUT)
                    own = gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))
                    new = first_state_scale(a.reset_h_ptr, nothing, rows, own, tile.mask_q & reset, H, SPLITS)
                    scale = gl.where(reset[None, :], new[None, :], scale)
                states = select_states(reset[None, :], fresh, states)
        else:
            states, scale = scaled_reset_states(
                states, scale, reset, fixed, fixed_scale, RESET_STATE, False, SCALED
            )  # fmt: skip
    return states, scale


@gluon.jit
def _send_state(
    exchange, h, scale, number, live, place, SCALED: gl.constexpr, DTYPE: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """Sends the hidden state that a step starts from to all programs; a word holds two adjacent units of a sequence.

    Nothing is sent if `live` is 0. In a cluster, its bits are the columns to send (`columns_of`).
    """
    BLOCK_H: gl.constexpr = h.shape[0]
    BATCH: gl.constexpr = h.shape[1]
    if SCALED:
        h = h * scale
    bits = to_operand(h, DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    low, high = bits.reshape([BLOCK_H // 2, 2, BATCH]).permute([0, 2, 1]).split()
    pair = gl.arange(0, BLOCK_H // 2, gl.SliceLayout(1, low.type.layout))
    sequence = gl.arange(0, BATCH, gl.SliceLayout(0, low.type.layout))
    offset = sequence[None, :] * (BLOCK_H // 2) + pair[:, None]
    address = box_address(exchange, number, place, place.split, SPLITS, BATCH * BLOCK_H * 4) + offset * 8
    if exchange.dtype == gl.int32:
        LANES: gl.constexpr = 64 // BLOCK_H  # that have the same word; each sends it to a share of the programs
        SHARES: gl.constexpr = gl.BlockedLayout([1, 1, 1], [LANES, BLOCK_H // 2, 1], [1, 1, gl.num_warps()], [1, 0, 2])
        word = gl.convert_layout(low | (high << 16), gl.SliceLayout(0, SHARES))[None, :, :]
        address = gl.convert_layout(address, gl.SliceLayout(0, SHARES))[None, :, :]
        first = gl.arange(0, LANES, gl.SliceLayout(1, gl.SliceLayout(2, SHARES)))[:, None, None] * (SPLITS // LANES)
        nothing = (word + first) * 0
        sequence = gl.arange(0, BATCH, gl.SliceLayout(0, gl.SliceLayout(1, SHARES)))
        sends = nothing + has_column(live, sequence)[None, None, :]
        send_numbered_to(address, word + nothing, nothing + number, sends, first, SPLITS // LANES)
    else:
        send_numbered(address, low | (high << 16), offset * 0 + number, offset * 0 + live)


@gluon.jit
def _stack(values):
    """Returns a tuple of tensors `[a, b]`, whose number is a power of two, as a tensor `[a, b, number]`."""
    SHAPE: gl.constexpr = [values[0].shape[0], values[0].shape[1], len(values)]
    stacked = values
    for _ in gl.static_range(len(values).bit_length() - 1):
        joined = ()
        for k in gl.static_range(len(stacked) // 2):
            joined += (gl.join(stacked[k], stacked[k + len(stacked) // 2]),)
        stacked = joined
    return stacked[0].reshape(SHAPE)


@gluon.jit
def _receive_state(
    operand, exchange, number, place, columns, BLOCK_H: gl.constexpr, SPLITS: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Receives the hidden state of all programs into `operand`, `[groups, batch, part]`.

    In a cluster, columns that are not among `columns` are zeros: nobody writes them, and the mailbox was cleared.
    A thread receives a word of every 64 units, which lie at equal distances. Returns SUMS sums over units of what was
    received, `[batch]`: the sum of squares, and the sum.
    """
    GROUPS: gl.constexpr = operand.shape[0]
    BATCH: gl.constexpr = operand.shape[1]
    PART: gl.constexpr = operand.shape[2]
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    pair = gl.arange(0, 32, gl.SliceLayout(0, LOAD))
    sequence = gl.arange(0, BATCH, gl.SliceLayout(1, LOAD))
    box, within = pair // (BLOCK_H // 2), pair % (BLOCK_H // 2)
    offset = (box * (BATCH * BLOCK_H // 2) + within)[None, :] + sequence[:, None] * (BLOCK_H // 2)
    address = box_address(exchange, number, place, 0, SPLITS, BATCH * BLOCK_H * 4) + offset * 8
    COUNT: gl.constexpr = SPLITS * BLOCK_H // 64
    number = offset * 0 + number
    if exchange.dtype == gl.int32:
        number *= has_column(columns, sequence)[:, None]
    words = receive(address, number, COUNT, BATCH * 256, BATCH // gl.num_warps(), True, True)
    low, high = (), ()
    for k in gl.static_range(GROUPS * PART // 64):
        if k < COUNT:
            low += (words[k].to(gl.int16).to(operand.dtype, bitcast=True),)
            high += ((words[k] >> 16).to(gl.int16).to(operand.dtype, bitcast=True),)
        else:  # units that no program has
            low += (gl.zeros([BATCH, 32], operand.dtype, LOAD),)
            high += (gl.zeros([BATCH, 32], operand.dtype, LOAD),)
    state = gl.join(_stack(low), _stack(high)).permute([0, 2, 1, 3])
    operand.store(state.reshape([BATCH, GROUPS, PART]).permute([1, 0, 2]))
    sums = ()
    if SUMS > 0:
        squares = gl.zeros([BATCH, 32], gl.float32, LOAD)
        total = squares
        for k in gl.static_range(COUNT):
            for half in gl.static_range(2):
                h = (low, high)[half][k].to(gl.float32)
                squares += h * h
                total += h
        sums += (gl.sum(squares, axis=1),)
        if SUMS > 1:
            sums += (gl.sum(total, axis=1),)
    return sums


@gluon.jit
def _multiply_gates(weights, operand, terms, zeros, UNITS: gl.constexpr, PARTS: gl.constexpr):
    """Multiplies a program's weights by the state of all units; returns a tuple with a product per gate.

    `terms` is a buffer a gate, through which the products of the groups of warps are added.
    """
    GATES: gl.constexpr = len(weights)
    state = operand.permute([0, 2, 1]).load(gl.DotOperandLayout(1, zeros.type.layout, 2))
    for gate in gl.static_range(GATES):
        terms[gate].store(mma_v2(weights[gate], state, zeros))
    products = ()
    for gate in gl.static_range(GATES):
        product = gl.sum(terms[gate].load(PARTS), axis=0)
        products += (gl.convert_layout(product, UNITS),)
    return products


@gluon.jit
def _sums_of_state(received, unscale, SCALED: gl.constexpr, UNITS: gl.constexpr):
    """Converts the sums of `_receive_state` to the layout of a step, and undoes the scale of the states."""
    sums = ()
    for k in gl.static_range(len(received)):
        one = gl.convert_layout(received[k], gl.SliceLayout(0, UNITS))
        if SCALED:
            one = one * unscale
            if k == 0:  # the sum of squares
                one = one * unscale
        sums += (one,)
    return sums


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "pieces"], repr=names.of_loop("split_registers", "fwd"))
def forward_kernel(
    w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr, reset_h_ptr,
    reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr,
    scale_ptr, exchange_ptr,
    T, B, Q, tiles, items, pieces,
    STEP: gl.constexpr, RESIDUALS: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, NORM_WIDTH: gl.constexpr,
    RESET_STATE: gl.constexpr, H: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_K: gl.constexpr,
    SPLITS: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Runs the forward pass; the arrays are those of `arrays.Forward`, but for `exchange`.

    `exchange` is int32 zeros `[2, workers, SPLITS, BLOCK_B, BLOCK_H / 2, 2]`: two buffers, used in turn. A word holds
    two adjacent units of a sequence. The number of the send follows it, by which a receiver recognizes a new word.
    In a cluster it is None, and each program has the part of its worker, `[2, SPLITS, BLOCK_B, BLOCK_H / 2, 2]`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COUNT: gl.constexpr = GATES + 1 if SEPARATE or NORM_WIDTH > 0 else GATES  # of local gradients
    SUMS: gl.constexpr = 0 if NORM_WIDTH == 0 else 1 if x_mean_ptr is None else 2
    SCALED: gl.constexpr = w_hh_t_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_t_ptr.dtype.element_ty
    GROUPS: gl.constexpr = WARPS * 16 // BLOCK_H  # of warps, each of which multiplies PART units of the state
    PART: gl.constexpr = BLOCK_K // GROUPS
    ACC: gl.constexpr = _forward_layout(GROUPS, WARPS)
    # Whether resets are loaded a step before they are compared: else the step waits for memory. In a cluster, words
    # arrive sooner than that. Through L2 they do not, and who waits does not poll. A piece has too few steps to gain.
    RESETS_AHEAD: gl.constexpr = exchange_ptr is None and pieces is None
    PARTS: gl.constexpr = _parts_layout(BLOCK_H, WARPS)
    UNITS: gl.constexpr = gl.SliceLayout(0, PARTS)
    BY_LANE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])  # every warp has all sequences
    # both without conflicts between banks, as far as BLOCK_H allows
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    TERMS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, BLOCK_H // 16, [1, 2, 0])
    a = arrays.Forward(
        w_hh_t_ptr, b_hn_ptr, bias_ptr, w_sum_ptr, xp_ptr, x_norm_ptr, x_mean_ptr, h0_ptr, c0_ptr, reset_ptr,
        reset_h_ptr, reset_c_ptr, hs_ptr, cs_ptr, h_last_ptr, c_last_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr,
        norm_state_ptr, scale_ptr,
    )  # fmt: skip
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    place = Place(workers, worker, split)
    if exchange_ptr is None:
        exchange = open_mailbox(place, 2 * SPLITS * BLOCK_B * BLOCK_H * 4)
    else:
        exchange = exchange_ptr
    zeros = gl.zeros([GROUPS, BLOCK_H, BLOCK_B], gl.float32, ACC)
    own = gl.arange(0, BLOCK_H, gl.SliceLayout(1, UNITS))
    unit = split * BLOCK_H + own
    sent = 0  # number of the latest send
    item = worker
    while item < items:  # a turn is all items of a model, so that its weights are loaded once
        model = (item // tiles).to(gl.int64)
        weights, w_unscale = _load_shard(
            w_hh_t_ptr + model * (GATES * H * H), split, H, H * H, H, BLOCK_H, GATES, BLOCK_K, GROUPS, DTYPE, ACC
        )  # fmt: skip
        operand = gl.allocate_shared_memory(DTYPE, [GROUPS, BLOCK_B, PART], SHARED)
        terms = ()
        for _ in gl.static_range(GATES):
            terms += (gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_H, BLOCK_B], TERMS),)
        b_hn = 0.0
        if SEPARATE:
            b_hn = gl.load(b_hn_ptr + model * H + unit, mask=unit < H, other=0.0).to(gl.float32)[:, None]
        biases = load_biases(bias_ptr, model, unit, H, GATES, True)
        w_sum = load_biases(w_sum_ptr, model, unit, H, GATES, True)
        end = (item // tiles + 1) * tiles
        while item < end:
            tile = locate(item, tiles, arrays.Sizes(T, B, Q, pieces), reset_ptr, unit, BLOCK_B, H, REVERSE)
            mask_q, mask, seq, row, stride = tile.mask_q, tile.mask, tile.seq, tile.row, tile.stride
            columns = 1  # through L2, all or none are sent
            if exchange_ptr is None:
                columns = columns_of(mask_q)
            last = seq[None, :] * H + unit[:, None]
            lane_row, lane_mask = gl.convert_layout(row, BY_LANE), gl.convert_layout(mask_q, BY_LANE)
            lane_steps = tile.steps
            if pieces is not None:
                lane_steps = gl.convert_layout(tile.steps, BY_LANE)
            lanes = arrays.Tile(T, seq, lane_row, stride, unit, mask, lane_mask, lane_steps, tile.longest, 0)
            states = load_states(h0_ptr, c0_ptr, last, mask)
            fixed = fixed_reset_states(reset_h_ptr, reset_c_ptr, last, mask, RESET_STATE)
            scale = gl.full([1, BLOCK_B], 1.0, gl.float32, UNITS)
            fixed_scale = scale
            if SCALED:
                nothing = gl.zeros([BLOCK_H, BLOCK_B], gl.float32, UNITS)
                scale = first_state_scale(h0_ptr, nothing, seq, own, mask_q, H, SPLITS)[None, :]
                if RESET_STATE == RESET_FIXED:
                    fixed_scale = first_state_scale(reset_h_ptr, nothing, seq, own, mask_q, H, SPLITS)[None, :]
            first = step_time(0, T, REVERSE) * stride
            x = load_inputs(xp_ptr + (row + first)[None, :] * (GATES * H) + unit[:, None], mask, H, GATES)
            statistics = load_statistics(x_norm_ptr, x_mean_ptr, row + first, mask_q)
            loaded = _load_resets(reset_ptr, row + first, mask_q, lane_row + first, lane_mask, RESET_STATE)
            resets = _start_episodes(loaded)
            if RESETS_AHEAD:
                rows, lane_rows = forward_rows(tile, 1, REVERSE), forward_rows(lanes, 1, REVERSE)
                loaded = _load_resets(reset_ptr, rows, mask_q, lane_rows, lane_mask, RESET_STATE)
            before, scale = _start_step(
                states, scale, fixed, fixed_scale, resets, row + first, a, tile, RESET_STATE, H, SPLITS, SCALED
            )
            if pieces is None:
                sent += 1
                _send_state(exchange, before[0], scale, sent, columns, place, SCALED, DTYPE, SPLITS)
            else:  # nobody would receive the state of a tile without pieces
                exists = (tile.longest > 0).to(gl.int32)
                sent += exists
                _send_state(exchange, before[0], scale, sent, exists * columns, place, SCALED, DTYPE, SPLITS)
            for i in range(tile.longest):
                # equals i, which the compiler cannot tell: else addresses of many steps would take registers
                opaque_i = i + opaque_zero(i)
                next_rows = forward_rows(tile, opaque_i + 1, REVERSE)
                next_x = load_inputs(xp_ptr + next_rows[None, :] * (GATES * H) + unit[:, None], mask, H, GATES)
                next_statistics = load_statistics(x_norm_ptr, x_mean_ptr, next_rows, mask_q)
                if not RESETS_AHEAD:
                    lane_rows = forward_rows(lanes, opaque_i + 1, REVERSE)
                    loaded = _load_resets(reset_ptr, next_rows, mask_q, lane_rows, lane_mask, RESET_STATE)
                    resets = _start_episodes(loaded)
                received = _receive_state(operand, exchange, sent, place, columns, BLOCK_H, SPLITS, SUMS)
                if RESETS_AHEAD:
                    resets = _start_episodes(loaded)
                    then = opaque_i + 2
                    rows, lane_rows = forward_rows(tile, then, REVERSE), forward_rows(lanes, then, REVERSE)
                    loaded = _load_resets(reset_ptr, rows, mask_q, lane_rows, lane_mask, RESET_STATE)
                products = _multiply_gates(weights, operand, terms, zeros, UNITS, PARTS)
                if SCALED:
                    products = scaled(products, inverse(scale) * w_unscale)
                if x_mean_ptr is not None:
                    x = subtract_mean(x, statistics[1][None, :], w_sum)
                gates = add_inputs(products, x, b_hn, SEPARATE)
                if NORM_WIDTH > 0:
                    unscale = gl.sum(inverse(scale), axis=0)  # scale has one element per sequence
                    of_state = _sums_of_state(received, unscale, SCALED, UNITS)
                    norm_scale = scale_of_norm(of_state, statistics, H, NORM_WIDTH)
                    normalized, gates = normalize(gates, norm_scale[None, :], biases)
                states, activations = STEP(gates, x[GATES - 1].to(gl.float32), before, "fast")
                if local_grads_ptr is not None:
                    local_grads, factors = RESIDUALS(activations, before)
                    if NORM_WIDTH > 0:
                        local_grads = with_norm_grad(local_grads, normalized)
                        norm_state = normalized_state(before[0], of_state, statistics, norm_scale, H, NORM_WIDTH)
                    saved = pack_residuals(local_grads, factors, dc_dh_ptr)
                before, scale = _start_step(
                    states, scale, fixed, fixed_scale, resets, next_rows, a, tile, RESET_STATE, H, SPLITS, SCALED
                )
                more = (i + 1 < tile.longest).to(gl.int32)
                sent += more
                _send_state(exchange, before[0], scale, sent, more * columns, place, SCALED, DTYPE, SPLITS)
                this_rows = (row + step_time(opaque_i, T, REVERSE) * stride)[None, :]
                live, live_q = mask, mask_q
                if pieces is not None:
                    live, live_q = runs(mask, tile, i, True), mask_q & (i < tile.steps)
                store_states(hs_ptr, cs_ptr, this_rows * H + unit[:, None], states, live)
                if pieces is not None:
                    store_states(h_last_ptr, c_last_ptr, last, states, is_last_step(tile, i, True))
                if local_grads_ptr is not None:
                    store_residuals(a, this_rows, unit[:, None], live, saved, H, COUNT)
                    if NORM_WIDTH > 0:
                        stored = norm_state.to(norm_state_ptr.dtype.element_ty)
                        gl.store(norm_state_ptr + this_rows * H + unit[:, None], stored, mask=live)
                        gl.store(scale_ptr + this_rows, norm_scale[None, :], mask=live_q[None, :] & (split == 0))
                x = next_x
                statistics = next_statistics
            if pieces is None:
                store_states(h_last_ptr, c_last_ptr, last, states, mask)
            item += workers
    if exchange_ptr is None:
        close_mailbox(place)


@gluon.jit
def _multiply_columns(weights, operands, zeros, SIDE_BY_SIDE: gl.constexpr):
    """Returns the sum over gates of weights times operands, for the units of all programs.

    If SIDE_BY_SIDE, each gate has an accumulator of its own, so that the products overlap.
    """
    GATES: gl.constexpr = len(weights)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, zeros.type.layout, 2)
    total = mma_v2(weights[0], operands[0].permute([1, 0]).load(RIGHT), zeros)
    for gate in gl.static_range(1, GATES):
        operand = operands[gate].permute([1, 0]).load(RIGHT)
        if SIDE_BY_SIDE:
            total += mma_v2(weights[gate], operand, zeros)
        else:
            total = mma_v2(weights[gate], operand, total)
    return total


@gluon.jit
def _offset_in_box(unit, sequence, BLOCK_H: gl.constexpr):
    """Returns the place of elements in a box `[batch / 2, units, 2]`; a thread sends two adjacent sequences."""
    return (sequence // 2) * (2 * BLOCK_H) + unit * 2 + sequence % 2


@gluon.jit
def _send_parts(exchange, parts, number, place, columns, BLOCK_H: gl.constexpr, SPLITS: gl.constexpr):
    """Sends each program the part of the float32 tile `parts`, `[units, batch]`, that belongs to its units.

    The last bit of each element is replaced by `new_bit`. In a cluster, only `columns` are sent, which are in pairs.
    """
    RECEIVERS: gl.constexpr = parts.shape[0] // BLOCK_H  # those that exist, rounded up to a power of two
    BATCH: gl.constexpr = parts.shape[1]
    parts = parts.reshape([RECEIVERS, BLOCK_H, BATCH])
    LAYOUT: gl.constexpr = parts.type.layout
    receiver = gl.arange(0, RECEIVERS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    sequence = gl.arange(0, BATCH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    if exchange.dtype == gl.int32:
        offset = _offset_in_box(unit[None, :, None], sequence[None, None, :], BLOCK_H)
        address = box_address(exchange, number, place, place.split, SPLITS, BATCH * BLOCK_H * 4) + offset * 4
        # no program has the number SPLITS
        to = gl.where((has_column(columns, sequence) > 0)[None, None, :], receiver[:, None, None], SPLITS)
        send_pairs_to(address, to_word(parts, number), to + offset * 0, SPLITS)
    else:
        offset = (receiver * (SPLITS * BATCH * BLOCK_H))[:, None, None] + sequence[None, None, :] * BLOCK_H
        offset += unit[None, :, None]
        address = box_address(exchange, number, place, place.split, SPLITS * SPLITS, BATCH * BLOCK_H * 4) + offset * 4
        word = to_word(parts, number)
        if RECEIVERS == SPLITS:
            send(address, word)
        else:
            send_where(address, word, (receiver < SPLITS).to(gl.int32)[:, None, None] + offset * 0)


@gluon.jit
def _receive_parts(
    exchange, number, place, columns, BLOCK_H: gl.constexpr, BATCH: gl.constexpr, SPLITS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Returns the sum of the tiles that all programs sent to this one, always added in the same order.

    In a cluster, columns that are not among `columns` are zeros: nobody writes them, and the mailbox was cleared.
    Sender and receiver need the same `columns`, in pairs (`in_pairs`).

    A unit has 64 / BLOCK_H lanes. They take turns with the programs, so the words of a lane lie at equal distances.
    """
    LANES: gl.constexpr = 64 // BLOCK_H
    COUNT: gl.constexpr = SPLITS // LANES
    sender = gl.arange(0, LANES, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    unit = gl.arange(0, BLOCK_H, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    sequence = gl.arange(0, BATCH, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    if exchange.dtype == gl.int32:
        offset = _offset_in_box(unit[None, :, None], sequence[None, None, :], BLOCK_H)
        offset += (sender * (BATCH * BLOCK_H))[:, None, None]
        address = box_address(exchange, number, place, 0, SPLITS, BATCH * BLOCK_H * 4)
        bit = offset * 0 + new_bit(number) * has_column(columns, sequence)[None, None, :]
    else:
        offset = (sender * (BATCH * BLOCK_H))[:, None, None] + sequence[None, None, :] * BLOCK_H + unit[None, :, None]
        address = box_address(exchange, number, place, place.split * SPLITS, SPLITS * SPLITS, BATCH * BLOCK_H * 4)
        bit = offset * 0 + new_bit(number)
    words = receive(address + offset * 4, bit, COUNT, BATCH * 256, 2 * BATCH // gl.num_warps(), False, True)
    return gl.sum(add_words(words), axis=0)


@gluon.jit
def _send_sum(sums, total, number, place, SPLITS: gl.constexpr):
    """Sends one float32 per sequence, `[batch]`, to all programs; its last bit is replaced by `new_bit`."""
    BATCH: gl.constexpr = total.shape[0]
    sequence = gl.arange(0, BATCH, total.type.layout)
    address = box_address(sums, number, place, place.split, SPLITS, BATCH * 4) + sequence * 4
    if sums.dtype == gl.int32:
        send_to_all(address, to_word(total, number), SPLITS)
    else:
        send(address, to_word(total, number))


@gluon.jit
def _receive_sum(
    sums, number, place, BLOCK_H: gl.constexpr, BATCH: gl.constexpr, SPLITS: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Returns for each sequence the sum of what all programs sent, always added in the same order."""
    LANES: gl.constexpr = 64 // BLOCK_H  # the lanes take turns with the programs, as in `_receive_parts`
    BY_SENDER: gl.constexpr = gl.SliceLayout(1, PARTS)
    sender = gl.arange(0, LANES, gl.SliceLayout(1, BY_SENDER))
    sequence = gl.arange(0, BATCH, gl.SliceLayout(0, BY_SENDER))
    offset = (sender * BATCH)[:, None] + sequence[None, :]
    address = box_address(sums, number, place, 0, SPLITS, BATCH * 4) + offset * 4
    COUNT: gl.constexpr = SPLITS // LANES
    words = receive(
        address, offset * 0 + new_bit(number), COUNT, LANES * BATCH * 4, BATCH // gl.num_warps(), False, True
    )  # fmt: skip
    return gl.convert_layout(gl.sum(add_words(words), axis=0), gl.SliceLayout(0, gl.SliceLayout(0, PARTS)))


@gluon.jit
def _load_scale(scale_ptr, rows, mask_q):
    """Loads the factor of a step's norm by sequence; returns a tuple, which is empty without a norm."""
    if scale_ptr is not None:
        return (gl.load(scale_ptr + rows, mask=mask_q, other=1.0),)
    else:
        return ()


@gluon.jit(do_not_specialize=["T", "B", "Q", "tiles", "items", "pieces"], repr=names.of_loop("split_registers", "bwd"))
def backward_kernel(
    w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
    dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr, total_dh_ptr,
    total_dc_ptr, exchange_ptr, sums_ptr,
    T, B, Q, tiles, items, pieces,
    GRAD_STEP: gl.constexpr, GATES: gl.constexpr, SEPARATE: gl.constexpr, NORM_WIDTH: gl.constexpr, H: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr, REVERSE: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Runs the backward pass; the arrays are those of `arrays.Backward`, but for `exchange` and `sums`.

    `exchange` is int32 zeros `[2, workers, SPLITS, SPLITS, BLOCK_B, BLOCK_H]`: two buffers, used in turn, by receiving
    and then by sending program. A word is a float32 partial sum. Its last bit tells whether it is new. `sums` is the
    same for the sums of a norm, `[2, workers, SPLITS, BLOCK_B]`, which every program receives. In a cluster both are
    None, and each program has what it receives, `[2, SPLITS, BLOCK_B / 2, BLOCK_H, 2]` and `[2, SPLITS, BLOCK_B]`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COUNT: gl.constexpr = GATES + 1 if SEPARATE or NORM_WIDTH > 0 else GATES  # of local gradients
    STATES: gl.constexpr = 1 if dc0_ptr is None else 2
    SCALED: gl.constexpr = w_hh_ptr.dtype.element_ty == gl.float32
    DTYPE: gl.constexpr = gl.float16 if SCALED else w_hh_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    PARTS: gl.constexpr = _parts_layout(BLOCK_H, WARPS)
    UNITS: gl.constexpr = gl.SliceLayout(0, PARTS)
    a = arrays.Backward(
        w_hh_ptr, local_grads_ptr, dc_dh_ptr, carry_gate_ptr, norm_state_ptr, scale_ptr, reset_ptr, dhs_ptr, dcs_ptr,
        dh_last_ptr, dc_last_ptr, dxp_ptr, dhn_ptr, dnorm_ptr, dh0_ptr, dc0_ptr, dreset_h_ptr, dreset_c_ptr,
        total_dh_ptr, total_dc_ptr,
    )  # fmt: skip
    workers = gl.num_programs(0) // SPLITS
    worker = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    place = Place(workers, worker, split)
    if exchange_ptr is None:
        WORDS: gl.constexpr = 2 * SPLITS * BLOCK_B * BLOCK_H
        exchange = open_mailbox(place, 4 * (WORDS + WORDS // BLOCK_H if NORM_WIDTH > 0 else WORDS))
        sums = exchange + 4 * WORDS
    else:
        exchange, sums = exchange_ptr, sums_ptr
    zeros = gl.zeros([BLOCK_K, BLOCK_B], gl.float32, ACC)
    unit = split * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(1, UNITS))
    sent = 0  # number of the latest send
    item = worker
    while item < items:  # a turn is all items of a model, so that its weights are loaded once
        model = (item // tiles).to(gl.int64)
        weights, w_unscale = _load_shard(
            w_hh_ptr + model * (GATES * H * H), split, GATES * H, H, H, BLOCK_H, GATES, BLOCK_K, 0, DTYPE, ACC
        )  # fmt: skip
        operands = ()
        for _ in gl.static_range(GATES):
            operands += (gl.allocate_shared_memory(DTYPE, [BLOCK_B, BLOCK_H], _operand_layout(BLOCK_H)),)
        unscales = gl.allocate_shared_memory(gl.float32, [BLOCK_B], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        end = (item // tiles + 1) * tiles
        while item < end:
            tile = locate(item, tiles, arrays.Sizes(T, B, Q, pieces), reset_ptr, unit, BLOCK_B, H, REVERSE)
            mask_q, mask, row, stride = tile.mask_q, tile.mask, tile.row, tile.stride
            columns = 0  # not read through L2, where all are sent
            if exchange_ptr is None:
                columns = in_pairs(columns_of(mask_q))
            last = tile.seq[None, :] * H + unit[:, None]
            dstates = load_states(dh_last_ptr, dc_last_ptr, last, has_last_step(tile, pieces is not None))
            rows = row + step_time(tile.steps - 1, T, REVERSE) * stride
            saved, reset, dys = load_saved(a, tile, rows, H, COUNT, PACKED)
            norm_scale = _load_scale(scale_ptr, rows, mask_q)
            for i in range(tile.longest):
                dh = dstates[0] + dys[0].to(gl.float32)
                local_grads, factors = unpack_residuals(saved, COUNT, PACKED)
                if NORM_WIDTH > 0:
                    of_norm = gl.sum(rounded_product(dh, local_grads[GATES]), axis=0)
                    _send_sum(sums, of_norm, sent + 1, place, SPLITS)
                    grads, carried = GRAD_STEP((dh,), local_grads[:GATES], factors)
                    grads = scaled(grads, norm_scale[0][None, :])
                else:
                    grads, carried = step_gradients(dh, dstates, dys, local_grads, factors, dcs_ptr, GRAD_STEP)
                this_reset = reset
                this_dys = dys
                this_scale = norm_scale
                next_rows = backward_rows(tile, i + 1, REVERSE)
                saved, reset, dys = load_saved(a, tile, next_rows, H, COUNT, PACKED)
                norm_scale = _load_scale(scale_ptr, next_rows, mask_q)
                multiplied = operands_of(grads, GATES)
                if SCALED:
                    scale = scale_to_float16(gl.max(largest_magnitude(multiplied), axis=0), 14)
                    unscales.store(inverse(scale) * w_unscale)
                    multiplied = scaled(multiplied, scale[None, :])
                for gate in gl.static_range(GATES):
                    operands[gate].permute([1, 0]).store(to_operand(multiplied[gate], DTYPE))
                parts = _multiply_columns(weights, operands, zeros, BLOCK_H == 64 and GATES < 4)
                if SCALED:
                    parts = parts * unscales.load(gl.SliceLayout(0, ACC))[None, :]
                sent += 1
                _send_parts(exchange, parts, sent, place, columns, BLOCK_H, SPLITS)

                live, live_q = mask, mask_q
                if pieces is not None:
                    live, live_q = runs(mask, tile, i, True), mask_q & (i < tile.steps)
                rows = row + step_time(tile.steps - 1 - i, T, REVERSE) * stride
                dxp = dxp_ptr + rows[None, :] * (GATES * H) + unit[:, None]
                at = rows[None, :] * H + unit[:, None]
                for gate in gl.static_range(GATES):
                    gl.store(dxp + gate * H, grads[gate].to(dxp_ptr.dtype.element_ty), mask=live)
                if SEPARATE:
                    gl.store(dhn_ptr + at, grads[GATES].to(dhn_ptr.dtype.element_ty), mask=live)
                store_totals(a, at, dh, dstates, this_dys, live)
                if NORM_WIDTH > 0:
                    norm_state = gl.load(norm_state_ptr + at, mask=live, other=0.0)
                product = _receive_parts(exchange, sent, place, columns, BLOCK_H, BLOCK_B, SPLITS, PARTS)
                dstates = gradients_before(product, carried, STATES)
                if NORM_WIDTH > 0:
                    dnorm = _receive_sum(sums, sent, place, BLOCK_H, BLOCK_B, SPLITS, PARTS)
                    gl.store(dnorm_ptr + rows, dnorm, mask=live_q & (split == 0))
                    factor = this_scale[0] * dnorm * (1.0 / NORM_WIDTH)
                    dstates = (dstates[0] - norm_state.to(gl.float32) * factor[None, :],)
                if reset_ptr is not None:
                    dstates = reset_gradients(dstates, this_reset[None, :], dreset_h_ptr, dreset_c_ptr, at, live)
                if pieces is not None:
                    store_states(dh0_ptr, dc0_ptr, last, dstates, is_first_step(tile, i, True))
            if pieces is None:
                store_states(dh0_ptr, dc0_ptr, last, dstates, mask)
            item += workers
    if exchange_ptr is None:
        close_mailbox(place)
