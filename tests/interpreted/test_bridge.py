"""Tests the bridge from JAX to the kernels: precisions, the choice of tilings, keys of kernels, and addresses."""

import dataclasses
import functools
import itertools
import re

import calls
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from jax.lax import Precision

import jaxrnn
from jaxrnn import _bridge, kernel_vjp
from jaxrnn._bridge import availability, recurrence
from torch_bridge.tiling.devices import PROFILES, Device

# (JAX's precision, the kernels' precision up to 32 hidden units, and above)
PRECISIONS = [
    (None, "tf32x3", "tf32"),
    ("default", "tf32x3", "tf32"),
    ("fastest", "tf32x3", "tf32"),
    ("bfloat16", "tf32x3", "tf32"),
    (Precision.DEFAULT, "tf32x3", "tf32"),
    ("high", "tf32x3", "tf32x3"),
    ("tensorfloat32", "tf32x3", "tf32x3"),
    (Precision.HIGH, "tf32x3", "tf32x3"),
    ("highest", "tf32x3", "tf32x3"),
    ("float32", "tf32x3", "tf32x3"),
    (Precision.HIGHEST, "tf32x3", "tf32x3"),
    ((Precision.DEFAULT, Precision.DEFAULT), "tf32x3", "tf32"),
    (("default", "highest"), None, None),
    ("BF16_BF16_F32", None, None),
    (jax.lax.DotAlgorithmPreset.F32_F32_F32, None, None),
]


@pytest.mark.parametrize(("precision", "narrow", "wide"), PRECISIONS, ids=lambda x: str(x).replace(" ", ""))
def test_kernel_precision_follows_the_precision_of_jax(precision, narrow, wide):
    for hidden, want in ((1, narrow), (32, narrow), (33, wide), (1024, wide)):
        assert kernel_vjp.kernel_precision(precision, hidden) == want


def test_kernel_precision_without_an_argument_follows_the_default_of_jax():
    with jax.default_matmul_precision("float32"):
        assert kernel_vjp.kernel_precision(None, 64) == "tf32x3"
        assert kernel_vjp.kernel_precision("default", 64) == "tf32"
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert kernel_vjp.kernel_precision(None, 64) is None


@functools.cache
def traced(case):
    """Returns the problems of the launches of `case` by direction. The launches are lowered, but do not run."""
    found, original = {}, recurrence.RecurrenceKind.problem

    def problem(*args):
        result = original(*args)
        found[result.direction] = result
        return result

    shapes = {name: shape_of(x) for name, x in cases.make_inputs(case).items() if x is not None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence.RecurrenceKind, "problem", problem)
        jax.jit(functools.partial(cases._with_gradients, case, "triton")).lower(shapes)
    assert found.keys() == {"fwd", "bwd"}
    return found


def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# One case for each kind of product, which the heuristic distinguishes by dtype of the operands and precision.
KINDS = {"tf32": {}, "tf32x3": {"precision": "highest"}, "16-bit": {"dtype": "f16"}}


@pytest.fixture(params=itertools.product(("gru", "lstm"), ("fwd", "bwd"), KINDS), ids="-".join)
def problem(request):
    """Returns a small problem for each cell, direction and kind of product."""
    cell, direction, kind = request.param
    return traced(Case(cell, T=3, B=2, H=40, reset_state="tbh", **KINDS[kind]))[direction]


@pytest.mark.interpret
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_default_precision_of_jax_reaches_the_kernels(cell):
    case = Case(cell, T=3, B=2, H=40, D=3, precision=None)
    assert {problem.precision for problem in traced(case).values()} == {"tf32"}
    with jax.default_matmul_precision("highest"):
        assert {problem.precision for problem in traced.__wrapped__(case).values()} == {"tf32x3"}


# The profiles, and two parts of an H200 as MIG makes them.
DEVICES = PROFILES | {"part": Device(multiprocessors=26), "small-part": Device(multiprocessors=16)}
every_profile = pytest.mark.parametrize("device", PROFILES.values(), ids=PROFILES)
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
HIDDEN = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 192, 256, 500, 512, 513, 1000, 1024, 1536, 2048, 4096)


