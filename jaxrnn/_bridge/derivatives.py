"""Derivatives of functions that kernels compute: by kernels where there are any, else by XLA.

A few primitives are closed under differentiation, so that derivatives of every order exist. `function_p` runs the
forward kernels. Its derivative is `tangent_p`, the linear map from tangents of the arguments to tangents of the
results. `gradient_p` is the transpose of `tangent_p`, and runs the backward kernels. Reverse mode transposes
`tangent_p` without evaluating it. `hessian_p`, which is its own transpose, is the derivative of `gradient_p`. Where a
function has no kernels for `tangent_p` or `hessian_p`, and for all other derivatives, XLA differentiates
`Differentiable.reference`.

They are primitives because JAX keeps the rules of these, while it drops that of a `jax.custom_jvp` when it moves
constants out of a loop or transposes a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec

from jaxrnn._bridge.tracing import compile_launches, trace_ahead

if TYPE_CHECKING:
    from jax import Array
    from jax.extend.core import Jaxpr

# Beginning of the name of the functions by which XLA computes the derivative of a linear map, which `explain` finds.
TANGENT = "jaxrnn_tangent_"


@dataclasses.dataclass(frozen=True)
class Differentiable:
    """A function of a pytree of arrays that kernels compute, with derivatives of every order in both modes.

    Attributes:
      name: what it computes, such as "gru" or "rms_norm".
      static: its static options, which the three functions below take first.
      forward: maps (static, whether to save residuals, arguments) to (results, residuals), by kernels.
      backward: maps (static, whether to save what `hessian` reads, arguments, residuals, cotangents) to (gradients of
        the arguments, list of the arrays to save), by kernels; it has None for an argument without a gradient.
      reference: maps (static, arguments) to the results, by operations that XLA differentiates.
      tangent: maps (static, indices of leaves of the arguments, arguments, residuals, tangents of these leaves) to the
        tangents of the results, by kernels; None if XLA computes them.
      hessian: maps (static, inputs, outputs, arguments, residuals, cotangents, what `backward` saved, tangents) to what
        `_Hessian` defines, by kernels; None if XLA computes it.
      saved: how many arrays `backward` saves for `hessian`.
    """

    name: str
    static: Hashable
    forward: Callable[[Any, bool, Any], tuple[Any, Any]]
    backward: Callable[[Any, bool, Any, Any, Any], tuple[Any, list[Any]]]
    reference: Callable[[Any, Any], Any]
    tangent: Callable[..., Any] | None = None
    hessian: Callable[..., list[Any]] | None = None
    saved: int = 0

    def __call__(self, arguments: Any) -> Any:
        return _apply(self, arguments)


# Not needed for derivatives, but `function_p` is traced, and its kernels begin to compile, before JAX knows whether it
# differentiates. The rule of a `jax.custom_jvp` replaces it.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(function: Differentiable, arguments: Any) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    flat, results, _ = _bind_function(_Call(function, structure, save=False), leaves)
    return jax.tree.unflatten(results, flat)


def _apply_jvp(function: Differentiable, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(primals[0])
    along = [ad.Zero(x.aval) if isinstance(x, SymbolicZero) else x for x in jax.tree.leaves(tangents)]
    results, *flat = _differentiate(_Call(function, structure, save=False), leaves, along)
    primals, tangents = (jax.tree.unflatten(results, x[: results.num_leaves]) for x in flat)
    return primals, tangents


_apply.defjvp(_apply_jvp, symbolic_zeros=True)


class _Vmap(NamedTuple):
    """A `jax.vmap` around a primitive: its size, and which axis of each operand and result it maps, or None.

    Attributes:
      fixed: the axes of the leaves of the arguments and, for a linear map, of all that it is not linear in.
      tangents: for a linear map, the axes of the tangents of arguments. Where one is None, the gradient is a sum.
      results: for a linear map, the axes of the tangents of results, which are sums where one is None.
    """

    size: int
    spmd_axis_name: Any
    fixed: tuple[int | None, ...]
    tangents: tuple[int | None, ...] = ()
    results: tuple[int | None, ...] = ()

    def __call__(self, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
        return jax.vmap(function, in_axes, out_axes, axis_size=self.size, spmd_axis_name=self.spmd_axis_name)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Holds the static parameters of `function_p`, whose operands are the leaves of the arguments.

    Attributes:
      function: the function.
      arguments: the pytree structure of its arguments.
      save: whether it computes residuals.
      returned: which of its flat results and residuals the primitive returns.
      vmaps: each `jax.vmap` around it, the innermost first.
    """

    function: Differentiable
    arguments: Any
    save: bool
    returned: tuple[int, ...] = ()
    vmaps: tuple[_Vmap, ...] = ()

    def run(self, *leaves: Array) -> tuple[Any, Any]:
        """Computes the results and the residuals by the forward kernels."""

        def run(*leaves: Array) -> tuple[Any, Any]:
            arguments = jax.tree.unflatten(self.arguments, leaves)
            return self.function.forward(self.function.static, self.save, arguments)

        for vmap in self.vmaps:
            run = vmap(run, vmap.fixed, 0)
        return run(*leaves)

    def derivative(
        self, moving: tuple[int, ...], results: Any, residuals: Any, returned: tuple[int, ...]
    ) -> _LinearMap:  # fmt: skip
        """Returns the derivative by the leaves `moving`, given the pytree structures of results and residuals."""
        vmaps = tuple(
            vmap._replace(
                fixed=(*vmap.fixed, *(0,) * residuals.num_leaves), tangents=tuple(vmap.fixed[i] for i in moving),
                results=(0,) * results.num_leaves,
            )
            for vmap in self.vmaps
        )  # fmt: skip
        return _LinearMap(self.function, self.arguments, residuals, results, moving, vmaps, returned)


