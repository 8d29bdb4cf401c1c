"""The cells that can be fused: their base class, the cells, and which class of Flax each of them replaces."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Required, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax import Array
from jax.typing import ArrayLike
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.cells import GRUParams, LSTMParams, NormGRUParams, SimpleParams, norm_gru_cell
from jaxrnn.checks import Caller, Implementation, check_norm_and_constants, check_size
from jaxrnn.choice import must_scan
from jaxrnn.modules import Carry, CarryT
from torch_bridge.docstrings import inherit_descriptions

# The names of the layers that multiply x, and of those that multiply h.
Layers = tuple[list[str], list[str]]
DENSE: Layers = ["dense_i"], ["dense_h"]
KERNEL_INIT, RECURRENT_KERNEL_INIT = nnx.initializers.lecun_normal(), nnx.initializers.orthogonal()


class LayerWeights(NamedTuple):
    """The weights of a cell's layers, with the gates of several layers concatenated; None for layers without a bias."""

    w_ih: Array
    w_hh: Array
    b_ih: Array | None
    b_hh: Array | None

    def bias(self) -> Array:
        """Returns the sum of both biases."""
        present = [b for b in (self.b_ih, self.b_hh) if b is not None]
        return functools.reduce(jnp.add, present) if present else jnp.zeros(self.w_ih.shape[-1:], self.w_ih.dtype)


class CellOptions(TypedDict, total=False):
    """The arguments of Flax's constructors that all cells have; their defaults are Flax's."""

    activation_fn: Callable[..., Any]
    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    bias_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype
    carry_init: Initializer | None
    promote_dtype: PromoteDtypeFn
    keep_rngs: bool
    rngs: Required[nnx.Rngs]
    kernel_metadata: Mapping[str, Any]
    recurrent_kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]


class GatedCellOptions(CellOptions, total=False):
    """The arguments of Flax's constructors of cells with gates."""

    gate_fn: Callable[..., Any]


def block_initializer(init: Initializer, num_blocks: int) -> Initializer:
    """Returns an initializer of a block-diagonal kernel `[N, H / N, F / N]`, which is called with the shape `(H, F)`.

    If `init` returns metadata, as that of `nnx.with_partitioning` does, they are those of the whole kernel.
    """

    def initialize(key: Array, shape: Any, dtype: Any) -> Any:
        blocks = modules.initialize_blocks(init, num_blocks, key, shape, dtype)
        if not isinstance(blocks[0], nnx.VariableMetadata):
            return jnp.stack(blocks)
        return dataclasses.replace(blocks[0], raw_value=jnp.stack([one.raw_value for one in blocks]))

    return initialize


