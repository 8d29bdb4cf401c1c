"""Constructors that pass options on to that of a base class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def passes_options_to(base: Callable[..., None]) -> Callable[[Constructor], Constructor]:
    """Gives a constructor that passes `**options` on to `base` the signature and the errors of one that lists them."""

    def decorate(constructor: Constructor) -> Constructor:
        of_base, own = (inspect.signature(function) for function in (base, constructor))
        # in the order of a constructor that lists its own options before those of the base class
        new = {name: x for name, x in own.parameters.items() if name not in of_base.parameters and name != "options"}
        parameters = sorted((new | dict(of_base.parameters)).values(), key=lambda x: x.kind)
        names = {x.name for x in parameters}

        @functools.wraps(constructor)
        def check_names(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in names:
                    raise TypeError(f"{constructor.__qualname__}() got an unexpected keyword argument {name!r}")
            constructor(self, *args, **options)

        check_names.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return check_names  # type: ignore[return-value]

    return decorate