@dataclasses.dataclass(frozen=True)
class _LinearMap:
    """Holds the static parameters of `tangent_p`, a linear map, and of `gradient_p`, its transpose.

    Their operands are the leaves of arguments and residuals, followed by tangents of arguments or by cotangents.

    Attributes:
      function: the function that it is the derivative of.
      arguments, residuals, results: their pytree structures.
      moving: which leaves of the arguments have tangents and, of the transpose, gradients.
      vmaps: each `jax.vmap` around it, the innermost first.
      returned: which of the operands are residuals that are also results, and have their tangents.
      save: whether the transpose also returns, after the gradients, what `Differentiable.hessian` reads of it.
    """

    function: Differentiable
    arguments: Any
    residuals: Any
    results: Any
    moving: tuple[int, ...]
    vmaps: tuple[_Vmap, ...]
    returned: tuple[int, ...] = ()
    save: bool = False

    @property
    def fixed(self) -> int:
        """The number of operands that the map is not linear in."""
        return int(self.arguments.num_leaves + self.residuals.num_leaves)

    @property
    def by_kernels(self) -> bool:
        """Says whether the function has kernels for this linear map; without them, XLA computes it."""
        return self.function.tangent is not None

    def __call__(self, *operands: Array) -> list[Array]:
        """Computes the map, by kernels if there are any."""
        return self._under_vmaps(self._run_tangent)(*operands) if self.by_kernels else self.in_xla(False, *operands)

    def in_xla(self, transposed: bool, *operands: Array) -> list[Array]:
        """Computes the map or its transpose by differentiating the reference."""
        return self._under_vmaps(self._pull_reference if transposed else self._push_reference, transposed)(*operands)

    def pull(self, *operands: Array) -> list[Array]:
        """Computes the transpose by the backward kernels."""
        return self._under_vmaps(self._run_backward, True, self.function.saved if self.save else 0)(*operands)

    def is_residual(self, i: int) -> bool:
        """Returns whether operand i is a residual: these follow the leaves of the arguments."""
        return bool(0 <= i - self.arguments.num_leaves < self.residuals.num_leaves)

    def hessian(self, moving: tuple[int, ...]) -> _Hessian:
        """Returns the derivative of the transpose by the operands `moving`."""
        vmaps = []
        for vmap in self.vmaps:
            axes = *vmap.fixed, *vmap.results, *(0,) * self.function.saved
            vmaps.append(vmap._replace(fixed=axes, tangents=tuple(axes[i] for i in moving), results=vmap.tangents))
        return _Hessian(
            self.function, self.arguments, self.residuals, self.results, moving, tuple(vmaps), outputs=self.moving
        )  # fmt: skip

    def _under_vmaps(
        self, run: Callable[..., list[Array]], transposed: bool = False, saved: int = 0
    ) -> Callable[..., list[Array]]:
        for vmap in self.vmaps:
            inputs, outputs = (vmap.results, vmap.tangents) if transposed else (vmap.tangents, vmap.results)
            outputs = *outputs, *(0,) * saved
            run = _sum_unmapped(vmap(run, (*vmap.fixed, *inputs), [axis or 0 for axis in outputs]), outputs)
        return run

    def _trees(self, operands: Sequence[Array]) -> tuple[Any, Any]:
        """Returns the arguments and the residuals."""
        split = self.arguments.num_leaves
        parts = operands[:split], operands[split : split + self.residuals.num_leaves]
        return jax.tree.unflatten(self.arguments, parts[0]), jax.tree.unflatten(self.residuals, parts[1])

    def _run_tangent(self, *operands: Array) -> list[Array]:
        assert self.function.tangent is not None
        results = self.function.tangent(
            self.function.static, self.moving, *self._trees(operands), operands[self.fixed :]
        )
        return jax.tree.leaves(results)

    def _run_backward(self, *operands: Array) -> list[Array]:
        cotangents = jax.tree.unflatten(self.results, operands[self.fixed :])
        gradients, saved = self.function.backward(self.function.static, self.save, *self._trees(operands), cotangents)
        leaves = self.arguments.flatten_up_to(gradients)
        return [*(leaves[i] for i in self.moving), *saved]

    def _push_reference(self, *operands: Array) -> list[Array]:
        return list(jax.jvp(*self._reference_at(operands), list(operands[self.fixed :]))[1])

    def _pull_reference(self, *operands: Array) -> list[Array]:
        run, moving = self._reference_at(operands)
        return list(jax.vjp(run, *moving)[1](list(operands[self.fixed :])))

    def _reference_at(self, operands: Sequence[Array]) -> tuple[Callable[..., list[Array]], list[Array]]:
        """Returns the reference as a function of the leaves that have tangents, and these leaves."""

        def run(*moving: Array) -> list[Array]:
            leaves = _replaced(operands[: self.arguments.num_leaves], self.moving, moving)
            arguments = jax.tree.unflatten(self.arguments, leaves)
            return jax.tree.leaves(self.function.reference(self.function.static, arguments))

        return run, [operands[i] for i in self.moving]