class FusedCell(nnx.RNNCellBase, Generic[CarryT]):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation.

    With N > 1 blocks, the layers that multiply h have a kernel `[N, H / N, F / N]` instead of `[H, F]`. They only hold
    the weights: a call of such a layer is not the block-diagonal product.
    """

    dtype: Dtype | None
    param_dtype: Dtype

    # The layers that a cell of this class has, and one of the class of Flax that it replaces, and the parameters that
    # either may have besides those of the layers.
    _layers: ClassVar[Layers] = DENSE
    _other_params: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
        **options: Unpack[GatedCellOptions],
    ) -> None:
        caller = modules.caller_of(self)
        check_size(caller("in_features"), in_features)
        check_size(caller("hidden_features"), hidden_features)
        if "rngs" in options:
            modules.check_rngs(caller, options["rngs"])
        modules.check_num_blocks(caller, num_blocks, hidden_features)
        init_options: Any = options
        if num_blocks > 1:
            init = init_options.get("recurrent_kernel_init")
            if init is None:
                init = inspect.signature(super().__init__).parameters["recurrent_kernel_init"].default
            init_options["recurrent_kernel_init"] = block_initializer(init, num_blocks)
        super().__init__(in_features, hidden_features, **init_options)  # type: ignore[call-arg]
        self.precision = precision
        self.implementation = implementation
        self.num_blocks = num_blocks

    def __call__(self, carry: CarryT, inputs: ArrayLike) -> tuple[CarryT, Array]:
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell, or Flax's cell, which has no blocks, would
            have to run it.
        """
        caller = modules.caller_of(self, xs="inputs")
        reason = reason_to_scan(self, (carry, inputs))
        modules.check_blocks_are_fused(caller, self.num_blocks, reason)
        modules.check_structure(recurrence_of(self), carry, caller)
        if must_scan(reason, self.precision, self.implementation, "nnx.scan", caller):
            return super().__call__(carry, inputs)  # type: ignore[arg-type]  # Flax declares JAX arrays
        modules.check_dtypes(self)
        modules.check_step(caller, recurrence_of(self), carry, inputs)
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs, caller)
        options: Any = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = run_fused(self, carry, inputs[None], caller=caller, **options)
        return carry, ys[0]

    def initialize_carry(self, input_shape: tuple[int, ...], *args: Any, **options: Any) -> Carry:
        """Returns the carry of a new sequence, as Flax's cell does.

        Args:
          input_shape: the shape of the inputs of one step, `[*batch, D]`.
          args: Flax's other arguments, such as the random number generator of `carry_init`.
          options: the same by name.

        Returns:
          `[*batch, H]` or, for an LSTM, `(c, h)` of two such arrays, of the dtype `param_dtype`.

        Raises:
          ValueError: `input_shape` is no shape.
        """
        modules.check_input_shape(self, input_shape, "input_shape, rngs")
        return super().initialize_carry(input_shape, *args, **options)

    @staticmethod
    def _recurrence(cell: Any) -> modules.Recurrence:
        """Returns the recurrence of `jaxrnn` that computes a cell: its name, such as "gru", or one with constants."""
        raise NotImplementedError

    @staticmethod
    def _pack(cell: Any, weights: LayerWeights) -> Any:
        """Returns the parameters for that recurrence."""
        raise NotImplementedError

    @staticmethod
    def _reason_of_formula(cell: Any) -> str | None:
        """Returns why the formula of a cell is not that of `jaxrnn`, or None."""
        return modules.reason_to_scan_gates(cell)


class GRUCell(FusedCell[Array], nnx.GRUCell):
    """`flax.nnx.GRUCell` computed by `jaxrnn.gru`, with the same parameters, initial values and results.

    Flax's cell has no recurrent bias of n, unlike `linen.GRUCell`, and this cell has none while Flax's has none. If the
    bias exists, as `hn_bias` ([flax#5595](https://github.com/google/flax/pull/5595)) or in `dense_h`, it is used.

    Args:
      in_features: D, the width of the inputs.
      hidden_features: H, the width of the carry.
      gate_fn: the activation of the gates. With a function other than sigmoid, or an `activation_fn` other than tanh,
        Flax's own cell runs, and in an `RNN` it runs under `nnx.scan`.
      activation_fn: the activation of the candidate state; in an LSTM, also that of the cell state.
      kernel_init: the initializer of the input weights.
      recurrent_kernel_init: the initializer of the recurrent weights.
      bias_init: the initializer of the biases.
      dtype: the dtype of the matmul operands. None uses the dtype to which inputs, carry and parameters promote. The
        carry keeps its own dtype, so it may be float32 with `dtype=jnp.bfloat16`.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      carry_init: the initializer of the carry, by default zeros.
      promote_dtype: the function that converts inputs and parameters to one dtype. With a function other than the
        default, Flax's own cell runs.
      keep_rngs: whether the cell keeps `rngs` for `initialize_carry`.
      precision: the precision of the matmuls, as `jax.lax.dot_general` takes it; None means
        `jax_default_matmul_precision`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it, as "triton" cannot
        with another `gate_fn` or `activation_fn`.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, the kernel of `dense_h` is
        `[N, H / N, gates * H / N]` (in an `LSTMCell`, those of `hi`, `hf`, `hg` and `ho` are `[N, H / N, H / N]`), and
        `recurrent_kernel_init` initializes each block like a matrix. A call of `dense_h` itself is then not the product
        with all units. N must divide H. NotImplementedError is raised with another `gate_fn` or `activation_fn`.
      rngs: the random number generators of the parameters.
      kernel_metadata: metadata of the input weights, such as their sharding.
      recurrent_kernel_metadata: metadata of the recurrent weights.
      bias_metadata: metadata of the biases.

    Raises:
      ValueError: an argument has an invalid value, or `num_blocks` does not divide H.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import GRUCell
      >>> cell, x = GRUCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> carry, y = cell(carry, x)
      >>> y.shape
      (2, 4)
      >>> of_flax = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))  # the same parameters
      >>> bool((cell.dense_i.kernel[...] == of_flax.dense_i.kernel[...]).all())
      True
    """

    _other_params = ("hn_bias",)

    @staticmethod
    def _recurrence(cell: Any) -> modules.Recurrence:
        """Returns the name of the recurrence of `jaxrnn` that computes a cell."""
        return "gru"

    @staticmethod
    def _pack(cell: Any, weights: LayerWeights) -> GRUParams:
        """Returns the parameters for `jaxrnn.gru`, with recurrent biases of r and z, if any, in the input biases."""
        w_ih, w_hh, b_i, b_h = weights
        b_i = jnp.zeros(w_ih.shape[-1:], w_ih.dtype) if b_i is None else b_i
        hn_bias = getattr(cell, "hn_bias", None)
        b_hn = jnp.zeros(cell.hidden_features, b_i.dtype) if hn_bias is None else hn_bias[...]
        if b_h is None:
            return GRUParams(w_ih, w_hh, b_i, b_hn)
        of_rz, of_n = jnp.split(b_h, [2 * cell.hidden_features])
        return GRUParams(w_ih, w_hh, b_i.at[: of_rz.size].add(of_rz), b_hn + of_n)


