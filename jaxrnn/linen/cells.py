"""The cells that can be fused: their base class, the cells, and which class of Flax each of them replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer, PRNGKey
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import modules
from jaxrnn.cells import GRUParams, LSTMParams, MGUParams, NormGRUParams, SimpleParams, norm_gru_cell
from jaxrnn.checks import Caller, Implementation, check_norm_and_constants
from jaxrnn.choice import must_scan
from jaxrnn.modules import Carry, CarryT
from torch_bridge.docstrings import inherit_descriptions


def block_initializer(init: Initializer, num_blocks: int) -> Initializer:
    """Returns an initializer of a block-diagonal kernel `[N, H / N, F / N]`, which is called with the shape `(H, F)`.

    If `init` returns a box, such as that of `nn.with_partitioning`, its names are those of the three axes.
    """

    def initialize(key: Array, shape: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x), *modules.initialize_blocks(init, num_blocks, key, shape, dtype))

    return initialize


class FusedCell(nn.RNNCellBase, Generic[CarryT]):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation.

    A subclass defines `recurrence` and `packed_params(input_features, hidden)`, which returns the parameters for the
    function of `jaxrnn`, creating missing ones.
    """

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None
    num_blocks: int = 1

    def __call__(self, carry: CarryT, inputs: ArrayLike) -> tuple[CarryT, Array]:
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM. H is the width of the carry, as in Flax.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

        Raises:
          ValueError: shapes or dtypes disagree, or `num_blocks` does not divide H.
          NotImplementedError: the named implementation cannot run this cell, or Flax's cell, which has no blocks, would
            have to run it.
        """
        caller = modules.caller_of(self, xs="inputs")
        reason = reason_to_scan(self, (carry, inputs))
        modules.check_blocks_are_fused(caller, self.num_blocks, reason)
        modules.check_structure(self.recurrence, carry, caller)
        if must_scan(reason, self.precision, self.implementation, "nn.scan", caller):
            return super().__call__(carry, inputs)
        modules.check_dtypes(self)
        modules.check_step(caller, self.recurrence, carry, inputs)
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs, caller)
        options: Any = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = self.run(carry, inputs[None], caller=caller, **options)
        return carry, ys[0]

    @nn.nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> Carry:
        """Returns the carry of a new sequence, as Flax's cell does.

        Args:
          rng: the key for `carry_init`.
          input_shape: the shape of the inputs of one step, `[*batch, D]`.

        Returns:
          `[*batch, H]` or, for an LSTM, `(c, h)` of two such arrays, of the dtype `param_dtype`.

        Raises:
          ValueError: `features` is not a positive integer, or `input_shape` is no shape.
        """
        modules.check_sizes(self, "features")
        modules.check_input_shape(self, input_shape, "rng, input_shape")
        return super().initialize_carry(rng, input_shape)

    @staticmethod
    def _reason_of_formula(cell: Any) -> str | None:
        """Returns why the formula of a cell, of Flax or of this module, is not that of `jaxrnn`, or None."""
        return modules.reason_to_scan_gates(cell)

    @property
    def recurrence(self) -> modules.Recurrence:
        """The recurrence of `jaxrnn` that computes the cell: its name, such as "gru", or a cell with its constants."""
        raise NotImplementedError

    @nn.nowrap
    def layer_param(self, layer: str, name: str, init: Initializer, shape: tuple[int, ...]) -> Array:
        """Returns a parameter under the name of a layer of Flax's cell, such as `ir/kernel`; creates it if missing.

        It has the shape that `init` returns for `shape`: this shape, or that of the blocks of a `block_initializer`. It
        is created in the scope of the layer, without a module, so that `tabulate` and interceptors see the cell alone.
        """
        scope: Any = self.scope
        return scope.push(layer, reuse=True).param(name, init, shape, self.param_dtype)

    @nn.nowrap
    def gate_params(
        self, operand: Literal["i", "h"], gates: Sequence[str], width: int, hidden: int, biased: Sequence[str] = ()
    ) -> tuple[Array, Any]:
        """Returns kernel and bias of the products of all gates with x ("i") or h ("h"), under Flax's names.

        The kernel of a gate is `[width, hidden]`, or, for a product with h in N > 1 blocks, `[N, H / N, H / N]`. The
        gates in `biased` have a bias; without any, the bias is None.

        Raises:
          ValueError: the given parameters are those of another cell or have other widths, or `num_blocks` does not
            divide H.
        """
        modules.check_num_blocks(modules.caller_of(self), self.num_blocks, hidden)
        kernel_init = self.kernel_init if operand == "i" else self.recurrent_kernel_init
        if operand == "h" and self.num_blocks > 1:
            kernel_init = block_initializer(kernel_init, self.num_blocks)
        kernels, biases = [], []
        for gate in gates:
            layer = operand + gate
            self.check_given(layer, width, hidden)
            kernels.append(self.layer_param(layer, "kernel", kernel_init, (width, hidden)))
            if gate in biased:
                biases.append(self.layer_param(layer, "bias", self._bias_init_of(gate), (hidden,)))

        def joined(parts: list[Array]) -> Array:
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

        return joined(kernels), joined(biases) if biases else None

    @nn.nowrap
    def _bias_init_of(self, gate: str) -> Initializer:
        """Returns the initializer of the biases of a gate."""
        return self.bias_init

    @nn.nowrap
    def check_given(self, name: str, input_features: int, hidden: int) -> None:
        """Raises ValueError if parameters of a gate are missing and not created, or have wrong widths.

        Only the widths of kernels of inputs ("i*") are checked here; Flax checks the others.
        """
        kind, path = type(self).__name__, "/".join(self.path) or "the top level"
        if not self.has_variable("params", name):
            if self.is_mutable_collection("params"):
                return  # they are created
            given = ", ".join(self.variables.get("params", {})) or "none"
            raise ValueError(
                f"{kind}: the parameters at {path} must have {name}, got {given}; pass the variables that init of this "
                'module returned, {"params": ...}'
            )
        kernel = nn.meta.unbox(self.get_variable("params", name).get("kernel"))
        shape: tuple[int, ...] = getattr(kernel, "shape", ())  # Flax's error names a kernel that is missing
        if not name.startswith("i") or shape == (input_features, hidden) or len(shape) != 2:
            return
        if shape[0] != input_features:
            raise ValueError(
                f"{kind}: inputs must be {shape[0]} wide, as those that the parameters at {path} were made for, got "
                f"{input_features}; pass inputs of that width, or call init with these"
            )
        raise ValueError(
            f"{kind}: the carry must be {shape[1]} wide, as that which the parameters at {path} were made for, got "
            f"{hidden}; pass a carry of that width and set features={shape[1]} if the module has features, or call "
            "init with this carry"
        )

    @nn.nowrap
    def run(self, carry: Carry, xs: Array, *, caller: Caller, **options: Any) -> tuple[Carry, Array, Carry | None]:
        """Calls `modules.run` with the parameters of this cell."""
        modules.check_dtypes(self)
        modules.check_carry(self.recurrence, carry, caller)
        h = jax.tree.leaves(carry)[-1]
        params = self.packed_params(xs.shape[-1], h.shape[-1])
        dtype = canonicalize_dtype(xs, h, *params, dtype=self.dtype)
        params, xs = modules.cast(params, dtype), jnp.asarray(xs, dtype)
        return modules.run(self.recurrence, params, carry, xs, caller=caller, **options)


class GRUCell(FusedCell[Array], nn.GRUCell):
    """`flax.linen.GRUCell` computed by `jaxrnn.gru`, with the same parameters, initial values and results.

    `RNN` and `ScannedRNN` run the cell over time in one call. A call of the cell itself computes one step.

    Attributes:
      features: H, the width of the carry that `initialize_carry` returns.
      gate_fn: the activation of the gates. With a function other than sigmoid, or an `activation_fn` other than tanh,
        Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      activation_fn: the activation of the candidate state; in an LSTM, also that of the cell state.
      kernel_init: the initializer of the input weights of each gate.
      recurrent_kernel_init: the initializer of the recurrent weights of each gate.
      bias_init: the initializer of the biases.
      dtype: the dtype of the matmul operands. None uses the dtype to which inputs, carry and parameters promote. The
        carry keeps its own dtype, so it may be float32 with `dtype=jnp.bfloat16`.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      carry_init: the initializer of the carry.
      precision: the precision of the matmuls, as `jax.lax.dot_general` takes it; None means
        `jax_default_matmul_precision`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it, as "triton" cannot
        with another `gate_fn` or `activation_fn`.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, the kernel of each layer `h*` is
        `[N, H / N, H / N]`, and `recurrent_kernel_init` initializes each block like a matrix. N must divide H.
        NotImplementedError is raised with another `gate_fn` or `activation_fn`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxrnn.linen import GRUCell
      >>> cell, x = GRUCell(features=4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
      >>> of_flax = nn.GRUCell(features=4).init(jax.random.key(0), carry, x)  # the same parameters
      >>> jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, of_flax)
      True
    """

    recurrence = "gru"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> GRUParams:
        """Returns the parameters for `jaxrnn.gru`, creating missing ones. The cell has no biases b_hr and b_hz."""
        w_ih, b_ih = self.gate_params("i", "rzn", input_features, hidden, biased="rzn")
        w_hh, b_hn = self.gate_params("h", "rzn", hidden, hidden, biased="n")
        return GRUParams(w_ih, w_hh, b_ih, b_hn)


class FusedLSTMCell(FusedCell[tuple[Array, Array]]):
    """The base class of the two LSTM cells."""

    recurrence = "lstm"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int, proj_size: int | None = None) -> LSTMParams:
        """Returns the parameters for `jaxrnn.lstm`, creating missing ones. A projection adds `proj` to Flax's names."""
        width = hidden if proj_size is None else proj_size
        w_ih, _ = self.gate_params("i", "ifgo", input_features, hidden)
        w_hh, b = self.gate_params("h", "ifgo", width, hidden, biased="ifgo")
        if proj_size is None:
            return LSTMParams(w_ih, w_hh, b)
        return LSTMParams(w_ih, w_hh, b, self.layer_param("proj", "kernel", self.kernel_init, (hidden, proj_size)))


