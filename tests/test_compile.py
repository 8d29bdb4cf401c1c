"""Every shipped configuration compiles for Ampere, Hopper and Blackwell without a GPU, fits, and does not spill."""

import dataclasses
import itertools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.launches import KINDS, make_problem
from jaxrnn import fused
from torch_bridge import config
from torch_bridge.config import Device, KernelConfig, Problem

pytestmark = pytest.mark.compile_only

# An A100, an H200 and a B200: multiprocessors, and the shared memory a program can have.
DEVICES = {"sm_80": Device(80, 108, 166_912), "sm_90": Device(90, 132, 232_448), "sm_100": Device(100, 148, 232_448)}


HIDDEN = (
    1, 24, 33, 64, 65, 100, 128, 134, 192, 256, 260, 300, 323, 384, 386, 448, 449, 512, 519, 576, 700, 771, 960, 1024,
    1025, 2048, 4096,
)  # fmt: skip
BATCHES = (1, 16, 19, 32, 64, 100, 132, 256, 384, 512, 1024, 2048, 16384)


# Of the GRU in TF32 what is saved lies in arrays of its own, or where input projections were.
FORMS = [
    pytest.param(cell, kind, in_place, id=f"{cell}-{kind}{'-in_place' * in_place}")
    for cell, kind, in_place in [*itertools.product(("gru", "lstm"), KINDS, (False,)), ("gru", "tf32", True)]
]
every_form = pytest.mark.parametrize(("cell", "kind", "in_place"), FORMS)
every_fast_form = pytest.mark.parametrize(("cell", "kind", "in_place"), [x for x in FORMS if x.values[1] != "tf32x3"])


def shipped(
    cell: str, direction: str, kind: str, device: Device, in_place: bool = False
) -> list[tuple[Problem, KernelConfig]]:
    """The tilings that the heuristic picks on a device, each with a problem it is picked for.

    Of hidden sizes with the same tiling, one that the blocks divide, one that they do not and an odd one stand for all,
    and of numbers of programs that share the units the largest, of those that the blocks divide the smallest too; of
    reset states the per-step ones, which take the most arrays, and none where a tiling is for the common problem.
    """
    picked: dict[Any, dict[int, tuple[Problem, KernelConfig]]] = {}
    widths = [hidden for hidden in HIDDEN if not in_place or hidden % fused._IN_PLACE_UNITS == 0]
    for reset_state, models, hidden, batch in itertools.product(("stepped", "zeros"), (1, 16), widths, BATCHES):
        p = make_problem(cell, direction, kind, hidden, batch, reset_state=reset_state, in_place=in_place)
        p = dataclasses.replace(p, models=models, groups=models)
        c = config.heuristic(p, device)
        # programs in Gluon have all that the others share with them in their code
        splits = min(c.splits, 2) if c.variant == "plain" else c.splits
        divided = hidden % c.block_k == 0
        alike = picked.setdefault((dataclasses.replace(c, splits=1), divided, hidden % 4 == 0), {})
        alike.setdefault(splits, (p, c))
    return [
        alike[splits]
        for (_, divided, _), alike in picked.items()
        for splits in {max(alike), min(alike) if divided else max(alike)}
    ]


@every_form
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("target", DEVICES)
def test_configurations_fit_and_do_not_spill(target, direction, cell, kind, in_place):
    device = DEVICES[target]
    bad = misfits(shipped(cell, direction, kind, device, in_place), device)
    assert not bad, "\n".join(bad)


@every_form
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_tilings_of_tables_fit_and_do_not_spill(direction, cell, kind, in_place):
    for path in config.TABLES.glob("*.json"):
        table, picked = config.Table.load(path), {}
        for entry in table.entries:
            p = make_problem(cell, direction, kind, entry.hidden, entry.sequences, in_place=in_place)
            if config.key(p) == entry.key:
                picked.setdefault((entry.config, entry.hidden % entry.config.block_k == 0), (p, entry.config))
        bad = misfits(picked.values(), table.device)
        assert not bad, "\n".join(bad)


# (hidden, batch, reset state): of each kernel the widest tilings, which leave the fewest registers. Elsewhere than on
# Hopper every other one: there is one kind of kernels.
IN_BOTH = ((64, 300, "stepped"), (128, 16, "zeros"), (256, 64, "stepped"), (448, 64, "stepped"), (512, 300, "zeros"))