class FusedLSTMCell(FusedCell[tuple[Array, Array]]):
    """The base class of the LSTM cells."""

    _other_params = ("proj",)

    @staticmethod
    def _recurrence(cell: Any) -> modules.Recurrence:
        """Returns the name of the recurrence of `jaxrnn` that computes a cell."""
        return "lstm"

    @staticmethod
    def _pack(cell: Any, weights: LayerWeights) -> LSTMParams:
        """Returns the parameters for `jaxrnn.lstm`."""
        w_hr: Any = cell.proj.kernel[...] if isinstance(cell, ProjectedLSTMCell) else None
        return LSTMParams(weights.w_ih, weights.w_hh, weights.bias(), w_hr)


@inherit_descriptions(GRUCell)
class LSTMCell(FusedLSTMCell, nnx.LSTMCell):
    """`flax.nnx.LSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import LSTMCell
      >>> cell, x = LSTMCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> (c, h), y = cell((c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """

    _layers = ["ii", "if_", "ig", "io"], ["hi", "hf", "hg", "ho"]


@inherit_descriptions(GRUCell)
class OptimizedLSTMCell(FusedLSTMCell, nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import OptimizedLSTMCell
      >>> cell, x = OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> (c, h), y = cell((c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """


class ProjectedLSTMCell(OptimizedLSTMCell):
    """The cell of an `LSTM` with a projection: `proj` maps H units to P, and `dense_h` takes the P units."""

    def __init__(self, in_features: int, hidden_features: int, *, proj_size: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(in_features, hidden_features, rngs=rngs, **options)
        dtypes: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
        inits: Any = {"kernel_init": options["recurrent_kernel_init"], "bias_init": options["bias_init"]}
        self.dense_h = nnx.Linear(proj_size, 4 * hidden_features, **inits, **dtypes)
        self.proj = nnx.Linear(hidden_features, proj_size, use_bias=False, kernel_init=options["kernel_init"], **dtypes)


class SimpleCellOptions(CellOptions, total=False):
    """The arguments of Flax's constructor."""

    residual: bool


@inherit_descriptions(GRUCell)
class SimpleCell(FusedCell[Array], nnx.SimpleCell):
    """`flax.nnx.SimpleCell` computed by `jaxrnn.simple_rnn`, with the same parameters, initial values and results.

    Args:
      activation_fn: tanh or relu. With another function, Flax's own cell runs, and in an `RNN` it runs under
        `nnx.scan`.
      dtype: the dtype of the matmul operands, by default float32 as in Flax. The carry keeps its own dtype, whereas
        Flax's cell casts it to `dtype`.
      residual: if True, which is another formula, Flax's own cell runs, and in an `RNN` it runs under `nnx.scan`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it, as "triton" cannot
        run a cell that Flax runs.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import SimpleCell
      >>> cell, x = SimpleCell(3, 4, activation_fn=nnx.relu, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> carry, y = cell(carry, x)
      >>> y.shape
      (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
        **options: Unpack[SimpleCellOptions],
    ) -> None:
        cell_options: Any = options  # other options than those of cells with gates
        super().__init__(
            in_features,
            hidden_features,
            precision=precision,
            implementation=implementation,
            num_blocks=num_blocks,
            **cell_options,
        )

    @staticmethod
    def _recurrence(cell: Any) -> modules.Recurrence:
        """Returns the name of the recurrence of `jaxrnn` that computes a cell."""
        return "simple_relu" if modules.is_relu(cell.activation_fn) else "simple_tanh"

    @staticmethod
    def _pack(cell: Any, weights: LayerWeights) -> SimpleParams:
        """Returns the parameters for `jaxrnn.simple_rnn`."""
        return SimpleParams(w_ih=weights.w_ih, w_hh=weights.w_hh, b=weights.bias())

    @staticmethod
    def _reason_of_formula(cell: Any) -> str | None:
        """Returns why a cell cannot be fused, or None."""
        if not modules.is_tanh(cell.activation_fn) and not modules.is_relu(cell.activation_fn):
            return "a cell whose activation_fn is neither tanh nor relu"
        return "a SimpleCell with residual=True" if cell.residual else None


class PlainCellOptions(TypedDict, total=False):
    """The arguments of the constructor that Flax's cells have too."""

    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    bias_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype
    rngs: Required[nnx.Rngs]


class PlainCell(nnx.RNNCellBase):
    """The constructor and the carry of a cell that Flax does not have, in the form that Flax's cells have.

    It stands where the class of Flax stands among the bases of other cells. A subclass sets `_gates`.
    """

    _gates: ClassVar[int]

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        kernel_init: Initializer = KERNEL_INIT,
        recurrent_kernel_init: Initializer = RECURRENT_KERNEL_INIT,
        bias_init: Initializer = jax.nn.initializers.zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        wide = self._gates * hidden_features
        self.dense_i = nnx.Linear(in_features, wide, kernel_init=kernel_init, bias_init=bias_init, **options)
        self.dense_h = nnx.Linear(hidden_features, wide, use_bias=False, kernel_init=recurrent_kernel_init, **options)

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """Raises NotImplementedError: this would run a cell that `jaxrnn` cannot run, but Flax has no such cell."""
        raise NotImplementedError(
            f"{type(self).__name__}: jaxrnn cannot run {reason_to_scan(self)}, and Flax has no such cell; keep the "
            "layers and parameters that the constructor makes"
        )

    def initialize_carry(
        self, input_shape: tuple[int, ...], rngs: Any = None, carry_init: Initializer | None = None
    ) -> Array:
        """Returns the carry of a new sequence: zeros, or what `carry_init` returns for a key of `rngs`."""
        shape = (*input_shape[:-1], self.hidden_features)
        if carry_init is None:
            return jnp.zeros(shape, self.param_dtype)
        key = rngs.carry() if isinstance(rngs, nnx.Rngs) else rngs()
        carry: Array = carry_init(key, shape, self.param_dtype)
        return carry

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of an input that are no batch axes."""
        return 1


class NormParams(nnx.Module):
    """The parameters of the norm of the inputs or of the state, with the names that Flax's norms give them."""

    def __init__(self, features: int, has_bias: bool, param_dtype: Dtype) -> None:
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype)) if has_bias else nnx.data(None)


class PlainNormGRUCell(PlainCell):
    """The constructor of `NormGRUCell`, which adds the norm."""

    _gates = 3

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        norm: Literal["rms", "layer"],
        epsilon: float,
        update_bias: float,
        param_dtype: Dtype = jnp.float32,
        **options: Any,
    ) -> None:
        super().__init__(in_features, hidden_features, param_dtype=param_dtype, **options)
        self.norm = norm
        self.epsilon = epsilon
        self.update_bias = update_bias
        self.norm_i = NormParams(in_features, norm == "layer", param_dtype)
        self.norm_h = NormParams(hidden_features, norm == "layer", param_dtype)


