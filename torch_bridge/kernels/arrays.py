"""The arrays of the time loops, with the shape of each, and where a tile lies in them.

`common` explains the shapes: G groups, S models, T steps, B sequences of a group, H units. The names are those of the
kernels' arguments, which are the same in every family, except for workspaces: those here are of the loop "streamed". A
kernel passes the arrays to its functions as one tuple. An array that is absent is None, in the interpreter too.
"""

from typing import Any, NamedTuple


class Forward(NamedTuple):
    """The arrays of a forward kernel, or of its tangent, as `loops.streamed` explains: it reads the residuals."""

    w_hh_t_ptr: Any  # [S, GATES * H, H] transposed recurrent weights; float32 is rounded to TF32 if PRECISION is "tf32"
    b_hn_ptr: Any  # [S, H] added to the last gate's hidden product, or None if the last gate is not separate
    bias_ptr: Any  # [S, GATES * H] added to the normalized gates, or None without a norm
    w_sum_ptr: Any  # [S, GATES * H] sums of w_hh_t over its columns, float32, or None without x_mean
    xp_ptr: Any  # [G, T, B, GATES * H] input projections
    x_norm_ptr: Any  # [G, T, B] the part of variance + epsilon that follows from the inputs, float32, or None
    x_mean_ptr: Any  # [G, T, B] the mean of the inputs, float32, or None if the norm is that of RMSNorm
    h0_ptr: Any  # [G, B, H]
    c0_ptr: Any  # [G, B, H] the second state, or None if there is one state
    reset_ptr: Any  # [G, T, B] nonzero where an episode starts at step t, or None
    reset_h_ptr: Any  # [G, B, H] or [G, T, B, H] by RESET_STATE, or None
    reset_c_ptr: Any  # like reset_h
    hs_ptr: Any  # [G, T, B, H] out, dtype of h0
    cs_ptr: Any  # [G, T, B, H] out, dtype of c0, or None
    h_last_ptr: Any  # [G, B, H] out, float32: the carry between launches that each run some of the steps
    c_last_ptr: Any  # like h_last
    local_grads_ptr: Any  # [G, T, B, H, 1, 2 or 4] out, or None if no residuals are saved
    dc_dh_ptr: Any  # [G, T, B, H] out, or None
    carry_gate_ptr: Any  # [G, T, B, H] out, float32; if None for a cell that has one, local_grads is words, maybe in xp
    norm_state_ptr: Any  # [G, T, B, H] out: the normalized state before each step, or None
    scale_ptr: Any  # [G, T, B] out, float32: the factor of each step's norm, or None
    exchange_ptr: Any = None  # [2, G, B, H] of the weights' dtype, workspace, or None if SPLITS == 1
    sums_ptr: Any = None  # [2, G, B, 1 or 2, SPLITS] float32, workspace, or None without a norm or if SPLITS == 1
    barrier_ptr: Any = None  # [workers] int32 zeros, or None if no program waits for another


class Backward(NamedTuple):
    """The arrays of a backward kernel."""

    w_hh_ptr: Any  # [S, H, GATES * H] recurrent weights; float32 is already rounded to TF32 if PRECISION is "tf32"
    local_grads_ptr: Any  # [G, T, B, H, 1, 2 or 4], or words if PACKED, which dxp may overwrite
    dc_dh_ptr: Any  # [G, T, B, H], or None if there is one state
    carry_gate_ptr: Any  # [G, T, B, H], or None
    norm_state_ptr: Any  # [G, T, B, H], or None without a norm
    scale_ptr: Any  # [G, T, B], or None
    reset_ptr: Any  # [G, T, B] or None
    dhs_ptr: Any  # [G, T, B, H]
    dcs_ptr: Any  # [G, T, B, H], or None if the second states of the steps have no gradient
    dh_last_ptr: Any  # [G, B, H]
    dc_last_ptr: Any  # [G, B, H] or None
    dxp_ptr: Any  # [G, T, B, GATES * H] out: gradients of the gates before activations and, with a norm, before it
    dhn_ptr: Any  # [G, T, B, H] out: gradient of the last gate's hidden product, or None if that gate is not separate
    dnorm_ptr: Any  # [G, T, B] out, float32: D of each step, or None without a norm
    dh0_ptr: Any  # [G, B, H] out, float32
    dc0_ptr: Any  # [G, B, H] out, float32, or None if there is one state
    dreset_h_ptr: Any  # [G, T, B, H] out, float32: gradient of each step's reset state, or None
    dreset_c_ptr: Any  # like dreset_h
    total_dh_ptr: Any = None  # [G, T, B, H] out, float32: the whole gradient of each step's state, or None
    total_dc_ptr: Any = None  # like total_dh, without what reaches c through h of the same step
    exchange_ptr: Any = None  # [2, G, B, GATES * H] of the weights' dtype, workspace, or None if SPLITS == 1
    sums_ptr: Any = None  # [2, G, B, SPLITS] float32, workspace, or None without a norm or if SPLITS == 1
    barrier_ptr: Any = None  # [workers] int32 zeros, or None


class Sizes(NamedTuple):
    """The sizes of a launch's arrays, and into how many pieces of time it cuts them."""

    T: Any  # number of steps
    B: Any  # number of sequences of a group
    Q: Any  # number of sequences of a model
    pieces: Any  # number of pieces of a sequence that may run side by side, or None if it is one


class Tile(NamedTuple):
    """The place of a tile's sequences, or of pieces of sequences, and of its units in the arrays."""

    T: Any  # number of steps of a sequence
    seq: Any  # sequences, counted over all groups; a scalar if the tile is one sequence
    row: Any  # rows of time index 0 of the sequences (`common.time_order`), moved by `begin` steps
    stride: Any  # number of rows from one time index to the next
    unit: Any  # hidden units
    mask: Any  # which elements of a tile of states exist
    mask_q: Any  # which sequences, or pieces, exist
    steps: Any  # number of steps of each: T, or those of the piece; without one 1, but 0 if a program has one sequence
    longest: Any  # number of steps that the program runs: T, or those of its longest piece, 0 if it has none
    begin: Any  # first step of each piece, or 0 if a sequence is one piece


class Piece(NamedTuple):
    """The place in the arrays of a program that runs a piece of one sequence; all are scalars."""

    seq: Any  # the sequence, counted over all groups
    row: Any  # as in `Tile`
    stride: Any  # as in `Tile`
    begin: Any  # first step
    steps: Any  # number of steps, 0 if there is no such piece