@every_fast_form
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("target", DEVICES)
def test_both_directions_in_one_launch_fit_and_do_not_spill(target, direction, cell, kind, in_place):
    device, problems = DEVICES[target], []
    for hidden, batch, reset_state in IN_BOTH if target == "sm_90" else IN_BOTH[1::2]:
        p = make_problem(cell, direction, kind, hidden, batch, reset_state=reset_state, in_place=in_place)
        problems.append(dataclasses.replace(p, models=2, groups=2, reverse="odd"))
    bad = misfits([(p, config.heuristic(p, device)) for p in problems], device)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_programs_of_a_sequence_fit_and_do_not_spill(cell, direction):
    """In either direction and in both, with all that they can be given without a reset state."""
    device, problems = DEVICES["sm_90"], []
    exact = [("tf32x3", hidden, True) for hidden in (31, 32, 64, 65, 100, 119, 123, 127, 128)]
    of_tf32 = itertools.product(["tf32"], (33, 64), (False, True))
    for (kind, hidden, halves), reverse in itertools.product([*exact, *of_tf32], (True, "odd")):
        p = make_problem(cell, direction, kind, hidden, 16, halves=halves)
        cells = {"fwd": ("cs", "float32"), "bwd": ("dcs", "float32")}[direction]
        p = dataclasses.replace(p, models=2, groups=2, reverse=reverse)
        p = dataclasses.replace(p, dtypes=(*p.dtypes, cells)) if cell == "lstm" else p
        problems.append((p, config.heuristic(p, device)))
    assert {c.variant for _, c in problems} == {"sm90_fma"}
    bad = misfits(problems, device)
    assert not bad, "\n".join(bad)


# Bytes of local memory a thread may have where one program has all units and tiles are of sixteen sequences: faster all
# the same than tiles of eight that take turns (H200: GRU 2048,256,128 in bfloat16 1.67 ms for 1.89).
LOCAL_BYTES_OF_SIXTEENS = {"fwd": 40, "bwd": 120}

# The same where a program has a sequence of 65 to 128 units, faster than programs that share the units by more than
# spilling costs: with Triton up to 3.7, and later. Most of widths that no four divide, from 119 on.
LOCAL_BYTES_OF_FMA = {
    ("gru", "fwd"): (0, 264), ("gru", "bwd"): (24, 72), ("lstm", "fwd"): (72, 352), ("lstm", "bwd"): (16, 80)
}  # fmt: skip


