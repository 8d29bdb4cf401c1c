"""Computes the cells and norms, forward and backward, in float64 NumPy, for comparison with all implementations.

The code follows the equations, its gradients are derived by hand, and all arrays are time first. The prefix `ct_` marks
a cotangent, which is an input; the prefix `d` marks a gradient, which is an output.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray | None]
    Results = dict[str, NDArray]


def error(got: NDArray, want: NDArray) -> float:
    """Returns `||got - want|| / ||want||`, or `||got||` if `want` is zero. The result is NaN if anything is NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {got.shape}, want {want.shape}")
    scale = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (1.0 if scale == 0 else scale))


def product(h: NDArray, w_hh: NDArray) -> NDArray:
    """Returns the product of states and recurrent weights. A test replaces it to round the operands."""
    return h @ w_hh


def gru(inputs: Arrays, *, reverse: bool = False) -> Results:
    """Returns outputs and gradients of a GRU.

    Args:
      inputs: `w_ih [D, 3H]`, `w_hh [H, 3H]`, `b_ih [3H]`, `b_hn [H]`, `xs [T, B, D]`, `carry [B, H]`, optionally
        `resets [T, B]` and `reset_state` (`[H]`, `[B, H]` or `[T, B, H]`), and the cotangents `ct_ys [T, B, H]`,
        `ct_carry [B, H]`.
      reverse: whether to run from the last step to the first.

    Returns:
      `ys`, `carry`, and the gradients `dw_ih`, `dw_hh`, `db_ih`, `db_hn`, `dxs`, `dcarry`, and `dreset_state` if there
      is a reset state.
    """

    def step(xp: NDArray, hp: NDArray, h: NDArray) -> tuple[NDArray, ...]:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(xp, 3, axis=-1), np.split(hp, 3, axis=-1)
        r, z = _sigmoid(x_r + h_r), _sigmoid(x_z + h_z)
        n = np.tanh(x_n + r * h_n)
        return (1 - z) * n + z * h, r, z, n, h_n

    def back(dh: NDArray, saved: tuple[NDArray, ...], h: NDArray) -> tuple[NDArray, ...]:
        _, r, z, n, h_n = saved
        d_n = dh * (1 - z) * (1 - n**2)
        d_z = dh * (h - n) * z * (1 - z)
        d_r = d_n * h_n * r * (1 - r)
        return np.concatenate([d_r, d_z, d_n], axis=-1), np.concatenate([d_r, d_z, d_n * r], axis=-1), dh * z

    return _one_state(inputs, reverse, "b_ih", step, back)


def mgu(inputs: Arrays, *, reverse: bool = False) -> Results:
    """Returns outputs and gradients of an MGU, as `gru` does, with two gates instead of three."""

    def step(xp: NDArray, hp: NDArray, h: NDArray) -> tuple[NDArray, ...]:
        (x_f, x_n), (h_f, h_n) = np.split(xp, 2, axis=-1), np.split(hp, 2, axis=-1)
        f = _sigmoid(x_f + h_f)
        n = np.tanh(x_n + f * h_n)
        return (1 - f) * n + f * h, f, n, h_n

    def back(dh: NDArray, saved: tuple[NDArray, ...], h: NDArray) -> tuple[NDArray, ...]:
        _, f, n, h_n = saved
        d_n = dh * (1 - f) * (1 - n**2)
        d_f = (dh * (h - n) + d_n * h_n) * f * (1 - f)
        return np.concatenate([d_f, d_n], axis=-1), np.concatenate([d_f, d_n * f], axis=-1), dh * f

    return _one_state(inputs, reverse, "b_ih", step, back)


