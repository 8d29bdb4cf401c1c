"""Checks outputs and every gradient against float64. This check precedes every timing.

The oracle is jaxrnn's `lax.scan` reference in float64, which the tests compare with a NumPy loop whose gradients are
derived by hand. Its inputs have the provider's values: they are rounded to bfloat16 if the provider's arrays are.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

import jaxrnn
from benchmarks import timing
from jaxrnn.cells import CELLS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from benchmarks.cases import Case, Derivative, Dtype, NormCase, Precision
    from benchmarks.providers import Provider, Ready
    from benchmarks.results import Row

    Arrays = dict[str, jax.Array]
    Errors = dict[str, tuple[float, float]]

# The function of each cell.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gru": jaxrnn.gru, "lstm": jaxrnn.lstm, "mgu": jaxrnn.mgu, "simple_tanh": jaxrnn.simple_rnn,
    "simple_relu": functools.partial(jaxrnn.simple_rnn, activation="relu"), "rms_norm_gru": jaxrnn.norm_gru,
    "layer_norm_gru": functools.partial(jaxrnn.norm_gru, norm="layer"),
}  # fmt: skip


def tolerance(cell: str, precision: Precision) -> float:
    """Returns the largest relative error with which a provider is still timed.

    Args:
      cell: the name of the cell.
      precision: the precision of the provider's matrix products.
    """
    # Rounding causes errors of some 1e-3 in TF32 and 1e-2 in bfloat16, and larger ones if the state is rounded too. A
    # wrong bias, gate order or reset causes 1e-1 or more. Rounded products change the signs of sums near zero, and so
    # the derivative of a ReLU: on an H200 at 5e46f77, the TF32 gradients of the kernels, of Flax and of a hoisted
    # `lax.scan` were all off by 0.021 to 0.024, at 64,128,128 and at 1024,128,256.
    return 5e-2 if precision == "bf16" or cell == "simple_relu" else 1e-2


def forward(cell: str, weights: Arrays, fixed: Mapping[str, Any], **options: Any) -> jax.Array:
    """Returns the outputs `[T, B, H]` of a cell's function; `weights` also has `xs`, and the states of new episodes."""
    weights = dict(weights)
    xs = weights.pop("xs")
    states = [weights.pop(name) for name in ("reset_c", "reset_h") if name in weights]
    if states:
        options["reset_state"] = states[0] if len(states) == 1 else tuple(states)
    params, resets = CELLS[cell].params(**weights), fixed["resets"]
    ys: jax.Array = FUNCTIONS[cell](params, initial_carry(fixed), xs, resets=resets, **options)[1]
    return ys


def initial_carry(states: Mapping[str, Any]) -> Any:
    """Returns `h0`, or `(c0, h0)` of an LSTM."""
    return (states["c0"], states["h0"]) if "c0" in states else states["h0"]


def of_gradients(gradients: Arrays) -> Arrays:
    """Returns gradients by their own names, as in `dxs`."""
    return {f"d{name}": x for name, x in gradients.items()}


def differentiate(
    derivative: Derivative, forward: Callable[..., jax.Array], arguments: tuple[Any, ...], along: tuple[Any, ...],
    ct_ys: jax.Array,
) -> tuple[Arrays, tuple[Any, ...]]:  # fmt: skip
    """Differentiates `forward(*arguments) -> ys`, as `cases.Case.derivative` says.

    Returns:
      The outputs, by name, and for each argument its gradient, given the cotangent `ct_ys`, or its part of the product
      with the Hessian. With "jvp", the tangents `dys` are among the outputs, and there are no gradients.
    """
    if derivative == "jvp":
        ys, dys = jax.jvp(forward, arguments, along)
        return {"ys": ys, "dys": dys}, ()
    if derivative == "hvp":
        # the gradient of the loss by the outputs depends on these, as in an agent

        def loss(*arguments: Any) -> jax.Array:
            return jnp.sum(ct_ys * forward(*arguments) ** 2) / 2

        return {}, jax.jvp(jax.grad(loss, range(len(arguments))), arguments, along)[1]
    ys, vjp = jax.vjp(forward, *arguments)
    return {"ys": ys}, vjp(ct_ys)


def run_cell(
    cell: str, inputs: Arrays, *, gradients: bool = True, derivative: Derivative = "", **options: Any
) -> Arrays:
    """Returns `ys` of a cell's function and the gradients `dxs`, `dw_ih`, ..., or what else `differentiate` returns.

    Without `gradients`, it returns `ys` alone.
    """
    fixed: Arrays = {name: inputs[name] for name in ("h0", "c0", "resets", "ct_ys") if name in inputs}
    along = {name.removeprefix("along_"): x for name, x in inputs.items() if name.startswith("along_")}
    differentiated = {name: x for name, x in inputs.items() if name not in fixed and not name.startswith("along_")}

    def run(arrays: Arrays) -> jax.Array:
        return forward(cell, arrays, fixed, **options)

    if not gradients:
        return {"ys": run(differentiated)}
    results, of_arguments = differentiate(derivative, run, (differentiated,), (along,), fixed["ct_ys"])
    return results | (of_gradients(*of_arguments) if of_arguments else {})


