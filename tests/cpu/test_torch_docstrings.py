"""Checks that the public docstrings of `torch_bridge` are complete, and runs their examples."""

import inspect

import docstrings
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
    sections = ["Args", "Raises"] if inspect.isclass(described) else ["Args", "Returns", "Raises"]
    assert docstrings.missing_sections(described, sections) == []
    if "Returns" in sections:
        assert docstrings.type_of_result(described) == ""  # the annotation has it
    takes_arguments = described.__init__ if inspect.isclass(described) else described
    assert docstrings.names_in(described, "Args") == docstrings.parameters_of(takes_arguments)


@pytest.mark.parametrize("described", CALLED, ids=lambda x: x.__qualname__)
def test_examples_of_docstrings_run(described):
    torch.manual_seed(0)
    docstrings.run_examples(described)