@pytest.mark.quick("problem")
@pytest.mark.interpret
@every_device
def test_tiling_covers_all_units_and_fits_the_device(problem, device):
    from torch_bridge.tiling import heuristic, max_hidden

    widths = [hidden for hidden in HIDDEN if hidden <= max_hidden(device)]
    for hidden, batch, models, steps in itertools.product(widths, (1, 8, 100, 2048, 100_000), (1, 7), (5, 16)):
        p = dataclasses.replace(problem, hidden=hidden, batch=batch, models=models, groups=models, steps=steps)
        config = heuristic(p, device)
        assert config == heuristic.__wrapped__(p, device)
        # programs of "rows" kernels come in fours, those of "split_registers" kernels have 64 units together
        width = {"rows": 128, "split_registers": 64}.get(config.loop, config.block_h)
        covered = config.block_h * config.splits
        assert covered % width == 0 and covered >= hidden > covered - width
        columns = batch * config.pieces
        assert config.block_b * config.tiles(p) >= columns > config.block_b * (config.tiles(p) - 1)
        assert 1 <= config.workers(p, device) <= models * config.tiles(p)
        assert config.shared_memory(p) <= device.shared_memory
        if config.splits > 1:  # the programs wait for one another, so all must run at once
            assert config.workers(p, device) * config.splits <= device.multiprocessors


