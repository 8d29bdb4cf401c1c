"""Weights from and to Flax linen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

from jaxrnn.cells import LAYOUTS
from jaxrnn.convert.arrays import alternatives, describe, keys_of, remedy_for
from jaxrnn.convert.checks import check_params, expect
from jaxrnn.convert.dense import dense_names, from_dense, to_dense
from jaxrnn.convert.layout import without_blocks

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import Params
    from jaxrnn.convert.layout import ParamsT


@overload
def from_linen(tree: Any, *, into: type[ParamsT]) -> ParamsT: ...


@overload
def from_linen(tree: Any, *, into: None = ...) -> Params: ...


def from_linen(tree: Any, *, into: type[Any] | None = None) -> Params:
    """Returns the weights of `flax.linen.GRUCell`, `LSTMCell`, `OptimizedLSTMCell`, `MGUCell` or `SimpleCell`.

    The cells of `jaxrnn.linen` have the same parameters; with `num_blocks`, `w_hh` has the blocks. Parameters do not
    include attributes: a `gate_fn` or `activation_fn` other than the default cannot be detected here, nor can
    `residual=True` of a SimpleCell. Do not convert such a cell, except for a SimpleCell with relu, which is
    `jaxrnn.simple_rnn(..., activation="relu")`.

    Args:
      tree: the parameters of the cell, or its variables: `{"ir": {"kernel": [D, H], "bias": [H]}, ...}`. In the
        variables of a larger module the cell is at a path like `variables["params"]["ScannedRNN_0"]["GRUCell_1"]`, or,
        in an `nn.RNN`, under "cell".
      into: the class of the parameters, such as `jaxrnn.GRUParams`. It tells type checkers the class of the result, and
        weights of another cell raise.

    Returns:
      `GRUParams`, `LSTMParams`, `MGUParams` or `SimpleParams`, with arrays in the dtypes of the source.

    Raises:
      ValueError: these are not the parameters of such a cell, or are those of an MGUCell with `reset_gate=False`, which
        computes something else; or the weights are not those of `into`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> rnn, xs = nn.RNN(nn.GRUCell(4), time_major=True), jnp.ones((5, 2, 3))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> params = convert.from_linen(variables["params"]["cell"])
      >>> _, ys = jaxrnn.gru(params, jnp.zeros((2, 4)), xs)
      >>> bool(jnp.allclose(ys, rnn.apply(variables, xs), atol=1e-2))
      True
    """
    if isinstance(tree, Mapping) and "params" in tree:  # tree holds all variables of a module
        tree = tree["params"]
    for layout in LAYOUTS:
        if keys_of(tree) == set(dense_names(layout)):
            layer, reason = layout.required_bias or (None, None)
            if layer is not None and "bias" not in keys_of(tree[layer]):
                raise ValueError(f"from_linen: {reason}")
            return expect("from_linen", from_dense("from_linen", layout, tree), into)
    wanted = [f"of {layout.linen} ({', '.join(dense_names(layout))})" for layout in LAYOUTS]
    raise ValueError(
        f"from_linen: tree must be the parameters {alternatives(wanted)}, got {describe(tree)}{_remedy(tree)}"
    )


def _remedy(tree: Any) -> str:
    """Returns what to pass instead, after a semicolon."""
    if paths := [path for path, _ in zip(_paths_of_cells(tree), range(4), strict=False)]:
        return f"; pass its part {alternatives(paths)}"
    if hasattr(tree, "features") or hasattr(tree, "cell"):
        return '; pass the parameters that init returned, variables["params"]'
    return remedy_for("from_linen", tree, "; pass the parameters of one cell")


def _paths_of_cells(tree: Any, path: str = "") -> Iterator[str]:
    """Yields the paths of the cells in a tree of parameters, such as `["cell"]`."""
    for name, part in tree.items() if isinstance(tree, Mapping) else ():
        here = f"{path}[{name!r}]"
        if any(keys_of(part) == set(dense_names(layout)) for layout in LAYOUTS):
            yield here
        else:
            yield from _paths_of_cells(part, here)


def to_linen(params: Params, *, dense: bool = False) -> dict[str, dict[str, Array]]:
    """Returns the parameters of the cell of `flax.linen`. `LSTMCell` and `OptimizedLSTMCell` share a format.

    Args:
      params: the weights.
      dense: whether to make N blocks of recurrent weights a matrix that is zero outside of the blocks, for a cell of
        Flax. Without it, the parameters are those of a cell of `jaxrnn.linen` with `num_blocks=N`.

    Returns:
      The kernels `[D, H]` and `[H, H]` and the biases `[H]` of each gate, in the dtypes of `params`.

    Raises:
      ValueError: `params` are not parameters of jaxrnn, or their shapes disagree.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> params = jaxrnn.SimpleParams(w_ih=jnp.ones((3, 4)), w_hh=jnp.eye(4), b=jnp.zeros(4))
      >>> carry, y = nn.SimpleCell(4).apply({"params": convert.to_linen(params)}, jnp.zeros(4), jnp.ones(3))
      >>> y.shape
      (4,)
    """
    layout = check_params("to_linen", params)
    return to_dense(layout, without_blocks(params) if dense else params)
