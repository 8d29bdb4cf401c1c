"""Programs that launch kernels, with the arrays that they take."""

import functools

import cases
import jax
import jax.numpy as jnp


def recurrence(case, implementation="triton"):
    """Returns the function that computes outputs and gradients of `case`, and its arrays by name."""
    arrays = {name: x for name, x in cases.make_inputs(case).items() if x is not None}
    return functools.partial(cases._with_gradients, case, implementation), arrays


def seeds(case, implementation="triton"):
    """Returns the same for two models under `vmap`."""
    function, arrays = recurrence(case, implementation)
    return jax.vmap(function), {name: jnp.stack([x, x]) for name, x in arrays.items()}