@inherit_descriptions(GRUCell)
class NormGRUCell(FusedCell[Array], PlainNormGRUCell):
    """The GRU of DreamerV3, whose gates see a norm of inputs and state, computed by `jaxrnn.norm_gru`.

    Flax has no such cell. Gates are ordered r, n, u. The kernel of `dense_i` is `[D, 3H]`, its bias `[3H]`, and the
    kernel of `dense_h` `[H, 3H]`. `norm_i` has the scale of the norm for the inputs, `[D]`, and `norm_h` that for the
    state, `[H]`; with `norm="layer"`, each also has a bias, the shift of the norm.

    Args:
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
      kernel_init: the initializer of the input weights.
      recurrent_kernel_init: the initializer of the recurrent weights.
      bias_init: the initializer of the biases of the gates.
      dtype: the dtype of the matmul operands; the carry keeps its own dtype. None uses the dtype to which inputs, carry
        and parameters promote.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      precision: the precision of the matmuls, as `jax.lax.dot_general` takes it; None means
        `jax_default_matmul_precision`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it.
      num_blocks: must be 1, because the norm sees all units.
      rngs: the random number generators of the parameters.

    Raises:
      ValueError: an argument has an invalid value.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import NormGRUCell
      >>> cell, x = NormGRUCell(3, 4, norm="layer", rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(x.shape)
      >>> carry, y = cell(carry, x)
      >>> y.shape
      (2, 4)
      >>> cell.norm_h.scale.shape, cell.norm_h.bias.shape
      ((4,), (4,))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        norm: Literal["rms", "layer"] = "rms",
        epsilon: float = 1e-4,
        update_bias: float = -1.0,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
        **options: Unpack[PlainCellOptions],
    ) -> None:
        caller = modules.caller_of(self)
        check_norm_and_constants(caller, norm, epsilon, update_bias)
        modules.check_blocks_without_norm(caller, num_blocks)
        own = {"norm": norm, "epsilon": epsilon, "update_bias": update_bias}
        given: Any = {**options, **own}  # other options than those of cells with gates
        super().__init__(in_features, hidden_features, precision=precision, implementation=implementation, **given)

    _other_params = ("norm_i", "norm_h")

    @staticmethod
    def _recurrence(cell: Any) -> modules.Recurrence:
        """Returns the cell of `jaxrnn` with the norm and the constants of this one."""
        return norm_gru_cell(cell.norm, cell.epsilon, cell.update_bias)

    @staticmethod
    def _pack(cell: Any, weights: LayerWeights) -> NormGRUParams:
        """Returns the parameters for `jaxrnn.norm_gru`."""

        def values(norm: Any) -> tuple[Any, Any]:
            return norm.scale[...], None if norm.bias is None else norm.bias[...]

        (scale_i, shift_i), (scale_h, shift_h) = values(cell.norm_i), values(cell.norm_h)
        return NormGRUParams(weights.w_ih, weights.w_hh, weights.bias(), scale_i, scale_h, shift_i, shift_h)

    @staticmethod
    def _reason_of_formula(cell: Any) -> None:
        """Returns None: the activations of such a cell cannot be chosen."""


# By class of Flax, the class that replaces it.
REPLACEMENTS: dict[type[nnx.RNNCellBase], type[FusedCell[Any]]] = {
    nnx.GRUCell: GRUCell,
    nnx.LSTMCell: LSTMCell,
    nnx.OptimizedLSTMCell: OptimizedLSTMCell,
    nnx.SimpleCell: SimpleCell,
}

_OWN: tuple[type[FusedCell[Any]], ...] = (*REPLACEMENTS.values(), ProjectedLSTMCell, NormGRUCell)

# By class of a cell that can be fused, the class that computes it.
FUSED: dict[type[nnx.RNNCellBase], type[FusedCell[Any]]] = {**REPLACEMENTS, **{cell: cell for cell in _OWN}}


def fused_class_of(cell: Any) -> type[FusedCell[Any]]:
    """Returns the class that computes a cell, by the cell's class or, for a subclass, by its base."""
    return next(FUSED[cls] for cls in type(cell).__mro__ if cls in FUSED)


