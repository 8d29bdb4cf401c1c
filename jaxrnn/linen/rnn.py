"""A cell over time, fused if possible: the modules `RNN` and `ResetRNN`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypedDict, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import PRNGKey
from jax import Array
from jax.typing import ArrayLike
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.checks import Caller, Implementation
from jaxrnn.choice import must_scan
from jaxrnn.linen import cells
from jaxrnn.modules import Carry, ReturnsCarry
from torch_bridge.docstrings import inherit_descriptions

CELL_EXAMPLE = "features=128"
SCAN_OPTIONS: dict[str, Any] = {
    "variable_axes": {},
    "variable_broadcast": "params",
    "variable_carry": False,
    "split_rngs": {"params": False},
}


def reason_to_scan(cell: nn.RNNCellBase, scan_options: Mapping[str, Any], arrays: Any = None) -> str | None:
    """Returns why `cell` has to run under `nn.scan` with these options on carry and inputs `arrays`, or None."""
    if (reason := cells.reason_to_scan(cell, arrays)) is not None:
        return reason
    if any(scan_options[name] != default for name, default in SCAN_OPTIONS.items()):
        return f"an RNN with non-default {', '.join(SCAN_OPTIONS)}"
    return None


def run_cell(
    cell: nn.RNNCellBase,
    carry: Carry,
    xs: Array,
    *,
    resets: Any,
    reset_carry: Carry | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_states: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
    scan_options: Mapping[str, Any] = SCAN_OPTIONS,
    caller: Caller,
) -> tuple[Carry, Array, Carry | None]:
    """Runs a bound cell over time, fused if possible; returns `(carry, ys, carries of all steps or None)`.

    Messages name `caller`.
    """
    precision = getattr(cell, "precision", None) if precision is None else precision
    implementation = getattr(cell, "implementation", None) if implementation is None else implementation
    time_axis = 0 if time_major else xs.ndim - cell.num_feature_axes - 1
    if must_scan(reason_to_scan(cell, scan_options, (carry, xs)), precision, implementation, "nn.scan", caller):
        return scan_cell(cell, carry, xs, time_axis, resets, reset_carry, reverse, return_states, scan_options, caller)
    if type(cell) in cells.REPLACEMENTS:
        names = (field.name for field in dataclasses.fields(cell) if field.name not in ("parent", "name"))
        scope: Any = cell.scope  # shared, so that the parameters keep the path of Flax's cell
        cell = cells.REPLACEMENTS[type(cell)](**{name: getattr(cell, name) for name in names}, parent=scope.rewound())
    return cell.run(  # of `cells.FusedCell`
        carry,
        xs,
        resets=resets,
        reset_state=reset_carry,
        reverse=reverse,
        time_major=time_major,
        return_states=return_states,
        precision=precision,
        implementation=implementation,
        caller=caller,
    )


def initial_carry_of(cell: nn.RNNCellBase, key: PRNGKey | None, xs: Array, time_axis: int) -> Carry:
    """Returns `cell.initialize_carry` for the batch axes of `xs`."""
    key = jax.random.key(0) if key is None else key
    return cell.initialize_carry(key, xs.shape[:time_axis] + xs.shape[time_axis + 1 :])


def default_carries(
    cell: nn.RNNCellBase,
    initial_carry: Carry | None,
    xs: Array,
    resets: Any,
    reset_carry: Carry | None,
    *,
    init_key: PRNGKey | None = None,
    time_axis: int = 0,
) -> tuple[Carry, Carry | None]:
    """Returns the initial carry and the reset carry, by default `cell.initialize_carry`."""
    make = functools.partial(initial_carry_of, cell, init_key, xs, time_axis)
    return modules.default_carries(make, initial_carry, resets, reset_carry, cells.starts_from_zeros(cell))


def scan_cell(
    cell: nn.RNNCellBase,
    carry: Carry,
    xs: Array,
    time_axis: int,
    resets: Array | None,
    reset_carry: Carry | None,
    reverse: bool,
    return_states: bool,
    scan_options: Mapping[str, Any],
    caller: Caller,
) -> tuple[Carry, Array, Carry | None]:
    """Runs any cell with `nn.scan`; returns what `run_cell` returns."""
    loop = modules.prepare_loop(
        carry, xs, resets, reset_carry, cell.variables, cell.num_feature_axes, time_axis, caller
    )

    def step(cell: nn.RNNCellBase, before: Carry, inputs: Any) -> tuple[Carry, tuple[Array, Carry | None]]:
        x, *of_step = inputs
        carry, y = cell(loop.start(before, *of_step), x)
        carry = modules.like_before(carry, before)
        return carry, (y, carry if return_states else None)

    carry, outputs = nn.scan(step, reverse=reverse, **scan_options)(cell, loop.carry, loop.inputs)
    ys, carries = jax.tree.map(lambda x: jnp.moveaxis(x, 0, time_axis), outputs)
    return carry, ys, carries


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `RNN.__call__`, except `return_carry`."""

    initial_carry: Carry | None
    init_key: PRNGKey | None
    seq_lengths: ArrayLike | None
    time_major: bool | None
    reverse: bool | None
    keep_order: bool | None
    resets: ArrayLike | None
    reset_carry: Carry | None


