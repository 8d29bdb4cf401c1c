"""Tests that tilings which differ only in how they divide sequences into tiles give the same bits."""

import dataclasses
import functools
import itertools

import cases
import jax
import numpy as np
import pytest
from tilings import COMPILED, DIRECTIONS, fits, for_width, outputs

from torch_bridge import cells, rules
from torch_bridge.tiling import GPUS, PROFILES, Device, candidates, heuristic, with_residual_dtypes
from torch_bridge.tiling.streamed import SharedStreamed, Streamed

CELLS = ("gru", "lstm")
# The sequences of two models, with two groups each, fill whole tiles and parts of tiles.
LAYOUT = {"models": 2, "groups": 4, "batch": 11, "steps": 9}


def assert_same(problem, device, tiling, place, tiles):
    """Asserts the same bits for all sizes of tiles, and if few programs process all tiles in turn."""
    few = dataclasses.replace(device, multiprocessors=tiling.splits)
    first, *others = [
        outputs(problem, d, dataclasses.replace(tiling, block_b=block_b), place)
        for block_b, d in itertools.product(tiles, (device, few) if tiling.splits > 1 else (device,))
    ]
    for other in others:
        for name, x in first.items():
            np.testing.assert_array_equal(other[name], x, err_msg=name)


def multiply(a, b, dtype):
    """Returns `a @ b`, with each element summed in the same order for all shapes, which BLAS does not do."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        total += a[:, k, None].astype(dtype) * b[None, k].astype(dtype)
    return total


@pytest.mark.quick("direction")
@pytest.mark.interpret
@pytest.mark.parametrize(
    "tiling", [Streamed(64, 8, 4), SharedStreamed(16, 8, 32, 3, 4, 2)], ids=["one-program", "shared"]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", cells.CELLS)
def test_tiles_of_any_size_give_the_same_bits_interpreted(monkeypatch, cell, direction, tiling):
    from triton.runtime import interpreter

    from benchmarks.problems import make_problem

    class Numpy:
        matmul = staticmethod(multiply)

        def __getattr__(self, name):
            return getattr(np, name)

    monkeypatch.setattr(interpreter, "np", Numpy())
    problem = dataclasses.replace(make_problem(cell, direction, "tf32", 40, 1), **LAYOUT | {"batch": 9, "steps": 2})
    assert_same(problem, Device(interpreted=True), tiling, "cpu", (8, 32))


# Each variant has hidden sizes, a tiling for them, and sizes of tiles.
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
@pytest.mark.parametrize("variant", COMPILED)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_tiles_of_any_size_give_the_same_bits(cell, direction, variant, kind):
    from benchmarks.problems import make_problem
    from torch_bridge import gpu

    device = gpu.device(0)
    widths, tiling, tiles = COMPILED[variant]
    if tiling.loop in ("split", "rows") and not device.has_wgmma:
        pytest.skip("the kernel multiplies with wgmma, which this GPU does not have")
    for hidden in widths:
        problem = dataclasses.replace(make_problem(cell, direction, kind, hidden, 1), **LAYOUT)
        fitted = for_width(tiling, hidden)
        sizes = [b for b in tiles if fits(problem, device, dataclasses.replace(fitted, block_b=b))]
        if len(sizes) > 1:
            assert_same(problem, device, fitted, "cuda", sizes)


@pytest.mark.quick("cell")
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("cell", cells.CELLS)
def test_cells_have_only_the_loops_that_their_entries_name(cell, profile):
    from benchmarks.problems import KINDS, make_problem

    device, found = PROFILES[profile], set()
    for direction, kind, hidden, batch in itertools.product(DIRECTIONS, KINDS, (24, 64, 128, 300, 700), (1, 300)):
        found |= {c.loop for c in candidates(make_problem(cell, direction, kind, hidden, batch), device)}
    named = set(cells.CELLS[cell].loops)
    assert found == (named if device.has_wgmma else named - {"split", "rows"})


def test_a_gpu_that_is_no_profile_runs_the_kernels_of_one():
    """They differ in the number of SMs, which no kernel is compiled for."""
    compiled = {(gpu.capability, gpu.shared_memory, gpu.threads) for gpu in PROFILES.values()}
    others = [gpu for gpu in GPUS.values() if gpu.capability >= rules.LOWEST_CAPABILITY]
    assert len(others) > len(PROFILES)
    assert {(gpu.capability, gpu.shared_memory, gpu.threads) for gpu in others} == compiled


@pytest.mark.parametrize("hidden", [24, 64, 128, 300])
@pytest.mark.parametrize("cell", cells.CELLS)
def test_residuals_declared_float32_get_the_dtypes_that_kernels_save(cell, hidden):
    """The kernels that multiply in full float32 save float32, the others float16, but for the carry gate."""
    from benchmarks.problems import make_problem

    device, spec = PROFILES["h200"], cells.CELLS[cell]
    problem = make_problem(cell, "fwd", "tf32", hidden, 16, halves=False)
    dtypes = dict(with_residual_dtypes(problem, device).dtypes)
    saved = "float32" if heuristic(problem, device).loop == "fma" else "float16"
    for name, _ in spec.residuals:
        assert dtypes[name] == ("float32" if name == "carry_gate" else saved)
    assert not problem.has_packed_residuals
    unsaved = tuple((name, x) for name, x in problem.dtypes if name not in dict(spec.residuals))
    assert with_residual_dtypes(dataclasses.replace(problem, dtypes=unsaved), device).dtypes == unsaved
    if spec.packed_residuals:
        words = make_problem(cell, "fwd", "tf32", 128, 16, in_place=True)
        assert words.has_packed_residuals and with_residual_dtypes(words, device) == words


@pytest.mark.interpret
@pytest.mark.parametrize("reset_state", [None, "h", "tbh"])
@pytest.mark.parametrize("cell", CELLS)
def test_problems_made_for_torch_match_those_of_jax(monkeypatch, cell, reset_state):
    """Checks that `make_problem` and `make_arrays` give the arrays, shapes and dtypes of a call in JAX."""
    from benchmarks.problems import make_arrays, make_problem, outputs_of, shape_of
    from jaxrnn._bridge.recurrence import RecurrenceKind

    found, original = [], RecurrenceKind.problem

    def problem_of(kind, arrays):
        problem, results = original(kind, arrays), kind.types(arrays)
        found.append((problem, {name: x.shape for name, x in (arrays | results).items()}, [*results]))
        return problem

    monkeypatch.setattr(RecurrenceKind, "problem", problem_of)
    all_states = cell == "lstm" and reset_state is not None
    case = cases.Case(cell, T=3, B=5, H=40, precision="default", reset_state=reset_state, cells=all_states)
    inputs = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in cases.make_inputs(case).items() if x is not None
    }
    jax.jit(functools.partial(cases._with_gradients, case, "triton")).lower(inputs)
    kind = {None: "zeros", "h": "fixed", "tbh": "stepped"}[reset_state]
    assert [problem.direction for problem, _, _ in found] == ["fwd", "bwd"]
    for problem, shapes, results in found:
        made = make_problem(cell, problem.direction, "tf32", 40, 5, steps=3, reset_state=kind, halves=False)
        assert dict(made.dtypes) == dict(problem.dtypes)
        backward = {} if problem.direction == "fwd" else {"reset_state": "zeros"}  # the backward pass does not use it
        assert dataclasses.replace(made, dtypes=problem.dtypes, **backward) == problem
        assert shapes == {name: shape_of(made, name) for name in shapes}
        assert sorted(results) == sorted(outputs_of(made))
        arrays = make_arrays(made, "cpu")
        assert {name: str(x.dtype).removeprefix("torch.") for name, x in arrays.items()} == dict(made.dtypes)
        assert {name: tuple(x.shape) for name, x in arrays.items()} == shapes