def recurrence_of(cell: Any) -> modules.Recurrence:
    """Returns the recurrence of `jaxrnn` that computes a cell."""
    return fused_class_of(cell)._recurrence(cell)


def packed_params(cell: Any) -> Any:
    """Returns the parameters of a cell that can be fused, as the function of `jaxrnn` takes them."""

    def kernels_of(names: list[str]) -> Array:
        return jnp.concatenate([getattr(cell, name).kernel[...] for name in names], axis=-1)

    def biases_of(names: list[str]) -> Array | None:
        layers = [getattr(cell, name) for name in names]
        if all(layer.bias is None for layer in layers):
            return None
        kernels = [layer.kernel[...] for layer in layers]
        zeros = [jnp.zeros(kernel.shape[-1:], kernel.dtype) for kernel in kernels]
        pairs = zip(layers, zeros, strict=True)
        return jnp.concatenate([zero if layer.bias is None else layer.bias[...] for layer, zero in pairs], axis=-1)

    fused = fused_class_of(cell)
    of_x, of_h = fused._layers
    return fused._pack(cell, LayerWeights(kernels_of(of_x), kernels_of(of_h), biases_of(of_x), biases_of(of_h)))


def run_fused(
    cell: Any, carry: Carry, xs: Array, *, caller: Caller, **options: Any
) -> tuple[Carry, Array, Carry | None]:
    """Calls `modules.run` with the parameters of a cell that can be fused, after checking the carry's structure."""
    recurrence, params = recurrence_of(cell), packed_params(cell)
    modules.check_carry(recurrence, carry, caller)
    check_widths(recurrence, params, carry, xs, caller)
    dtype = dtypes.canonicalize_dtype(xs, jax.tree.leaves(carry)[-1], *params, dtype=cell.dtype)
    return modules.run(recurrence, modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), caller=caller, **options)


