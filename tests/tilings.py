"""Tilings of the compiled kernels, and the bits of a launch with one of them, which two test files share."""

import dataclasses

from torch_bridge.tiling.resident import Resident
from torch_bridge.tiling.rows import Rows
from torch_bridge.tiling.split import Split
from torch_bridge.tiling.split_registers import SplitRegisters
from torch_bridge.tiling.streamed import SharedStreamed, Streamed

DIRECTIONS = ("fwd", "bwd")
COMPILED = {
    "one-program-64": ((64, 40), Streamed(64, 8, 4), (8, 16)),
    "one-program-128": ((128,), Streamed(128, 8, 8), (8, 16)),
    "shared-16": ((192,), SharedStreamed(16, 16, 32, 12, 4, 2), (16, 32)),
    "shared-64": ((256, 300), SharedStreamed(64, 16, 32, 4, 8, 2), (16, 32)),
    "resident-64": ((64, 40), Resident(64, 8), (1, 4, 8, 16)),
    "resident-128": ((128,), Resident(128, 8), (1, 2, 4, 8, 16)),
    "split": ((192, 300), Split(8, 3, 4), (8, 16, 32)),
    "rows": ((512, 300), Rows(64, 12), (64, 128)),
    "split-registers-64": ((192, 256), SplitRegisters(64, 8, 4), (8, 16)),
    "split-registers-32": ((300, 512), SplitRegisters(32, 8, 16), (8, 16)),
    "split-registers-16": ((520,), SplitRegisters(16, 8, 36), (8, 16)),
    "split-of-8-warps": ((256,), Split(16, 4, 8), (16, 32)),
}


def outputs(problem, device, tiling, place):
    """Runs a launch; returns the bits of the arrays that it writes, as `np.ndarray` by name."""
    import torch

    from benchmarks.problems import Run, make_arrays, outputs_of

    arrays = make_arrays(problem, place)
    Run(problem, device, tiling, arrays)()
    results = {}
    for name in outputs_of(problem):
        x = arrays[name].cpu().contiguous()
        assert bool(x.isfinite().all()), name
        results[name] = x.view(torch.int16).numpy()
    return results


def for_width(tiling, hidden):
    """Returns the tiling with as many programs as share `hidden` units, a multiple of some number in two loops."""
    if tiling.splits == 1:
        return tiling
    multiple = {"rows": 4, "split_registers": 64 // tiling.block_h}.get(tiling.loop, 1)
    splits = multiple * -(-hidden // (multiple * tiling.block_h))
    return dataclasses.replace(tiling, splits=splits)


def fits(problem, device, tiling):
    return tiling.shared_memory(problem) <= device.shared_memory
