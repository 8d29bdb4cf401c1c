"""Checks that the public docstrings of `jaxrnn`, its modules and its converters are complete, and runs their examples.

The docstring of a function describes arguments, result and errors; that of a linen module or a record, its attributes;
that of an NNX module, the arguments of the constructor. All have examples.
"""

import dataclasses
import inspect
import typing

import docstrings
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import jaxrnn
from jaxrnn import convert, linen, nnx
from tools import site_pages

PACKAGES = {"jaxrnn": jaxrnn, "linen": linen, "nnx": nnx, "convert": convert}
PUBLIC = {
    f"{package}.{name}": getattr(module, name)
    for package, module in PACKAGES.items()
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
}
FUNCTIONS = {name: x for name, x in PUBLIC.items() if inspect.isfunction(x)}
LINEN = {name: x for name, x in PUBLIC.items() if inspect.isclass(x) and issubclass(x, flax_linen.Module)}
NNX = {name: x for name, x in PUBLIC.items() if inspect.isclass(x) and issubclass(x, flax_nnx.Module)}
RECORDS = {
    name: x
    for name, x in PUBLIC.items()
    if name not in LINEN and inspect.isclass(x) and (dataclasses.is_dataclass(x) or hasattr(x, "_fields"))
}
# Their examples use PyTorch's modules, or choose kernels for a GPU that is not here.
NEED_TORCH = {"jaxrnn.explain", "convert.from_torch", "convert.to_torch"}
# The methods that the pages of the API describe.
MEMBERS = {
    f"{name}.{method}": getattr(module, method)
    for name, module in (LINEN | NNX).items()
    for method in site_pages.methods("jaxrnn", name)
    if hasattr(module, method)
}


def constructor_arguments(module):
    """Returns the arguments of the constructor of an NNX module, with those that it passes on to Flax's."""
    names = docstrings.parameters_of(module.__init__)
    hints = typing.get_type_hints(module.__init__)
    if "options" in names:
        (passed_on,) = typing.get_args(hints["options"])
        names = [*(name for name in names if name != "options"), *passed_on.__annotations__]
    return sorted(names)


def each(described):
    return pytest.mark.parametrize("described", [pytest.param(x, id=name) for name, x in described.items()])


def test_every_public_name_is_a_function_a_module_or_a_record():
    others = PUBLIC.keys() - {*FUNCTIONS, *LINEN, *NNX, *RECORDS}
    assert others == {"jaxrnn.ImplementationWarning"}
    assert {name.partition(".")[0] for name in PUBLIC} == set(PACKAGES)
    assert len(MEMBERS) > len(LINEN) + len(NNX)


@each(FUNCTIONS | MEMBERS)
def test_docstrings_of_functions_describe_every_argument_the_result_and_the_errors(described):
    arguments = docstrings.parameters_of(described)
    returns = ["Returns"] if inspect.signature(described).return_annotation != "None" else []
    assert docstrings.missing_sections(described, ["Args"] * bool(arguments) + returns + ["Raises"]) == []
    if arguments:
        assert docstrings.names_in(described, "Args") == arguments
    if returns:
        assert docstrings.type_of_result(described) == ""  # the annotation has it


@each(LINEN)
def test_docstrings_of_linen_modules_describe_every_attribute(described):
    assert docstrings.missing_sections(described, ["Attributes"]) == []
    fields = {field.name for field in dataclasses.fields(described)} - {"parent", "name"}
    assert docstrings.names_in(described, "Attributes") == sorted(fields)


@each(NNX)
def test_docstrings_of_nnx_modules_describe_every_argument_of_the_constructor(described):
    assert docstrings.missing_sections(described, ["Args", "Raises"]) == []
    assert docstrings.names_in(described, "Args") == constructor_arguments(described)


@each(RECORDS)
def test_docstrings_of_records_describe_every_field(described):
    assert docstrings.missing_sections(described, ["Attributes"]) == []
    fields = getattr(described, "_fields", None) or [field.name for field in dataclasses.fields(described)]
    assert docstrings.names_in(described, "Attributes") == sorted(fields)


@pytest.mark.parametrize(
    "described",
    [pytest.param(x, id=name, marks=[pytest.mark.torch] * (name in NEED_TORCH)) for name, x in PUBLIC.items()],
)
def test_examples_of_docstrings_run(described, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    docstrings.run_examples(described)