def check_widths(recurrence: modules.Recurrence, params: Any, carry: Carry, xs: Array, caller: Caller) -> None:
    """Raises ValueError unless inputs and carry have the widths for which a cell was made."""
    modules.check_width(caller("xs"), "in_features", params.w_ih.shape[0], xs.shape[-1])
    h = jax.tree.leaves(carry)[-1]
    if getattr(params, "w_hr", None) is None and h.ndim:
        hidden = math.prod(params.w_hh.shape[:-1])  # [H, gates * H], or blocks [N, H / N, gates * H / N]
        modules.check_width(caller("carry"), "hidden_features", hidden, h.shape[-1])


def starts_from_zeros(cell: Any) -> bool:
    """Returns whether `cell.initialize_carry` is known to return zeros."""
    return modules.starts_from_zeros(cell, [None, jax.nn.initializers.zeros], FUSED)


def reason_to_scan(cell: Any, arrays: Any = None) -> str | None:
    """Returns why `cell` has to run under `nnx.scan` on carry and inputs `arrays`, or None if it can be fused."""
    if type(cell) not in FUSED:
        return modules.reason_to_scan_unlisted(cell, REPLACEMENTS)
    fused = fused_class_of(cell)
    reason = modules.reason_to_scan_options(cell, REPLACEMENTS, _defaults, arrays) or fused._reason_of_formula(cell)
    if reason is not None:
        return reason
    if getattr(cell, "promote_dtype", dtypes.promote_dtype) is not dtypes.promote_dtype:
        return "a cell with its own promote_dtype"
    layers = [name for names in fused._layers for name in names]
    for name in layers:
        if (difference := _difference_to_linear(getattr(cell, name), cell.dtype)) is not None:
            return f"a cell whose {name} is not a plain nnx.Linear of the cell's dtype: {difference}"
    if unknown := sorted(nnx.state(cell, nnx.Param).keys() - {*layers, *fused._other_params}):
        return f"a cell with the parameter {unknown[0]}, which jaxrnn does not support"
    return None


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the options of a class that have a default, with it."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _difference_to_linear(layer: Any, dtype: Dtype | None) -> str | None:
    """Returns what may make a layer compute something else than `nnx.Linear` does with this dtype, or None."""
    if type(layer) is not nnx.Linear:
        return f"it is a {type(layer).__name__}"
    if layer.dtype != dtype and (None in (layer.dtype, dtype) or jnp.dtype(layer.dtype) != jnp.dtype(dtype)):
        return "dtype"
    if layer.use_bias != (layer.bias is not None):
        return "use_bias"
    of_flax = _defaults(nnx.Linear)
    for name, value in vars(layer).items():
        if name in ("kernel", "bias", "in_features", "out_features", "use_bias", "dtype", "param_dtype"):
            continue
        if not name.startswith("_") and (name not in of_flax or value is not of_flax[name]):
            return name
    return None
