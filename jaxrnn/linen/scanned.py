"""The recurrent modules of JAX RL agents: `ScannedRNN` and `HiddenFirstScannedRNN`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import modules
from jaxrnn.checks import Implementation, check_size, describe, shown, suggest
from jaxrnn.linen.cells import CELL_TYPES, REPLACEMENTS, FusedCell
from jaxrnn.linen.rnn import default_carries, run_cell
from jaxrnn.modules import Carry
from torch_bridge.docstrings import inherit_descriptions

# The options of a cell that `ScannedRNN` sets itself.
_SET_HERE = ("features", "dtype", "param_dtype", "num_blocks", "name", "parent")

P = ParamSpec("P")
R = TypeVar("R")


class ClassOrInstanceMethod(Generic[P, R]):
    """A descriptor that makes a function a method of both the class and its instances: its first argument is either."""

    nowrap = True  # Flax does not wrap methods with this attribute

    def __init__(self, function: Callable[Concatenate[Any, P], R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[P, R]:
        return types.MethodType(self.function, owner if instance is None else instance)


def _new_carry(rnn: Any, batch_size: Any, hidden_size: Any, form: str = "an integer or a tuple") -> Carry:
    """Returns the carry of a new episode for a class or an instance, for a batch axis or a tuple of batch axes.

    `form` is how the caller's argument gives the sizes, for the message of an error.
    """
    batch = tuple(batch_size) if isinstance(batch_size, Sequence) else (batch_size,)
    _check_attributes(rnn)
    hidden_size = rnn.hidden_state_dim if hidden_size is None else hidden_size
    if hidden_size is None:
        raise ValueError(
            "ScannedRNN: hidden_size must be an integer, got None; pass it to initialize_carry, or set hidden_state_dim"
        )
    check_size("ScannedRNN: hidden_size", hidden_size)
    if not modules.are_sizes(batch):
        raise ValueError(
            f"ScannedRNN: batch_size must be {form}, got {shown(batch_size)}; pass the sizes of all batch axes"
        )
    make, given = _class_and_options(rnn.cell_type)
    cell = make(**given, **_cell_options(make, hidden_size, param_dtype=rnn.param_dtype), parent=None)
    return cell.initialize_carry(jax.random.key(0), (*batch, hidden_size))


def _cell_options(make: Any, features: int, **options: Any) -> dict[str, Any]:
    """Returns the options of a cell: its width, and those of `options` that its class has.

    Raises:
      ValueError: the class has no option `features`, or lacks another one that is set to a value other than its default
        in `ScannedRNN`.
    """
    accepted = inspect.signature(make).parameters
    defaults = {name: ScannedRNN.__dataclass_fields__[name].default for name in options}
    needed = ["features", *(name for name, value in options.items() if value != defaults[name])]
    if missing := [name for name in needed if name not in accepted]:
        has = ", ".join(name for name in accepted if name not in ("parent", "name"))
        raise ValueError(
            f"ScannedRNN: cell_type must be a class with the options {', '.join(needed)}, got "
            f"{make.__module__}.{make.__qualname__}, which lacks {', '.join(missing)} and has {has or 'none'}; add "
            "what is missing to the class, or run an instance of it with RNN"
        )
    return {"features": features, **{name: value for name, value in options.items() if name in accepted}}


def _check_attributes(rnn: Any) -> None:
    """Raises ValueError if `hidden_state_dim` or `cell_name` of a class or an instance has another type."""
    if not isinstance(rnn.hidden_state_dim, (int, np.integer, type(None))):
        raise ValueError(
            f"ScannedRNN: hidden_state_dim must be an integer or None, got {describe(rnn.hidden_state_dim)}; a cell is "
            "given as cell_type"
        )
    if not isinstance(rnn.cell_name, (str, type(None))):
        raise ValueError(f"ScannedRNN: cell_name must be a string or None, got {shown(rnn.cell_name)}; pass a name")


def _type_of_attribute(name: str) -> str:
    """Returns a type with which a subclass can annotate an attribute without an import other than of `Any`."""
    annotation = str(inspect.get_annotations(ScannedRNN)[name])
    return annotation if {"int", "str", "None"}.issuperset(annotation.split(" | ")) else "Any"


class ScannedRNN(nn.Module):
    """The recurrent module of JAX RL agents: `carry, ys = ScannedRNN()(carry, (ins, resets))`.

    It replaces the `ScannedRNN` of JaxMARL, Craftax_Baselines, Stoix and Mava: changing the import changes neither the
    parameters (`ScannedRNN_0/GRUCell_1/...`), nor their initial values, nor the results. Kinetix calls
    `initialize_carry(batch_size)`: set `hidden_state_dim` to 256 for it. purejaxrl and popjaxrl have the parameters at
    `ScannedRNN_0/GRUCell_0/...`: set `cell_name` for these.
    H is the width of the carry and may differ from D. Rollouts call the module with T = 1, and updates call it with
    whole sequences.

    Set `cell_type` for another cell. If `initialize_carry` is called on the class, set `cell_type` in a subclass.

    Attributes:
      hidden_state_dim: H, the default `hidden_size` of `initialize_carry`; if set, the carry must have this width.
      cell_type: "gru", "lstm", "optimized_lstm" or another name in `jaxrnn.linen.cells.CELL_TYPES`, or a cell class.
        Those that `jaxrnn.linen` has are fused, and so is a class of Flax that one of them replaces, but no subclass.
        Of the options of the class, `features`, `dtype`, `param_dtype` and `num_blocks` are set, and the others have
        their defaults, unless a `functools.partial` of the class sets them, such as `kernel_init`. A class of yours
        needs the option `features`, and those of the other three that are set here.
      cell_name: the name of the cell's parameters, by default `GRUCell_1` for "gru", `LSTMCell_1` for "lstm", and so
        on. The classes that this one replaces create a dummy cell first, and only the second cell has parameters. If
        your class creates no dummy cell, creates it with `parent=None` or creates it second, the name is "GRUCell_0".
      dtype: the dtype of the matmul operands; the carry keeps its own dtype. None uses the dtype to which inputs, carry
        and parameters promote.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      precision: the precision of the matmuls, as `jax.lax.dot_general` takes it; None means
        `jax_default_matmul_precision`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the cell. NotImplementedError is raised if the named one cannot run it.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. N must divide H. More than 1 needs a cell that is fused.

    Examples:
      The second environment was reset before step 2:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import ScannedRNN
      >>> ins, dones = jnp.ones((5, 2, 3)), jnp.zeros((5, 2), bool).at[2, 1].set(True)
      >>> carry = ScannedRNN.initialize_carry(2, 4)
      >>> rnn = ScannedRNN()
      >>> variables = rnn.init(jax.random.key(0), carry, (ins, dones))
      >>> carry, ys = rnn.apply(variables, carry, (ins, dones))
      >>> ys.shape, list(variables["params"])
      ((5, 2, 4), ['GRUCell_1'])

      An LSTM, whose carry is `(c, h)`:

      >>> class ScannedLSTM(ScannedRNN):
      ...     cell_type: str = "lstm"
      >>> [state.shape for state in ScannedLSTM.initialize_carry(2, 4)]
      [(2, 4), (2, 4)]
    """

    hidden_state_dim: int | None = None
    cell_type: Any = "gru"  # type checkers let a subclass declare another type, such as str, only for Any
    cell_name: str | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None
    num_blocks: int = 1

    _cell_index = 1

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError for an attribute that is set without a type: a dataclass would ignore it."""
        annotated = inspect.get_annotations(cls)
        for name in ScannedRNN.__dataclass_fields__:
            if name in vars(cls) and name not in annotated:
                raise TypeError(
                    f"{cls.__name__}: {name} is set without a type, and a dataclass would ignore it: write "
                    f"`{name}: {_type_of_attribute(name)} = {vars(cls)[name]!r}`"
                )
        super().__init_subclass__(**options)

    @nn.compact
    def __call__(self, carry: Carry, x: tuple[ArrayLike, ArrayLike]) -> tuple[Carry, Array]:
        """Runs the cell over time, and restarts it at every step where `resets` is nonzero.

        An episode starts from zeros, or from what `initialize_carry` of a cell class of one's own returns.

        Args:
          carry: `[*batch, H]`, or `(c, h)` for an LSTM; `initialize_carry` returns one.
          x: `(ins, resets)`: `ins [T, *batch, D]`, and `resets [T, *batch]`, real, nonzero where step t is the
            first of an episode: the done flag that step t - 1 returned, not that of step t.

        Returns:
          `(carry, ys [T, *batch, H])`.

        Raises:
          ValueError: shapes or dtypes disagree, or the parameters belong to another cell or have another name;
            `num_blocks` does not divide H, or the cell is not one of `jaxrnn.linen` and cannot have blocks.
          NotImplementedError: the named implementation cannot run this cell or input; the message says why.
        """
        caller = modules.caller_of(self, has_time_major=False, xs="ins")
        _check_attributes(self)
        ins, resets = modules.check_pair(caller, "x", x, carry)
        if not (states := jax.tree.leaves(carry)) or not all(getattr(state, "ndim", 0) for state in states):
            raise ValueError(
                f"{caller('carry')} must be an array [*batch, H], or a pair (c, h) of them for an LSTM, got "
                f"{describe(carry)}; initialize_carry returns one"
            )
        hidden = states[-1].shape[-1]
        if self.hidden_state_dim not in (None, hidden):
            raise ValueError(
                f"{caller('carry')} must be hidden_state_dim = {self.hidden_state_dim} wide, got {hidden}; "
                "initialize_carry of this instance returns one"
            )
        make, given = _class_and_options(self.cell_type)
        if self.num_blocks != 1:
            make = REPLACEMENTS.get(make, make)  # the cells of Flax have no blocks
        name = f"{make.__name__}_{self._cell_index}" if self.cell_name is None else self.cell_name
        self._check_name(name, make)
        options = _cell_options(make, hidden, dtype=self.dtype, param_dtype=self.param_dtype)
        cell = make(name=name, **given, **options, **self._block_options(make))
        carry, reset_carry = default_carries(cell, carry, ins, resets, None)
        carry, ys, _ = run_cell(
            cell,
            carry,
            ins,
            resets=resets,
            reset_carry=reset_carry,
            precision=self.precision,
            implementation=self.implementation,
            caller=caller,
        )
        return carry, ys

    def _block_options(self, make: Any) -> dict[str, int]:
        """Returns the attribute `num_blocks` of the cell, if there are several blocks."""
        if self.num_blocks == 1:
            return {}
        if not issubclass(make, FusedCell):
            raise ValueError(
                f"{type(self).__name__}: num_blocks={shown(self.num_blocks)} needs a cell of jaxrnn.linen, got the "
                f'class {make.__module__}.{make.__qualname__}; pass cell_type="gru", for example'
            )
        return {"num_blocks": self.num_blocks}

    def _check_name(self, name: str, cell: Any) -> None:
        """Raises ValueError if the given parameters belong to another cell or have another name."""
        params = self.variables.get("params", {})
        if params and name not in params and not self.is_mutable_collection("params"):
            first = next(iter(params))
            cell_type = "" if first.rpartition("_")[0] == cell.__name__ else "cell_type to their cell, and "
            raise ValueError(
                f"{type(self).__name__}: the given parameters must be under {name}, got {', '.join(params)}; to load "
                f'them, set {cell_type}`cell_name: str | None = "{first}"` in a subclass of this class'
            )

    @ClassOrInstanceMethod
    def initialize_carry(self: Any, batch_size: int | Sequence[int], hidden_size: int | None = None) -> Carry:
        """Returns the carry of a new episode, zeros for a cell of Flax. It is a method of the class and of instances.

        Args:
          batch_size: an int, or a tuple with the sizes of all batch axes.
          hidden_size: H; by default `hidden_state_dim`.

        Returns:
          The carry, `[*batch, H]` or a pair `(c, h)` of such arrays, in `param_dtype`.

        Raises:
          ValueError: there is no `hidden_size`, or a size or `cell_type` is not valid.
        """
        return _new_carry(self, batch_size, hidden_size)


