"""The launch that computes the gradients of all weights of a recurrence, and when it is profitable."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn._bridge import availability
from jaxrnn._bridge.launch_kind import LaunchKind, Output, axes_of_sequences
from jaxrnn._bridge.primitive import bind
from jaxrnn.numerics import is_reset

if TYPE_CHECKING:
    from jax import Array


def launch_weight_grads(
    arrays: dict[str, Array | None], *, reverse: bool, may_use_xla: bool = False
) -> dict[str, Array]:
    """Launches the kernel that sums up the gradients of all weights of S models, as `launch` does.

    `torch_bridge.weight_grads` names its arrays. Returns the gradients, `[S, ...]` in float32, by the field names of
    `torch_bridge.weight_grads.Layout`.
    """
    from torch_bridge.weight_grads import Layout

    reset_state, reset_h = "zeros", arrays.get("reset_h")
    if reset_h is not None:  # per-step reset states have the shape of the states
        reset_state = "stepped" if reset_h.ndim == arrays["hs"].ndim else "fixed"  # type: ignore[union-attr]
    kind = WeightGradsKind(
        outputs=(Output("sums", jnp.dtype(jnp.float32)),), may_use_xla=may_use_xla, reverse=reverse,
        reset_state=reset_state,
    )  # fmt: skip
    sums = bind(kind, arrays)["sums"]
    inputs, hidden, gates = (arrays[name].shape[-1] for name in ("x", "hs", "dxp"))  # type: ignore[union-attr]
    last_gate_separate = arrays.get("dhn") is not None
    at = Layout.of(inputs, hidden, gates, last_gate_separate)
    shapes = {"w_ih": (inputs, gates), "w_hh": (hidden, gates), "bias": (gates,)}
    shapes |= {"b_hn": (hidden,)} if last_gate_separate else {}
    ends = (*at[1:], at.end)
    return {
        name: sums[:, start:end].reshape(-1, *shapes[name])
        for name, start, end in zip(at._fields, at, ends, strict=True)
        if name in shapes
    }


def is_weight_grads_launch_profitable(
    shape: tuple[int, ...], hidden: int, gates: int, dtype: Any, *, last_gate_separate: bool, normed: bool
) -> bool:
    """Whether `launch_weight_grads` supports this problem here and is faster than XLA's products and sums.

    `shape` is that of the inputs, `[G, T, B, D]`; the gate gradients are `[G, T, B, gates]`. With `last_gate_separate`,
    the array "dhn" takes part too, and with `normed`, the array "scale".
    """
    from torch_bridge import weight_grads

    names = ("x", "hs", "h0", "dxp", *(("dhn",) if last_gate_separate else ()))
    dtypes = dict.fromkeys(names, str(jnp.dtype(dtype))) | ({"scale": "float32"} if normed else {})
    groups, steps, batch, inputs = shape
    problem = weight_grads.Problem(1, groups, steps, batch, inputs, hidden, gates, tuple(dtypes.items()))
    return weight_grads.is_profitable(problem, availability.chosen_device())


def is_features_first_profitable(rows: int, gates: int) -> bool:
    """Estimates whether `memory_layout.features_first` speeds up a TF32 product that sums over `rows` rows.

    On an H200, a pass whose weight gradients use `features_first` takes 2.31 ms instead of 2.80 ms (GRU 512,32,1024),
    0.762 ms instead of 0.818 ms (GRU 128,64,512), 0.603 ms instead of 0.605 ms (GRU 32,128,256) and 2.57 ms instead of
    2.64 ms (LSTM 1024,128,256). With 384 gate columns the pass is slower: 3.35 ms instead of 3.31 ms (GRU
    2048,256,128).
    """
    device = availability.chosen_device()
    return device.has_wgmma and rows >= 4096 and gates >= 768


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class WeightGradsKind(LaunchKind):
    """The kind of `launch_weight_grads`. If sequences are sharded, the sums of all devices are added up."""

    name = "weight_grads"

    reverse: bool
    reset_state: Any

    def shape_of(self, output: Any, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        from torch_bridge.weight_grads import Layout

        inputs, hidden, gates = (arrays[name].shape[-1] for name in ("x", "hs", "dxp"))
        return (arrays["x"].shape[0], Layout.of(inputs, hidden, gates, "dhn" in arrays).end)

    def choose(self, arrays: Mapping[str, Any], device: Any) -> Any:
        from torch_bridge.weight_grads import Launch, Problem

        hidden, gates = (arrays[name].shape[-1] for name in ("hs", "dxp"))
        models, groups, steps, batch, inputs = arrays["x"].shape
        problem = Problem(
            models, groups, steps, batch, inputs, hidden, gates, self.dtypes(arrays), self.reverse, self.reset_state
        )
        return Launch(problem, device)

    def in_xla(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        x, hs, h0, dxp = (arrays[name] for name in ("x", "hs", "h0", "dxp"))
        first, rest = h0[:, :, None], hs[:, :, 1:] if self.reverse else hs[:, :, :-1]
        h_prev = jnp.concatenate([rest, first] if self.reverse else [first, rest], axis=2)
        if "reset" in arrays:
            new: Any = arrays.get("reset_h", 0)
            if self.reset_state == "fixed":
                new = new[:, :, None]
            h_prev = jnp.where(is_reset(arrays["reset"])[..., None], new, h_prev)
        dhn, of_products = arrays.get("dhn"), dxp
        if dhn is not None:  # the gradient of the last gate's hidden product
            of_products = jnp.concatenate([dxp[..., : -dhn.shape[-1]], dhn], axis=-1)
        contract = functools.partial(jnp.einsum, "sgtbi,sgtbj->sij", preferred_element_type=jnp.float32)
        grads = [contract(x, dxp), contract(h_prev, of_products)]
        if "x_mean" in arrays:
            grads[1] -= jnp.sum(arrays["x_mean"] * dxp.astype(jnp.float32), axis=(1, 2, 3))[:, None]
        of_bias = dxp if "scale" not in arrays else dxp.astype(jnp.float32) / arrays["scale"]
        grads += [jnp.sum(d, axis=(1, 2, 3), dtype=jnp.float32) for d in (of_bias, dhn) if d is not None]
        return {"sums": jnp.concatenate([d.reshape(d.shape[0], -1) for d in grads], axis=-1)}

    def describe(self) -> tuple[str, str]:
        return "weight gradients", "bwd"

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        return ("models", "length") if name == "sums" else axes_of_sequences(name, rank)
