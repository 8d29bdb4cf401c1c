"""The code shared by the modules of Flax linen and NNX: everything except their parameters."""

from jaxrnn.modules.activations import is_relu, is_tanh
from jaxrnn.modules.blocks import (
    check_blocks_are_fused,
    check_blocks_without_norm,
    check_blocks_without_projection,
    check_num_blocks,
    initialize_blocks,
)
from jaxrnn.modules.carries import (
    Carry,
    CarryT,
    ReturnsCarry,
    broadcast_batch_axes,
    broadcast_carry,
    default_carries,
    one_or_tuple,
    starts_from_zeros,
)
from jaxrnn.modules.checks import (
    are_sizes,
    as_array,
    caller_of,
    check_cell,
    check_dtypes,
    check_function,
    check_input_shape,
    check_inputs,
    check_pair,
    check_rngs,
    check_sizes,
    check_step,
    check_unroll,
    check_width,
)
from jaxrnn.modules.norms import check_norm_options, normalize, option_of_flax, run_flax
from jaxrnn.modules.options import passes_options_to
from jaxrnn.modules.reasons import (
    reason_to_scan_gates,
    reason_to_scan_options,
    reason_to_scan_unlisted,
)
from jaxrnn.modules.recurrence import Recurrence, cast, check_carry, check_structure, run, state_names
from jaxrnn.modules.resets import check_reset_carry, first_reset_carry, like_before, prepare_loop
from jaxrnn.modules.rnn import run_over_time
from jaxrnn.modules.stack import check_stack, group_by_direction, run_stack

__all__ = [
    "Carry",
    "CarryT",
    "Recurrence",
    "ReturnsCarry",
    "are_sizes",
    "as_array",
    "broadcast_batch_axes",
    "broadcast_carry",
    "caller_of",
    "cast",
    "check_blocks_are_fused",
    "check_blocks_without_norm",
    "check_blocks_without_projection",
    "check_carry",
    "check_cell",
    "check_dtypes",
    "check_function",
    "check_input_shape",
    "check_inputs",
    "check_norm_options",
    "check_num_blocks",
    "check_pair",
    "check_reset_carry",
    "check_rngs",
    "check_sizes",
    "check_stack",
    "check_step",
    "check_structure",
    "check_unroll",
    "check_width",
    "default_carries",
    "first_reset_carry",
    "group_by_direction",
    "initialize_blocks",
    "is_relu",
    "is_tanh",
    "like_before",
    "normalize",
    "one_or_tuple",
    "option_of_flax",
    "passes_options_to",
    "prepare_loop",
    "reason_to_scan_gates",
    "reason_to_scan_options",
    "reason_to_scan_unlisted",
    "run",
    "run_flax",
    "run_over_time",
    "run_stack",
    "starts_from_zeros",
    "state_names",
]
