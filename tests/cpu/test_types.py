"""Checks the programs of `tests/typed_programs` as a user's type checker sees them, against an installed wheel.

Each program says with `assert_type` which types the public API has, and with comments which calls are mistakes. mypy
and pyright also report a comment that suppresses no error.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "tests" / "typed_programs").glob("*.py"))


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # without these variables, a checker would also find the repository, and pyright would look for a newer version
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    environ["PYRIGHT_PYTHON_IGNORE_WARNINGS"] = "1"
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """Returns a folder with the programs and an environment `env`, in which the wheel is installed.

    The environment finds the dependencies in the one that runs the tests, after its own packages. Python reads no
    `.pth` file there, so an editable installation of the repository is not found.
    """
    folder = tmp_path_factory.mktemp("user")
    # hatchling copies the working tree, so a file that only the repository has is missing here too
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist", cwd=ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    assert made.returncode == 0, made.stdout + made.stderr
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(packages)
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    for program in PROGRAMS:
        shutil.copy(program, folder)
    return folder


def names_of(user: Path) -> list[str]:
    return sorted(path.name for path in user.glob("*.py"))


@pytest.mark.types
def test_checkers_see_the_wheel(user):
    code = "import jaxrnn, torch_bridge; print(jaxrnn.__file__); print(torch_bridge.__file__)"
    found = run(user / "env" / "bin" / "python", "-c", code, cwd=user).stdout.splitlines()
    assert len(found) == 2 and all(path.startswith(str(user / "env")) for path in found)
    assert all((Path(path).parent / "py.typed").is_file() for path in found)


@pytest.mark.types
def test_programs_pass_mypy(user):
    options = ["--strict", "--config-file=", "--cache-dir", ROOT / ".mypy_cache" / "users"]
    python = ["--python-executable", user / "env" / "bin" / "python"]
    done = run(sys.executable, "-m", "mypy", *options, *python, *names_of(user), cwd=user)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"Success: no issues found in {len(PROGRAMS)} source files")


@pytest.mark.types
def test_programs_pass_pyright(user):
    config = {
        "include": names_of(user), "enableTypeIgnoreComments": False, "reportUnnecessaryTypeIgnoreComment": "error",
    }  # fmt: skip
    (user / "pyrightconfig.json").write_text(json.dumps(config))
    python = ["--pythonpath", user / "env" / "bin" / "python"]
    done = run(sys.executable, "-m", "pyright", "--outputjson", *python, cwd=user)
    report = json.loads(done.stdout)
    errors = [f"{Path(one['file']).name}:{one['range']['start']['line'] + 1} {one['message']}" for one in
              report["generalDiagnostics"]]  # fmt: skip
    assert not errors, "\n".join(errors)
    assert report["summary"]["filesAnalyzed"] == len(PROGRAMS)


@pytest.mark.parametrize("program", [path.stem for path in PROGRAMS])
def test_programs_run(program):
    if program.startswith("torch"):
        pytest.importorskip("torch")
    runpy.run_path(str(ROOT / "tests" / "typed_programs" / f"{program}.py"))
