"""Arrays and comparisons of trees for the tests of modules."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def random_tree(seed, tree):
    """Replaces every array of `tree` by a random one: zero biases would hide where they are added."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), tree)


def some_resets(shape):
    return jnp.asarray(np.random.default_rng(9).random(shape) < 0.3)


def some_carry(cell, batch, hidden, seed=5):
    """Returns a random carry of the cell whose class in Flax is called `cell`."""
    h = normal(seed, (*batch, hidden))
    return (normal(seed + 1, (*batch, hidden)), h) if "LSTM" in cell else h


def assert_identical(got, want):
    """Asserts that two trees have the same paths, shapes, dtypes and values."""
    got, want = (traverse_util.flatten_dict(tree, sep="/") for tree in (got, want))
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert (got[path].shape, got[path].dtype) == (value.shape, value.dtype), path
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def assert_close(got, want, tol=2e-6, atol=None):
    """Asserts the same structure, shapes and dtypes, and elements that differ by `tol`, relative or absolute."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    atol = tol if atol is None else atol
    for a, b in zip(*map(jax.tree.leaves, jax.device_get((got, want))), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        np.testing.assert_allclose(np.asarray(a, wide), np.asarray(b, wide), rtol=tol, atol=atol)