@dataclasses.dataclass(frozen=True)
class _Hessian(_LinearMap):
    """Holds the static parameters of `hessian_p`: a part of the second derivative of <cotangents, results>.

    The operands are the leaves of arguments, residuals and cotangents, and what the backward pass saved, followed by
    tangents of those at the indices `moving`. The results are the tangents of the gradients by the operands at
    `outputs`. The second derivative is symmetric, so that the transpose exchanges the two. Tangents of residuals follow
    from those of arguments. They may be given so that they need not be computed again.
    """

    outputs: tuple[int, ...] = ()

    @property
    def _end(self) -> int:
        """The number of leaves of arguments, residuals and cotangents."""
        return super().fixed + int(self.results.num_leaves)

    @property
    def fixed(self) -> int:
        return self._end + self.function.saved

    def is_residual(self, i: int) -> bool:
        return super().is_residual(i) or self._end <= i < self.fixed

    @property
    def by_kernels(self) -> bool:
        return self.function.hessian is not None

    def transpose(self) -> _Hessian:
        outputs = tuple(i for i in self.moving if not self.is_residual(i))
        vmaps = tuple(x._replace(tangents=x.results, results=tuple(self.free(x.tangents))) for x in self.vmaps)
        return dataclasses.replace(self, moving=self.outputs, outputs=outputs, vmaps=vmaps)

    def free(self, tangents: Sequence[Any]) -> list[Any]:
        """Returns what belongs to tangents, without those of residuals."""
        return [x for i, x in zip(self.moving, tangents, strict=True) if not self.is_residual(i)]

    def _run_tangent(self, *operands: Array) -> list[Array]:
        assert self.function.hessian is not None
        cotangents = jax.tree.unflatten(self.results, operands[super().fixed : self._end])
        return self.function.hessian(
            self.function.static, self.moving, self.outputs, *self._trees(operands), cotangents,
            operands[self._end : self.fixed], operands[self.fixed :],
        )  # fmt: skip

    def _reference_at(self, operands: Sequence[Array]) -> tuple[Callable[..., list[Array]], list[Array]]:
        """Returns the gradients as a function of the leaves that have tangents, and these leaves."""
        split, cotangents = self.arguments.num_leaves, super().fixed
        free = self.free(self.moving)

        def run(*moving: Array) -> list[Array]:
            leaves = _replaced(operands[: self.fixed], free, moving)
            among = [i for i in self.outputs if i < split]

            def results(*values: Array) -> list[Array]:
                arguments = jax.tree.unflatten(self.arguments, _replaced(leaves[:split], among, values))
                return jax.tree.leaves(self.function.reference(self.function.static, arguments))

            values, pull = jax.vjp(results, *(leaves[i] for i in among))
            gradients = dict(zip(among, pull(leaves[cotangents : self._end]), strict=True))
            return [gradients[i] if i < split else values[i - cotangents] for i in self.outputs]

        return run, [operands[i] for i in free]

    def _push_reference(self, *operands: Array) -> list[Array]:
        return list(jax.jvp(*self._reference_at(operands), self.free(operands[self.fixed :]))[1])