@pytest.mark.interpret
@pytest.mark.parametrize("multiprocessors", [82, 108, 128, 132])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
def test_number_of_sms_determines_tile_sizes(capability, multiprocessors):
    """On any chip, tiles are as small as possible while all run at once, or have 16 sequences if that saves rounds."""
    from benchmarks.problems import make_problem
    from torch_bridge.tiling import heuristic

    n, device = multiprocessors, Device(capability, multiprocessors)

    def chosen(batch, models, cell="gru", direction="fwd", kind="tf32", hidden=128):
        p = make_problem(cell, direction, kind, hidden, batch)
        config = heuristic(dataclasses.replace(p, models=models, groups=models), device)
        return config.block_b if config.loop == "resident" else None

    for batch, models, want in (
        (4, 1, 1), (n, 1, 1), (n + 1, 1, 2), (2 * n, 1, 2), (4 * n, 1, 4), (8 * n, 1, 8), (8 * n + 1, 1, 16),
        (16 * n, 1, 16), (16 * n + 1, 1, 8), (32 * n, 1, 16),
        (64, n // 8, 8), (64, n // 8 * 2, 16), (64, n // 4 + 1, 8),
    ):  # fmt: skip
        tile = functools.partial(chosen, batch, models)
        assert [tile(), tile(kind="bf16"), tile(kind="bf16", direction="bwd")] == [want] * 3
        assert [tile(direction="bwd"), tile("lstm"), tile(hidden=120)] == [min(want, 8)] * 3


def _takes_a_program_a_sequence(cell, hidden, kind, batch, device=Device(), **changes):  # noqa: B008  # frozen class
    """Returns whether one program per sequence is chosen for the forward pass, and whether for the backward pass."""
    from benchmarks.problems import make_problem
    from torch_bridge.tiling import heuristic

    problems = [make_problem(cell, direction, kind, hidden, batch, **changes) for direction in ("fwd", "bwd")]
    return [heuristic(problem, device).loop == "fma" for problem in problems]


@pytest.mark.interpret
@every_profile
def test_few_units_use_one_program_per_sequence(device):
    """The limit in float32 is 32 units, 128 without TF32, or 64 with few sequences; in 16 bits it is 32 units."""
    taken, n = functools.partial(_takes_a_program_a_sequence, device=device), device.multiprocessors
    both, none = [True, True], [False, False]
    for cell in ("gru", "lstm"):
        for hidden, kind in itertools.product((1, 16, 32), ("tf32x3", "tf32")):
            assert taken(cell, hidden, kind, 4) == taken(cell, hidden, kind, 9999) == both
            assert taken(cell, hidden, kind, 4, reset_state="stepped") == both
        assert taken(cell, 32, "bf16", 16 * n) == both and taken(cell, 32, "bf16", 16 * n + 1) == none
        assert taken(cell, 64, "tf32x3", 8 * n) == both
        assert taken(cell, 64, "tf32", 2 * n) == both and taken(cell, 64, "tf32", 2 * n + 1) == none
        assert taken(cell, 64, "tf32", 4, reset_state="stepped") == both and taken(cell, 65, "tf32", 4) == none
        assert taken(cell, 33, "bf16", 4) == none
        assert taken(cell, 65, "tf32x3", n) == taken(cell, 128, "tf32x3", n) == both
        assert taken(cell, 65, "tf32x3", n, reset_state="stepped") == both
        assert taken(cell, 129, "tf32x3", n) == none
    assert taken("gru", 64, "tf32x3", 8 * n + 1) == [False, True] and taken("lstm", 64, "tf32x3", 8 * n + 1) == both


def _variants(device):
    """Returns the variants of kernels that are candidates for at least one of many problems on `device`."""
    from benchmarks.problems import KINDS, make_problem
    from torch_bridge.tiling import candidates

    options = itertools.product(("gru", "lstm"), ("fwd", "bwd"), KINDS, (1, 32, 64, 128, 256, 512, 1000), (1, 64, 2048))
    return {config.loop for option in options for config in candidates(make_problem(*option), device)}


@pytest.mark.interpret
@every_device
def test_all_kernels_without_wgmma_run_from_capability_8_on(device):
    needs_wgmma = {"split", "rows"}
    anywhere = {"streamed", "resident", "fma", "split_registers"}
    assert _variants(device) == anywhere | (needs_wgmma if device.capability == 90 else set())


@pytest.mark.interpret
@pytest.mark.parametrize("device", [Device(75), Device(interpreted=True)], ids=["sm_75", "interpreted"])
def test_without_gluon_only_plain_kernels_run(device):
    assert _variants(device) == {"streamed"}


@pytest.mark.interpret
@every_profile
def test_lstm_keeps_as_many_gates_in_shared_memory_as_fit(device):
    """Backward, an LSTM of 128 units keeps the weights of two gates there, or of one if a program has just 99 KB."""
    from benchmarks.problems import make_problem
    from torch_bridge.tiling import heuristic

    forward, backward = (
        heuristic(make_problem("lstm", direction, "tf32x3", 128, 4), device) for direction in ("fwd", "bwd")
    )
    assert forward.loop == backward.loop == "fma"
    assert forward.shared_gates == 1
    assert backward.shared_gates == (1 if device.capability in (86, 89, 120) else 2)


@pytest.mark.interpret
@every_device
def test_choice_does_not_depend_on_the_name_of_the_device(device):
    """Tilings are computed from the other facts about the device, and none is looked up by its name."""
    from benchmarks.problems import KINDS, make_problem
    from torch_bridge import input_projections, norms, tiling, weight_grads

    others = [dataclasses.replace(device, name=name) for name in ("", "NVIDIA A40", "NVIDIA H200")]
    options = itertools.product(("gru", "lstm"), ("fwd", "bwd"), KINDS, (1, 33, 64, 128, 256, 1000), (4, 300, 2048))
    for problem in (make_problem(*option) for option in options):
        for other in others:
            assert tiling.candidates(problem, other) == tiling.candidates(problem, device)
    projections = [
        input_projections.Problem(1, 8192, inputs, 384, (("x", "bfloat16"), ("xp", "float16"))) for inputs in (64, 256)
    ]
    rows = [
        norms.Problem("layer", "bwd", 1, 4096, columns, 1e-6, (("dy", "float32"), ("x", "float32"), ("dx", "float32")))
        for columns in (512, 16384)
    ]
    gradients = weight_grads.Problem(1, 1, 64, 64, 128, 128, 384, (("x", "bfloat16"), ("dhn", "bfloat16")))
    for other in others:
        for module, problem in [
            *((input_projections, problem) for problem in projections),
            *((norms, problem) for problem in rows),
            (weight_grads, gradients),
        ]:
            assert module.choose(problem, other) == module.choose(problem, device)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("cell", "hidden", "steps", "forward", "backward"),
    [
        ("gru", 16, 1, None, None), ("lstm", 16, 2, None, None),
        ("gru", 32, 1, 2, 2), ("lstm", 32, 7, 14, 14), ("gru", 32, 11, 22, 22), ("gru", 32, 12, None, None),
        ("gru", 64, 2, 2, 2), ("gru", 64, 15, 4, 4), ("gru", 64, 16, 8, None),
        ("lstm", 64, 4, 4, 4), ("lstm", 64, 5, 4, None), ("lstm", 64, 15, 4, None), ("lstm", 64, 16, None, None),
    ],
)  # fmt: skip
def test_few_steps_of_many_sequences_use_tiles(cell, hidden, steps, forward, backward):
    """`forward` and `backward` are the most sequences per SM with one program for each; None means any number."""
    for i, most in enumerate((forward, backward)):
        batches = (9999,) if most is None else (most * 132, most * 132 + 1)
        taken = [_takes_a_program_a_sequence(cell, hidden, "tf32x3", batch, steps=steps)[i] for batch in batches]
        assert taken == [True, False][: len(batches)], (i, batches)


