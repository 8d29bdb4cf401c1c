"""An extension of the site's reader of docstrings, which does not run code: what decorators add to docstrings."""

import importlib
import inspect

import griffe


class InheritedDocstrings(griffe.Extension):
    """Shows the docstrings that `inherit_descriptions` completes, and the arguments that `passes_options_to` adds."""

    def on_object(self, *, obj, loader, **options):
        """Replaces the docstring or the parameters of a decorated object."""
        names = {decorator.callable_path.rpartition(".")[2] for decorator in getattr(obj, "decorators", ())}
        if "inherit_descriptions" in names:
            obj.docstring.value = inspect.getdoc(_runtime(obj))
        if "passes_options_to" in names:
            (base,) = (cls for cls in obj.parent.mro() if "__init__" in cls.members)
            obj.parameters = griffe.Parameters(
                *(
                    next(
                        function.parameters[name] for function in (base["__init__"], obj) if name in function.parameters
                    )
                    for name in inspect.signature(_runtime(obj)).parameters
                )
            )


def _runtime(obj):
    """Returns the class or the function that the source of an object defines."""
    found = importlib.import_module(obj.module.path)
    for name in obj.path.removeprefix(f"{obj.module.path}.").split("."):
        found = getattr(found, name)
    return found
