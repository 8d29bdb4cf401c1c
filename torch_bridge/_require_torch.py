"""Imports PyTorch for `torch_bridge.nn`, `functional` and `explain`, or raises an error that says how to install it."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "torch_bridge.nn, torch_bridge.functional and torch_bridge.explain need PyTorch, which is not installed: pip "
        "install '.[torch]' in a checkout of jaxrnn.",
        name="torch",
    ) from error