@inherit_descriptions(GRUCell)
class LSTMCell(FusedLSTMCell, nn.LSTMCell):
    """`flax.linen.LSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import LSTMCell
      >>> cell, x = LSTMCell(features=4), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), (c, h), x)
      >>> (c, h), y = cell.apply(variables, (c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """


@inherit_descriptions(GRUCell)
class OptimizedLSTMCell(FusedLSTMCell, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell` computed by `jaxrnn.lstm`. It differs from `LSTMCell` of this module only in name.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import OptimizedLSTMCell
      >>> cell, x = OptimizedLSTMCell(features=4), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), (c, h), x)
      >>> (c, h), y = cell.apply(variables, (c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """


@inherit_descriptions(GRUCell)
class MGUCell(FusedCell[Array], nn.MGUCell):
    """`flax.linen.MGUCell` computed by `jaxrnn.mgu`, with the same parameters, initial values and results.

    Attributes:
      forget_bias_init: the initializer of the biases of the forget gate.
      activation_bias_init: the initializer of the biases of n.
      reset_gate: if False, which is another formula, Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it, as "triton" cannot
        run a cell that Flax runs.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import MGUCell
      >>> cell, x = MGUCell(features=4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
    """

    recurrence = "mgu"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> MGUParams:
        """Returns the parameters for `jaxrnn.mgu`, creating missing ones. The cell has no bias b_hf."""
        w_ih, b_ih = self.gate_params("i", "fn", input_features, hidden, biased="fn")
        w_hh, b_hn = self.gate_params("h", "fn", hidden, hidden, biased="n")
        return MGUParams(w_ih, w_hh, b_ih, b_hn)

    @nn.nowrap
    def _bias_init_of(self, gate: str) -> Initializer:
        """Returns the initializer of the biases of a gate."""
        return self.forget_bias_init if gate == "f" else self.activation_bias_init

    @staticmethod
    def _reason_of_formula(cell: Any) -> str | None:
        """Returns why the formula of a cell is not that of `jaxrnn.mgu`, or None."""
        return modules.reason_to_scan_gates(cell) or (None if cell.reset_gate else "an MGUCell with reset_gate=False")


@inherit_descriptions(GRUCell)
class SimpleCell(FusedCell[Array], nn.SimpleCell):
    """`flax.linen.SimpleCell` computed by `jaxrnn.simple_rnn`, with the same parameters, initial values and results.

    Attributes:
      activation_fn: tanh or relu. With another function, Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      dtype: the dtype of the matmul operands. None uses the dtype to which inputs, carry and parameters promote. The
        carry keeps its own dtype, whereas Flax's cell casts it to `dtype`.
      residual: if True, which is another formula, Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it, as "triton" cannot
        run a cell that Flax runs.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import SimpleCell
      >>> cell, x = SimpleCell(features=4, activation_fn=jax.nn.relu), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
    """

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell."""
        return "simple_relu" if modules.is_relu(self.activation_fn) else "simple_tanh"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> SimpleParams:
        """Returns the parameters for `jaxrnn.simple_rnn`, creating missing ones."""
        w_ih, b = self.gate_params("i", [""], input_features, hidden, biased=[""])
        w_hh, _ = self.gate_params("h", [""], hidden, hidden)
        return SimpleParams(w_ih, w_hh, b)

    @staticmethod
    def _reason_of_formula(cell: Any) -> str | None:
        """Returns why the formula of a cell is not that of `jaxrnn.simple_rnn`, or None."""
        if not modules.is_tanh(cell.activation_fn) and not modules.is_relu(cell.activation_fn):
            return "a cell whose activation_fn is neither tanh nor relu"
        return "a SimpleCell with residual=True" if cell.residual else None


class PlainCell(nn.RNNCellBase):
    """The base class of what a cell that Flax does not have takes from Flax's cell. A subclass has the attributes."""

    @nn.nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> Array:
        """Returns the carry of a new sequence, as Flax's cells do."""
        cell: Any = self
        carry: Array = cell.carry_init(rng, (*input_shape[:-1], cell.features), cell.param_dtype)
        return carry

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of an input that are no batch axes."""
        return 1


class PlainNormGRUCell(PlainCell):
    """The attributes of `NormGRUCell`, in the order of Flax's cells."""

    features: int
    norm: Literal["rms", "layer"] = "rms"
    epsilon: float = 1e-4
    update_bias: float = -1.0
    kernel_init: Initializer = nn.initializers.lecun_normal()
    recurrent_kernel_init: Initializer = nn.initializers.orthogonal()
    bias_init: Initializer = nn.initializers.zeros
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = nn.initializers.zeros


@inherit_descriptions(GRUCell)
class NormGRUCell(FusedCell[Array], PlainNormGRUCell):
    """The GRU of DreamerV3, whose gates see a norm of inputs and state, computed by `jaxrnn.norm_gru`.

    Flax has no such cell. Gates are ordered r, n, u. The layers `ir`, `in` and `iu` have a kernel `[D, H]` and a bias
    `[H]`; `hr`, `hn` and `hu` have a kernel `[H, H]`. `norm_i` has the scale of the norm for the inputs, `[D]`, and
    `norm_h` that for the state, `[H]`; with `norm="layer"`, each also has a bias, the shift of the norm.

    Attributes:
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
      bias_init: the initializer of the biases of the gates.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it.
      num_blocks: must be 1, because the norm sees all units; ValueError is raised otherwise.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import NormGRUCell
      >>> cell, x = NormGRUCell(features=4, norm="layer"), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
      >>> jax.tree.map(jnp.shape, variables["params"]["norm_h"])
      {'bias': (4,), 'scale': (4,)}
    """

    @property
    def recurrence(self) -> modules.Recurrence:
        """The cell of `jaxrnn` with the norm and the constants of this one."""
        check_norm_and_constants(modules.caller_of(self), self.norm, self.epsilon, self.update_bias)
        return norm_gru_cell(self.norm, self.epsilon, self.update_bias)

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> NormGRUParams:
        """Returns the parameters for `jaxrnn.norm_gru`, creating missing ones."""
        modules.check_blocks_without_norm(modules.caller_of(self), self.num_blocks)
        w_ih, b = self.gate_params("i", "rnu", input_features, hidden, biased="rnu")
        w_hh, _ = self.gate_params("h", "rnu", hidden, hidden)
        scale_i, shift_i = self._norm_params("norm_i", input_features)
        scale_h, shift_h = self._norm_params("norm_h", hidden)
        return NormGRUParams(w_ih, w_hh, b, scale_i, scale_h, shift_i, shift_h)

    @staticmethod
    def _reason_of_formula(cell: Any) -> None:
        """Returns None: the activations of such a cell cannot be chosen."""

    @nn.nowrap
    def _norm_params(self, name: str, features: int) -> tuple[Array, Array | None]:
        """Returns scale and bias of the norm for the inputs or for the state. Raises ValueError for another norm's."""
        self.check_given(name, features, features)
        wanted = ["scale", "bias"] if self.norm == "layer" else ["scale"]
        names = sorted(self.get_variable("params", name), reverse=True) if self.has_variable("params", name) else wanted
        if names != wanted:
            raise ValueError(
                f"{modules.caller_of(self)('norm')} must be that of the given parameters, whose {name} has "
                f'{", ".join(names)}, got "{self.norm}"; "rms" has a scale, and "layer" has a scale and a bias'
            )
        scale = self.layer_param(name, "scale", nn.initializers.ones, (features,))
        if self.norm == "rms":
            return scale, None
        return scale, self.layer_param(name, "bias", nn.initializers.zeros, (features,))


# By class of Flax, the class that replaces it.
REPLACEMENTS: dict[type[nn.RNNCellBase], type[FusedCell[Any]]] = {
    nn.GRUCell: GRUCell,
    nn.LSTMCell: LSTMCell,
    nn.OptimizedLSTMCell: OptimizedLSTMCell,
    nn.MGUCell: MGUCell,
    nn.SimpleCell: SimpleCell,
}

# The classes that `ScannedRNN.cell_type` can name.
CELL_TYPES: dict[str, type[FusedCell[Any]]] = {
    "gru": GRUCell,
    "lstm": LSTMCell,
    "optimized_lstm": OptimizedLSTMCell,
    "optimised_lstm": OptimizedLSTMCell,
    "mgu": MGUCell,
    "simple": SimpleCell,
    "norm_gru": NormGRUCell,
}

# The class that computes a cell, by the class of the cell.
FUSED = REPLACEMENTS | {cell: cell for cell in CELL_TYPES.values()}


def starts_from_zeros(cell: nn.RNNCellBase) -> bool:
    """Returns whether `cell.initialize_carry` is known to return zeros."""
    return modules.starts_from_zeros(cell, [nn.initializers.zeros], FUSED)


def reason_to_scan(cell: nn.RNNCellBase, arrays: Any = None) -> str | None:
    """Returns why `cell` has to run under `nn.scan` on carry and inputs `arrays`, or None if it can be fused."""
    if (fused := FUSED.get(type(cell))) is None:
        return modules.reason_to_scan_unlisted(cell, REPLACEMENTS)
    return modules.reason_to_scan_options(cell, REPLACEMENTS, _defaults, arrays) or fused._reason_of_formula(cell)


def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the options of a class, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(cls)}
