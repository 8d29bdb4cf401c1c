"""Tests that every shipped configuration compiles for the GPUs of `tiling.PROFILES`, fits, and does not spill.

`tests/spills.json` names those that may spill, and how much:

- Tiles of 16 sequences where one program has all units are faster than tiles of 8 that do not all run at once (H200:
  GRU 2048,256,128 in bfloat16 takes 1.67 ms instead of 1.89 ms).
- One program per sequence of 65 to 128 units is faster than programs that share the units and read the weights from L2
  at every step, by more than spilling costs. Widths from 119 on that are not multiples of four spill most.
- Cells with a norm need more registers than the cell whose tilings they use. Backward, an LSTM of 65 to 128 units in
  TF32 needs most of them for its weights. Without those that spill, slower kernels would run.
- Norms whose tilings leave room for other programs are faster than those with enough registers (H200: LayerNorm of 512
  columns, backward, reaches 0.76 of a copy's bandwidth instead of 0.63).

The tests need no GPU.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cubins
import pytest
import spills
from ptx_hashes import without_lines

from benchmarks.problems import KINDS, make_problem
from jaxrnn.kernel_vjp import spec
from torch_bridge import tiling
from torch_bridge.cells import CELLS
from torch_bridge.tiling import Device, KernelConfig, Problem, support
from torch_bridge.tiling.arithmetic import power_of_2
from torch_bridge.tiling.devices import PROFILES
from torch_bridge.tiling.split_registers import CLUSTER_BATCH

pytestmark = pytest.mark.compile_only


def targets() -> dict[str, Device]:
    """Returns the GPUs of `PROFILES` by names like `sm_86-rtx3090`; only the first of GPUs that differ only in name."""
    found: dict[Device, str] = {}
    for profile, device in PROFILES.items():
        found.setdefault(dataclasses.replace(device, name=""), f"sm_{device.capability}-{profile}")
    return {target: device for device, target in found.items()}


TARGETS = targets()
# Kernels were tuned for these GPUs, so more configurations are compiled for them than for others. With `--full`, all.
HOPPER = [target for target, device in TARGETS.items() if device.has_wgmma]

# With Triton 3.7, the PTX of a kernel for one capability equals the PTX for another one, except for the line that
# names the target (`test_ptx_equals_that_of_another_target` checks that). Making PTX takes four fifths of the time of a
# compilation. On 10.0, the plain kernels multiply with other instructions.
SAME_PTX = {86: 80, 89: 80, 103: 100}
SAME_GLUON_PTX = SAME_PTX | {120: 100}
OWN_PTX = [target for target, device in TARGETS.items() if device.capability not in SAME_PTX]

# The first decorator of a test, so that adjacent tests differ in the target and share PTX in Triton's cache.
every_target = pytest.mark.parametrize("target", TARGETS)


HIDDEN = (
    1, 24, 33, 64, 65, 100, 127, 128, 134, 192, 256, 260, 300, 323, 384, 386, 448, 449, 512, 519, 576, 700, 771, 960,
    1024, 1025, 2048, 4096,
)  # fmt: skip
FURTHER_HIDDEN = (60, 63, 119, 120)  # only with `--full`
BATCHES = (1, 16, 19, 32, 64, 100, 132, 256, 384, 512, 1024, 2048, 16384)


# A GRU in TF32 stores its residuals in separate arrays, or in place of the input projections.
FORMS = [
    pytest.param(cell, kind, in_place, id=f"{cell}-{kind}{'-in_place' * in_place}")
    for cell, kind, in_place in [*itertools.product(("gru", "lstm"), KINDS, (False,)), ("gru", "tf32", True)]
]
every_form = pytest.mark.parametrize(("cell", "kind", "in_place"), FORMS)
every_fast_form = pytest.mark.parametrize(("cell", "kind", "in_place"), [x for x in FORMS if x.values[1] != "tf32x3"])


@functools.cache
def shipped(
    cell: str, direction: str, kind: str, device: Device, in_place: bool = False, full: bool = False
) -> list[tuple[Problem, KernelConfig]]:
    """Returns the tilings that the heuristic picks on a device, each with a problem for which it is picked.

    A few problems represent all that have the same tiling:

    - Of the hidden sizes, one is a multiple of the block, one is not, and one is not a multiple of four.
    - The number of programs that share the units is the largest or, for multiples of the block, also the smallest.
    - The reset states are per-step ones, which take the most arrays, or none if the tiling is only for common problems.

    With `full`, there are more hidden sizes, and Gluon tilings in which one program has all units come with both the
    narrowest and the widest state. Without `full`, there are only the tiles with the most sequences and the widest
    states, and one tiling of each loop and number of units of a program, for whole sequences and for pieces. Of
    "split", "rows" and "streamed" on Hopper, there are also those with other warps, stages or blocks, unless residuals
    differ only in their place.
    """
    picked: dict[Any, dict[int, list[tuple[Problem, KernelConfig]]]] = {}
    widths = sorted(HIDDEN + (FURTHER_HIDDEN if full else ()))
    widths = [hidden for hidden in widths if not in_place or hidden % spec._IN_PLACE_UNITS == 0]
    for reset_state, models, hidden, batch in itertools.product(("stepped", "zeros"), (1, 16), widths, BATCHES):
        p = make_problem(cell, direction, kind, hidden, batch, reset_state=reset_state, in_place=in_place)
        p = dataclasses.replace(p, models=models, groups=models)
        c = tiling.heuristic(p, device)
        # the code of Gluon kernels depends on how many programs share the units
        splits = min(c.splits, 2) if c.loop == "streamed" else c.splits
        divided = hidden % c.block_k == 0
        same = {"splits": 1, "cluster": min(c.cluster, 2)}
        alike = picked.setdefault((numbers_of(c, **same), divided, hidden % 4 == 0), {})
        alike.setdefault(splits, []).append((p, c))
    found = []
    for (_, divided, _), alike in picked.items():
        for splits in {max(alike), min(alike) if divided else max(alike)}:
            ways = alike[splits]
            first, c = ways[0]
            widest = max(
                (way for way in ways if way[0].reset_state == first.reset_state), key=lambda way: way[0].hidden
            )
            both = full and c.loop in ("resident", "fma") and widest[0] != first
            found += [ways[0], widest] if both else [widest if c.loop in ("resident", "fma") else ways[0]]
    if full:
        return found
    tallest: dict[Any, tuple[Problem, KernelConfig]] = {}
    for p, c in found:
        key: Any = c.loop, c.block_h, c.cluster > 1, p.is_unaligned, p.reset_state if c.loop != "streamed" else None
        if c.loop in ("split", "rows", "streamed") and device.has_wgmma and not in_place:
            key = numbers_of(c, splits=1, block_b=1), p.hidden % c.block_k == 0, p.is_unaligned, p.reset_state
        tallest[key] = max(tallest.get(key, (p, c)), (p, c), key=lambda way: (way[1].block_b, way[0].hidden))
    return [*tallest.values(), *in_pieces(found, device)]


def in_pieces(found: list[tuple[Problem, KernelConfig]], device: Device) -> Iterator[tuple[Problem, KernelConfig]]:
    """Yields, for each loop and block, the tiling for sequences in pieces whose kernel takes the most registers."""
    long = ((dataclasses.replace(p, steps=1024), c) for p, c in found)
    cut: dict[Any, list[tuple[Problem, KernelConfig]]] = {}
    for p, c in long:
        if (config := c.in_pieces(p, device)).pieces > 1:
            cut.setdefault((c.loop, c.block_h, config.cluster > 1), []).append((p, config))
    for ways in cut.values():
        yield max(ways, key=lambda way: (way[0].reset_state == "stepped", way[0].is_unaligned, way[0].hidden))


def numbers_of(config: KernelConfig, **same: int) -> tuple[Any, ...]:
    """Returns the loop and the numbers of a tiling, with those in `same` in place of its own."""
    return config.loop, *(config._asdict() | same).values()


def test_targets_cover_the_profiles():
    assert {device.capability for device in TARGETS.values()} == {device.capability for device in PROFILES.values()}
    assert {80, 86, 89, 90, 100, 103, 120} <= {device.capability for device in TARGETS.values()}
    assert {TARGETS[target].capability for target in HOPPER} == {90}


@pytest.fixture
def full(request):
    """Returns whether every configuration is compiled for every target."""
    return request.config.option.full


@pytest.fixture
def whole(full, target):
    """Returns whether a test compiles all of its problems for the target."""
    return full or target in HOPPER


@every_target
@every_form
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_configurations_fit_and_do_not_spill(target, full, direction, cell, kind, in_place):
    device = TARGETS[target]
    bad = misfits(shipped(cell, direction, kind, device, in_place, full), device)
    assert not bad, "\n".join(bad)


# (hidden, batch, reset state) for the widest tilings of each kernel, which leave the fewest registers. There are fewer
# for GPUs other than Hopper, because these have fewer kinds of kernels.
IN_BOTH = (
    (64, 300, "stepped"), (127, 300, "fixed"), (128, 16, "zeros"), (128, 2048, "fixed"), (256, 64, "stepped"),
    (448, 64, "stepped"), (512, 300, "zeros"),
)  # fmt: skip
IN_BOTH_ELSEWHERE = ((127, 300, "stepped"), (128, 16, "zeros"), (128, 2048, "fixed"), (448, 64, "stepped"))


@every_target
@every_fast_form
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_both_directions_in_one_launch_fit_and_do_not_spill(target, direction, cell, kind, in_place):
    device, problems = TARGETS[target], []
    for hidden, batch, reset_state in IN_BOTH if target in HOPPER else IN_BOTH_ELSEWHERE:
        if in_place and hidden % spec._IN_PLACE_UNITS != 0:
            continue
        p = make_problem(cell, direction, kind, hidden, batch, reset_state=reset_state, in_place=in_place)
        problems.append(dataclasses.replace(p, models=2, groups=2, reverse="bidirectional"))
    bad = misfits([(p, tiling.heuristic(p, device)) for p in problems], device)
    assert not bad, "\n".join(bad)


TANGENTS = [name for name, spec in CELLS.items() if spec.has_tangent_loop]
# Cells other than these take the tilings of a cell with at least as many gates, in derivatives too.
WITH_MOST_GATES = ("gru", "lstm")


@pytest.mark.parametrize(
    ("cell", "target"),
    [(cell, target) for cell in TANGENTS for target in (TARGETS if cell in WITH_MOST_GATES else OWN_PTX)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_passes_fit_and_do_not_spill(target, full, whole, cell, kind):
    """Tangents, and backward passes that write the gradients of all states, or those of the gates in float32.

    Those of cells with fewer gates are dealt to the targets.
    """
    device, problems = TARGETS[target], []
    kinds = {"direction": "fwd", "tangent": True}, {"direction": "bwd", "totals": True}
    kinds += ({"direction": "bwd", "gate_dtype": "float32"},) if kind == "bf16" else ()
    some = (32, 64, 119, 127, 128, 300) if whole else (64, 127, 128, 300)
    for hidden, batch in itertools.product((24, *some, 100, 448, 1025) if full else some, (16, 2048)):
        for further in kinds:
            p = make_problem(cell, kind=kind, hidden=hidden, batch=batch, **further)
            problems += [(p, tiling.heuristic(p, device))]
    problems += in_pieces(problems, device)
    if not full and cell not in WITH_MOST_GATES:
        # the first in turn changes with each round, so that a target has every kind and batch
        among, mine = len(OWN_PTX), OWN_PTX.index(target)
        problems = [way for k, way in enumerate(problems) if (k + k // among) % among == mine]
    bad = misfits(problems, device)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(("cell", "hidden"), [("gru", 32), ("gru", 64), ("gru", 128), ("lstm", 128)])
def test_lanes_of_a_warp_run_the_same_steps_of_a_piece(cell, hidden, direction):
    """If ptxas does not see that they do, it synchronizes them at each step, which takes 20 to 50 cycles (H200)."""
    from torch_bridge.recurrences import Launch

    device = PROFILES["h200"]
    p = make_problem(cell, direction, "tf32", hidden, 16, steps=1024)
    config = tiling.heuristic(p, device)
    assert config.pieces > 1
    (kernel,) = Launch(p, device, config).compile()
    assert "WARPSYNC" not in cubins.text_of(kernel.asm["cubin"], "nvdisasm", "-c")


def of_split_registers(problem: Problem, device: Device) -> list[tuple[Problem, KernelConfig]]:
    """Returns the tilings of the loop "split_registers" for a problem, also those that `heuristic` does not pick.

    Those with clusters are among them, where the device has these and a cluster may be as large.
    """
    found = [c for c in tiling.candidates(problem, device) if c.loop == "split_registers"]
    if device.capability >= 90:
        fit = [c for c in found if c.block_b == CLUSTER_BATCH and c.splits <= 16]
        found += [dataclasses.replace(c, cluster=c.splits) for c in fit]
    return [(problem, c) for c in found]


@pytest.mark.parametrize("target", OWN_PTX)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_weights_of_wide_states_in_registers_fit_and_do_not_spill(target, full, cell, direction):
    device, problems = TARGETS[target], []
    widths = (200, 256, 300, 512, 771, 1024) if full else (256, 300, 771)
    for kind, hidden, reset_state in itertools.product(("tf32", "bf16"), widths, ("stepped", "fixed", "zeros")):
        if reset_state == "stepped" or full or (hidden == 300 and (kind, reset_state) != ("bf16", "fixed")):
            p = make_problem(cell, direction, kind, hidden, 300, reset_state=reset_state)
            problems += of_split_registers(p, device)
    assert {c.block_h for _, c in problems} == {64, 32, 16}
    assert {c.block_b for _, c in problems} == ({8, 16} if (cell, direction) == ("gru", "fwd") else {8})
    bad = misfits(problems, device)
    assert not bad, "\n".join(bad)


# (hidden, batch, reset state) for each kind of kernel that the other cells have. They use the tilings of a cell with at
# least as many gates, whose configurations are all compiled.
OF_OTHER_CELLS = (
    (24, 64, "zeros"), (64, 64, "stepped"), (127, 300, "stepped"), (128, 16, "zeros"), (128, 2048, "zeros"),
    (128, 2048, "fixed"), (448, 64, "stepped"),
)  # fmt: skip


@pytest.mark.parametrize("target", OWN_PTX)
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in ("gru", "lstm")])
def test_other_cells_fit_and_do_not_spill(target, full, cell):
    """Cells with a norm need the most registers. The ways of the others, with fewer gates, are dealt to the targets.

    Each target has those of one program for a sequence of 128 units, which spill.
    """
    device, ways = TARGETS[target], []
    for direction, kind, (hidden, batch, reset_state) in itertools.product(("fwd", "bwd"), KINDS, OF_OTHER_CELLS):
        p = make_problem(cell, direction, kind, hidden, batch, reset_state=reset_state)
        ways.append([(p, tiling.heuristic(p, device)), *of_split_registers(p, device)])
    assert {c.loop for way in ways for _, c in way} == set(CELLS[cell].loops)
    if not full and not CELLS[cell].norm:
        spilling = [way for way in ways if (way[0][1].loop, way[0][1].block_h) == ("fma", 128)]
        ways = [*ways[OWN_PTX.index(target) :: len(OWN_PTX)], *spilling]
    bad = misfits(itertools.chain(*ways), device)
    assert not bad, "\n".join(bad)


@every_target
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_one_program_per_sequence_fits_and_does_not_spill(target, full, whole, cell, direction):
    """The launches run in reverse or in both directions, with all arrays that they can take without a reset state."""
    device, problems = TARGETS[target], []
    widths = (31, 32, 64, 65, 100, 119, 123, 127, 128) if whole else (64, 127, 128)
    exact = [("tf32x3", hidden, True) for hidden in widths]
    of_tf32 = itertools.product(["tf32"], (33, 64) if whole else (64,), (False, True) if whole else (False,))
    for (kind, hidden, halves), reverse in itertools.product([*exact, *of_tf32], (True, "bidirectional")):
        if reverse is True and not (full or (whole and hidden in (64, 127))):  # both directions take more arrays
            continue
        p = make_problem(cell, direction, kind, hidden, 16, halves=halves)
        cells = {"fwd": ("cs", "float32"), "bwd": ("dcs", "float32")}[direction]
        p = dataclasses.replace(p, models=2, groups=2, reverse=reverse)
        p = dataclasses.replace(p, dtypes=(*p.dtypes, cells)) if cell == "lstm" else p
        problems.append((p, tiling.heuristic(p, device)))
    assert {c.loop for _, c in problems} == {"fma"}
    bad = misfits(problems, device)
    assert not bad, "\n".join(bad)


@every_target
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_fit_and_spill_within_bounds(target, whole, kind, direction, dtype):
    from torch_bridge import norms

    arrays = {"fwd": ("x", "residual", "weight", "bias", "y", "total"), "bwd": ("dy", "x", "dtotal", "weight", "dx")}
    statistics = ("rstd", "mean") if kind == "layer" else ("rstd",)
    sums = ("dweight", "dbias") if direction == "bwd" else ()
    dtypes = dict.fromkeys(arrays[direction] + sums, dtype) | dict.fromkeys(statistics, "float32")
    alone = {name: x for name, x in dtypes.items() if name not in ("residual", "total", "dtotal")}
    wide = alone | {name: "float32" for name in ("weight", "bias", *sums) if name in alone}
    bad, device = [], TARGETS[target]
    columns = (1, 64, 100, 512, 1000, 1024, 2048, 4096, 8192, 16384, 20001, 32767, 32768, 50257)
    if not whole:  # tilings are nearly the same on all GPUs, and so is the PTX of most targets
        columns = (1, 512, 4096, 16384, 32767, 50257) if device.capability in (80, 100) else (512, 16384)
    beside = {tuple(wide.items()): " with float32 weights"}  # equals `alone` if rows are float32
    beside |= dict.fromkeys((tuple(dtypes.items()), tuple(alone.items())), "")
    for n, (given, weights) in itertools.product(columns, beside.items()):
        launch = norms.Launch(norms.Problem(kind, direction, 2, 4096, n, 1e-6, given), device)
        bad += excesses(launch.problem, launch, device, f"norm of {max(4096, power_of_2(n))} columns{weights}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("target", OWN_PTX)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_recurrences_with_float16_projections_fit_and_do_not_spill(target, full, cell):
    """A tiling per loop and block is enough: a thread holds half as much as with float32, which all tilings are for."""
    device = TARGETS[target]
    problems = {}
    for p, c in shipped(cell, "fwd", "bf16", device, full=full):
        dtypes = dict(p.dtypes) | {"xp": "float16"}
        problem = dataclasses.replace(p, dtypes=tuple(dtypes.items()))
        problems[(c.loop, c.block_h, c.block_b, c.num_warps) if full else (c.loop, c.block_h)] = problem, c
    bad = misfits(problems.values(), device)
    assert not bad, "\n".join(bad)


@every_target
@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [*(("bfloat16", n) for n in (32, 100, 128, 256, 300, 1024)), *(("float32", n) for n in (36, 64, 100, 128))],
)
def test_projections_fit_and_do_not_spill(target, whole, dtype, inputs):
    from torch_bridge import input_projections

    device, bad = TARGETS[target], []
    out = {"bfloat16": "float16", "float32": "float32"}[dtype]
    dtypes = {"x": dtype, "w_ih_t": dtype, "bias": "float32", "xp": out}
    for gates in (192, 300, 1024) if whole else (300,):
        problem = input_projections.Problem(2, 8192, inputs, gates, tuple(dtypes.items()))
        kept = dtype == "bfloat16" and (inputs <= 128 or (inputs <= 256 and device.shared_memory > 140_000))
        assert input_projections.is_profitable(problem, device) == (device.has_wgmma or kept)
        if not input_projections.is_profitable(problem, device):
            continue
        bad += excesses(problem, input_projections.Launch(problem, device), device)
    assert not bad, "\n".join(bad)


@every_target
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cell", ["gru", "lstm", "rms_norm_gru", "layer_norm_gru"])
def test_gradients_of_weights_fit_and_do_not_spill(target, whole, cell, dtype):
    from torch_bridge import weight_grads

    bad, device = [], TARGETS[target]
    gates, names = 4 if cell == "lstm" else 3, ("x", "hs", "h0", "dxp", *(("dhn",) if cell == "gru" else ()))
    sizes = (
        (128, 128, "bool", False, "zeros"), (200, 192, "float32", True, "stepped"), (64, 64, "bool", False, "fixed"),
        (128, 128, None, True, "zeros"), (256, 256, "bool", False, "zeros"), (128, 128, "bool", False, "stepped"),
    )  # fmt: skip
    for inputs, hidden, reset, reverse, reset_state in sizes if whole else sizes[:2]:
        dtypes = [(name, dtype) for name in (*names, *(("reset_h",) if reset_state != "zeros" else ()))]
        dtypes += [("reset", reset)] if reset else []
        dtypes += [("scale", "float32")] if "norm" in cell else []
        dtypes += [("x_mean", "float32")] if cell == "layer_norm_gru" else []
        sizes_of_arrays = (1, 1, 64, 64, inputs, hidden, gates * hidden)
        problem = weight_grads.Problem(*sizes_of_arrays, tuple(dtypes), reverse, reset_state)
        assert weight_grads.supports(problem, device)
        launch = weight_grads.Launch(problem, device)
        bad += excesses(problem, launch, device)
        ptx = [of_call(kernel)(ptx_source(kernel.function, device.capability)).asm["ptx"] for kernel in launch.kernels]
        narrow = sum(each.count("cp.async.ca") for each in ptx)
        bad += [f"{problem}: {narrow} copies of less than 16 bytes"] if narrow else []
    assert not bad, "\n".join(bad)


@every_target
@pytest.mark.parametrize(("cell", "hidden"), [("gru", 128), ("gru", 256), ("lstm", 128), ("lstm", 256)])
def test_gradients_of_weights_come_from_a_launch_where_it_is_faster(target, cell, hidden):
    """A launch is faster for a GRU of 128 units from 8 sequences of 128 steps on, and of 256 units for more.

    Without wgmma, it is faster only for the GRU of 128 units from 16 sequences on, of many rows only with four pipeline
    stages.
    """
    from torch_bridge import weight_grads

    device, gates = TARGETS[target], CELLS[cell].gates
    names = ("x", "hs", "h0", "dxp", "reset", *CELLS[cell].hidden_grads)
    dtypes = tuple((name, "bool" if name == "reset" else "float32") for name in names)
    used = {
        batch: weight_grads.is_profitable(
            weight_grads.Problem(1, 1, 128, batch, hidden, hidden, gates * hidden, dtypes), device
        )
        for batch in (7, 8, 15, 16, 31, 32, 64, 2048)
    }
    common = (cell, hidden) == ("gru", 128)
    fewest = 8 if device.has_wgmma else 16
    few = {batch: common and batch >= fewest for batch in (7, 8, 15, 16, 31)}
    if device.has_wgmma:
        assert used == few | {32: cell == "gru", 64: cell == "gru", 2048: cell == "gru" or hidden == 128}
    else:
        assert used == few | {32: common, 64: common, 2048: common and device.shared_memory > 140_000}


def sampled(device: Device, whole: bool) -> dict[str, tuple[Any, Callable[[int], Any]]]:
    """Returns a kernel of each kind that runs without wgmma: its function, and a function that compiles it."""
    from torch_bridge import input_projections, norms, weight_grads
    from torch_bridge.recurrences import Launch

    further = (
        ("gru", "bwd", "tf32", 512, "zeros"), ("lstm", "fwd", "bf16", 256, "stepped"),
        ("lstm", "fwd", "tf32", 127, "zeros"), ("gru", "bwd", "bf16", 64, "zeros"),
        ("gru", "fwd", "tf32x3", 32, "zeros"), ("lstm", "bwd", "tf32x3", 128, "zeros"),
    )  # fmt: skip

    found: dict[str, tuple[Any, Callable[[int], Any]]] = {}
    for cell, direction, kind, hidden, reset_state in (
        ("gru", "fwd", "tf32x3", 64, "stepped"), ("lstm", "bwd", "tf32x3", 512, "stepped"),
        ("gru", "fwd", "bf16", 128, "zeros"), ("lstm", "bwd", "tf32", 127, "stepped"),
        ("lstm", "fwd", "tf32x3", 127, "zeros"), ("gru", "bwd", "tf32x3", 64, "stepped"),
        *(further if whole else ()),
    ):  # fmt: skip
        p = make_problem(cell, direction, kind, hidden, 300, reset_state=reset_state)
        launch = Launch(p, device, tiling.heuristic(p, device))
        found[f"{launch.config.loop} {p}"] = launch.kernels[0].function, of_call(launch.kernels[0])
    statistics, names = {"mean": "float32", "rstd": "float32"}, ("dy", "x", "weight", "dx", "dweight", "dbias")
    calls: list[Any] = [
        norms.Launch(norms.Problem("layer", direction, 1, 4096, columns, 1e-6, tuple(dtypes.items())), device)
        for direction, columns, dtypes in (
            ("fwd", 1024, dict.fromkeys(("x", "weight", "bias", "y"), "bfloat16") | statistics),
            ("bwd", 16384, dict.fromkeys(names, "bfloat16") | statistics),
            *([("bwd", 50257, dict.fromkeys(names, "float32") | statistics)] if whole else []),
        )
    ]
    for dtype, inputs in (("bfloat16", 128), ("bfloat16", 300), *([("float32", 128)] if whole else [])):
        dtypes = {"x": dtype, "w_ih_t": dtype, "bias": "float32", "xp": "float32"}
        problem = input_projections.Problem(1, 8192, inputs, 300, tuple(dtypes.items()))
        calls.append(input_projections.Launch(problem, device))
    names = ("x", "hs", "h0", "dxp", "dhn", "reset")
    dtypes = dict.fromkeys(names, "bfloat16") | {"reset": "bool"}
    gradients = weight_grads.Problem(1, 1, 64, 64, 128, 128, 384, tuple(dtypes.items()))
    calls.append(weight_grads.Launch(gradients, device))
    for call in calls:
        for kernel in call.kernels:
            found[f"{kernel.function.__name__} {call.problem}"] = kernel.function, of_call(kernel)
    return found


@pytest.mark.parametrize("target", [target for target in TARGETS if TARGETS[target].capability in SAME_GLUON_PTX])
def test_ptx_equals_that_of_another_target(target, whole):
    """Shared memory is equal too. The test samples kernels that the tests above do not compile for the target."""
    if support.triton_version() != (3, 7):
        pytest.skip("other versions of Triton make different PTX for some targets, so no test assumes equal PTX")
    device, bad, same = TARGETS[target], [], 0
    for name, (function, compile) in sampled(device, whole).items():
        source = ptx_source(function, device.capability)
        if source == device.capability:
            continue
        ours, theirs = compile(device.capability), compile(source)
        alike = theirs.metadata.shared == ours.metadata.shared
        alike &= retarget(without_lines(theirs.asm["ptx"]), device.capability) == without_lines(ours.asm["ptx"])
        same += alike
        bad += [] if alike else [name]
    assert same and not bad, "\n".join(bad)


def of_call(kernel: Any) -> Callable[[int], Any]:
    """Returns a function that compiles one kernel of a launch for a capability."""
    return lambda capability: kernel.compile(capability)


def retarget(ptx: str, capability: int) -> str:
    """Returns PTX with another target, for which Triton would generate the same code."""
    from triton.backends.nvidia.compiler import sm_arch_from_capability

    return re.sub(r"(?m)^\.target sm_\w+", f".target {sm_arch_from_capability(capability)}", ptx)


def assemble(ptx: str, capability: int) -> bytes:
    """Returns the machine code of PTX for a target, assembled by Triton's ptxas with Triton's options."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", capability, 32))
    options = backend.parse_options({"enable_fp_fusion": True})
    return backend.make_cubin(retarget(ptx, capability), {}, options, capability)


