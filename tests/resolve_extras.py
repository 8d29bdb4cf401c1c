"""Checks by pip's resolver, from metadata alone, that each CUDA extra gives one environment; run by `make resolve`.

JAX and PyTorch load CUDA's libraries from the same `nvidia-*` packages, so both use the one version that pip installs.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile

PYTHONS = ("3.11", "3.12")  # JAX 0.10 is the last version for Python 3.11
SUFFIX = {
    "cuda12": re.compile(r"-cu12$"),
    "cuda13": re.compile(r"-cu13$|-(?!cu\d)[a-z]+$"),
}  # CUDA 13 dropped most suffixes
SHOWN = ("jax", "flax", "torch", "triton", "cublas", "cudnn", "nccl", "cuda-runtime", "cuda-nvcc")


def resolve(extra: str, python: str) -> dict[str, str]:
    """Returns the versions of the packages that pip would install on Linux x86-64, by name."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(17, 36)]
    with tempfile.TemporaryDirectory() as scratch:
        report = f"{scratch}/report.json"
        # --isolated ignores the machine's pip configuration, which may name wheels of its own, such as a CPU build of
        # torch. fast-deps downloads metadata instead of wheels.
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--use-feature=fast-deps", "--only-binary=:all:", f"--python-version={python}", *platforms]
        command += ["--platform=manylinux2014_x86_64", f"--target={scratch}", f"--report={report}", f".[{extra}]"]
        subprocess.run(command, check=True)
        with open(report) as file:
            installs = json.load(file)["install"]
    return {re.sub(r"[-_.]+", "-", i["metadata"]["name"]).lower(): i["metadata"]["version"] for i in installs}


for python, extra in itertools.product(PYTHONS, [*SUFFIX, *(f"torch-{extra}" for extra in SUFFIX)]):
    suffix, found = SUFFIX[extra.removeprefix("torch-")], resolve(extra, python)
    if ("torch" in found) != extra.startswith("torch-"):
        sys.exit(f"{extra} on Python {python} {'has' if 'torch' in found else 'lacks'} torch")
    cuda = [name for name in found if name.startswith("nvidia-")]
    foreign = [name for name in cuda if not suffix.search(name)]
    if foreign or not cuda:
        sys.exit(f"{extra} on Python {python} needs CUDA packages of one major version, got {foreign or 'no CUDA'}")
    shown = [f"{n} {v}" for n, v in found.items() if n in SHOWN or (n in cuda and any(s in n for s in SHOWN))]
    print(f"{extra}, Python {python}: {len(cuda)} CUDA libraries, one version each: {', '.join(shown)}")