@inherit_descriptions(ScannedRNN)
class HiddenFirstScannedRNN(ScannedRNN):
    """The `ScannedRNN` of JaxMARL's Q-learning and of purejaxql.

    It has `initialize_carry(hidden_size, *batch_size)`, and its parameters are under `ScannedRNN_0/GRUCell_0`.

    Attributes:
      cell_name: the name of the cell's parameters, by default `GRUCell_0` for "gru", and so on.

    Examples:
      The module that replaces purejaxql's LSTM:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import HiddenFirstScannedRNN
      >>> class ScannedRNN(HiddenFirstScannedRNN):
      ...     cell_type: str = "optimized_lstm"
      >>> ins, dones = jnp.ones((5, 2, 3)), jnp.zeros((5, 2), bool)
      >>> carry = ScannedRNN.initialize_carry(4, 2)
      >>> variables = ScannedRNN().init(jax.random.key(0), carry, (ins, dones))
      >>> (c, h), ys = ScannedRNN().apply(variables, carry, (ins, dones))
      >>> ys.shape, list(variables["params"])
      ((5, 2, 4), ['OptimizedLSTMCell_0'])
    """

    _cell_index = 0

    @ClassOrInstanceMethod
    def initialize_carry(  # type: ignore[override]  # other arguments
        self: Any, hidden_size: int, *batch_size: int
    ) -> Carry:
        """Returns the carry that `ScannedRNN.initialize_carry` returns, but takes the width first.

        Args:
          hidden_size: H.
          batch_size: the sizes of all batch axes.

        Returns:
          The carry, `[*batch, H]` or a pair `(c, h)` of such arrays, in `param_dtype`.

        Raises:
          ValueError: a size or `cell_type` is not valid.
        """
        return _new_carry(self, batch_size, hidden_size, form="separate integers")