@pytest.mark.interpret
def test_few_steps_of_a_wide_gru_use_the_cheaper_kernel():
    taken = functools.partial(_takes_a_program_a_sequence, "gru", 128, "tf32x3")
    assert taken(528, steps=2) == [False, False] and taken(528, steps=7) == taken(132, steps=2) == [True, True]


def _residual_dtypes(cell, direction, hidden, batch, kind="tf32", device=Device(), **changes):  # noqa: B008  # frozen class
    """Returns the dtypes of the residuals that a kernel stores or loads if the traced program declares float32."""
    from benchmarks.problems import make_problem
    from torch_bridge.tiling import heuristic, with_residual_dtypes

    make = functools.partial(make_problem, cell, direction, kind, hidden, batch, **changes)
    wide = make(halves=False)
    held = with_residual_dtypes(wide, device)
    assert heuristic(held, device) == heuristic(wide, device) and held in (wide, make())
    return {dtype for name, dtype in held.dtypes if name in ("local_grads", "dc_dh")}


@pytest.mark.interpret
def test_pieces_fill_the_gpu_that_sequences_leave_free():
    from benchmarks.problems import make_problem
    from torch_bridge.tiling import heuristic

    def chosen(hidden, batch, steps=1024, models=1, cell="gru", direction="fwd", resets=True, device="h200"):
        p = make_problem(cell, direction, "tf32", hidden, batch, steps=steps)
        dtypes = tuple(named for named in p.dtypes if resets or named[0] != "reset")
        p = dataclasses.replace(p, models=models, groups=models, dtypes=dtypes)
        config = heuristic(p, PROFILES[device])
        if config.pieces > 1:
            assert models * config.tiles(p) * config.splits <= PROFILES[device].multiprocessors
        return config.pieces

    for direction in ("fwd", "bwd"):
        assert chosen(256, 8, direction=direction) == chosen(256, 8, cell="lstm", direction=direction) == 30
        assert chosen(512, 1, direction=direction) == 56
        assert chosen(20, 12, direction=direction) == 11
    assert (chosen(128, 16), chosen(128, 66), chosen(128, 67), chosen(128, 2048)) == (8, 2, 1, 1)
    # shorter ones were not measured, but for those of an LSTM, whose steps take 4 to 5 % longer in pieces
    assert chosen(128, 16, steps=127) == chosen(128, 16, cell="lstm", steps=1023) == chosen(256, 8, steps=255) == 1
    for hidden in (32, 64, 128):
        assert chosen(hidden, 16, steps=128) == 8
    assert chosen(128, 16, cell="lstm", steps=1024) == 8
    assert chosen(256, 1, steps=256) == 32  # at least eight steps for each
    assert (chosen(128, 8, models=8), chosen(128, 8, models=16)) == (2, 1)
    assert chosen(1024, 8) == 1  # of two pieces, each would slow the other down
    assert (chosen(256, 8, device="a100"), chosen(128, 64, device="a100")) == (27, 1)
    assert chosen(128, 16, resets=False) == chosen(256, 8, resets=False) == 1