def simple_tanh(inputs: Arrays, *, reverse: bool = False) -> Results:
    """Returns outputs and gradients of a simple cell with tanh, as `gru` does; the bias is `b [H]`."""

    def step(xp: NDArray, hp: NDArray, h: NDArray) -> tuple[NDArray, ...]:
        return (np.tanh(xp + hp),)

    def back(dh: NDArray, saved: tuple[NDArray, ...], h: NDArray) -> tuple[NDArray, ...]:
        d = dh * (1 - saved[0] ** 2)
        return d, d, np.zeros_like(dh)

    return _one_state(inputs, reverse, "b", step, back)


def simple_relu(inputs: Arrays, *, reverse: bool = False) -> Results:
    """Returns outputs and gradients of a simple cell with ReLU, as `gru` does; the bias is `b [H]`.

    The inputs may contain `ys [T, B, H]`, the outputs of an implementation: a gate is then positive where they are.
    Rounding changes the sign of a few gates near zero, and the implementation's gradients follow its own signs.
    """
    signs = None if inputs.get("ys") is None else iter(inputs["ys"][::-1] if reverse else inputs["ys"])

    def step(xp: NDArray, hp: NDArray, h: NDArray) -> tuple[NDArray, ...]:
        gates = xp + hp
        positive = gates > 0 if signs is None else next(signs) > 0
        return np.where(positive, gates, 0), positive

    def back(dh: NDArray, saved: tuple[NDArray, ...], h: NDArray) -> tuple[NDArray, ...]:
        d = np.where(saved[1], dh, 0)
        return d, d, np.zeros_like(dh)

    return _one_state(inputs, reverse, "b", step, back)


def lstm(inputs: Arrays, *, reverse: bool = False) -> Results:
    """Returns outputs and gradients of an LSTM.

    Args:
      inputs: `w_ih [D, 4H]`, `w_hh [H, 4H]`, `b [4H]`, `xs [T, B, D]`, `carry_c` and `carry_h [B, H]`, optionally
        `resets [T, B]`, `reset_c` and `reset_h` (as `reset_state` of `gru`), and the cotangents `ct_ys [T, B, H]`,
        `ct_carry_c`, `ct_carry_h [B, H]` and optionally `ct_cs [T, B, H]`. With `w_hr [H, P]` the hidden state is
        projected. Then `w_hh` is `[P, 4H]`, and P is the width of `carry_h`, `reset_h`, `ct_ys`, `ct_carry_h` and `ys`.
      reverse: whether to run from the last step to the first.

    Returns:
      `ys`, `cs`, `carry_c`, `carry_h`, and the gradients `dw_ih`, `dw_hh`, `db`, `dxs`, `dcarry_c`, `dcarry_h`, and
      `dw_hr`, `dreset_c`, `dreset_h` if the corresponding input is given.
    """
    w_ih, w_hh, b, xs, c, h, ct_ys, ct_c, ct_h = _float64(
        inputs, "w_ih", "w_hh", "b", "xs", "carry_c", "carry_h", "ct_ys", "ct_carry_c", "ct_carry_h"
    )
    T, B, H, P = *xs.shape[:2], w_hh.shape[1] // 4, w_hh.shape[0]
    w_hr = None if inputs.get("w_hr") is None else _float64(inputs, "w_hr")[0]
    ct_cs = np.zeros((T, B, H)) if inputs.get("ct_cs") is None else _float64(inputs, "ct_cs")[0]
    reset = _resets(inputs, T, B)
    start_c, start_h = _per_step(inputs.get("reset_c"), T, B, H), _per_step(inputs.get("reset_h"), T, B, P)
    order = range(T)[::-1] if reverse else range(T)

    xp = xs @ w_ih + b
    c_in, i, f, g, o, cs, ms = (np.empty((T, B, H)) for _ in range(7))
    h_in, ys = np.empty((T, B, P)), np.empty((T, B, P))
    for t in order:
        c_in[t], h_in[t] = np.where(reset[t], start_c[t], c), np.where(reset[t], start_h[t], h)
        p_i, p_f, p_g, p_o = np.split(xp[t] + product(h_in[t], w_hh), 4, axis=-1)
        i[t], f[t], g[t], o[t] = _sigmoid(p_i), _sigmoid(p_f), np.tanh(p_g), _sigmoid(p_o)
        cs[t] = c = f[t] * c_in[t] + i[t] * g[t]
        ms[t] = o[t] * np.tanh(c)
        ys[t] = h = ms[t] if w_hr is None else ms[t] @ w_hr

    d_p, d_start_c, d_start_h = np.empty((T, B, 4 * H)), np.zeros((T, B, H)), np.zeros((T, B, P))
    d_hs = np.empty((T, B, P))
    dc, dh = ct_c, ct_h
    for t in order[::-1]:
        d_hs[t] = dh + ct_ys[t]
        dm, tanh_c = d_hs[t] if w_hr is None else d_hs[t] @ w_hr.T, np.tanh(cs[t])
        dc = dc + ct_cs[t] + dm * o[t] * (1 - tanh_c**2)
        d_i, d_f = dc * g[t] * i[t] * (1 - i[t]), dc * c_in[t] * f[t] * (1 - f[t])
        d_g, d_o = dc * i[t] * (1 - g[t] ** 2), dm * tanh_c * o[t] * (1 - o[t])
        d_p[t] = np.concatenate([d_i, d_f, d_g, d_o], axis=-1)
        d_c_in, d_h_in = dc * f[t], d_p[t] @ w_hh.T
        d_start_c[t], dc = np.where(reset[t], d_c_in, 0), np.where(reset[t], 0, d_c_in)
        d_start_h[t], dh = np.where(reset[t], d_h_in, 0), np.where(reset[t], 0, d_h_in)

    results = {"ys": ys, "cs": cs, "carry_c": c, "carry_h": h, "dcarry_c": dc, "dcarry_h": dh}
    results |= _projection_gradients(w_ih, xs, d_p, "db") | {"dw_hh": _outer(h_in, d_p)}
    if w_hr is not None:
        results["dw_hr"] = _outer(ms, d_hs)
    for name, d_start in (("reset_c", d_start_c), ("reset_h", d_start_h)):
        if inputs.get(name) is not None:
            results["d" + name] = _sum_to(d_start, np.shape(inputs[name]))
    return results


