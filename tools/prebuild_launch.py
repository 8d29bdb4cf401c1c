"""Builds the handler of the native launch for several versions of jaxlib, for a wheel to carry; `make wheel` runs it.

    python tools/prebuild_launch.py

XLA's C interface changes with jaxlib, so the headers of each version give a library, unless they are the same. They
come from the wheels that `jaxlib.txt` lists with their hashes. The libraries go to jaxrnn/_bridge/native/prebuilt,
where `jaxrnn._bridge.native.build` finds the one of the installed jaxlib.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxrnn._bridge.native import build

WHEELS = Path(__file__).with_name("jaxlib.txt")
# The wheels that are listed: pip would look for those of this machine.
KIND = ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_27_x86_64")
HEADERS = "jaxlib/include/"


def main() -> None:
    """Replaces the prebuilt libraries by those for the listed versions of jaxlib."""
    build.PREBUILT.mkdir(exist_ok=True)
    for old in build.PREBUILT.glob("*.so"):
        old.unlink()
    for requirement in WHEELS.read_text().splitlines():
        if requirement.startswith("#"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(download(requirement, Path(folder))) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(HEADERS)])
            path = build.prebuild(Path(folder, HEADERS))
        print(f"{requirement.split()[0]}: {path.relative_to(Path.cwd())}")


def download(requirement: str, folder: Path) -> Path:
    """Returns the path of a wheel in `folder`, which pip takes only if it has the hash of the requirement."""
    (folder / "requirements.txt").write_text(requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *KIND]
    subprocess.run([*command, f"--dest={folder}", f"--requirement={folder / 'requirements.txt'}"], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    main()