@pytest.mark.interpret
def test_programs_exchange_in_clusters_where_all_of_them_run_at_once():
    from benchmarks.problems import make_problem
    from torch_bridge.tiling import heuristic

    def chosen(hidden, batch, steps=128, cell="gru", resets=True, models=1, device=PROFILES["h200"], state="zeros"):
        p = make_problem(cell, "bwd", "tf32", hidden, batch, steps=steps, reset_state=state)
        dtypes = tuple(named for named in p.dtypes if resets or named[0] != "reset")
        p = dataclasses.replace(p, models=models, groups=models, dtypes=dtypes)
        config = heuristic(p, device)
        assert config.cluster in (1, config.splits)
        if config.cluster > 1:
            assert config.loop == "split_registers" and not config.workspaces(p, device)
            assert config.workers(p, device) == config.rounds(p, device) * models * config.tiles(p)
        return config.cluster, config.pieces

    assert chosen(256, 8) == chosen(256, 240, cell="lstm") == chosen(256, 120, models=2) == (4, 1)
    assert chosen(256, 241) == chosen(256, 120, models=3) == (1, 1)
    assert chosen(192, 8 * 39, cell="rms_norm_gru") == (3, 1) and chosen(192, 8 * 39 + 1) == (1, 1)
    assert chosen(512, 56) == (16, 1) and chosen(512, 57) == chosen(1024, 8) == (1, 1)
    assert chosen(256, 8, steps=1024) == (4, 30)
    # at least half as many pieces as through L2, of which there are 13
    assert chosen(320, 8, steps=1024) == (10, 7) and chosen(320, 8, steps=1024, resets=False) == (10, 1)
    assert chosen(512, 1, steps=1024, cell="lstm") == (16, 56)
    for hidden in (448, 512):  # pieces would spill in clusters
        assert chosen(hidden, 1, steps=1024, cell="lstm", state="stepped")[0] == 1
    # on Blackwell pieces would spill
    assert chosen(256, 8, device=PROFILES["b200"], steps=1024) == chosen(256, 240, device=PROFILES["b200"]) == (4, 1)
    for hidden, state in ((250, "zeros"), (256, "stepped")):  # an LSTM spills there
        assert chosen(hidden, 8, device=PROFILES["h200"], cell="lstm", state=state)[0] == 4
        assert chosen(hidden, 8, device=PROFILES["b200"], cell="lstm", state=state) == (1, 1)
    fewer = dataclasses.replace(PROFILES["h200"], multiprocessors=114, clusters=(0, 114, 57, 30, 25))
    assert chosen(256, 200, device=fewer) == (4, 1)
    assert chosen(256, 201, device=fewer) == chosen(320, 8, device=fewer) == (1, 1)
    for other in (PROFILES["a100"], PROFILES["rtx5090"]):
        assert chosen(256, 8, device=other) == (1, 1)


@pytest.mark.interpret
@every_profile
def test_a_relu_of_up_to_128_units_runs_a_program_a_sequence(device):
    """Up to two sequences per SM where TF32 is allowed, one if there is a single step, and never if wider."""
    from benchmarks.problems import make_problem
    from torch_bridge.tiling import heuristic

    sms = device.multiprocessors
    for hidden, direction in itertools.product((65, 100, 128), ("fwd", "bwd")):
        of = functools.partial(make_problem, "simple_relu", direction, "tf32", hidden)
        loops = [heuristic(of(batch), device).loop for batch in (1, sms, 2 * sms, 2 * sms + 1, 9 * sms)]
        assert loops == ["fma", "fma", "fma", "streamed", "streamed"], (hidden, direction)
        loops = [heuristic(of(batch, steps=1), device).loop for batch in (sms, sms + 1)]
        assert loops == ["fma", "streamed"], (hidden, direction)
        assert heuristic(of(2, steps=64), device) == heuristic(of(2, steps=64, reset_state="stepped"), device)
    for hidden, kind in ((129, "tf32"), (128, "bf16")):
        assert heuristic(make_problem("simple_relu", "fwd", kind, hidden, 4), device).loop != "fma"


@pytest.mark.interpret
@every_profile
def test_residuals_are_as_precise_as_the_products(device, monkeypatch):
    """Residuals are float32 for few sequences of 33 to 64 units where TF32 is allowed, with any reset state."""
    few = 2 * device.multiprocessors
    for cell, direction in itertools.product(("gru", "lstm"), ("fwd", "bwd")):
        held = functools.partial(_residual_dtypes, cell, direction, device=device)
        assert held(33, few) == held(64, few) == held(48, 4, "tf32x3") == {"float32"}
        assert held(33, few + 1) == held(64, few + 1) == held(65, 4) == {"float16"}
        assert _residual_dtypes(cell, direction, 48, 4, device=Device(75)) == {
            "float16"
        }  # only plain kernels run there
    assert _residual_dtypes("gru", "fwd", 64, 9999, device=device, in_place=True) == {"float32"}
    assert _residual_dtypes("lstm", "fwd", 48, 4, device=device, reset_state="stepped") == {"float32"}
    monkeypatch.setattr(availability, "chosen_device", lambda: device)
    for hidden, kind in itertools.product((33, 63, 64, 65, 96, 128), ("zeros", "fixed", "stepped")):
        for batch in (4, few, few + 1):
            float32_as_it_is, _ = _takes_a_program_a_sequence("gru", hidden, "tf32", batch, device, reset_state=kind)
            assert _bridge.may_have_float32_residuals(hidden, batch) == float32_as_it_is


