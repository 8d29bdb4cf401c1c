"""Checks imports: `jaxrnn` works without PyTorch and Triton, `torch_bridge` without JAX, and modules obey a table."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_bridge.cells import CELLS

ROOT = Path(__file__).resolve().parents[2]
JAX_SIDE = ("jax", "jaxlib", "flax", "jaxrnn")
TORCH_SIDE = ("torch", "triton")
CONVERTED = ("equinox", "haiku", "keras")
NOT_DEPENDENCIES = (
    *("jaxtyping", "beartype", "hypothesis", "pytest", "tqdm", "tests", "benchmarks", "examples"),
    *CONVERTED,
)

# The files of jaxrnn.convert that all frameworks share.
SHARED_BY_FRAMEWORKS = tuple(f"jaxrnn.convert.{name}" for name in ("arrays", "checks", "dense", "layout"))


def modules(package: str) -> list[str]:
    """Returns the names of a package and of every module in it, without importing any."""
    paths = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def run_without(blocked: tuple[str, ...], code: str) -> None:
    """Runs code in a fresh process in which importing any of `blocked` raises ImportError."""
    block = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"
    done = subprocess.run([sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def imported_names(path: Path) -> Iterator[str]:
    """Yields the names that a file imports at run time, also inside functions: all except under `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)


def imports(module: str) -> set[str]:
    path = ROOT.joinpath(*module.split("."))
    return set(imported_names(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")))


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def test_modules_of_jaxrnn_import_with_their_base_dependencies_alone():
    """Each module is imported in a child that has imported nothing of this package, and JAX and Flax once for all."""
    assert len(modules("jaxrnn")) > 50
    run_without(
        (*TORCH_SIDE, *NOT_DEPENDENCIES),
        f"""
import importlib, os, traceback
import flax.linen, flax.nnx, jax
failed = []
for module in {modules("jaxrnn")!r}:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(module)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(module)
assert not failed, failed
""",
    )


def test_import_jaxrnn_loads_neither_torch_nor_flax():
    loaded = f"set(sys.modules) & {set(TORCH_SIDE) | {'flax'}!r}"
    run_without((), f"import jaxrnn; assert not {loaded}, {loaded}")


def test_submodules_of_jaxrnn_are_imported_on_first_use():
    run_without(
        TORCH_SIDE,
        """
import sys
import jaxrnn
names = {"convert", "linen", "nnx"}
assert names <= set(dir(jaxrnn)) and not {f"jaxrnn.{name}" for name in names} & set(sys.modules)
class ScannedRNN(jaxrnn.linen.ScannedRNN):
    cell_type: str = "lstm"
c, h = ScannedRNN.initialize_carry(2, 3)
assert c.shape == h.shape == (2, 3)
assert jaxrnn.nnx is sys.modules["jaxrnn.nnx"] and jaxrnn.convert is sys.modules["jaxrnn.convert"]
assert not hasattr(jaxrnn, "layers")
""",
    )


@pytest.mark.torch
def test_submodules_of_torch_bridge_are_imported_on_first_use():
    code = "assert {'explain', 'functional', 'nn'} <= set(dir(torch_bridge)) and 'torch' not in sys.modules"
    uses = "torch_bridge.nn.GRU; torch_bridge.functional.gru; torch_bridge.explain"
    run_without(JAX_SIDE, f"import sys, torch_bridge; {code}; {uses}")


OPERATORS = [f"{name}{end}" for name in (*CELLS, "rms_norm", "layer_norm") for end in ("", "_backward")]


@pytest.mark.torch
@pytest.mark.parametrize(
    "lines",
    ["import torch, torch_bridge", "import torch_bridge, torch", "import torch_bridge.tiling, torch",
     "import torch_bridge.nn", "import torch_bridge.recording, torch_bridge.nn"],
)  # fmt: skip
def test_operators_are_registered_once_pytorch_is_imported_and_triton_is_not(lines):
    """Whichever of the two is imported first."""
    run_without(
        JAX_SIDE,
        f"""
{lines}
import torch
missing = [name for name in {OPERATORS!r} if not hasattr(torch.ops.torch_bridge, name)]
assert not missing and "triton" not in sys.modules, missing
from torch.utils.flop_counter import flop_registry
assert {{getattr(torch.ops.torch_bridge, name) for name in {list(CELLS)!r}}} <= flop_registry.keys()
""",
    )


def test_registration_knows_the_parts_of_the_operators_that_import_pytorch():
    """The operators import these modules, so nothing is registered while one of them imports PyTorch."""
    from torch_bridge import registration

    def imported_at_once(module):
        path = ROOT.joinpath(*module.split("."))
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
        names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        return names | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}

    tables = {module: imported_at_once(module) for module in modules("torch_bridge") if module != "torch_bridge"}
    reached, pending = set(), list(registration._OPERATORS)
    while pending:
        reached.add(module := pending.pop())
        pending += [name for name in tables.keys() - reached if any(within(one, name) for one in tables[module])]
    importers = [module for module in reached if any(within(one, "torch") for one in tables[module])]
    known = (*registration._OPERATORS, *registration._PARTS)
    assert len(importers) > 10 and not [module for module in importers if not within(module, *known)]


@pytest.mark.torch
def test_operators_are_registered_in_a_process_of_jax_too():
    loaded = "hasattr(torch.ops.torch_bridge, 'gru')"
    run_without((), f"import jaxrnn; assert 'torch' not in sys.modules; import torch; assert {loaded}")


@pytest.mark.parametrize("lines", ["import torch, torch_bridge", "import torch_bridge, torch"])
def test_a_pytorch_that_is_too_old_for_the_operators_is_left_alone(tmp_path, lines):
    """Users of JAX may have any version."""
    (tmp_path / "torch.py").write_text(
        "class OldVersion:\n    __lt__ = lambda self, other: True\n__version__ = OldVersion()"
    )
    run_without((), f"sys.path.insert(0, {str(tmp_path)!r})\n{lines}\nassert 'torch_bridge.rnn_ops' not in sys.modules")


@pytest.mark.torch
@pytest.mark.parametrize("lines", ["import torch, torch_bridge", "import torch_bridge, torch", "import jaxrnn, torch"])
@pytest.mark.parametrize("part", ["op_common", "norm_ops"])
def test_operators_that_cannot_be_imported_leave_pytorch_usable(lines, part):
    """As with a PyTorch that has moved a private name. Importing the modules raises the error."""
    run_without(
        (),
        f"""
import logging
class Broken:
    def find_spec(self, name, *_):
        if name == "torch_bridge.{part}":
            raise AttributeError("a private name has moved")
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("torch_bridge").addHandler(handler)
sys.meta_path.insert(0, Broken())
{lines}
(record,) = records
assert record.levelname == "WARNING" and "has moved" in str(record.exc_info[1])
assert torch.ones(2).sum() == 2 and not hasattr(torch.ops.torch_bridge, "rms_norm")
for module in ("nn", "functional"):
    try:
        __import__(f"torch_bridge.{{module}}")
    except AttributeError as error:
        assert "has moved" in str(error)
    else:
        raise AssertionError("the error is lost")
""",
    )


def test_functions_are_called_once_after_an_import(tmp_path):
    (tmp_path / "module.py").write_text("import os\nassert os.path.exists(os.environ['FOLDER'])\nvalue = 3")
    run_without(
        (),
        f"""
import importlib.util, os
from torch_bridge.registration import call_after_import
sys.path.insert(0, {str(tmp_path)!r})
seen = []
call_after_import("module", lambda: seen.append(sys.modules["module"].value))
assert importlib.util.find_spec("module") is not None and importlib.util.find_spec("no_module") is None and not seen
os.environ["FOLDER"] = "/nowhere"
try:
    import module
except AssertionError:
    assert not seen
else:
    raise AssertionError("the module's own error is lost")
os.environ["FOLDER"] = {str(tmp_path)!r}
import module
importlib.reload(module)
assert seen == [3]
call_after_import("module", lambda: seen.append(4))
assert seen == [3, 4]
""",
    )


PUBLIC = (
    *("jaxrnn", "jaxrnn.convert", "jaxrnn.linen", "jaxrnn.nnx"),
    *("torch_bridge", "torch_bridge.functional", "torch_bridge.nn"),
)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_modules_list_their_names(module):
    """`__all__` lists each name that the module imports from its own package, and no others but modules."""
    tree = ast.parse((ROOT.joinpath(*module.split(".")) / "__init__.py").read_text())
    listed = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(module.split(".")[0])
        for alias in node.names
    }
    assert listed and listed == imported


def test_import_convert_loads_none_of_the_frameworks():
    run_without((*TORCH_SIDE, "flax", *CONVERTED), "import jaxrnn.convert")


def test_jaxrnn_trains_without_torch():
    run_without(
        TORCH_SIDE,
        """
import jax, jax.numpy as jnp
from jaxrnn.linen import ScannedRNN
carry, ins = ScannedRNN.initialize_carry(2, 4), (jnp.ones((3, 2, 4)), jnp.zeros((3, 2), bool))
params = ScannedRNN().init(jax.random.key(0), carry, ins)
jax.jit(jax.grad(lambda p: ScannedRNN().apply(p, carry, ins)[1].sum()))(params)
""",
    )


def test_jaxrnn_trains_nnx_modules_without_torch():
    run_without(
        TORCH_SIDE,
        """
import jax.numpy as jnp
from flax import nnx
from jaxrnn.nnx import GRU
model = GRU(3, 4, num_layers=2, bidirectional=True, rngs=nnx.Rngs(0))
nnx.jit(nnx.grad(lambda model: model(jnp.ones((2, 5, 3)), resets=jnp.zeros((2, 5))).sum()))(model)
""",
    )


@pytest.mark.torch
def test_torch_bridge_imports_without_jax():
    run_without((*JAX_SIDE, *NOT_DEPENDENCIES), "\n".join(f"import {module}" for module in modules("torch_bridge")))


def test_base_dependencies_and_those_of_torch_bridge_bring_no_jax():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def names(requirements):
        """Returns the names of distributions, those of extras of this one included."""
        found = set()
        for one in requirements:
            name, of = re.match(r"([\w.-]+)(?:\[(.*?)\])?", one).groups()
            found |= set().union(*(names(extras[extra]) for extra in of.split(","))) if name == "jaxrnn" else {name}
        return found

    assert names([*project["dependencies"], *extras["torch"]]) == {"numpy", "torch", "triton", "typing_extensions"}
    for extra in ("cuda12", "cuda13"):
        assert {"jax", "flax", "triton"} <= names(extras[extra]) and "torch" not in names(extras[extra])
        assert {"jax", "flax", "triton", "torch"} <= names(extras[f"torch-{extra}"])
    assert "jax" in names(extras["examples"])


def test_import_of_jaxrnn_without_jax_names_the_extra():
    run_without(
        JAX_SIDE[:3],
        """
try:
    import jaxrnn
except ModuleNotFoundError as error:
    assert "pip install '.[jax]'" in str(error) and error.name == "jax", error
else:
    raise AssertionError("jaxrnn imports without JAX")
import torch_bridge
""",
    )


@pytest.mark.parametrize("module", ["jaxrnn.linen", "jaxrnn.nnx", "torch_bridge.nn", "torch_bridge.functional"])
def test_import_of_modules_without_flax_or_torch_names_the_extra(module):
    missing, extra = ("torch", "torch") if module.startswith("torch_bridge") else ("flax", "jax")
    run_without(
        (missing,),
        f"""
try:
    import {module}
except ModuleNotFoundError as error:
    assert "{module}" in str(error) and "pip install '.[{extra}]'" in str(error), error
    assert error.name == "{missing}"
else:
    raise AssertionError("{module} imports without {missing}")
""",
    )


def test_shared_modules_of_torch_bridge_import_without_torch_and_jax():
    tables = ", ".join(f"torch_bridge.{name}" for name in ("tiling", "cells", "records", "rules"))
    run_without((*TORCH_SIDE, *JAX_SIDE), f"import torch_bridge, {tables}")


def test_tests_are_collected_without_torch_and_triton():
    options = ("tests", "--collect-only", "-q", "-p", "no:cacheprovider")
    run_without(TORCH_SIDE, f"import pytest\nsys.exit(pytest.main([*{options!r}]))")


def test_torch_bridge_runs_on_the_cpu_without_triton():
    pytest.importorskip("torch")
    run_without(
        ("triton", *JAX_SIDE),
        """
import torch
from torch_bridge.nn import GRU, LSTM
for kind in (GRU, LSTM):
    kind(3, 4)(torch.ones(5, 2, 3), resets=torch.zeros(5, 2))[0].sum().backward()
""",
    )


# Modules that import neither torch nor triton, and that every module of jaxrnn may import.
SHARED = ("torch_bridge.cells", "torch_bridge.docstrings", "torch_bridge.records", "torch_bridge.rules")
# The modules of jaxrnn that each module may import. Only `_bridge` may import the rest of torch_bridge, and only
# `linen`, `nnx` and `_require_flax` may import Flax.
ARROWS = {
    "": ("_bridge", "api", "cells", "choice", "context", "explanation", "norms"),
    "numerics": (),
    "cells": ("numerics",),
    "context": ("checks",),
    "call": ("cells",),
    "blocks": ("call", "cells", "sharding"),
    "checks": ("cells",),
    "choice": ("_bridge", "checks", "context"),
    "explanation": ("_bridge", "checks", "choice", "context"),
    "convert": ("cells", "checks"),
    "sharding": (),
    "scan": ("call", "cells", "numerics", "sharding"),
    "_bridge": ("cells", "context", "numerics", "sharding"),
    "norms": ("_bridge", "checks", "choice", "norm_kernels", "numerics", "sharding"),
    "norm_kernels": ("_bridge", "numerics", "sharding"),
    "kernel_vjp": ("_bridge", "call", "cells", "numerics", "scan", "sharding"),
    "recurrent": ("_bridge", "blocks", "call", "cells", "checks", "choice", "kernel_vjp", "scan", "sharding"),
    "api": ("cells", "checks", "recurrent"),
    "modules": ("cells", "checks", "choice", "context", "norms", "numerics", "recurrent", "sharding"),
    "_require_flax": (),
    "linen": ("_require_flax", "cells", "checks", "choice", "modules"),
    "nnx": ("_require_flax", "cells", "checks", "choice", "modules"),
}


@pytest.mark.quick("module")
@pytest.mark.parametrize("module", modules("jaxrnn"))
def test_modules_of_jaxrnn_import_only_what_they_may(module):
    name = ".".join(module.split(".")[1:2])  # a package counts as one module
    imported = imports(module)
    forbidden = [*NOT_DEPENDENCIES, *(() if name == "_bridge" else (*TORCH_SIDE, "torch_bridge"))]
    forbidden += () if name in ("linen", "nnx", "_require_flax") else ("flax",)
    assert not [one for one in imported if within(one, *forbidden) and not within(one, *SHARED)]
    allowed = [f"jaxrnn.{one}" for one in (*ARROWS[name], name)]
    assert not [one for one in imported if within(one, "jaxrnn") and not within(one, *allowed)]
    if name == "convert":
        cells = {one for one in imported if within(one, "jaxrnn.cells")}
        assert cells <= {"jaxrnn.cells.LAYOUTS"}, "convert reads the table of cells, and names none of them"


@pytest.mark.parametrize("module", [module for module in modules("jaxrnn") if within(module, "jaxrnn.convert")])
def test_modules_of_convert_do_not_import_those_of_frameworks(module):
    within_convert = {one for one in imports(module) if within(one, "jaxrnn.convert")}
    assert module == "jaxrnn.convert" or all(within(one, *SHARED_BY_FRAMEWORKS) for one in within_convert)


@pytest.mark.quick("module")
@pytest.mark.parametrize("module", modules("torch_bridge"))
def test_modules_of_torch_bridge_import_only_what_they_may(module):
    forbidden = [*JAX_SIDE, *NOT_DEPENDENCIES]
    rooms = ["recording", "availability", "op_common", "steps", "torch_loop", "rnn_ops", "norm_ops"]
    rooms += ["tracing", "explanation", "functional", "nn"]
    front = [f"torch_bridge.{name}" for name in rooms]
    room = next((i for i, name in enumerate(front) if within(module, name)), -1)
    forbidden += front[room + 1 :]  # each may import those before it; what launches imports none of them
    if within(module, "torch_bridge.tiling", "torch_bridge.registration", *SHARED):
        forbidden += ["torch", "triton", "torch_bridge.launch", "torch_bridge.kernels"]  # pure functions and data
    assert not [name for name in imports(module) if within(name, *forbidden)]


def test_modules_of_the_benchmarks_import_each_other_in_one_direction():
    """Imports inside functions count too."""
    tables = {f"benchmarks.{path.stem}": set(imported_names(path)) for path in ROOT.glob("benchmarks/*.py")}
    known = {module: [other for other in tables if any(within(x, other) for x in tables[module])] for module in tables}
    assert "benchmarks.first_call" in known["benchmarks.harness"]
    graphlib.TopologicalSorter(known).prepare()  # raises CycleError


def test_no_test_imports_another():
    files = list(ROOT.joinpath("tests").rglob("*.py"))
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    assert tests
    for path in files:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not names & tests, path


# The words that name a cell, and its own files; beside these, only tables and exports name it. The GRU and the LSTM are
# left out: the costs of tilings, and the words of other frameworks, name them.
ROOMS = ("jaxrnn/cells", "torch_bridge/kernels/cells", "torch_bridge/functional")
NAMES = {
    "mgu": (r"\bmgu\b|MGU", ("mgu.py",)),
    "norm_gru": (r"norm_gru|NORM_GRU|Norm\w*GRU", ("norm_gru.py",)),
    "simple": (
        r"\bsimple_(tanh|relu|rnn)\b|SIMPLE_|Simple(Params|Cell|RNN)",
        ("simple.py", "simple_tanh.py", "simple_relu.py", "rnn.py"),
    ),
}


# The files that have a function or a class of each cell, and the table of cells.
TABLES = {
    *("torch_bridge/cells.py", "torch_bridge/steps.py", "torch_bridge/nn/layers.py", "jaxrnn/api.py"),
    *("jaxrnn/linen/cells.py", "jaxrnn/linen/stack.py", "jaxrnn/nnx/cells.py", "jaxrnn/nnx/stack.py"),
}
# Flax NNX has no MGU, and `torch_bridge.nn` calls the simple cell RNN.
UNNAMED = {
    "mgu": ("jaxrnn/nnx/cells.py", "jaxrnn/nnx/stack.py"),
    "simple": ("torch_bridge/nn/layers.py",),
    "norm_gru": (),
}


def test_every_cell_but_gru_and_lstm_has_a_pattern():
    patterns = [pattern for pattern, _ in NAMES.values()]
    assert [name for name in CELLS if not any(re.search(pattern, name) for pattern in patterns)] == ["gru", "lstm"]


def without_docstrings(path):
    """Returns the code of a file without its comments and docstrings, which may list the cells."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


@pytest.mark.parametrize("cell", NAMES)
def test_a_cell_is_named_in_its_own_files_and_in_tables_alone(cell):
    pattern, own = NAMES[cell]
    paths = [path for package in ("jaxrnn", "torch_bridge") for path in ROOT.joinpath(package).rglob("*.py")]
    naming = {path.relative_to(ROOT) for path in paths if re.search(pattern, without_docstrings(path))}
    files = {Path(room, name) for room in ROOMS for name in own}
    assert len(naming & files) >= 2
    others = {str(path) for path in naming - files if path.name != "__init__.py"}
    assert others == TABLES - {*UNNAMED[cell]}
