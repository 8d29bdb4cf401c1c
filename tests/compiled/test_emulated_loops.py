"""Tests that run the compiled time loops in the PTX emulator, and compare them with float64.

The emulator reports races between warps, accesses out of bounds and deadlocks; `tests/ptx` says what it cannot see.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import emulated
import oracle
import pytest
import torch
from cases import deal
from ptx import Kernel, PTXError

from benchmarks.problems import KINDS, make_arrays, make_problem
from torch_bridge import tiling
from torch_bridge.cells import CELLS
from torch_bridge.recurrences import Launch
from torch_bridge.rnn_ops.kernels import weights_for_tensor_cores

if TYPE_CHECKING:
    from torch_bridge.tiling import Direction, KernelConfig, Problem, ResetState, Reverse

pytestmark = pytest.mark.compile_only

DEVICE = tiling.PROFILES["a100"]
# Large enough that every case has a reset.
RESET_RATE = 0.25
# These loops multiply with wgmma, which the emulator does not run.
NOT_EMULATED = ("split", "rows")


class Case(NamedTuple):
    """A launch of each of its cells, in each direction: see `cells_of`.

    Attributes:
      loop: the family of time loops.
      kind: dtype and precision of the products, a key of `problems.KINDS`.
      hidden: number of hidden units.
      batch: number of sequences of a group.
      steps: number of time steps.
      block_b: number of sequences of a tile, or 0 for the first tiling of the loop.
      shared: whether several programs share a tile.
      reset_state: where an episode's first state comes from.
      reverse: as in `Problem`; with "bidirectional" there are two models.
      groups: number of groups of a model.
      workers: number of workers that the device has room for, or 0 for as many as there are tiles.
      in_place: whether residuals overwrite the input projections.
      cells: the cells that the case is for, or none for those that have the loop.
      directions: the directions that have the tiling; "tangent" is that of a forward launch, and "totals" is a backward
        launch that also writes the gradients of all states.
      seed: of the order in which warps and programs run, or None for lockstep.
    """

    loop: str
    kind: str
    hidden: int
    batch: int
    steps: int
    block_b: int = 0
    shared: bool = False
    reset_state: ResetState = "zeros"
    reverse: Reverse = False
    groups: int = 1
    workers: int = 0
    in_place: bool = False
    cells: tuple[str, ...] = ()
    directions: tuple[Direction | Literal["tangent", "totals"], ...] = ("fwd", "bwd")
    seed: int | None = None

    def __str__(self) -> str:
        sizes = f"{self.loop}-{self.kind}-H{self.hidden}-B{self.batch}-T{self.steps}"
        rest = {
            f"tile{self.block_b}": self.block_b, "shared": self.shared, self.reset_state: self.reset_state != "zeros",
            "bidirectional" if self.reverse == "bidirectional" else "reverse": self.reverse,
            f"groups{self.groups}": self.groups > 1, f"workers{self.workers}": self.workers, "in_place": self.in_place,
            f"seed{self.seed}": self.seed is not None,
        }  # fmt: skip
        return "-".join([sizes, *(name for name, told in rest.items() if told)])


# Hidden sizes fill a block or not, and are a multiple of four (aligned) or not; the last tile of a batch is partial.
CASES = (
    Case("resident", "tf32", 64, 11, 3, block_b=8, reset_state="stepped"),
    Case("resident", "bf16", 37, 5, 4, block_b=2, reset_state="fixed", reverse=True, groups=2),
    Case("resident", "tf32", 100, 3, 3, block_b=4, reverse="bidirectional"),
    Case("resident", "bf16", 128, 17, 3, block_b=16, cells=("gru",), seed=0),
    Case("resident", "tf32", 64, 11, 3, block_b=8, reset_state="fixed", in_place=True, cells=("gru",)),
    Case("resident", "tf32", 128, 11, 3, block_b=8, reset_state="stepped", reverse=True, cells=("gru", "lstm")),
    Case("resident", "bf16", 128, 11, 4, block_b=8, reset_state="stepped", groups=2, cells=("lstm",)),
    Case("resident", "tf32", 127, 11, 5, block_b=8, reset_state="stepped", groups=2, cells=("layer_norm_gru",)),
    Case("resident", "bf16", 40, 11, 2, block_b=1, reset_state="stepped", reverse="bidirectional", cells=("mgu",)),
    Case("fma", "tf32", 33, 2, 4, reset_state="stepped"),
    Case("fma", "tf32", 100, 2, 4, reset_state="stepped", reverse=True, groups=2, cells=("simple_relu",)),
    Case("fma", "tf32", 128, 2, 3, reset_state="fixed", reverse="bidirectional", cells=("simple_relu",)),
    Case("fma", "tf32x3", 64, 2, 3, reset_state="fixed", reverse="bidirectional"),
    Case("fma", "bf16", 20, 3, 4, reverse=True, groups=2),
    Case("fma", "tf32x3", 100, 2, 3, cells=("gru", "lstm"), seed=0),
    Case("split_registers", "tf32", 192, 11, 3, block_b=8, shared=True, reset_state="stepped", workers=1),
    Case("split_registers", "bf16", 133, 3, 3, shared=True, reset_state="fixed", reverse=True, groups=2),
    Case("split_registers", "tf32", 260, 3, 2, shared=True, reverse="bidirectional", cells=("lstm",)),
    Case("split_registers", "bf16", 192, 19, 3, block_b=16, shared=True, directions=("fwd",), cells=("gru",)),
    Case("split_registers", "bf16", 192, 19, 3, shared=True, workers=1, cells=("gru",), seed=0),
    # a worker that has items of two models
    Case(
        "split_registers", "tf32", 192, 11, 3, shared=True, reverse="bidirectional", workers=1, cells=("lstm",), seed=0
    ),
    Case("split_registers", "tf32", 192, 11, 3, shared=True, in_place=True, cells=("gru",)),
    # programs of fewer units than 64, whose lanes take turns with the sums of a norm
    Case("split_registers", "tf32", 260, 3, 2, shared=True, reset_state="stepped", cells=("layer_norm_gru",)),
    Case("split_registers", "bf16", 260, 9, 3, shared=True, workers=1, cells=("rms_norm_gru",), seed=0),
    Case("streamed", "tf32", 16, 11, 4, reset_state="stepped"),
    Case("streamed", "bf16", 37, 5, 3, reset_state="fixed", reverse="bidirectional", groups=2),
    Case("streamed", "tf32x3", 32, 3, 3, reverse=True),
    Case("streamed", "tf32", 96, 19, 3, shared=True, reset_state="stepped", workers=1),
    Case("streamed", "bf16", 70, 3, 3, shared=True, reset_state="fixed", reverse=True, groups=2),
    Case("streamed", "tf32x3", 40, 5, 3, shared=True, reverse="bidirectional"),
    Case("streamed", "tf32", 128, 3, 3, shared=True, in_place=True, cells=("gru",)),
    Case("streamed", "tf32", 96, 19, 2, shared=True, workers=1, cells=("gru", "lstm"), seed=0),
    *(
        case._replace(cells=("gru", "lstm", "mgu", "simple_tanh"), directions=("tangent",))
        for case in (
            Case("resident", "tf32", 64, 11, 3, block_b=8),
            Case("resident", "tf32", 128, 11, 4, block_b=8, reverse=True, seed=0),
            Case("resident", "bf16", 37, 5, 4, block_b=2, reverse="bidirectional", groups=2),
            Case("fma", "tf32x3", 20, 3, 9, reverse=True, groups=2),
            Case("fma", "tf32", 40, 2, 5, reverse="bidirectional"),
            Case("fma", "tf32x3", 100, 2, 4),
            Case("streamed", "tf32x3", 40, 5, 4, reverse=True),
            Case("streamed", "tf32", 96, 19, 3, shared=True, reverse="bidirectional", workers=1),
        )
    ),
    *(
        case._replace(cells=("gru", "lstm", "simple_tanh"), directions=("totals",))
        for case in (
            Case("resident", "tf32", 64, 11, 3, block_b=8, reset_state="stepped"),
            Case("resident", "bf16", 37, 5, 4, block_b=2, reverse="bidirectional", groups=2),
            Case("fma", "tf32x3", 40, 3, 5, reset_state="fixed", reverse=True, groups=2),
            Case("split_registers", "tf32", 192, 11, 3, shared=True, reset_state="stepped", workers=1),
            Case("streamed", "tf32x3", 32, 5, 4, reverse=True),
            Case("streamed", "tf32", 96, 19, 3, shared=True, reset_state="stepped", reverse="bidirectional", workers=1),
        )
    ),
)


def problem_of(case: Case, cell: str, direction: Direction) -> Problem:
    """Returns the problem of a case for a cell and a direction."""
    p = make_problem(
        cell, {"tangent": "fwd", "totals": "bwd"}.get(direction, direction), case.kind, case.hidden, case.batch,
        steps=case.steps, reset_state=case.reset_state, in_place=case.in_place, tangent=direction == "tangent",
        totals=direction == "totals",
    )  # fmt: skip
    models = 2 if case.reverse == "bidirectional" else 1
    return dataclasses.replace(p, models=models, groups=case.groups * models, reverse=case.reverse)


def tiling_of(case: Case, problem: Problem) -> KernelConfig:
    """Returns the first tiling of the case's loop for a problem with many steps: for few, some loops have none.

    It has whole sequences.
    """
    found = tiling.candidates(dataclasses.replace(problem, steps=100), DEVICE)
    config = next(
        c for c in found if c.loop == case.loop and (c.splits > 1) == case.shared and case.block_b in (0, c.block_b)
    )
    return dataclasses.replace(config, pieces=1) if config.pieces > 1 else config


def launch_of(case: Case, cell: str, direction: Direction, pieces: int = 1) -> Launch:
    """Returns the launch of a case, on a device with room for `case.workers`."""
    problem = problem_of(case, cell, direction)
    config = tiling_of(case, problem)
    if pieces > 1:
        config = dataclasses.replace(config, pieces=pieces)
    room = {"multiprocessors": config.splits * case.workers} if case.workers else {}
    return Launch(problem, dataclasses.replace(DEVICE, **room), config)


# The cells that run every case that names none.
WHOLE = ("gru", "lstm")


def cells_of(case: Case) -> list[str]:
    """Returns the names of the cells that a case is for.

    Of the cases that name none, the first of a loop is for every cell, and the others are dealt: what differs between
    them is code that all cells share.
    """
    names = [name for name, spec in CELLS.items() if case.loop in spec.loops]
    if case.cells:
        return [name for name in names if name in case.cells]
    first, *others = (c for c in CASES if (c.loop, c.shared, c.cells) == (case.loop, case.shared, ()))
    return names if case == first else [name for name, dealt in deal(others, names, WHOLE) if dealt == case]


LAUNCHES = [
    pytest.param(case, cell, direction, id=f"{cell}-{direction}-{case}")
    for case in CASES
    for cell in cells_of(case)
    for direction in case.directions
]
# The kernels round operands, and the residuals that they save, to TF32 or float16 by up to 2**-11 of a value, or to
# bfloat16 by up to 2**-9. In the norm of an array, most of these errors cancel: the largest are 2.7e-4 in TF32 and, in
# bfloat16, where gradients are rounded twice, 2.3e-3. TF32x3 has the accuracy of float32: its largest error is 2e-7.
TOLERANCE = {"tf32": 2**-11, "bf16": 2**-8, "tf32x3": 2**-20}


def arrays_of(problem: Problem) -> dict[str, torch.Tensor]:
    """Returns the arrays of a problem, with more resets than elsewhere, since there are few steps."""
    arrays = make_arrays(problem, "cpu")
    generator = torch.Generator().manual_seed(1)
    arrays["reset"] = torch.rand(arrays["reset"].shape, generator=generator) < RESET_RATE
    return arrays


@pytest.mark.quick("case.loop", "cell", "direction")
@pytest.mark.parametrize(("case", "cell", "direction"), LAUNCHES)
def test_loops_match_float64_without_races(case, cell, direction):
    launch = launch_of(case, cell, direction)
    arrays = arrays_of(launch.problem)
    assert arrays["reset"].any() and not arrays["reset"].all()
    if case.reset_state == "stepped":
        for name in {"reset_h", "reset_c"} & arrays.keys():  # only the states of steps that begin an episode count
            arrays[name][~arrays["reset"]] = float("nan")
    want = emulated.expected(launch.problem, arrays)
    if case.in_place:  # one array under two names
        written, read = ("local_grads", "xp") if direction == "fwd" else ("dxp", "local_grads")
        arrays[written] = arrays[read]
    emulated.run(launch, arrays, emulated.kernels_of(launch), seed=case.seed)
    if case.in_place and direction == "fwd":
        arrays |= emulated.unpack_words(arrays["local_grads"])
    if cell == "simple_relu" and direction == "fwd":  # rounding changes the signs of gates near zero
        want["local_grads"] = (arrays["hs"] > 0).double()
    errors = {name: oracle.error(arrays[name].double(), x) for name, x in want.items()}
    assert errors and all(e <= TOLERANCE[case.kind] for e in errors.values()), errors


# Each with the number of pieces into which a sequence may be cut: more or fewer than there are steps or columns.
IN_PIECES = [
    (Case("resident", "tf32", 64, 3, 24, block_b=1, reset_state="stepped"), 5),
    (Case("resident", "bf16", 37, 5, 17, block_b=1, reset_state="fixed", reverse=True, groups=2), 3),
    (Case("resident", "tf32", 40, 2, 9, block_b=1, reverse="bidirectional"), 12),
    (Case("fma", "tf32", 20, 2, 21, reset_state="stepped", groups=2), 4),
    (Case("fma", "tf32x3", 64, 2, 17, reset_state="fixed", reverse="bidirectional"), 3),
    (Case("fma", "tf32", 100, 2, 9, reverse=True, cells=("simple_relu",)), 2),
    (Case("split_registers", "tf32", 140, 3, 17, shared=True, reset_state="stepped"), 5),
    (Case("split_registers", "bf16", 260, 1, 13, shared=True, reset_state="fixed", reverse=True), 20),
    (Case("split_registers", "bf16", 192, 2, 12, shared=True, reverse="bidirectional", workers=1), 9),
]


def resets_at(pattern, shape, pieces):
    """Returns resets `[G, T, B]`: at random steps, at all, at none, or at and beside the bounds of chunks of time."""
    resets = torch.zeros(shape, dtype=torch.bool)
    if pattern == "random":
        resets = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.15
    elif pattern == "bounds":
        chunk = -(-shape[1] // pieces)
        for b in range(shape[2]):  # one step before, at, or one step after the bounds
            resets[:, max(chunk - 1 + b % 3, 0) :: 2 * chunk, b] = True
    elif pattern == "all":
        resets |= True
    return resets


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("cell", "case", "pieces"),
    [
        pytest.param(cell, case, pieces, id=f"{cell}-{case}-{pieces}")
        for k, (case, pieces) in enumerate(IN_PIECES)
        for names in [[name for name in CELLS if case.loop in CELLS[name].loops]]
        for cell in case.cells or dict.fromkeys((names[k % len(names)], ("gru", "lstm")[k % 2]))
        if cell in names
    ],
)
def test_pieces_of_a_sequence_have_the_bits_of_the_whole(cell, case, pieces, direction):
    compare_with_whole(
        case, cell, direction, pieces,
        lambda shape: [resets_at(pattern, shape, pieces) for pattern in ("random", "bounds", "all", "none")],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "pieces"),
    [pytest.param(*x, id=str(x[0])) for x in IN_PIECES if x[0].reverse and x[0].loop != "split_registers"],
)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_pieces_of_a_tangent_have_the_bits_of_the_whole(cell, case, pieces):
    compare_with_whole(
        case._replace(reset_state="zeros", hidden=min(case.hidden, 64)), cell, "tangent", pieces,
        lambda shape: [resets_at(pattern, shape, pieces) for pattern in ("random", "all", "none")],
    )  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_is_found_however_far_it_is(reverse):
    """A program looks at 512 steps at a time."""
    case = Case("fma", "tf32", 8, 1, 1300, reverse=reverse)

    def resets(shape):
        far = torch.zeros((2, *shape), dtype=torch.bool)
        for step in (
            100,
            1200,
        ):  # in the run's order: in the first of three chunks, and 767 steps after the second begins
            far[0, :, -1 - step if reverse else step] = True
        return far

    compare_with_whole(case, "gru", "fwd", 3, resets)


# Each with a number of pieces. Clusters of three, four and ten programs; a worker of several items, and of two models.
IN_CLUSTERS = [
    (Case("split_registers", "tf32", 192, 11, 5, shared=True, reset_state="stepped", workers=1, cells=WHOLE), 1),
    (Case("split_registers", "bf16", 250, 3, 5, shared=True, reset_state="fixed", reverse=True, cells=WHOLE), 1),
    (Case("split_registers", "tf32", 260, 3, 2, shared=True, reverse="bidirectional", workers=1, cells=("lstm",)), 1),
    (Case("split_registers", "tf32", 192, 11, 3, shared=True, in_place=True, cells=("gru",), seed=0), 1),
    (Case("split_registers", "bf16", 260, 9, 3, shared=True, cells=("layer_norm_gru",), seed=0), 1),
    (Case("split_registers", "tf32", 192, 5, 3, shared=True, cells=("rms_norm_gru", "mgu", "simple_tanh")), 1),
    (Case("split_registers", "tf32", 140, 3, 17, shared=True, reset_state="stepped", cells=WHOLE), 5),
    (Case("split_registers", "bf16", 192, 2, 12, shared=True, reverse=True, workers=1, cells=("gru",)), 9),
]


@pytest.mark.quick
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("cell", "case", "pieces"),
    [
        pytest.param(cell, case, pieces, id=f"{cell}-{case}-{pieces}")
        for case, pieces in IN_CLUSTERS
        for cell in case.cells
    ],
)
def test_exchange_in_a_cluster_has_the_bits_of_exchange_through_l2(cell, case, pieces, direction):
    launch = launch_of(case, cell, direction, pieces)
    room = {"multiprocessors": launch.config.splits * case.workers} if case.workers else {}
    device = dataclasses.replace(tiling.PROFILES["h200"], **room)
    given, results = arrays_of(launch.problem), []
    for cluster in (1, launch.config.splits):
        each = Launch(launch.problem, device, dataclasses.replace(launch.config, cluster=cluster))
        assert len(each.workspaces) == (0 if cluster > 1 else 2 if CELLS[cell].norm and direction == "bwd" else 1)
        arrays = {name: x.clone() for name, x in given.items()}
        emulated.run(each, arrays, emulated.kernels_of(each), seed=case.seed)
        results.append([arrays[name] for name in emulated.outputs_of(launch.problem)])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_program_has_one_mailbox_between_two_barriers_of_its_cluster(direction):
    """Nothing may be sent before the receiver has cleared its mailbox, and after it has ended."""
    case = Case("split_registers", "tf32", 192, 3, 2, shared=True)
    config = dataclasses.replace(launch_of(case, "gru", direction).config, cluster=3)
    launch = Launch(problem_of(case, "gru", direction), tiling.PROFILES["h200"], config)
    (compiled,) = launch.compile()
    assert len(re.findall(r"barrier\.cluster\.wait", compiled.asm["ptx"])) == 2
    assert len(re.findall(r"mailbox\[", compiled.asm["ptx"])) == 1


def compare_with_whole(case, cell, direction, pieces, resets):
    """Asserts that pieces have the bits of whole sequences, with each of `resets(shape)`, and write all outputs."""
    launch = launch_of(case, cell, direction)
    compiled = [(each, emulated.kernels_of(each)) for each in (launch, launch_of(case, cell, direction, pieces))]
    outputs = emulated.outputs_of(launch.problem)
    given = arrays_of(launch.problem)
    given |= {name: torch.full_like(given[name], float("nan")) for name in outputs}  # nothing is left unwritten
    given["dh_last" if direction == "bwd" else "h0"][:, 0] = 1e4  # has an effect as far as the first reset
    for reset in resets(given["reset"].shape):
        results = []
        for each, kernels in compiled:
            arrays = {name: x.clone() for name, x in given.items()} | {"reset": reset}
            emulated.run(each, arrays, kernels)
            results.append({name: arrays[name] for name in outputs})
        whole, cut = results
        assert all(x.isfinite().all() for x in whole.values())
        assert [name for name in outputs if not torch.equal(whole[name], cut[name])] == []


@pytest.mark.parametrize(
    ("cell", "hidden", "steps", "block_b", "reverse"),
    [
        ("gru", 64, 1, 1, False), ("gru", 64, 2, 4, True), ("gru", 128, 5, 1, False), ("gru", 128, 4, 8, True),
        ("lstm", 128, 3, 1, "bidirectional"), ("lstm", 128, 3, 8, False), ("mgu", 100, 4, 2, False),
    ],
)  # fmt: skip
def test_each_reset_state_has_the_scale_of_its_own_magnitude(cell, hidden, steps, block_b, reverse):
    """With the scale of a smaller state, float16 operands would be clamped."""
    case = Case("resident", "tf32", hidden, 11, steps, block_b, reset_state="stepped", reverse=reverse)
    launch = launch_of(case, cell, "fwd")
    arrays = arrays_of(launch.problem)
    generator = torch.Generator().manual_seed(2)
    arrays["reset"] = torch.rand(arrays["reset"].shape, generator=generator) < 0.5
    large = torch.rand(arrays["reset"].shape, generator=generator) < 0.5
    assert (arrays["reset"] & large).any() and (arrays["reset"] & ~large).any()
    arrays["reset_h"] *= torch.where(large, 300.0, 1.0)[..., None]
    arrays["w_hh_t"] *= 0.01  # so that rounding does not decide whether a gate saturates
    want = emulated.expected(launch.problem, arrays)
    emulated.run(launch, arrays, emulated.kernels_of(launch))
    errors = {name: oracle.error(arrays[name].double(), x) for name, x in want.items()}
    assert errors and all(e <= TOLERANCE["tf32"] for e in errors.values()), errors


@pytest.mark.parametrize("reset_state", tiling.RESET_STATES)
@pytest.mark.parametrize(
    ("cell", "loop", "hidden"),
    [
        ("gru", "resident", 64), ("lstm", "fma", 48), ("lstm", "split_registers", 192), ("gru", "streamed", 16),
        ("lstm", "streamed", 16),
    ],
)  # fmt: skip
def test_a_carry_of_nan_does_not_pass_a_reset(cell, loop, hidden, reset_state):
    case = Case(loop, "tf32", hidden, 5, 2, shared=loop == "split_registers", reset_state=reset_state)
    launch = launch_of(case, cell, "fwd")
    arrays = arrays_of(launch.problem)
    arrays["h0"][..., 1, :] = float("nan")
    arrays["reset"][..., 0, 1] = True
    want = emulated.expected(launch.problem, arrays)
    assert all(x.isfinite().all() for x in want.values())
    emulated.run(launch, arrays, emulated.kernels_of(launch))
    assert all(oracle.error(arrays[name].double(), x) <= TOLERANCE["tf32"] for name, x in want.items())


# Loops, hidden units, and whether programs share a tile.
EVERY_LOOP = [
    ("resident", 64, False), ("fma", 32, False), ("split_registers", 192, True), ("streamed", 16, False),
    ("streamed", 96, True),
]  # fmt: skip


def outputs_with(values, name, cell, loop, hidden, shared, kind="tf32"):
    """Returns the outputs of a launch and of float64, without resets, and with these bits at these places of an array.

    There are five sequences.
    """
    launch = launch_of(Case(loop, kind, hidden, 5, 3, shared=shared), cell, "fwd")
    arrays = make_arrays(launch.problem, "cpu")
    arrays["reset"].zero_()
    for at, bits in values.items():
        arrays[name].view(torch.int32)[at] = bits - 2**32 if bits >= 2**31 else bits
    if loop == "streamed":
        arrays["w_hh_t"] = weights_for_tensor_cores(arrays["w_hh_t"], launch.problem.precision)
    want = emulated.expected(launch.problem, arrays)
    emulated.run(launch, arrays, emulated.kernels_of(launch))
    return arrays["hs"], want["hs"]


# Tensor cores ignore the 13 low bits of a float32. Without these bits, the last two NaNs are infinities.
NANS = (0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFF801FFF)
PLACES = {  # states and inputs of the first four sequences; weights of four units of a gate
    "h0": {(0, k, 7): bits for k, bits in enumerate(NANS)},
    "xp": {(0, 0, k, 5): bits for k, bits in enumerate(NANS)},
    "w_hh_t": {(0, k, 7): bits for k, bits in enumerate(NANS)},
}


@pytest.mark.parametrize(
    ("loop", "hidden", "shared", "kind"),
    [(*loop, "tf32") for loop in EVERY_LOOP] + [(*loop, "tf32x3") for loop in EVERY_LOOP if loop[0] == "streamed"],
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cell", ["gru", "lstm", "layer_norm_gru"])
def test_nan_reaches_every_output_that_depends_on_it(cell, loop, hidden, shared, kind, place):
    got, want = outputs_with(PLACES[place], place, cell, loop, hidden, shared, kind)
    assert 0 < want.isnan().sum() < want.numel()
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("kind", ["tf32", "bf16"])
@pytest.mark.parametrize(("loop", "hidden", "shared"), EVERY_LOOP)
def test_an_infinite_state_stays_infinite(loop, hidden, shared, kind):
    """In scaled float16, it counts as a finite number in the products for other units; see docs/numerics.md."""
    got, want = outputs_with({(0, 1, 7): 0x7F800000}, "h0", "gru", loop, hidden, shared, kind)
    assert not want[0, :, 1, 7].isfinite().any() and not got[0, :, 1, 7].isfinite().any()
    assert not (want.isfinite() & ~got.isfinite()).any()
    scaled = kind == "tf32" and loop in ("resident", "split_registers")
    assert torch.equal(got.isfinite(), want.isfinite()) != scaled


def test_cases_cover_every_loop_in_every_way():
    """Each cell runs every loop that needs no wgmma, in both directions; each loop runs in every order and state.

    The cells of `WHOLE`, and all others together, multiply in every kind.
    """
    covered = {
        (cell, case.loop, case.shared, case.kind, direction)
        for case in CASES
        for cell in cells_of(case)
        for direction in case.directions
    }
    ways = covered | {("other", *way) for cell, *way in covered if cell not in WHOLE}
    for cell, loops in {"other": CELLS["gru"].loops, **{cell: spec.loops for cell, spec in CELLS.items()}}.items():
        for loop in set(loops) - set(NOT_EMULATED):
            kinds = ("tf32", "bf16") if loop in ("resident", "split_registers") else KINDS
            shared = {"split_registers": (True,), "streamed": (False, True)}.get(loop, (False,))
            kinds = kinds if cell in ("other", *WHOLE) else ("tf32",)
            missing = set(itertools.product([cell], [loop], shared, kinds, ("fwd", "bwd"))) - ways
            assert not missing
    for loop in {case.loop for case in CASES}:
        cases = [case for case in CASES if case.loop == loop]
        assert {case.reset_state for case in cases} == set(tiling.RESET_STATES)
        assert {case.reverse for case in cases} == {False, True, "bidirectional"}
        assert any(case.seed is not None for case in cases) and any(case.groups > 1 for case in cases)


@pytest.mark.parametrize("loop", ["resident", "fma", "split_registers", "streamed"])
def test_missing_barriers_are_found(loop):
    """A kernel without one of its barriers has a race, unless another barrier makes that one redundant.

    With Triton 3.7, at most 6 of 28 barriers are redundant, with 3.6 9 of 22.
    """
    cases = [case for case in CASES if case.loop == loop and case.seed is None and "gru" in cells_of(case)]
    launch = launch_of(max(cases, key=lambda case: case.hidden), "gru", "fwd")
    (compiled,) = launch.compile()
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    barriers, unnoticed = [*re.finditer(r"\bbar\.sync\s+0;", ptx)], 0
    assert barriers
    for barrier in barriers:
        without = ptx[: barrier.start()] + ptx[barrier.end() :]
        kernel = Kernel(without, metadata.name, metadata.shared, metadata.num_warps)
        try:
            emulated.run(launch, arrays_of(launch.problem), [kernel])
        except PTXError as e:
            assert "race in shared memory" in str(e)
        else:
            unnoticed += 1
    assert unnoticed < len(barriers) / 2