def norm_gru(kind: str, inputs: Arrays, *, reverse: bool = False) -> Results:
    """Returns outputs and gradients of a GRU whose gates see a norm of inputs and state, as `jaxrnn.norm_gru` does.

    Args:
      kind: "rms" (RMSNorm) or "layer" (LayerNorm).
      inputs: as for `gru`, with the bias `b [3H]`, the scales `scale_i [D]` and `scale_h [H]` and, with LayerNorm, the
        shifts `shift_i [D]` and `shift_h [H]`.
      reverse: whether to run from the last step to the first.
    """
    w_ih, w_hh, b, xs, h, ct_ys, ct_carry = _float64(inputs, "w_ih", "w_hh", "b", "xs", "carry", "ct_ys", "ct_carry")
    (T, B, D), H = xs.shape, w_hh.shape[0]
    weight, gain = np.concatenate([w_ih, w_hh]), np.concatenate(_float64(inputs, "scale_i", "scale_h"))
    shift = np.concatenate(_float64(inputs, "shift_i", "shift_h")) if kind == "layer" else 0.0
    reset_state = inputs.get("reset_state")
    reset, start = _resets(inputs, T, B), _per_step(reset_state, T, B, H)
    order = range(T)[::-1] if reverse else range(T)

    normal, scale = np.empty((T, B, D + H)), np.empty((T, B, 1))
    h_in, ys, saved = np.empty((T, B, H)), np.empty((T, B, H)), {}
    for t in order:
        h_in[t] = np.where(reset[t], start[t], h)
        both = np.concatenate([xs[t], h_in[t]], axis=-1)
        if kind == "layer":
            both = both - both.mean(-1, keepdims=True)
        scale[t] = 1 / np.sqrt((both**2).mean(-1, keepdims=True) + 1e-4)
        normal[t] = both * scale[t]
        p_r, p_n, p_u = np.split((normal[t] * gain + shift) @ weight + b, 3, axis=-1)
        r, u = _sigmoid(p_r), _sigmoid(p_u - 1)
        n = np.tanh(r * p_n)
        saved[t] = p_n, r, n, u
        ys[t] = h = u * n + (1 - u) * h_in[t]

    d_p, d_normal, d_xs = np.empty((T, B, 3 * H)), np.empty_like(normal), np.empty_like(xs)
    d_start = np.zeros((T, B, H))
    dh = ct_carry
    for t in order[::-1]:
        (p_n, r, n, u), dh = saved[t], dh + ct_ys[t]
        d_rn = dh * u * (1 - n**2)
        d_u = dh * (n - h_in[t]) * u * (1 - u)
        d_p[t] = np.concatenate([d_rn * p_n * r * (1 - r), d_rn * r, d_u], axis=-1)
        d_normal[t] = d_p[t] @ weight.T
        d = d_normal[t] * gain
        d_both = d - normal[t] * (d * normal[t]).mean(-1, keepdims=True)
        if kind == "layer":
            d_both -= d.mean(-1, keepdims=True)
        d_xs[t], d_in = np.split(scale[t] * d_both, [D], axis=-1)
        d_in = d_in + dh * (1 - u)
        d_start[t], dh = np.where(reset[t], d_in, 0), np.where(reset[t], 0, d_in)

    results = {"ys": ys, "carry": h, "dcarry": dh, "dxs": d_xs, "db": d_p.sum((0, 1))}
    results["dw_ih"], results["dw_hh"] = np.split(_outer(normal * gain + shift, d_p), [D])
    results["dscale_i"], results["dscale_h"] = np.split((d_normal * normal).sum((0, 1)), [D])
    if kind == "layer":
        results["dshift_i"], results["dshift_h"] = np.split(d_normal.sum((0, 1)), [D])
    if reset_state is not None:
        results["dreset_state"] = _sum_to(d_start, np.shape(reset_state))
    return results


