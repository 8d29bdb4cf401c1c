"""Tests that `make test` runs every cell, time loop and front, and that each test is in one part."""

import itertools
import json
import subprocess
import sys

import pytest
from child import ROOT, environment

import jaxrnn
import jaxrnn.convert
import jaxrnn.linen
import jaxrnn.nnx
from jaxrnn.linen import cells as linen_cells
from jaxrnn.linen import stack
from jaxrnn.nnx import cells as nnx_cells
from jaxrnn.nnx import stack as nnx_stack

pytestmark = pytest.mark.torch  # without PyTorch, tests that need it are not found
COLLECT = """
import json, sys
import pytest, quick

class Collected:
    @pytest.hookimpl(tryfirst=True)  # before conftest.py leaves any out
    def pytest_collection_modifyitems(self, items):
        ids = {name: [item.nodeid for item in quick.part(items, name)] for name in ("quick", "rest", None)}
        compiled = [x.nodeid for x in quick.part(items, "quick") if x.get_closest_marker("compile_only")]
        with open(sys.argv[1], "w") as file:
            json.dump([[ids["quick"], ids["rest"], ids[None]], compiled, list(quick.chosen(items))], file)

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[Collected()]))
"""


def classes(module, base):
    """Returns the names of the public classes of a module that inherit from a base class."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {name for name, x in found.items() if isinstance(x, type) and issubclass(x, base)}


def expected():
    """Returns what the quick cases of a test have to run: the values of the parameters that its marker names."""
    from torch_bridge import cells, nn
    from torch_bridge.nn.recurrent import RecurrentModule

    loops = {(loop, name, way) for name, x in cells.CELLS.items() for loop in x.loops for way in ("fwd", "bwd")}
    norms = {name.removesuffix("_norm") for name in jaxrnn.__all__ if name.endswith("_norm")}
    frameworks = {name.removeprefix("from_") for name in jaxrnn.convert.__all__ if name.startswith("from_")}
    values = {
        "compiled/test_emulated_loops.py::test_loops_match_float64_without_races":
            {x for x in loops if x[0] not in ("split", "rows")},  # which the emulator cannot run
        "compiled/test_names.py::test_compiled_time_loop_has_its_name": {loop for loop, _, _ in loops},
        "interpreted/test_kernels_interpreted.py::test_outputs_and_gradients_match_the_oracle":
            set(itertools.product(cells.CELLS, ("None", "h", "bh", "tbh"))),
        "cpu/test_reference.py::test_matches_the_oracle_in_float64": set(cells.CELLS),
        "interpreted/test_torch_ops.py::test_resets_may_be_of_any_dtype":
            set(itertools.product(cells.CELLS, ("None", "torch", "triton"))),
        "cpu/test_torch_nn.py::test_ensemble_under_vmap_matches_its_modules": classes(nn, RecurrentModule),
        "cpu/test_linen.py::test_agents_with_the_replacement_compute_the_same":
            classes(jaxrnn.linen, linen_cells.FusedCell),
        "cpu/test_stacks.py::test_triton_matches_xla": classes(jaxrnn.linen, stack.FusedStack),
        "cpu/test_nnx.py::test_rnn_equals_flax_rnn": classes(jaxrnn.nnx, nnx_cells.FusedCell),
        "cpu/test_nnx.py::test_stacks_equal_those_of_linen": classes(jaxrnn.nnx, nnx_stack.FusedStack),
        "interpreted/test_norms.py::test_interpreted_kernels_have_at_most_twice_the_error_of_xla": norms,
        "interpreted/test_norm_modules.py::test_linen_modules_equal_those_of_flax": {(x, "triton") for x in norms},
        "interpreted/test_norm_modules.py::test_nnx_modules_equal_those_of_flax": {(x, "triton") for x in norms},
        "interpreted/test_torch_norms.py::test_kernels_match_the_formula": norms,
        "cpu/test_convert.py::test_class_of_the_result_may_be_requested": frameworks,
    }  # fmt: skip
    return {f"tests/{test}": {(x,) if isinstance(x, str) else x for x in each} for test, each in values.items()}


def test_the_quick_part_has_every_cell_time_loop_and_front(tmp_path):
    arguments = [sys.executable, "-c", COLLECT, str(tmp_path / "collected.json")]
    done = subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (quick, rest, every), compiled, chosen = json.loads((tmp_path / "collected.json").read_text())
    assert sorted(quick + rest) == sorted(every)
    assert all(name.startswith("tests/compiled/") for name in compiled)  # where conftest.py looks for them
    found = {(test, tuple(values)) for test, values in chosen}
    assert all(expected().values())
    missing = [(test, value) for test, each in expected().items() for value in each if (test, value) not in found]
    assert not missing, "\n".join(f"{test}: {value}" for test, value in missing)