@calls.kernels_only
@pytest.mark.parametrize("mapped", ["sequences", "models"])
@calls.every_cell
def test_casts_of_residuals_are_dropped(cell, mapped, implementation):
    """Residuals traced as float32 are float16 after `vmap` adds sequences; a jitted gradient has no casts left."""
    lead = (2,) if mapped == "models" else ()
    batch = (2, 150) if mapped == "sequences" else (150,)
    *arguments, _ = calls.arguments(cell, batch, steps=2, hidden=48, lead=lead)
    call = calls.with_gradients(calls.runner(cell, implementation, precision=None))
    lowered = jax.jit(jax.vmap(call, (None, 0, 1, 1, None) if mapped == "sequences" else 0)).lower(*arguments, None)
    assert re.search(r"xf16>\) -> tensor<\w*xf32>", lowered.as_text())
    text = lowered.compile().as_text()
    assert "f16[" in text and not re.search(r"= f16\[\S* convert\(", text)


@calls.kernels_only
def test_residuals_beyond_float16_are_clamped(implementation):
    """Residuals are clamped whichever kernels run, also if more cotangents than sequences use another backward kernel.

    Some kernels on Hopper multiply gate gradients in 16 bits, scaled for the largest gradient of the sequence. A
    gradient times a residual above 32768 may not fit there. In this test, only small gradients meet such residuals.
    """
    params, (c, h), xs, *_ = calls.arguments("lstm", (3,), steps=2, hidden=48)
    beyond = jnp.arange(48) % 2 == 0
    c = jnp.where(beyond, 1e6, 1.0) * c

    def run(params, c, xs, remat=False):
        run = functools.partial(jaxrnn.lstm, precision="default", remat=remat, implementation=implementation)
        return run(params, (c, h), xs)[0][0]

    _, vjp = jax.vjp(run, params, c, xs)
    _, recomputing = jax.vjp(functools.partial(run, remat=True), params, c, xs)
    cotangents = jnp.where(beyond, 0.1, 1.0) * calls.random_like(jnp.zeros((300, *c.shape)))
    together = jax.vmap(vjp)(cotangents)
    alone, recomputed = (calls.stack([vjp(each) for each in cotangents[:2]]) for vjp in (vjp, recomputing))
    for x, y, z in zip(*map(jax.tree.leaves, (together, alone, recomputed)), strict=True):
        assert all(np.isfinite(each).all() for each in (x, y, z))
        assert max(cases.oracle.error(x[:2], y), cases.oracle.error(z, y)) < 5e-3


@calls.kernels_only
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("largest", [2e5, 1e6])
def test_residuals_of_a_norm_beyond_float16_are_clamped(norm, largest, implementation):
    """The local gradients of the last gate and of the norm grow with the state, and so may exceed float16 too."""
    params, h, xs, *_ = calls.arguments(f"{norm}_norm_gru", (3,), steps=2, hidden=48)
    h = jnp.where(jnp.arange(48) % 2 == 0, largest, 1.0) * h

    def run(params, h, xs, remat=False):
        options = {"norm": norm, "precision": "default", "remat": remat, "implementation": implementation}
        return jaxrnn.norm_gru(params, h, xs, **options)[1]

    ys, vjp = jax.vjp(run, params, h, xs)
    _, recomputing = jax.vjp(functools.partial(run, remat=True), params, h, xs)
    cotangents = calls.random_like(ys)
    for x in jax.tree.leaves((vjp(cotangents), recomputing(cotangents))):
        assert np.isfinite(x).all()


@pytest.mark.interpret
@every_device
def test_hidden_width_beyond_the_limit_of_the_device_raises(problem, device):
    from torch_bridge.tiling import UnsupportedError, heuristic

    widest = 64 * device.multiprocessors
    assert heuristic(dataclasses.replace(problem, hidden=widest), device).splits == device.multiprocessors
    assert issubclass(UnsupportedError, NotImplementedError)
    text = rf'hidden width of {widest + 1} is more than .* can share \(at most {widest}\); pass implementation="xla"'
    with pytest.raises(UnsupportedError, match=text):
        heuristic(dataclasses.replace(problem, hidden=widest + 1), device)