def ptx_source(function: Any, capability: int) -> int:
    """Returns the capability for which to compile a kernel to get its PTX for `capability`."""
    if support.triton_version() != (3, 7):
        return capability
    if function.fn.__module__.endswith(".split_registers") and capability == 120:
        return capability  # only 10.0 and 10.3 have an instruction for the maximum of float32 over all lanes of a warp
    return (SAME_GLUON_PTX if function.is_gluon() else SAME_PTX).get(capability, capability)


def bytes_taken(compile: Callable[[int], Any], function: Any, capability: int) -> tuple[int, int]:
    """Returns the bytes of shared memory of a program, with a mailbox, and of local memory of a thread."""
    source = ptx_source(function, capability)
    compiled = compile(source)
    cubin = compiled.asm["cubin"] if source == capability else assemble(compiled.asm["ptx"], capability)
    mailbox = sum(int(size) for size in re.findall(r"\.shared .* mailbox\[(\d+)\]", compiled.asm["ptx"]))
    return compiled.metadata.shared + mailbox, local_bytes(cubin)


def excesses(problem: Any, launch: Any, device: Device, kind: str = "") -> list[str]:
    """Returns a line per kernel that exceeds the device's shared memory, or spills more than `spills.json` says."""
    bad = []
    assert launch.kernels
    for kernel in launch.kernels:
        shared, local = bytes_taken(of_call(kernel), kernel.function, device.capability)
        spilled = spills.exceed(kind or kernel.name, device.capability, local)
        if shared > device.shared_memory or spilled:
            bad.append(f"{problem} {kernel.function.__name__}: {shared} bytes shared, {local} bytes local")
    return bad


def misfits(problems: Iterable[tuple[Problem, KernelConfig]], device: Device) -> list[str]:
    """Returns a line per tiling that spills too much, or whose shared memory exceeds its bound or the device's."""
    from torch_bridge.recurrences import Launch

    bad, problems = [], list(problems)
    assert problems
    for p, c in problems:
        launch = Launch(p, device, c)
        (kernel,) = launch.kernels
        shared, local = bytes_taken(of_call(kernel), kernel.function, device.capability)
        spilled = spills.exceed(spills.kind_of(p, c), device.capability, local)
        if not shared <= c.shared_memory(p) <= device.shared_memory or spilled:
            bad.append(f"H={p.hidden} {c}: {shared} of {device.shared_memory} bytes shared, {local} bytes local")
    return bad


def local_bytes(cubin: bytes) -> int:
    """Returns the bytes of local memory per thread of the kernel, for values that do not fit into registers."""
    usage = cubins.text_of(cubin, "cuobjdump", "-res-usage")
    return int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