CELLS = {
    "gru": gru, "lstm": lstm, "mgu": mgu, "simple_tanh": simple_tanh, "simple_relu": simple_relu,
    "rms_norm_gru": functools.partial(norm_gru, "rms"), "layer_norm_gru": functools.partial(norm_gru, "layer"),
}  # fmt: skip


def norm(kind: str, inputs: Arrays, total: NDArray, epsilon: float) -> Results:
    """Returns outputs and gradients of RMSNorm or LayerNorm.

    Args:
      kind: "rms" (RMSNorm) or "layer" (LayerNorm).
      inputs: `x [..., N]`, optionally `weight` and `bias [N]` and `residual`, and the cotangents `ct_y` and, with a
        residual, `ct_total`.
      total: the array to normalize: x, or the sum of x and the residual, rounded to their dtype.
      epsilon: the number that is added to the mean of squares.

    Returns:
      `y`, with a residual also `total`, and the gradients `dx` and, for the inputs that are given, `dresidual`,
      `dweight` and `dbias`.
    """
    names = [name for name in ("x", "weight", "bias", "residual") if inputs.get(name) is not None]
    x, dy = _float64({"x": total, "ct_y": inputs["ct_y"]}, "x", "ct_y")
    weight = _float64(inputs, "weight")[0] if "weight" in names else 1.0
    centered = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    scale = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)
    normal, d_normal = centered * scale, dy * weight
    dx = scale * (d_normal - normal * (d_normal * normal).mean(-1, keepdims=True))
    if kind == "layer":
        dx -= scale * d_normal.mean(-1, keepdims=True)
    results = {"y": normal * weight, "dx": dx}
    if "residual" in names:
        results["dx"] = dx = dx + _float64(inputs, "ct_total")[0]
        results |= {"total": x, "dresidual": dx}
    if "weight" in names:
        results["dweight"] = _sum_to(dy * normal, x.shape[-1:])
    if "bias" in names:
        results["y"] = results["y"] + _float64(inputs, "bias")[0]
        results["dbias"] = _sum_to(dy, x.shape[-1:])
    return results