@pytest.mark.interpret
@pytest.mark.parametrize(("hidden", "shortest"), [(24, 1), (300, 8)])  # wide states use another kernel for few steps
def test_key_of_a_kernel_does_not_depend_on_steps_and_batch(problem, hidden, shortest):
    from torch_bridge.recurrences import Launch

    def compiled_for(**changes):
        launch = Launch(dataclasses.replace(problem, **({"hidden": hidden} | changes)), Device())
        (kernel,) = launch.kernels
        return launch.config.pieces > 1, kernel.key

    keys = {}  # sequences that may run in pieces have another kernel
    for more, batch, groups in (
        (2, 2, 1),
        (0, 2, 1),
        (3, 2, 1),
        (2, 1, 1),
        (15, 7, 1),
        (1000, 8, 1),
        (2, 1, 5),
        (2, 2, 4),
    ):
        in_pieces, key = compiled_for(steps=shortest + more, batch=batch, groups=groups)
        first = keys.setdefault(in_pieces, key)
        assert (key, hash(key)) == (first, hash(first))
    for changes in ({"reverse": True}, {"dtypes": problem.dtypes[:-1]}):
        assert compiled_for(**changes)[1] not in keys.values()
    common = tuple((name, x) for name, x in problem.dtypes if name not in ("cs", "dcs") and "reset_" not in name)
    small, large = (compiled_for(hidden=512, batch=batch, reset_state="zeros", dtypes=common) for batch in (2, 100_000))
    assert small != large


@pytest.mark.interpret
def test_view_has_the_address_of_the_array():
    import torch

    from torch_bridge import dlpack

    array, tensor = np.arange(24, dtype=np.float32).reshape(4, 6), torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    addresses = [(x, x.ctypes.data) for x in (array, array[1:], array[2:, 3:], array.T, array[::2], array > 3)]
    addresses += [(x, x.data_ptr()) for x in (tensor, tensor[1:], tensor[2:, 3:], tensor.T, tensor[::2], tensor > 3)]
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, bool):
        x = jnp.ones((4, 6), dtype)
        addresses.append((x, x.unsafe_buffer_pointer()))
    for x, address in addresses:
        assert dlpack.view(x) == dlpack.View(address, dlpack.CPU, 0)
    assert len({address for _, address in addresses}) >= 11  # addresses include offsets


@pytest.mark.quick("problem")
@pytest.mark.interpret
def test_launch_passes_all_arguments_in_the_order_of_the_kernel(problem):
    from torch_bridge.recurrences import Launch

    class Kernel:
        function = packed_metadata = None

        def run(self, *arguments):
            self.arguments = arguments

    launch = Launch(problem, Device())
    (call,), kernel = launch.kernels, Kernel()
    launch._ready[1] = [(kernel, call.grid, call.cluster, call.arguments())]
    names = [name for name, _ in problem.dtypes] + [name for name, *_ in launch.workspaces]
    addresses = {name: 1000 + i for i, name in enumerate(names)}
    launch(stream=7, ordinal=1, addresses=addresses)
    assert kernel.arguments[:4] == (call.grid, 1, 1, 7)
    expected = addresses | dict(call.scalars) | dict(call.constants)
    given = dict(zip(call.function.arg_names, kernel.arguments[9:], strict=True))
    assert given == {name: expected.get(name, expected.get(name.removesuffix("_ptr"))) for name in given}
    assert set(addresses) <= {name.removesuffix("_ptr") for name in given}


@pytest.mark.torch
def test_weight_gradients_under_vmap_over_an_empty_axis():
    lead = (0, 1, 1, 2, 3)  # the mapped axis, models, groups, steps and batch
    arrays = {"x": (*lead, 8), "hs": (*lead, 128), "h0": (0, 1, 1, 3, 128), "dxp": (*lead, 384), "dhn": (*lead, 128)}
    run = jax.vmap(functools.partial(_bridge.launch_weight_grads, reverse=False))
    got = jax.eval_shape(run, {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()})
    shapes = {name: x.shape for name, x in got.items()}
    assert shapes == {"w_ih": (0, 1, 8, 384), "w_hh": (0, 1, 128, 384), "bias": (0, 1, 384), "b_hn": (0, 1, 128)}
