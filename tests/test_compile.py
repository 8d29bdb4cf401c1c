"""Every shipped configuration compiles for Ampere, Hopper and Blackwell without a GPU, fits, and does not spill."""

import dataclasses
import pathlib
import re
import subprocess
import tempfile

import pytest
import triton

from torch_bridge import config
from torch_bridge.config import Device, KernelConfig, Problem
from torch_bridge.launch import Launch

pytestmark = pytest.mark.compile_only

# An A100, an H200 and a B200: multiprocessors, and the shared memory a program can have.
DEVICES = {"sm_80": Device(80, 108, 166_912), "sm_90": Device(90, 132, 232_448), "sm_100": Device(100, 148, 232_448)}
KINDS = {"tf32": ("float32", "tf32"), "tf32x3": ("float32", "tf32x3"), "bf16": ("bfloat16", "tf32")}
CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def problem(cell: str, direction: str, kind: str, hidden: int, batch: int, reset_state: str) -> Problem:
    """A problem with every array that a kernel can take with a reset state: the most that one has to hold.

    With "zeros" it is the common one instead: no cell states of every step either, nor their gradients.
    """
    operand, precision = KINDS[kind]
    states = ("h",) if cell == "gru" else ("h", "c")
    saved = "float16" if precision == "tf32" else "float32"
    backward = ({"factors": saved} if cell == "gru" else {"factors": saved, "through": saved}) | {"keep": "float32"}
    names = {"w_hh_t" if direction == "fwd" else "w_hh": operand, "reset": "bool"}
    if reset_state != "zeros":
        names |= {f"reset_{s}": "float32" for s in states}
    if direction == "fwd":
        names |= {"xp": "float32"} | backward | ({"b_hn": "float32"} if cell == "gru" else {})
        names |= {f"{s}{suffix}": "float32" for s in states for suffix in ("0", "s", "_last")}
        if reset_state == "zeros":
            names.pop("cs", None)
    else:
        names |= {"dxp": operand} | backward | ({"dhn": operand} if cell == "gru" else {})
        names |= {f"d{s}{suffix}": "float32" for s in states for suffix in ("s", "_last", "0")}
        names |= {f"dreset_{s}": "float32" for s in states if reset_state != "zeros"}
        if reset_state == "zeros":
            names.pop("dcs", None)
    return Problem(cell, direction, 1, 1, 64, batch, hidden, tuple(names.items()), reset_state, False, precision)


def shipped(cell: str, direction: str, kind: str, device: Device) -> list[tuple[Problem, KernelConfig]]:
    """The tilings that the heuristic picks on a device, each with a problem it is picked for.

    Of hidden sizes with the same tiling, one that the blocks divide and one that they do not stand for all; of reset
    states the per-step ones, which take the most arrays, and none where a tiling is for the common problem.
    """
    picked = {}
    for reset_state in ("stepped", "zeros"):
        for hidden in (1, 24, 64, 100, 128, 192, 256, 300, 384, 448, 512, 576, 1024):
            for batch in (1, 16, 64, 256, 1024, 2048, 16384):
                p = problem(cell, direction, kind, hidden, batch, reset_state)
                c = config.heuristic(p, device)
                # programs in Gluon have all that the others share with them in their code
                splits = min(c.splits, 2) if c.variant == "plain" else c.splits
                tiling = dataclasses.replace(c, splits=splits), hidden % c.block_k == 0
                picked.setdefault(tiling, (p, c))
    return list(picked.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("target", DEVICES)
def test_configurations_fit_and_do_not_spill(target, cell, direction, kind):
    device = DEVICES[target]
    bad = []
    for p, c in shipped(cell, direction, kind, device):
        compiled = Launch(p, device, c).specialization.compile()
        shared, local = compiled.metadata.shared, local_bytes(compiled.asm["cubin"])
        if not shared <= c.shared_memory(p) <= device.shared_memory or local:
            bad.append(f"H={p.hidden} {c}: {shared} of {device.shared_memory} bytes shared, {local} bytes local")
    assert not bad, "\n".join(bad)


def local_bytes(cubin: bytes) -> int:
    """Bytes of local memory a thread of the kernel has: what did not fit into its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
