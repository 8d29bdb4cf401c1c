"""Builds the handler of the native launch for several versions of jaxlib, for a wheel to carry; `make wheel` runs it.

    python tools/prebuild_launch.py 0.8.0 0.9.2 0.10.2 0.11.2

XLA's C interface changes with jaxlib, so the headers of each version give a library, unless they are the same. They go
to jaxrnn/_bridge/native/prebuilt, where `jaxrnn._bridge.native.build` finds the one of the installed jaxlib.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxrnn._bridge.native import build

# Every jaxlib that the package supports has wheels for one of these.
PYTHONS = ("3.12", "3.11")
HEADERS = "jaxlib/include/"


def main(versions: list[str]) -> None:
    """Replaces the prebuilt libraries by those for these versions of jaxlib."""
    build.PREBUILT.mkdir(exist_ok=True)
    for old in build.PREBUILT.glob("*.so"):
        old.unlink()
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(download(version, Path(folder))) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(HEADERS)])
            path = build.prebuild(Path(folder, HEADERS))
        print(f"jaxlib {version}: {path.relative_to(Path.cwd())}")


def download(version: str, folder: Path) -> Path:
    """Returns the path of a wheel of jaxlib in `folder`."""
    for python in PYTHONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [f"--python-version={python}", f"--dest={folder}", f"jaxlib=={version}"]
        if subprocess.run(command).returncode == 0:
            (wheel,) = folder.glob("jaxlib-*.whl")
            return wheel
    sys.exit(f"there is no wheel of jaxlib {version} for Python {' or '.join(PYTHONS)}")


if __name__ == "__main__":
    main(sys.argv[1:])
