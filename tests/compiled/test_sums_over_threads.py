"""Tests that all threads get the same bits from a sum over threads, in kernels with a norm.

Threads exchange their terms by instructions "butterfly shuffle", and each adds what it receives to its own. If its own
term is a product, a fused multiply-add would not round it, while the other threads receive it rounded. Then the result
depends on which thread stores it.
"""

import re

import cubins
import pytest

from benchmarks.problems import make_problem
from torch_bridge import norms, tiling
from torch_bridge.recurrences import Launch
from torch_bridge.tiling.devices import PROFILES

pytestmark = pytest.mark.compile_only

DEVICE = PROFILES["h100"]
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+) (.*?) *;")

WIDE = ("LD", "HMMA")  # instructions that write up to four registers


def machine_code(launch):
    """Returns the instructions of each kernel of a launch: of each, its name and its operands."""
    kernels = []
    for kernel in launch.kernels:
        text = cubins.text_of(kernel.compile(DEVICE.capability).asm["cubin"], "nvdisasm")
        kernels.append([(name, operands.split(", ")) for name, operands in INSTRUCTION.findall(text)])
    return kernels


def shuffles_and_fused(instructions):
    """Returns the number of butterfly shuffles, and of fused multiply-adds to what one of them received."""
    received, shuffles, fused = set(), 0, 0
    for name, operands in instructions:
        if name.startswith("SHFL.BFLY"):
            shuffles += 1
            received.add(operands[1])
            continue
        fused += name.startswith("FFMA") and operands[3].lstrip("-|").partition(".")[0] in received
        first = re.fullmatch(r"R(\d+)", operands[0])
        written = 4 if name.startswith(WIDE) else 1
        received -= {f"R{int(first[1]) + k}" for k in range(written)} if first else set()
    return shuffles, fused


def test_fused_multiply_adds_to_received_numbers_are_found():
    text = """
        /*0010*/ SHFL.BFLY PT, R21, R20, 0x8, 0x1f ;
        /*0020*/ @P0 FFMA R22, R12, R12, R21 ;
        /*0030*/ SHFL.BFLY PT, R23, R22, 0x4, 0x1f ;
        /*0040*/ FADD R23, R22, R23 ;
        /*0050*/ FFMA R24, R12, R12, R23 ;
        /*0060*/ SHFL.BFLY PT, R31, R20, 0x2, 0x1f ;
        /*0070*/ LDG.E.128 R28, desc[UR20][R26.64] ;
        /*0080*/ FFMA R24, R12, R12, R31 ;
    """
    assert shuffles_and_fused((name, operands.split(", ")) for name, operands in INSTRUCTION.findall(text)) == (3, 1)


@pytest.mark.quick("kind", "direction")
@pytest.mark.parametrize("columns", [17, 33, 100, 255])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_of_norms(kind, direction, columns):
    arrays = {"fwd": ("x", "weight", "bias", "y"), "bwd": ("dy", "x", "weight", "dx", "dweight", "dbias")}[direction]
    dtypes = tuple((name, "float32") for name in (*arrays, "mean", "rstd"))
    found = machine_code(norms.Launch(norms.Problem(kind, direction, 1, 4096, columns, 1e-6, dtypes), DEVICE))
    counts = [shuffles_and_fused(instructions) for instructions in found]
    assert counts[0][0] > 0 and not any(fused for _, fused in counts), counts


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("loop", ["streamed", "fma", "resident", "split_registers"])
@pytest.mark.parametrize("cell", ["rms_norm_gru", "layer_norm_gru"])
def test_states_of_time_loops(cell, loop, direction):
    hidden = {"fma": 24, "split_registers": 300}.get(loop, 100)
    problem = make_problem(cell, direction, "bf16", hidden, 9, steps=9)
    wanted = [config for config in tiling.candidates(problem, DEVICE) if config.loop == loop]
    wanted.sort(key=lambda config: config.block_h * config.block_b / config.num_warps)  # terms of a thread
    counts = []
    for config in (wanted[0], wanted[-1]):
        for instructions in machine_code(Launch(problem, DEVICE, config)):
            counts.append(shuffles_and_fused(instructions))
    assert any(shuffles for shuffles, _ in counts) and not any(fused for _, fused in counts), counts
