"""A compiled kernel is named after what it computes, so that profiles tell the kernels of a program apart."""

import pytest

from benchmarks.problems import make_problem
from torch_bridge.cells import CELLS
from torch_bridge.tiling import PROFILES
from torch_bridge.tiling.resident import Resident
from torch_bridge.tiling.rows import Rows
from torch_bridge.tiling.split import Split
from torch_bridge.tiling.split_registers import SplitRegisters
from torch_bridge.tiling.streamed import Streamed

H100 = PROFILES["h100"]
LOOPS = {
    "streamed": (Streamed(64, 16, 4), 64),
    "fma": (None, 64),
    "resident": (Resident(64, 8), 64),
    "split": (Split(16, 4, 4), 256),
    "split_registers": (SplitRegisters(64, 8, 4), 256),
    "rows": (Rows(64, 8), 256),
}


def launch(cell, direction, loop):
    from torch_bridge import recurrences

    tiling, hidden = LOOPS[loop]
    result = recurrences.Launch(make_problem(cell, direction, "tf32", hidden, 16), H100, tiling)
    assert result.config.loop == loop
    return result


@pytest.mark.torch
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(("cell", "loop"), [(c, loop) for c in CELLS for loop in LOOPS if loop in CELLS[c].loops])
def test_name_of_a_time_loop_says_cell_direction_and_family(cell, loop, direction):
    """The names are known without compiling, in the interpreter too."""
    from torch_bridge import kernels

    (call,) = launch(cell, direction, loop).kernels
    of_cell = kernels.CELLS[cell].__name__.rpartition(".")[2]  # cells that differ in their norm alone share a file
    assert call.name == f"{of_cell}_{direction}_{loop}"


@pytest.mark.quick("loop")
@pytest.mark.compile_only
@pytest.mark.parametrize("loop", LOOPS)
def test_compiled_time_loop_has_its_name(loop):
    result = launch("gru", "fwd", loop)
    (compiled,) = result.compile()
    assert compiled.metadata.name == compiled.name == result.kernels[0].name
    assert f".entry gru_fwd_{loop}(" in compiled.asm["ptx"]


def norm(kind, direction, columns=256):
    from torch_bridge import norms

    arrays = {"fwd": ("x", "weight", "y"), "bwd": ("dy", "x", "weight", "rstd", "dx", "dweight")}[direction]
    arrays += ("mean",) if kind == "layer" else ()
    dtypes = tuple((name, "float32") for name in arrays)
    return norms.Launch(norms.Problem(kind, direction, 1, 512, columns, 1e-6, dtypes), H100)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_name_of_the_kernel_of_a_norm_says_norm_and_direction(kind):
    assert [call.name for call in norm(kind, "fwd").kernels] == [f"{kind}_norm_fwd"]
    assert [call.name for call in norm(kind, "bwd").kernels] == [f"{kind}_norm_bwd", "norm_sum_kernel"]
    assert norm(kind, "bwd", 16384).kernels[0].name == f"{kind}_norm_bwd_staged"


@pytest.mark.quick
@pytest.mark.compile_only
def test_compiled_kernels_of_a_norm_have_their_names():
    result = norm("layer", "bwd")
    assert [compiled.metadata.name for compiled in result.compile()] == [call.name for call in result.kernels]


@pytest.mark.compile_only
def test_the_sanitizer_checks_every_kernel():
    """A kernel with another name would pass without a check."""
    import sanitized

    from torch_bridge.kernels import input_projection, names, norm, norm_staged, sums, weight_grads
    from torch_bridge.recurrences import Launch

    launched = [Launch(*each) for each in sanitized.launches(H100)]
    found = {call.name for launch in launched for call in launch.kernels}
    assert {name.split("_")[-1] for name in found} >= {"streamed", "fma", "resident", "split", "registers", "rows"}
    modules = input_projection, norm, norm_staged, sums, weight_grads
    functions = [x for module in modules for name, x in vars(module).items() if name.endswith("_kernel")]
    found |= {names.name_of(function, {"CENTERED": True}) for function in functions}
    assert {"layer_norm_fwd", "sum_kernel", "projection_kernel"} <= found
    assert [name for name in found if not any(part in name for part in sanitized.KERNELS)] == []
