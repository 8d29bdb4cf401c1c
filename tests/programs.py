"""Programs that launch kernels, with the arrays that they take."""

import functools

import cases
import jax
import jax.numpy as jnp


def recurrence(case):
    """Returns the function that computes outputs and gradients of `case` with the kernels, and its arrays by name."""
    arrays = {name: x for name, x in cases.make_inputs(case).items() if x is not None}
    return functools.partial(cases._with_gradients, case, "triton"), arrays


def seeds(case):
    """Returns the same for two models under `vmap`."""
    function, arrays = recurrence(case)
    return jax.vmap(function), {name: jnp.stack([x, x]) for name, x in arrays.items()}