def _one_state(inputs: Arrays, reverse: bool, bias: str, step: Callable, back: Callable) -> Results:
    """Runs a cell whose only state is the hidden state, forward and backward in time.

    Args:
      inputs: as for `gru`; `bias` names that of the gates, and `b_hn`, if present, is added to the last hidden product.
      reverse: whether to run from the last step to the first.
      bias: a name in `inputs`.
      step: maps the input projection and the hidden product of a step, and the state before it, to a tuple whose first
        element is the next state.
      back: maps the gradient of that state, the tuple, and the state before the step to the gradients of the
        projection, of the product, and of what does not pass through the gates.
    """
    w_ih, w_hh, b, xs, h, ct_ys, ct_carry = _float64(inputs, "w_ih", "w_hh", bias, "xs", "carry", "ct_ys", "ct_carry")
    reset_state = inputs.get("reset_state")
    T, B, H = *xs.shape[:2], w_hh.shape[0]
    b_h = np.zeros(w_hh.shape[1])
    if "b_hn" in inputs:
        b_h[-H:] = inputs["b_hn"]
    reset, start = _resets(inputs, T, B), _per_step(reset_state, T, B, H)
    order = range(T)[::-1] if reverse else range(T)

    xp = xs @ w_ih + b
    h_in, ys, saved = np.empty((T, B, H)), np.empty((T, B, H)), {}
    for t in order:
        h_in[t] = np.where(reset[t], start[t], h)
        saved[t] = step(xp[t], product(h_in[t], w_hh) + b_h, h_in[t])
        ys[t] = h = saved[t][0]

    d_xp, d_hp, d_start = np.empty_like(xp), np.empty_like(xp), np.zeros((T, B, H))
    dh = ct_carry
    for t in order[::-1]:
        d_xp[t], d_hp[t], straight = back(dh + ct_ys[t], saved[t], h_in[t])
        d_in = straight + d_hp[t] @ w_hh.T
        d_start[t], dh = np.where(reset[t], d_in, 0), np.where(reset[t], 0, d_in)

    results = {"ys": ys, "carry": h, "dcarry": dh, "dw_hh": _outer(h_in, d_hp)}
    results |= _projection_gradients(w_ih, xs, d_xp, "d" + bias)
    if "b_hn" in inputs:
        results["db_hn"] = d_hp[..., -H:].sum((0, 1))
    if reset_state is not None:
        results["dreset_state"] = _sum_to(d_start, np.shape(reset_state))
    return results


def _float64(inputs: Arrays, *names: str) -> list[NDArray]:
    return [np.asarray(inputs[name], np.float64) for name in names]


def _sigmoid(x: NDArray) -> NDArray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _resets(inputs: Arrays, T: int, B: int) -> NDArray:
    resets = inputs.get("resets")
    return np.zeros((T, B, 1), bool) if resets is None else (np.asarray(resets) != 0)[..., None]


def _per_step(reset_state: NDArray | None, T: int, B: int, width: int) -> NDArray:
    return np.broadcast_to(np.float64(0) if reset_state is None else np.asarray(reset_state, np.float64), (T, B, width))


def _sum_to(x: NDArray, shape: tuple[int, ...]) -> NDArray:
    return x.sum(axis=tuple(range(x.ndim - len(shape))))


def _outer(x: NDArray, y: NDArray) -> NDArray:
    return x.reshape(-1, x.shape[-1]).T @ y.reshape(-1, y.shape[-1])


def _projection_gradients(w_ih: NDArray, xs: NDArray, d_xp: NDArray, bias: str) -> Results:
    return {"dxs": d_xp @ w_ih.T, "dw_ih": _outer(xs, d_xp), bias: d_xp.sum((0, 1))}
