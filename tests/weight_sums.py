"""The sums that the launch of weight gradients computes, in float64."""

import numpy as np


def step_by_step(arrays, reverse):
    """Goes through the steps in order, with the state that each of them sees; returns the sums by name, `[S, ...]`.

    `torch_bridge.weight_grads.Problem` names the arrays.
    """
    x, hs, h, dxp = (np.asarray(arrays[name], np.float64) for name in ("x", "hs", "h0", "dxp"))
    given = {
        name: np.asarray(x, np.float64) for name, x in arrays.items() if name in ("dhn", "reset_h", "scale", "x_mean")
    }
    new = given.get("reset_h", np.zeros_like(h))
    hidden, steps = h.shape[-1], x.shape[2]
    w_ih, w_hh, bias, b_hn = 0, 0, 0, 0
    for t in reversed(range(steps)) if reverse else range(steps):
        start = new[:, :, t] if new.ndim == hs.ndim else new
        before = np.where(np.asarray(arrays["reset"])[:, :, t, :, None] != 0, start, h)
        d = dxp[:, :, t]
        products = d
        if "dhn" in given:
            dhn = given["dhn"][:, :, t]
            products = np.concatenate([d[..., :-hidden], dhn], -1)
            b_hn += dhn.sum((1, 2))
        w_ih += np.einsum("sgbx,sgby->sxy", x[:, :, t], d)
        if "x_mean" in given:
            before = before - given["x_mean"][:, :, t]
        w_hh += np.einsum("sgbx,sgby->sxy", before, products)
        bias += (d / given["scale"][:, :, t] if "scale" in given else d).sum((1, 2))
        h = hs[:, :, t]
    return {"w_ih": w_ih, "w_hh": w_hh, "bias": bias} | ({"b_hn": b_hn} if "dhn" in given else {})


def in_one_row(sums):
    """Returns the sums as the launch writes them, `[S, Layout.end]`."""
    return np.concatenate([x.reshape(len(x), -1) for x in sums.values()], axis=1)


class Launch:
    """A substitute for the launch that computes the gradients of weights, whose kernel cannot be interpreted."""

    kernels = workspaces = ()

    def __init__(self, problem, device):
        from torch_bridge import weight_grads

        self.problem, self.tiling = problem, weight_grads.choose(problem, device)

    def load(self, ordinal):
        pass

    def interpret(self, tensors):
        import torch

        wide = {name: x.double().numpy() for name, x in tensors.items() if name != "sums"}
        sums = in_one_row(step_by_step(wide, self.problem.reverse))
        tensors["sums"].copy_(torch.from_numpy(sums))
