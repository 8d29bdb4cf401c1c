"""Imports Flax for `jaxrnn.linen` and `jaxrnn.nnx`, or raises an error that says how to install it."""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "jaxrnn.linen and jaxrnn.nnx need Flax, which is not installed: pip install '.[jax]' in a checkout of jaxrnn. "
        "The functions of jaxrnn do not need it.",
        name="flax",
    ) from error