class RNN(nn.RNN, Generic[ReturnsCarry]):
    """`flax.linen.RNN` with episode resets: runs `cell` over time in one launch. Its parameters are under `cell/`.

    The functions of `jaxrnn` run the cells of this module, and the cells of Flax that they replace. `nn.scan` runs any
    other cell, a cell with another `gate_fn` or `activation_fn` or on complex numbers, and an RNN whose
    `variable_axes`, `variable_broadcast`, `variable_carry` or `split_rngs` is not the default; these take `resets` too.

    Attributes:
      cell: the cell.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run from the last step to the first. Outputs are in the order computed, last step first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      unroll: the number of steps per loop iteration of `nn.scan`, if `nn.scan` runs the cell.
      variable_axes: the axes of variable collections over which `nn.scan` runs; by default none.
      variable_broadcast: the collections that are the same in every step of `nn.scan`; by default "params".
      variable_carry: the collections that `nn.scan` carries from step to step; by default none.
      split_rngs: by name of a random number generator, whether each step of `nn.scan` has its own key; by default none.
      precision: the precision of the matmuls, as `jax.lax.dot_general` takes it; None uses the cell's.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which uses the cell's
        or, if that is None too, the fastest that can run the cell. NotImplementedError is raised if the named one
        cannot run it.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import LSTMCell, RNN
      >>> rnn = RNN(LSTMCell(4), time_major=True, return_carry=True)
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> carry, ys = rnn.apply(variables, xs, resets=resets)
      >>> (c, h), ys = rnn.apply(variables, xs, initial_carry=carry, resets=resets)
      >>> ys.shape, c.shape, h.shape
      ((5, 2, 4), (2, 4), (2, 4))
    """

    return_carry: ReturnsCarry = False  # type: ignore[assignment]
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    @overload
    def __call__(
        self: RNN[Literal[False]], inputs: ArrayLike, *, return_carry: None = None, **options: Unpack[CallOptions]
    ) -> Array: ...

    @overload
    def __call__(
        self: RNN[Literal[True]], inputs: ArrayLike, *, return_carry: None = None, **options: Unpack[CallOptions]
    ) -> tuple[Carry, Array]: ...

    @overload
    def __call__(self, inputs: ArrayLike, *, return_carry: Literal[False], **options: Unpack[CallOptions]) -> Array: ...

    @overload
    def __call__(
        self, inputs: ArrayLike, *, return_carry: Literal[True], **options: Unpack[CallOptions]
    ) -> tuple[Carry, Array]: ...

    @overload
    def __call__(
        self, inputs: ArrayLike, *, return_carry: bool | None = None, **options: Unpack[CallOptions]
    ) -> Array | tuple[Carry, Array]: ...

    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Carry | None = None,
        init_key: PRNGKey | None = None,
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        resets: Any = None,
        reset_carry: Carry | None = None,
    ) -> Any:
        """Runs the cell over `inputs` and restarts it at every step where `resets` is nonzero.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`.
          initial_carry: the carry before the first step, `[*batch, H]` or a pair `(c, h)`; by default
            `cell.initialize_carry`.
          init_key: the key for `cell.initialize_carry`, which ignores the key unless `carry_init` is random.
          seq_lengths: `[*batch]` integers from 0 to T. Others raise an error, or are clipped if they are traced. The
            returned carry is the one at the end of each sequence (`initial_carry` if its length is 0). Outputs beyond
            the end are not zeroed. With `reverse`, padding stays at the end. NaN and infinities in the padding are read
            as zeros, so they reach no gradient.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          resets: `[*batch, T]`, or `[T, *batch]` if `time_major`, real; nonzero at the first step of an episode,
            that is, the *previous* step's done flag. That step starts from `reset_carry`. With `reverse`, the first
            step of an episode is the one computed first, which is its last in time.
          reset_carry: the carry that an episode starts from, by default `cell.initialize_carry`. It is `[H]`,
            `[*batch, H]` or a value per step `[*batch, T, H]` (`[T, *batch, H]`), or a pair of such arrays for an LSTM.
            It is differentiable.

        Returns:
          `outputs [*batch, T, H]` (`[T, *batch, H]`), or `(carry, outputs)` if `return_carry`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell or input; the message says why.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        caller = modules.caller_of(self, xs="inputs", carry="initial_carry", reset_state="reset_carry")
        modules.check_cell(caller, self.cell, nn.RNNCellBase, CELL_EXAMPLE)
        modules.check_inputs(caller, inputs, time_major, self.cell.num_feature_axes, initial_carry)
        modules.check_unroll(caller, self.unroll)
        modules.check_reset_carry(resets, reset_carry, caller)
        time_axis = 0 if time_major else inputs.ndim - self.cell.num_feature_axes - 1
        carry, reset_carry = default_carries(
            self.cell, initial_carry, inputs, resets, reset_carry, init_key=init_key, time_axis=time_axis
        )
        run = functools.partial(
            run_cell,
            self.cell,
            time_major=time_major,
            precision=self.precision,
            implementation=self.implementation,
            scan_options={"unroll": self.unroll} | {name: getattr(self, name) for name in SCAN_OPTIONS},
            caller=caller,
        )
        return modules.run_over_time(
            run,
            inputs,
            carry,
            resets=resets,
            reset_carry=reset_carry,
            seq_lengths=seq_lengths,
            feature_axes=self.cell.num_feature_axes,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
            return_carry=return_carry,
            caller=caller,
        )


@inherit_descriptions(RNN)
class ResetRNN(nn.Module):
    """jaxued's `ResetRNN`, time-major: `carry, ys = ResetRNN(cell)((xs, resets), initial_carry=carry)`.

    It has no parameters of its own. The parameters of the cell belong to the module that creates the cell, for example
    at `OptimizedLSTMCell_0`. Cells are fused if `RNN` would fuse them.

    Attributes:
      cell: the cell, of this module or of Flax.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxrnn.linen import OptimizedLSTMCell, ResetRNN
      >>> class Agent(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, xs, resets, carry=None):
      ...         return ResetRNN(OptimizedLSTMCell(4))((xs, resets), initial_carry=carry)
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2), bool)
      >>> (carry, ys), variables = Agent().init_with_output(jax.random.key(0), xs, resets)
      >>> carry, ys = Agent().apply(variables, xs, resets, carry)
      >>> ys.shape, list(variables["params"])
      ((5, 2, 4), ['OptimizedLSTMCell_0'])
    """

    cell: nn.RNNCellBase
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    @nn.compact
    def __call__(
        self,
        inputs: tuple[ArrayLike, ArrayLike],
        *,
        initial_carry: Carry | None = None,
        reset_carry: Carry | None = None,
    ) -> tuple[Carry, Array]:
        """Runs the cell over time and restarts it from `reset_carry` at every step where `resets` is nonzero.

        Args:
          inputs: `(xs, resets)`: `xs [T, *batch, D]`, and `resets [T, *batch]`, real, nonzero where step t is
            the first of an episode: the done flag that step t - 1 returned, not that of step t.
          initial_carry: `[*batch, H]`, or `(c, h)` for an LSTM; by default `reset_carry`, whose first step is used if
            it has a value per step.
          reset_carry: the carry that an episode starts from, by default `cell.initialize_carry`. It is `[H]`,
            `[*batch, H]` or `[T, *batch, H]`, or a pair of such arrays for an LSTM. It is differentiable.

        Returns:
          `(carry, ys [T, *batch, H])`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell or input; the message says why.
        """
        caller = modules.caller_of(self, has_time_major=False, carry="initial_carry", reset_state="reset_carry")
        modules.check_cell(caller, self.cell, nn.RNNCellBase, CELL_EXAMPLE)
        xs, resets = modules.check_pair(caller, "inputs", inputs, initial_carry)
        modules.check_reset_carry(resets, reset_carry, caller)
        if initial_carry is None and reset_carry is not None:
            like = jax.eval_shape(functools.partial(initial_carry_of, self.cell, None, xs, 0))
            initial_carry = modules.first_reset_carry(like, reset_carry, caller)
        carry, reset_carry = default_carries(self.cell, initial_carry, xs, resets, reset_carry)
        carry, ys, _ = run_cell(
            self.cell,
            carry,
            xs,
            resets=resets,
            reset_carry=reset_carry,
            precision=self.precision,
            implementation=self.implementation,
            caller=caller,
        )
        return carry, ys
