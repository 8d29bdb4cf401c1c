"""The code shared by the modules of Flax linen and NNX: everything except their parameters."""

from jaxrnn.modules.activations import is_relu, is_tanh
from jaxrnn.modules.carries import (
    Carry,
    CarryT,
    ReturnsCarry,
    broadcast_batch_axes,
    broadcast_carry,
    one_or_tuple,
)
from jaxrnn.modules.norms import check_norm, normalize
from jaxrnn.modules.reasons import reason_to_scan_gates, reason_to_scan_unlisted
from jaxrnn.modules.recurrence import cast, check_carry, run, state_names
from jaxrnn.modules.resets import check_reset_carry, with_resets
from jaxrnn.modules.rnn import run_over_time
from jaxrnn.modules.stack import check_stack, group_by_direction, run_stack

__all__ = [
    "Carry",
    "CarryT",
    "ReturnsCarry",
    "broadcast_batch_axes",
    "broadcast_carry",
    "cast",
    "check_carry",
    "check_norm",
    "check_reset_carry",
    "check_stack",
    "group_by_direction",
    "is_relu",
    "is_tanh",
    "normalize",
    "one_or_tuple",
    "reason_to_scan_gates",
    "reason_to_scan_unlisted",
    "run",
    "run_over_time",
    "run_stack",
    "state_names",
    "with_resets",
]
