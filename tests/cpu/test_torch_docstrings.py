"""Checks that the public docstrings of `torch_bridge` are complete, and runs their examples."""

import doctest
import inspect
import re

import pytest
from torch_calls import torch

import torch_bridge
from torch_bridge import functional, nn

CALLED = [x for room in (torch_bridge, functional, nn) for x in (getattr(room, name) for name in room.__all__)]
CALLED = [x for x in CALLED if inspect.isfunction(x) or (inspect.isclass(x) and issubclass(x, torch.nn.Module))]
# What takes arguments: functions, and of modules the constructor, which the class describes, and the call.
DESCRIBED = [y for x in CALLED for y in ([x, x.forward] if inspect.isclass(x) else [x])]


def test_every_room_has_public_functions_or_modules():
    assert {x.__name__ for x in CALLED} == {
        "gru", "lstm", "mgu", "rnn", "rms_norm", "layer_norm", "run_layer", "run_trajectories", "explain", "GRU",
        "LSTM", "MGU", "RNN", "RMSNorm", "LayerNorm", "norm_gru", "NormGRU",
    }  # fmt: skip


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda x: x.__qualname__)
def test_docstrings_describe_every_argument_the_results_and_the_errors(described):
    text = inspect.getdoc(described)
    sections = ["Args:", "Raises:"] if inspect.isclass(described) else ["Args:", "Returns:", "Raises:"]
    assert [name for name in sections if f"\n{name}\n" not in text] == []
    arguments = text.split("\nArgs:\n")[1].split("\n\n")[0]
    signature = inspect.signature(described.__init__ if inspect.isclass(described) else described)
    names = [name for name in signature.parameters if name != "self"]
    assert [name for name in names if not re.search(rf"  \*{{0,2}}{name}: ", arguments)] == []


@pytest.mark.parametrize("described", CALLED, ids=lambda x: x.__qualname__)
def test_examples_of_docstrings_run(described):
    (test,) = doctest.DocTestFinder(recurse=False).find(described, described.__name__, globs={})
    assert test.examples, "the docstring has no example"
    torch.manual_seed(0)
    output = []
    failed, _ = doctest.DocTestRunner().run(test, out=output.append)
    assert not failed, "".join(output)