# Flax names parameters after the class, and the class that this one replaces is named ScannedRNN.
HiddenFirstScannedRNN.__name__ = "ScannedRNN"


def _class_and_options(cell_type: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the cell class that `cell_type` is, names or is a `functools.partial` of, and the options of a partial.

    Raises:
      ValueError: `cell_type` is none of these, or a partial sets what `ScannedRNN` sets.
    """
    if isinstance(cell_type, str) and cell_type in CELL_TYPES:
        return CELL_TYPES[cell_type], {}
    make, args, options = cell_type, (), {}
    if isinstance(cell_type, functools.partial):
        make, args, options = cell_type.func, cell_type.args, cell_type.keywords
    if not (isinstance(make, type) and issubclass(make, nn.RNNCellBase)):
        raise ValueError(
            "ScannedRNN: cell_type must be a cell class of linen, a functools.partial of one, or one of "
            f"{', '.join(CELL_TYPES)}, got {shown(cell_type)}{suggest(cell_type, [*CELL_TYPES])}"
        )
    if taken := [*map(shown, args), *sorted(options.keys() & _SET_HERE)]:
        raise ValueError(
            "ScannedRNN: the functools.partial in cell_type must have only keyword arguments other than "
            f"{', '.join(_SET_HERE)}, got {', '.join(taken)}; leave these out: the carry has the width, and ScannedRNN "
            "has attributes for the others"
        )
    return make, options