class Truth(Protocol):
    """The correct results of a case, which those of providers are compared with."""

    @property
    def case(self) -> Case | NormCase:
        """The case."""

    def errors(self, provider: Provider, results: dict[str, Any], names: Sequence[str] | None = None) -> Errors:
        """Returns the errors of a provider's results, which are all of them or those in `names`."""

    def tolerance(self, provider: Provider) -> float:
        """Returns the largest relative error with which a provider is still timed."""


class Oracle:
    """The outputs and gradients of a case in float64, computed at their first use."""

    def __init__(self, case: Case, arrays: Callable[[Dtype, bool], Arrays]) -> None:
        """Takes the case and a function that returns its inputs in a dtype, with or without resets."""
        self.case = case
        self._arrays = arrays
        self._results: dict[tuple[Dtype, bool], Arrays] = {}
        self._programs: dict[Dtype, concurrent.futures.Future[Callable[[Arrays], Arrays]]] = {}

        def run(arrays: Arrays) -> Arrays:
            wide = {name: x if x.dtype == bool else x.astype(jnp.float64) for name, x in arrays.items()}
            return run_cell(case.cell, wide, derivative=case.derivative, implementation="xla", precision="highest")

        self._run = jax.jit(jax.vmap(run) if case.models else run)

    def compile(self, dtypes: Collection[Dtype], pool: concurrent.futures.Executor) -> None:
        """Begins to compile the programs for operands rounded to these dtypes in `pool`; `want` waits for them."""
        with jax.enable_x64(True):
            for dtype in dtypes:
                self._programs[dtype] = pool.submit(self._run.lower(self._arrays(dtype, True)).compile)

    def want(self, dtype: Dtype, resets: bool) -> Arrays:
        """Returns the results for operands rounded to `dtype`, with the case's resets or with none."""
        if (dtype, resets) not in self._results:
            run = self._programs[dtype].result() if dtype in self._programs else self._run
            with jax.enable_x64(True):
                self._results[dtype, resets] = run(self._arrays(dtype, resets))
        return self._results[dtype, resets]

    def errors(self, provider: Provider, results: dict[str, Any], names: Sequence[str] | None = None) -> Errors:
        """Returns the errors of a provider's results, which are all outputs and gradients or those in `names`."""
        got, want = to_jax(results), self.want(provider.dtype, provider.resets)
        return errors(got, want if names is None else {name: want[name] for name in names})

    def tolerance(self, provider: Provider) -> float:
        """Returns the largest error with which a provider is still timed."""
        return tolerance(self.case.cell, provider.precision)

    def forget(self) -> None:
        """Frees the results."""
        self._results.clear()


@jax.jit
def _errors(got: Arrays, want: Arrays) -> dict[str, tuple[jax.Array, jax.Array]]:
    def error(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
        got, want = got.astype(jnp.float64), want.astype(jnp.float64)
        difference = jnp.abs(got - want)
        norm, largest = jnp.linalg.norm(want.ravel()), jnp.abs(want).max()
        return jnp.linalg.norm(difference.ravel()) / norm, difference.max() / largest

    return {name: error(x, want[name]) for name, x in got.items()}


def largest_rms(errors: Errors) -> tuple[str, float]:
    """Returns the name of the array with the largest first error of `errors`, and that error; a NaN is the largest."""
    largest = {name: rms for name, (rms, _) in errors.items()}
    name = max(largest, key=lambda name: float("inf") if largest[name] != largest[name] else largest[name])
    return name, largest[name]


def errors(got: Arrays, want: Arrays) -> Errors:
    """Returns by name `||got - want|| / ||want||` and `max|got - want| / max|want|`, NaN where anything is NaN."""
    if got.keys() != want.keys():
        raise ValueError(f"got arrays {', '.join(sorted(got))}; want {', '.join(sorted(want))}")
    for name, x in got.items():
        if x.shape != want[name].shape:
            raise ValueError(f"{name} has shape {x.shape}, want {want[name].shape}")
    with jax.enable_x64(True):
        return {name: (float(rms), float(largest)) for name, (rms, largest) in _errors(got, want).items()}


def to_jax(arrays: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns JAX arrays unchanged, and converts PyTorch tensors to JAX arrays that share their memory."""
    if all(isinstance(x, jax.Array) for x in arrays.values()):
        return arrays
    timing.synchronize()
    return {name: jax.dlpack.from_dlpack(x.detach().contiguous()) for name, x in arrays.items()}


def judged(row: Row, errors: Errors, limit: float, difference: str = "is off by") -> Row:
    """Returns `row` with the largest error of any array, and marked as wrong if that exceeds `limit`."""
    name, error = largest_rms(errors)
    row = dataclasses.replace(row, error=error, error_of=name)
    if error <= limit:
        return row
    reason = f"not timed: {name} {difference} {error:.2g}, more than {limit:g}"
    return dataclasses.replace(row, status="wrong", reason=reason)


def check(provider: Provider, ready: Ready, truth: Truth, *, names: Sequence[str] | None = None) -> Row:
    """Runs one pass and compares all outputs and gradients, or only `names`, with the correct ones.

    Returns a row without a figure, which is marked as wrong or failed if the provider is not to be timed.
    """
    row = provider.row(truth.case)
    try:
        for _ in range(2 if ready.own_graphs else 0):
            ready.run()  # the first call warms up, the second records the graphs
        errors = truth.errors(provider, ready.canonical(ready.run()), names)
    except Exception as error:
        return row.failed(error)
    return judged(row, errors, truth.tolerance(provider))
