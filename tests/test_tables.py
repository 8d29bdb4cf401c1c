"""Tables of measured tilings: what is looked up, what is not, and that those that are shipped hold good."""

import dataclasses

import pytest

from torch_bridge import config
from torch_bridge.config import Device, Entry, KernelConfig, Problem, Table

H200 = Device(name="NVIDIA H200")
ARRAYS = ("w_hh_t", "b_hn", "xp", "h0", "reset", "hs", "h_last")
COMMON = Problem("gru", "fwd", 1, 1, 32, 100, 256, tuple((name, "float32") for name in ARRAYS))


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder of tables that lookups read, empty at first."""
    monkeypatch.setattr(config, "TABLES", tmp_path)
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget():
    config.table.cache_clear()
    config.choose.cache_clear()


def write(folder, problem, tiling, device=H200):
    entry = Entry(*config.key(problem), tiling, us=2.5, heuristic_us=3.0)
    path = Table(device, {"triton": "3.7.1", "commit": "abc"}, (entry,)).save(folder)
    forget()
    return path


def other_tiling(problem=COMMON):
    """One that the problem can run with, and that the heuristic does not choose."""
    heuristic, *others = config.candidates(problem, H200)
    return next(tiling for tiling in others if tiling != heuristic)


def test_an_entry_is_used_for_its_problem_alone(tables):
    tiling = other_tiling()
    write(tables, COMMON, tiling)
    assert config.choose(COMMON, H200) == tiling
    for changes in ({"batch": 65}, {"batch": 128}, {"batch": 50, "groups": 2}, {"steps": 8}, {"reverse": True}):
        assert config.choose(dataclasses.replace(COMMON, **changes), H200) == tiling
    for changes in (
        {"batch": 64}, {"batch": 129}, {"hidden": 255}, {"cell": "lstm"}, {"precision": "tf32x3"}, {"steps": 7},
        {"models": 2, "groups": 2}, {"reset_state": "fixed"},
    ):  # fmt: skip
        problem = dataclasses.replace(COMMON, **changes)
        assert config.choose(problem, H200) == config.heuristic(problem, H200)
    uncommon = dataclasses.replace(COMMON, cell="lstm", dtypes=(*COMMON.dtypes, ("cs", "float32")))
    write(tables, uncommon, config.candidates(uncommon, H200)[-1])
    assert config.choose(uncommon, H200) == config.heuristic(uncommon, H200)


@pytest.mark.parametrize(
    "changes",
    [{"splits": 5}, {"block_b": 128}, {"num_stages": 9}, {"variant": "resident"}],
    ids=lambda x: next(iter(x)),
)
def test_a_tiling_that_the_problem_cannot_run_with_is_not_used(tables, changes):
    write(tables, COMMON, dataclasses.replace(other_tiling(), **changes))
    assert config.choose(COMMON, H200) == config.heuristic(COMMON, H200)


def test_a_dtype_that_has_no_such_kernel_does_not_get_it(tables):
    brain, half = (
        dataclasses.replace(COMMON, dtypes=(("w_hh_t", dtype), *COMMON.dtypes[1:])) for dtype in ("bfloat16", "float16")
    )
    assert config.key(brain) == config.key(half)
    tiling = next(c for c in config.candidates(brain, H200)[1:] if c.variant == "split")
    write(tables, brain, tiling)
    assert config.choose(brain, H200) == tiling
    assert config.choose(half, H200) == config.heuristic(half, H200)


@pytest.mark.parametrize(
    "device",
    [
        Device(),
        Device(name="NVIDIA H100"),
        dataclasses.replace(H200, multiprocessors=114),
        dataclasses.replace(H200, interpreted=True),
    ],
    ids=["nameless", "another", "a part of one", "interpreted"],
)
def test_another_device_has_no_entry(tables, device):
    write(tables, COMMON, other_tiling())
    assert config.choose(COMMON, device) == config.heuristic(COMMON, device)


def test_a_table_survives_a_file(tables):
    lstm = dataclasses.replace(COMMON, cell="lstm", direction="bwd", dtypes=(("w_hh", "bfloat16"),))
    entries = (
        Entry(*config.key(COMMON), other_tiling(), 2.5, 3.0),
        Entry(*config.key(lstm), KernelConfig(64, 16, 64, 4, 4, 4), 1.25, 2.0),
    )
    table = Table(H200, {"driver": "580.1", "commit": "abc"}, entries)
    path = table.save(tables)
    assert path.name == "nvidia-h200.json" and Table.load(path) == table
    text = path.read_text()
    assert Table(H200, table.about, entries[::-1]).save(tables).read_text() == text
    lines = [line for line in text.split("\n") if line.startswith('{"cell"')]
    assert len(lines) == 2 and "gru" in lines[0]
    empty = Table(H200, {}, ())
    assert Table.load(empty.save(tables)) == empty


def test_every_entry_that_is_shipped_can_be_used():
    for path in sorted(config.TABLES.glob("*.json")):
        table = Table.load(path)
        assert config.slug(table.device.name) == path.stem and {"triton", "commit"} <= table.about.keys()
        keys = [entry.key for entry in table.entries]
        assert keys == sorted(set(keys))
        for entry in table.entries:
            operand = "bfloat16" if entry.kind == "16-bit" else "float32"
            problem = Problem(
                entry.cell, entry.direction, 1, 1, 32, entry.sequences, entry.hidden,
                (("w_hh_t" if entry.direction == "fwd" else "w_hh", operand),),
                precision="tf32" if entry.kind == "16-bit" else entry.kind,
            )  # fmt: skip
            assert config.key(problem) == entry.key
            assert table.find(problem, table.device) == config.choose(problem, table.device) == entry.config
            assert entry.us < entry.heuristic_us
