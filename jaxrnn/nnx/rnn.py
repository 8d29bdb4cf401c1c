"""A cell over time, fused if possible: the module `RNN`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypedDict, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.checks import Caller, Implementation
from jaxrnn.choice import must_scan
from jaxrnn.modules import Carry, ReturnsCarry
from jaxrnn.nnx.cells import reason_to_scan, run_fused, starts_from_zeros

Rngs = nnx.Rngs | nnx.RngStream | None

# Flax versions with `nnx.compat` have an `nnx.scan` that does not accept modules with carried state.
graph_scan: Any = getattr(nnx, "compat", nnx).scan
DEFAULT_STATE_AXES = nnx.StateAxes({...: nnx.Carry})  # type: ignore[arg-type]


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `RNN.__call__`, except `return_carry`."""

    initial_carry: Carry | None
    seq_lengths: ArrayLike | None
    time_major: bool | None
    reverse: bool | None
    keep_order: bool | None
    rngs: Rngs
    resets: ArrayLike | None
    reset_carry: Carry | None


class RNN(nnx.RNN, Generic[ReturnsCarry]):
    """`flax.nnx.RNN` with episode resets: runs `cell` over time in one launch.

    The functions of `jaxrnn` run the cells of this module, and the cells of Flax that they replace. `nnx.scan` runs any
    other cell, a cell with another `gate_fn`, `activation_fn` or `promote_dtype`, with layers other than `nnx.Linear`
    or with other settings, or on complex numbers, and an RNN whose `state_axes` or `broadcast_rngs` is not the default;
    these take `resets` too.

    Args:
      cell: the cell.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run from the last step to the first. Outputs are in the order computed, last step first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      unroll: the number of steps per loop iteration of `nnx.scan`, if `nnx.scan` runs the cell.
      state_axes: the scan axes of the cell's state in `nnx.scan`.
      broadcast_rngs: the filter of the random states that `nnx.scan` broadcasts over the steps.
      rngs: the random number generator of `cell.initialize_carry`.
      precision: the precision of the matmuls, as `jax.lax.dot_general` takes it; None uses the cell's.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which uses the cell's
        or, if that is None too, the fastest that can run the cell. NotImplementedError is raised if the named one
        cannot run it.

    Raises:
      ValueError: `cell` is no cell, or `unroll` is not a positive integer.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import LSTMCell, RNN
      >>> rnn = RNN(LSTMCell(3, 4, rngs=nnx.Rngs(0)), time_major=True, return_carry=True)
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))
      >>> carry, ys = rnn(xs, resets=resets)
      >>> (c, h), ys = rnn(xs, initial_carry=carry, resets=resets)
      >>> ys.shape, c.shape, h.shape
      ((5, 2, 4), (2, 4), (2, 4))
    """

    return_carry: ReturnsCarry

    def __init__(
        self,
        cell: nnx.RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Mapping[str, Any] | None = None,
        broadcast_rngs: Any = None,
        rngs: nnx.Rngs | nnx.RngStream | bool = True,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
    ) -> None:
        caller = modules.caller_of(self)
        modules.check_cell(caller, cell, nnx.RNNCellBase, "in_features=64, hidden_features=128, rngs=rngs")
        modules.check_unroll(caller, unroll)
        super().__init__(
            cell,
            time_major=time_major,
            return_carry=return_carry,
            reverse=reverse,
            keep_order=keep_order,
            unroll=unroll,
            state_axes=state_axes,
            broadcast_rngs=broadcast_rngs,
            rngs=rngs,
        )
        self.precision = precision
        self.implementation = implementation

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
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs = None,
        resets: Any = None,
        reset_carry: Carry | None = None,
    ) -> Any:
        """Runs the cell over `inputs` and restarts it at every step where `resets` is nonzero.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`.
          initial_carry: the carry before the first step, `[*batch, H]` or a pair `(c, h)`; by default
            `cell.initialize_carry`.
          seq_lengths: `[*batch]` integers from 0 to T. Others raise an error, or are clipped if they are traced. The
            returned carry is the one at the end of each sequence (`initial_carry` if its length is 0). Outputs beyond
            the end are not zeroed. With `reverse`, padding stays at the end. NaN and infinities in the padding are read
            as zeros, so they reach no gradient.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          rngs: the random number generator of `cell.initialize_carry`; by default the attribute.
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
        time_major = self.time_major if time_major is None else time_major
        caller = modules.caller_of(self, xs="inputs", carry="initial_carry", reset_state="reset_carry")
        modules.check_inputs(caller, inputs, time_major, self.cell.num_feature_axes, initial_carry)
        modules.check_reset_carry(resets, reset_carry, caller)

        def make_carry() -> Carry:
            time_axis = 0 if time_major else inputs.ndim - self.cell.num_feature_axes - 1
            source = self.rngs if rngs is None else rngs
            source = source.carry.fork() if isinstance(source, nnx.Rngs) else source
            return self.cell.initialize_carry(inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :], source)

        initial_carry, reset_carry = modules.default_carries(
            make_carry, initial_carry, resets, reset_carry, starts_from_zeros(self.cell)
        )
        return modules.run_over_time(
            functools.partial(self.run, time_major=time_major, caller=caller),
            inputs,
            initial_carry,
            resets=resets,
            reset_carry=reset_carry,
            seq_lengths=seq_lengths,
            feature_axes=self.cell.num_feature_axes,
            time_major=time_major,
            reverse=self.reverse if reverse is None else reverse,
            keep_order=self.keep_order if keep_order is None else keep_order,
            return_carry=self.return_carry if return_carry is None else return_carry,
            caller=caller,
        )

    def run(
        self,
        carry: Carry,
        xs: Array,
        *,
        resets: Array | None,
        reset_carry: Carry | None,
        reverse: bool,
        time_major: bool,
        return_states: bool,
        caller: Caller,
    ) -> tuple[Carry, Array, Carry | None]:
        """Runs the cell over time, fused if possible; returns `(carry, ys, carries of all steps or None)`."""
        precision = getattr(self.cell, "precision", None) if self.precision is None else self.precision
        implementation = getattr(self.cell, "implementation", None)
        implementation = implementation if self.implementation is None else self.implementation
        reason = reason_to_scan(self.cell, (carry, xs))
        if self.broadcast_rngs is not None or self.state_axes != DEFAULT_STATE_AXES:
            reason = "an RNN with non-default state_axes or broadcast_rngs"
        if must_scan(reason, precision, implementation, "nnx.scan", caller):
            time_axis = 0 if time_major else xs.ndim - self.cell.num_feature_axes - 1
            return self.scan(carry, xs, time_axis, resets, reset_carry, reverse, return_states, caller)
        return run_fused(
            self.cell,
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

    def scan(
        self,
        carry: Carry,
        xs: Array,
        time_axis: int,
        resets: Array | None,
        reset_carry: Carry | None,
        reverse: bool,
        return_states: bool,
        caller: Caller,
    ) -> tuple[Carry, Array, Carry | None]:
        """Runs any cell with `nnx.scan`; returns what `run` returns."""
        loop = modules.prepare_loop(
            carry, xs, resets, reset_carry, nnx.state(self.cell), self.cell.num_feature_axes, time_axis, caller
        )
        broadcast_rngs = nnx.All(nnx.RngState, self.broadcast_rngs)
        state_axes = nnx.StateAxes({broadcast_rngs: None, **self.state_axes})  # type: ignore[misc]

        # as in Flax's `RNN`, every call has new random numbers, and the scan carries the cell's state
        @nnx.split_rngs(splits=1, only=self.broadcast_rngs, squeeze=True)
        @graph_scan(in_axes=(state_axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0), unroll=self.unroll, reverse=reverse)
        def run(cell: Any, before: Carry, inputs: Any) -> tuple[Carry, tuple[Array, Carry | None]]:
            x, *of_step = inputs
            carry, y = cell(loop.start(before, *of_step), x)
            carry = modules.like_before(carry, before)
            return carry, (y, carry if return_states else None)

        carry, outputs = run(self.cell, loop.carry, loop.inputs)
        ys, carries = jax.tree.map(lambda x: jnp.moveaxis(x, 0, time_axis), outputs)
        return carry, ys, carries