# Bytes of local memory a thread may have, by columns: tilings that leave room for other programs are faster than such
# as have registers for all (H200: LayerNorm of 512 columns backward 0.76 of a copy's bandwidth for 0.63).
LOCAL_BYTES = {8192: 128, 16384: 224, 50257: 544}
LOCAL_BYTES_BESIDE_FLOAT32 = {4096: 128, 16384: 224, 50257: 544}  # the weights, of 16-bit rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("target", DEVICES)
def test_norms_fit(target, kind, direction, dtype):
    from torch_bridge import norms

    arrays = {"fwd": ("x", "residual", "weight", "bias", "y", "total"), "bwd": ("dy", "x", "dtotal", "weight", "dx")}
    statistics = ("rstd", "mean") if kind == "layer" else ("rstd",)
    sums = ("dweight", "dbias") if direction == "bwd" else ()
    dtypes = dict.fromkeys(arrays[direction] + sums, dtype) | dict.fromkeys(statistics, "float32")
    alone = {name: x for name, x in dtypes.items() if name not in ("residual", "total", "dtotal")}
    wide = alone | {name: "float32" for name in ("weight", "bias", *sums) if name in alone}
    bad = []
    # elsewhere than on Hopper fewer: tilings are the same everywhere
    columns = (1, 64, 100, 512, 1000, 1024, 2048, 4096, 8192, 16384, 20001, 32767, 32768, 50257)
    columns = columns if target == "sm_90" else (1, 100, 512, 1024, 4096, 16384, 32767, 50257)
    limits = {tuple(wide.items()): LOCAL_BYTES_BESIDE_FLOAT32}  # of float32 rows the same as `alone`
    limits |= dict.fromkeys((tuple(dtypes.items()), tuple(alone.items())), LOCAL_BYTES)
    for n, (given, by_columns) in itertools.product(columns, limits.items()):
        launch = norms.Launch(norms.Problem(kind, direction, 2, 4096, n, 1e-6, given), DEVICES[target])
        limit = next(limit for widest, limit in by_columns.items() if n <= widest)
        bad += excesses(launch.problem, launch.compile(), DEVICES[target], limit)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_loops_that_read_projections_of_float16_fit_and_do_not_spill(cell):
    """Of each tile one tiling: a thread has half as much to hold as of float32, with which all are tried."""
    device = DEVICES["sm_90"]
    problems = {}
    for p, c in shipped(cell, "fwd", "bf16", device):
        dtypes = dict(p.dtypes) | {"xp": "float16"}
        problem = dataclasses.replace(p, dtypes=tuple(dtypes.items()))
        problems[c.variant, c.block_h, c.block_b, c.num_warps] = problem, c
    bad = misfits(problems.values(), device)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [*(("bfloat16", n) for n in (32, 100, 128, 256, 300, 1024)), *(("float32", n) for n in (36, 64, 100, 128))],
)
def test_projections_fit_and_do_not_spill(dtype, inputs):
    from torch_bridge import input_projections

    device, bad = DEVICES["sm_90"], []
    out = {"bfloat16": "float16", "float32": "float32"}[dtype]
    dtypes = {"x": dtype, "w_ih_t": dtype, "bias": "float32", "xp": out}
    for gates in (192, 300, 1024):
        problem = input_projections.Problem(2, 8192, inputs, gates, tuple(dtypes.items()))
        assert input_projections.pays(problem, device)
        bad += excesses(problem, input_projections.Launch(problem, device).compile(), device)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_gradients_of_weights_fit_and_do_not_spill(cell, dtype):
    from torch_bridge import weight_grads

    bad, device = [], DEVICES["sm_90"]
    gates, names = (3, ("x", "hs", "h0", "dxp", "dhn")) if cell == "gru" else (4, ("x", "hs", "h0", "dxp"))
    for inputs, hidden, reset, reverse in (
        (64, 64, "bool", False), (128, 128, "bool", False), (128, 128, None, True), (200, 192, "float32", True),
        (256, 256, "bool", False),
    ):  # fmt: skip
        dtypes = [(name, dtype) for name in names] + ([("reset", reset)] if reset else [])
        problem = weight_grads.Problem(1, 1, 64, 64, inputs, hidden, gates * hidden, tuple(dtypes), reverse)
        assert weight_grads.supports(problem, device)
        kernels = weight_grads.Launch(problem, device).compile()
        bad += excesses(problem, kernels, device)
        narrow = sum(compiled.asm["ptx"].count("cp.async.ca") for compiled in kernels)
        bad += [f"{problem}: {narrow} copies of less than 16 bytes"] if narrow else []
    assert not bad, "\n".join(bad)


def excesses(problem: Any, kernels: Iterable[Any], device: Device, limit: int = 0) -> list[str]:
    """What takes more shared memory than there is, or of each thread's more bytes of local memory than `limit`."""
    bad = []
    for compiled in kernels:
        shared, local = compiled.metadata.shared, local_bytes(compiled.asm["cubin"])
        if shared > device.shared_memory or local > limit:
            bad.append(f"{problem} {compiled.name}: {shared} bytes shared, {local} bytes local")
    return bad


def misfits(problems: Iterable[tuple[Problem, KernelConfig]], device: Device) -> list[str]:
    """What does not keep within the shared memory that it is said to take, or spills."""
    from torch_bridge.launch import Launch

    bad = []
    for p, c in problems:
        compiled = Launch(p, device, c).specialization.compile()
        shared, local = compiled.metadata.shared, local_bytes(compiled.asm["cubin"])
        if not shared <= c.shared_memory(p) <= device.shared_memory or local > most_local_bytes(p, c):
            bad.append(f"H={p.hidden} {c}: {shared} of {device.shared_memory} bytes shared, {local} bytes local")
    return bad


def most_local_bytes(p: Problem, c: KernelConfig) -> int:
    """Bytes of local memory that a thread may have."""
    if (c.variant, c.block_b) == ("sm90", 16):
        return LOCAL_BYTES_OF_SIXTEENS[p.direction]
    if (c.variant, c.block_h) == ("sm90_fma", 128):
        return LOCAL_BYTES_OF_FMA[p.cell, p.direction][config._triton() > (3, 7)]
    return 0


def local_bytes(cubin: bytes) -> int:
    """Bytes of local memory a thread of the kernel has: what did not fit into its registers."""
    import triton

    cuobjdump = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
