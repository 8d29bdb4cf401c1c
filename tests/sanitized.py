"""Runs every kind of kernel once, on small arrays: a program for NVIDIA's compute-sanitizer.

`python sanitized.py` runs all kernels, checks that they write every element of their outputs, and prints how many
launches of time loops there were. `python sanitized.py compile` fills the caches of Triton and, if the environment
names one, of JAX: it compiles the kernels of the time loops, in parallel, and runs the other ones.
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import torch

import jaxrnn
from benchmarks import precompile
from benchmarks.problems import Run, make_arrays, make_problem, outputs_of
from torch_bridge import gpu, tiling
from torch_bridge.cells import CELLS
from torch_bridge.recurrences import Launch

# Parts of the names of jaxrnn's kernels. The sanitizer checks no others: with those of JAX and PyTorch it takes many
# times as long.
KERNELS = ("_fwd_", "_bwd_", "_norm_", "norm_sum", "sum_kernel", "weight_grads", "projection_kernel")
BATCH, STEPS = 9, 9  # enough steps to keep weights on chip
WIDTHS = (24, 64, 100, 128, 250, 512, 1000)


def launches(device):
    """Returns the arguments of `Launch` for each loop of each cell, direction, kind of product and reset states.

    With reset states of each step, forward kernels of some loops have further shared memory, and backward kernels store
    further gradients. Loops that hold all weights of a state have small and large tiles, of 64 and 128 units.
    """
    found = {}
    ways = itertools.product(CELLS, ("fwd", "bwd"), ("zeros", "stepped"), ("tf32", "bf16"), WIDTHS)
    for cell, direction, reset_state, kind, hidden in ways:
        problem = make_problem(cell, direction, kind, hidden, BATCH, steps=STEPS, reset_state=reset_state)
        for config in tiling.candidates(problem, device):
            tile = (config.block_h, config.block_b >= 8) if config.loop == "resident" else ()
            key = cell, direction, reset_state, kind, config.loop, config.splits > 1, tile
            found.setdefault(key, (problem, device, config))
    return list(found.values())


def run_time_loops(device):
    for problem, _, config in (wanted := launches(device)):
        arrays = make_arrays(problem, "cuda:0")  # outputs are NaN before
        Run(problem, device, config, arrays)()
        torch.cuda.synchronize()
        for name in outputs_of(problem):
            if name != "local_grads":  # some widths leave padding in it
                assert arrays[name].float().isfinite().all(), (problem, config, name)
    return len(wanted)


def run_norms_and_products():
    """Runs the kernels of norms, input projections and gradients of weights, which JAX launches beside the loops."""
    xs = jax.random.normal(jax.random.key(0), (64, 128, 128), jnp.bfloat16)
    for norm in (jaxrnn.rms_norm, jaxrnn.layer_norm):

        def norm_loss(x, w, norm=norm):
            return jnp.sum(norm(x, w, implementation="triton") ** 2)

        for rows in (xs, xs[..., :33].astype(jnp.float32)):
            weight = jnp.ones(rows.shape[-1], rows.dtype)
            jax.block_until_ready(jax.jit(jax.grad(norm_loss, (0, 1)))(rows, weight))
    weights = jnp.ones((128, 384), jnp.bfloat16) / 128
    params = jaxrnn.GRUParams(weights, weights, jnp.zeros(384, jnp.bfloat16), jnp.zeros(128, jnp.bfloat16))
    normed = jaxrnn.NormGRUParams(*(x.astype(jnp.float32) for x in params[:3]))
    resets = jax.random.bernoulli(jax.random.key(1), 0.1, xs.shape[:2])

    def loss(run, params, xs, reset_state=None):
        options = {"resets": resets, "reset_state": reset_state, "implementation": "triton", "precision": "default"}
        return jnp.sum(run(params, jnp.zeros_like(xs[0]), xs, **options)[1].astype(jnp.float32) ** 2)

    for run, arguments in (
        (jaxrnn.gru, (params, xs)), (jaxrnn.gru, (params, xs, xs[0])), (jaxrnn.gru, (params, xs, xs)),
        (jaxrnn.norm_gru, (normed, xs.astype(jnp.float32))),
    ):  # fmt: skip
        grad = jax.grad(functools.partial(loss, run))
        text = str(jaxrnn.explain(grad, *arguments))
        assert ("projection" in text or run is jaxrnn.norm_gru) and "weight" in text, text
        jax.block_until_ready(jax.jit(grad)(*arguments))


if __name__ == "__main__":
    here = gpu.device(0)
    if sys.argv[1:] == ["compile"]:
        precompile.compile_kernels(Launch, launches(here))
        run_norms_and_products()
    else:
        count = run_time_loops(here)
        run_norms_and_products()
        print(count, "launches of time loops")