def _sum_unmapped(run: Callable[..., list[Array]], axes: Sequence[int | None]) -> Callable[..., list[Array]]:
    """Returns `run` with results summed over axis 0 where `axes` is None."""
    return lambda *operands: [x.sum(0) if axis is None else x for x, axis in zip(run(*operands), axes, strict=True)]


def _replaced(values: Sequence[Any], where: Sequence[int], by: Sequence[Any]) -> list[Any]:
    """Returns `values` with those at the indices `where` replaced."""
    changed = dict(zip(where, by, strict=True))
    return [changed.get(i, x) for i, x in enumerate(values)]


# The parameters of the primitives are `call` or `linear`, and what the types of the results follow from: for those that
# always launch kernels the jaxpr, in which `explain` finds the launches, and for `tangent_p` and `hessian_p`, whose
# operations are traced when they are lowered, `types`.
function_p, tangent_p, gradient_p, hessian_p = map(
    Primitive, ("jaxrnn_function", "jaxrnn_tangent", "jaxrnn_gradient", "jaxrnn_hessian")
)
_run_forward = jax.jit(_Call.run, static_argnums=0, inline=True)
_run_backward = jax.jit(_LinearMap.pull, static_argnums=0, inline=True)
_run_tangent = jax.jit(_LinearMap.__call__, static_argnums=0, inline=True)


def launches_when_lowered(eqn: Any) -> list[Jaxpr]:
    """Returns the jaxpr that `tangent_p` or `hessian_p` becomes when it is lowered, for an equation of kernels."""
    linear = eqn.params.get("linear")
    if eqn.primitive not in (tangent_p, hessian_p) or not linear.by_kernels:
        return []
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    return [trace_ahead(lambda *operands: linear(*operands), *shapes)[0].jaxpr]


