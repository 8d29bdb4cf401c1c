"""Compares the kernels in Triton's interpreter, end to end under `jit` on the CPU, with float64."""

import functools

import cases
import jax
import numpy as np
import oracle
import pytest
from cases import Case

from jaxrnn import cells
from jaxrnn.kernel_vjp import chunks, recompute, recurrence, spec
from torch_bridge import tiling

pytestmark = pytest.mark.interpret

TF32 = 2e-3


def check(case, got, xla, want):
    """Compares errors with twice XLA's, or in TF32 with a constant, because XLA on a CPU does not round to TF32."""
    if (case.dtype, case.precision) == ("f32", "default"):
        cases.compare(got, want, lambda name: TF32)
    else:
        cases.check(case, got, xla, want)


@pytest.mark.quick("case.cell", "case.reset_state")
@pytest.mark.parametrize("case", cases.INTERPRETED, ids=str)
def test_outputs_and_gradients_match_the_oracle(case):
    # of one step of one sequence, the error of one draw is mostly chance
    inputs = [cases.make_inputs(case, draw) for draw in range(cases.draws(case) if case.T * case.B == 1 else 1)]
    want = cases.stack([cases.run_oracle(case, x) for x in inputs])
    got, xla = (
        cases.stack([cases.run(case, x, implementation) for x in inputs]) for implementation in ("triton", "xla")
    )
    assert got.keys() == want.keys()
    check(case, got, xla, want)


@pytest.mark.quick
@pytest.mark.parametrize("case", cases.INTERPRETED[::3], ids=str)
def test_outputs_without_gradients_match_the_oracle(case):
    inputs = cases.make_inputs(case)
    want = cases.run_oracle(case, inputs)
    got, xla = (cases.run_forward(case, inputs, implementation) for implementation in ("triton", "xla"))
    check(case, got, xla, want)


@pytest.mark.quick
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_programs_process_several_tiles_in_turn(cell, monkeypatch):
    """On a device with two SMs, each model has two tiles, and there is room for one tile at a time."""
    monkeypatch.setattr(tiling, "Device", functools.partial(tiling.Device, multiprocessors=2))
    case = Case(cell, T=2, B=70, H=70, D=7, precision="highest", reset_state="h", models=2)
    inputs = cases.make_inputs(case)
    cases.check(case, cases.run(case, inputs, "triton"), cases.run(case, inputs, "xla"), cases.run_oracle(case, inputs))


def in_chunks(**changes):
    """Returns a case of 7 steps by default: two chunks of 3 steps and a rest."""
    return Case(**({"T": 7, "B": 3, "H": 12, "D": 5, "precision": "highest", "remat": True} | changes))


CHUNKED = [in_chunks(cell=cell, reverse=reverse, reset_state=state, cells=cell == "lstm")
           for cell in ("gru", "lstm") for reverse in (False, True) for state in ("h", "tbh")]  # fmt: skip
CHUNKED += [in_chunks(cell=cell, **changes) for cell in ("gru", "lstm") for changes in (
    {"resets": "none"}, {"T": 6, "resets": "all", "reset_dtype": "float32"},
    {"time_major": False, "reset_state": "tbh"},
    {"models": 2, "reset_state": "bh", "reverse": True}, {"models": 2, "time_major": False, "reverse": True},
    {"H": 70, "reset_state": "tbh"}, {"dtype": "f16", "carry_dtype": "f16", "precision": "default"},
)]  # fmt: skip
CHUNKED += [in_chunks(cell="lstm", proj=5, reverse=reverse, reset_state=state, resets=resets)
            for reverse in (False, True) for resets, state in (("none", None), ("some", "h"))]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_remat_in_chunks_equals_remat_in_one_chunk(case, monkeypatch):
    inputs = cases.make_inputs(case)
    if case.resets == "some":  # at the boundaries of chunks too
        by_time = np.moveaxis(inputs["resets"], (1 if case.models else 0) + (not case.time_major), 0)
        by_time[[2, 3, 5, 6], ..., 0] = by_time[[3, 4, 6], ..., 1] = True
    given = {name: x for name, x in inputs.items() if x is not None}

    def run(case):
        one = functools.partial(cases._with_gradients, case, "triton")
        return {name: np.asarray(x) for name, x in jax.jit(jax.vmap(one) if case.models else one)(given).items()}

    whole = run(case)
    sizes = []
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 3)
    in_chunks = chunks.in_chunks
    monkeypatch.setattr(recurrence, "in_chunks", lambda *args, **kw: sizes.append(args[3]) or in_chunks(*args, **kw))
    got = run(case)
    assert sizes == [3, 3]
    for name, x in whole.items():
        assert oracle.error(got[name], x) <= (2.0**-10 if case.dtype == "f16" else 2.0**-20), name
    check(case, got, cases.run(case, inputs, "xla"), cases.run_oracle(case, inputs))


SEGMENTED = [in_chunks(T=8, cell=cell, reverse=reverse, reset_state=state)
             for cell in cells.CELLS for reverse, state in ((False, "tbh"), (True, "bh"))]  # fmt: skip
SEGMENTED += [in_chunks(T=8, cell=cell, **changes) for cell in ("gru", "lstm") for changes in (
    {"resets": "none"}, {"models": 2, "time_major": False, "reverse": True, "reset_state": "h"}, {"H": 70},
    {"dtype": "f16", "carry_dtype": "f16", "precision": "default"},
)]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_remat_recomputes_segments_side_by_side(case, monkeypatch):
    inputs, counts = cases.make_inputs(case), []
    count_segments = recompute._count_segments
    monkeypatch.setattr(recompute, "_MIN_STEPS", 2)
    monkeypatch.setattr(recompute, "_count_segments", lambda *args: counts.append(count_segments(*args)) or counts[-1])
    got = cases.run(case, inputs, "triton")
    assert counts == ([] if cells.CELLS[case.cell].activations_from_states else [4])
    check(case, got, cases.run(case, inputs, "xla"), cases.run_oracle(case, inputs))


def in_tf32(cell, hidden=128):
    """Returns the static options of a call with float32 arrays at the default precision."""
    return spec.KernelSpec(
        cells.CELLS[cell], reverse=False, time_major=True, precision=None, remat=True, returned=(), hidden=hidden,
        operand_dtype=np.dtype("float32"), reset_state="zeros", kernel_precision=spec.kernel_precision(None, hidden),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "sequences", "count"),
    [(128, 64, 4), (1024, 64, 8), (128, 4096, 1), (63, 1, 1), (100, 1, 2), (127, 1, 1), (1024, 0, 32)],
)
def test_segments_are_equal_and_few_enough(steps, sequences, count):
    assert recompute._count_segments(in_tf32("gru"), steps, sequences) == count


@pytest.mark.parametrize(("hidden", "count"), [(32, 4), (33, 1), (64, 1), (65, 4)])
def test_segments_do_not_change_the_precision(hidden, count):
    """From 33 to 64 units, few sequences are multiplied in full float32, and more in TF32."""
    assert recompute._count_segments(in_tf32("gru", hidden), 128, 64) == count


@pytest.mark.parametrize(
    ("steps", "most", "size"), [(16, 16, 16), (17, 16, 16), (24, 16, 12), (256, 23, 16), (31, 4, 4)]
)
def test_chunks_are_equal_where_possible(steps, most, size, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", most)
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 0)
    xs = jax.ShapeDtypeStruct((1, steps, 4, 8), np.float32)
    assert chunks.chunk_steps(cells.GRU, xs, 8) == size