def _launches(traced: Any, returned: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters of a primitive that runs a jaxpr, without the launches that only other results need."""
    used = [i in returned for i in range(len(traced.jaxpr.outvars))]
    jaxpr, _ = pe.dce_jaxpr(traced.jaxpr, used, instantiate=True)
    return {"jaxpr": jaxpr, "consts": tuple(traced.consts)}


def _bind_function(call: _Call, leaves: Sequence[Array]) -> tuple[list[Array], Any, Any]:
    """Binds `function_p`; returns the flat results and residuals, and the pytree structures of both.

    The primitive does not return what is an argument, nor anything twice: of such an array a scan would save two.
    """
    traced, shapes = trace_ahead(lambda *leaves: call.run(*leaves), *leaves)
    results, residuals = map(jax.tree.structure, shapes)
    outputs = [id(x) for x in traced.jaxpr.outvars]
    known = dict(zip(map(id, traced.jaxpr.invars), leaves, strict=True))
    returned = tuple(i for i, x in enumerate(outputs) if x not in known and x not in outputs[:i])
    call = dataclasses.replace(call, returned=returned)
    values = function_p.bind(*leaves, call=call, **_launches(traced, returned))
    known |= zip((outputs[i] for i in returned), values, strict=True)
    return [known[x] for x in outputs], results, residuals


def _bind_gradient(linear: _LinearMap, operands: Sequence[Array]) -> list[Array]:
    traced, _ = trace_ahead(lambda *operands: linear.pull(*operands), *operands)
    return gradient_p.bind(*operands, linear=linear, **_launches(traced, range(len(traced.jaxpr.outvars))))


def _run_returned(call: _Call, *leaves: Array) -> list[Array]:
    flat = jax.tree.leaves(_run_forward(call, *leaves))
    return [flat[i] for i in call.returned]


def _run_jaxpr(*operands: Array, jaxpr: Any, consts: Any, **_: Any) -> list[Array]:
    return jax.core.eval_jaxpr(jaxpr, consts, *operands)


def _trace_launches(*_: Any, jaxpr: Any, **params: Any) -> list[Any]:
    compile_launches(jaxpr)
    return [x.aval for x in jaxpr.outvars]


def _zero(x: Array) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _differentiate(call: _Call, leaves: Sequence[Array], tangents: Sequence[Any]) -> tuple[Any, list[Array], list[Any]]:
    """Returns the structure of the results, the flat results and residuals, and their tangents.

    Computes residuals even if nobody wants them, because the tangent may be transposed. They have no tangents.
    """
    primals, results, residuals = _bind_function(dataclasses.replace(call, save=True), leaves)
    saved = primals[results.num_leaves :]
    moving = tuple(i for i, x in enumerate(tangents) if type(x) is not ad.Zero)
    values = [*map(id, primals[: results.num_leaves])]
    returned = tuple(i for i, x in enumerate(saved, len(leaves)) if id(x) in values)
    along = tangent_p.bind(
        *leaves, *saved, *(tangents[i] for i in moving), linear=call.derivative(moving, results, residuals, returned),
        types=tuple(jax.typeof(x).to_tangent_aval() for x in primals[: results.num_leaves]),
    )  # fmt: skip
    return results, primals, [*along, *map(_zero, saved)]


def _differentiate_function(
    leaves: Sequence[Array], tangents: Sequence[Any], *, call: _Call, **_: Any
) -> tuple[list[Array], list[Any]]:
    _, primals, along = _differentiate(call, leaves, tangents)
    return [primals[i] for i in call.returned], [along[i] for i in call.returned]


def _differentiate_linear(
    primitive: Primitive, primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[Array], list[Any]]:
    """Differentiates a linear map: by its linear operands it is the map itself.

    By the arguments, the derivative of a gradient is `hessian_p`, if there are kernels for it. The gradient then saves
    what that reads, which has no tangents. XLA computes all other derivatives.
    """
    linear: _LinearMap = params["linear"]
    # residuals follow from the arguments, so that their tangents say nothing
    given = [i for i, x in enumerate(tangents) if type(x) is not ad.Zero]
    moving = [i for i in given if not linear.is_residual(i)]
    if primitive is gradient_p and linear.function.hessian is not None and moving and moving[0] < linear.fixed:
        moving = [i for i in given if i in moving or i in linear.returned]
        results = _bind_gradient(dataclasses.replace(linear, save=True), primals)
        gradients, saved = results[: len(linear.moving)], results[len(linear.moving) :]
        types = tuple(jax.typeof(x).to_tangent_aval() for x in gradients)
        moved = (tangents[i] for i in moving)
        along = hessian_p.bind(*primals, *saved, *moved, linear=linear.hessian(tuple(moving)), types=types)
        return (results, [*along, *map(_zero, saved)]) if linear.save else (gradients, along)
    results = primitive.bind(*primals, **params)
    if not moving:
        return results, [*map(_zero, results)]
    if moving[0] >= linear.fixed:
        along = map(ad.instantiate_zeros, tangents[linear.fixed :])
        return results, primitive.bind(*primals[: linear.fixed], *along, **params)

    def run(*operands: Array) -> list[Array]:
        return linear.in_xla(primitive is gradient_p, *_replaced(primals, moving, operands))

    run.__name__ = f"{TANGENT}{linear.function.name}"
    return results, jax.jvp(jax.jit(run), [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def _transpose(
    primitive: Primitive, cotangents: Sequence[Any], *operands: Any, linear: _LinearMap, **_: Any
) -> list[Any]:
    fixed, inputs = operands[: linear.fixed], operands[linear.fixed :]
    if primitive is gradient_p:  # nothing depends linearly on what it saves
        linear, cotangents = dataclasses.replace(linear, save=False), cotangents[: len(linear.moving)]
    operands = *fixed, *map(ad.instantiate_zeros, cotangents)
    results: Sequence[Array | None]
    types = tuple(x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in inputs)
    if primitive is tangent_p:
        results = _bind_gradient(linear, operands)
    elif isinstance(linear, _Hessian):
        transpose = linear.transpose()
        results = hessian_p.bind(*operands, linear=transpose, types=tuple(linear.free(types)))
        by_index = dict(zip(transpose.outputs, results, strict=True))
        results = [by_index.get(i) for i in linear.moving]
    else:
        results = tangent_p.bind(*operands, linear=linear, types=types)
    wanted = map(ad.is_undefined_primal, inputs)
    return [None] * len(fixed) + [x if is_wanted else None for x, is_wanted in zip(results, wanted, strict=True)]


def _batch(
    primitive: Primitive, axis: Any, operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int | None]]:
    """Binds the primitive with one more `jax.vmap` around it. The mapped axis of all results is the first."""
    if all(x is None for x in axes):
        results = primitive.bind(*operands, **params)
        return results, [None] * len(results)
    vmap = _Vmap(axis.size, axis.spmd_name, tuple(axes))
    if "types" in params:
        params["types"] = tuple(_mapped_type(axis, x) for x in params["types"])
    else:  # maps the jaxpr, because tracing the passes once more takes longer
        traced, _ = trace_ahead(vmap(functools.partial(_run_jaxpr, **params), vmap.fixed, 0), *operands)
        params |= {"jaxpr": traced.jaxpr, "consts": tuple(traced.consts)}
    if primitive is function_p:
        params["call"] = dataclasses.replace(params["call"], vmaps=(*params["call"].vmaps, vmap))
    else:
        linear: _LinearMap = params["linear"]
        fixed, inputs = vmap.fixed[: linear.fixed], vmap.fixed[linear.fixed :]
        if primitive is gradient_p:
            vmap = vmap._replace(fixed=fixed, tangents=(0,) * len(linear.moving), results=inputs)
        else:
            vmap = vmap._replace(fixed=fixed, tangents=inputs, results=(0,) * len(params["types"]))
        params["linear"] = dataclasses.replace(linear, vmaps=(*linear.vmaps, vmap))
    results = primitive.bind(*operands, **params)
    return results, [0] * len(results)


def _mapped_type(axis: Any, x: Any) -> Any:
    """Returns the type of an array with the axis of a `jax.vmap` before all others."""
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(axis.explicit_mesh_axis, *x.sharding.spec))
    return x.update(shape=(axis.size, *x.shape), sharding=sharding)


function_p.def_abstract_eval(_trace_launches)
gradient_p.def_abstract_eval(_trace_launches)
function_p.def_impl(lambda *leaves, call, **_: _run_returned(call, *leaves))
gradient_p.def_impl(lambda *operands, linear, **_: _run_backward(linear, *operands))
mlir.register_lowering(function_p, mlir.lower_fun(_run_jaxpr, multiple_results=True))
mlir.register_lowering(gradient_p, mlir.lower_fun(_run_jaxpr, multiple_results=True))
for _primitive in (tangent_p, hessian_p):
    _primitive.def_abstract_eval(lambda *_, linear, types: list(types))
    _primitive.def_impl(lambda *operands, linear, types: _run_tangent(linear, *operands))
    mlir.register_lowering(
        _primitive, mlir.lower_fun(lambda *operands, linear, types: linear(*operands), multiple_results=True)
    )
ad.primitive_jvps[function_p] = _differentiate_function
for _primitive in (function_p, tangent_p, gradient_p, hessian_p):
    _primitive.multiple_results = True
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
for _primitive in (tangent_p, gradient_p, hessian_p):
    ad.primitive_jvps[_primitive] = functools.partial(_differentiate_linear, _primitive)
    ad.primitive_transposes[_primitive] = functools.partial(_transpose, _primitive)

try:  # there are no public names
    from jax._src.checkify import error_checks, nan_error_check
except ImportError:  # without a rule, `checkify` does not check what the kernels return
    pass
else:
    for _primitive in (function_p, gradient_p):
        error_checks[_primitive] = functools.partial(nan_error_check, _primitive)
