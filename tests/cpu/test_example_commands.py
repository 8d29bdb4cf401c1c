"""Tests what the examples have in common: their options, what they print, and what Ctrl-C leaves of their results."""

import json
import math
import sys

import numpy as np
import pytest
from example_modules import load

SMALL = {
    "recurrent_ppo": "--num-envs 4 --rollout-steps 8 --hidden 4 --total-steps 6.4e2",  # 20 updates
    "many_seeds": "--seeds 2 --updates 3e1 --symbols 2 --steps 4 --batch 2 --hidden 3",
    "packing_and_resets": "--steps 6 --envs 2 --features 2 --hidden 3 --rollouts 2 --repeats 1 --mean-lengths 2 3",
    "torch_policy": "--updates 2e1 --steps 4 --batch 2 --hidden 3 --device cpu",
}
NAMES = [pytest.param(name, marks=pytest.mark.torch if "torch" in name else ()) for name in SMALL]
every_example = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def interrupt_at(monkeypatch):
    """Returns a function that makes an example receive Ctrl-C when its progress bars were updated so many times."""

    def patch(module, calls):
        module = module if hasattr(module, "tqdm") else sys.modules["training"]
        remaining = iter(range(calls - 1, -1, -1))

        class Interrupted(module.tqdm):
            def update(self, *args):
                if self.iterable is None and next(remaining) == 0:  # the loop below counts its own items
                    raise KeyboardInterrupt
                return super().update(*args)

            def __iter__(self):
                for item in super().__iter__():
                    if next(remaining) == 0:
                        raise KeyboardInterrupt
                    yield item

        monkeypatch.setattr(module, "tqdm", Interrupted)

    return patch


def run(module, out, *options):
    return module.main([*SMALL[module.__name__].split(), "--out", str(out), *options])


def written(module, out, key="runs"):
    def reject(text):
        raise AssertionError(f"{text} is not JSON")

    (path,) = out.glob("*.json")
    return json.loads(path.read_text(), parse_constant=reject)[key]


@every_example
def test_tables_fit_80_columns_and_compiling_is_announced(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run(load(name), tmp_path / "a" / "b")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert not any("…" in line for line in lines), "rich puts this where a cell is cut"
    assert max(len(line) for line in lines if "│" in line or "┃" in line) <= 80
    if name != "torch_policy":  # which compiles only with --compile
        assert "compiling ..." in printed.err
        assert printed.err.index("compiling ...") < printed.err.index("100%")


@every_example
@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "many", "1e-3"])
def test_counts_must_be_whole_numbers(name, text, tmp_path, capsys):
    option = {"recurrent_ppo": "--total-steps", "packing_and_resets": "--steps"}.get(name, "--updates")
    with pytest.raises(SystemExit) as error:
        run(load(name), tmp_path / "out", option, text)
    assert error.value.code == 2
    assert f"argument {option}: must be a whole number" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "value"), [("1e6", 10**6), ("2_000", 2000), ("-3", -3), ("12", 12)])
def test_whole_numbers_may_be_written_in_any_notation(text, value):
    got = load("command_line").whole_number(text)
    assert got == value and isinstance(got, int)


@every_example
def test_a_folder_that_cannot_be_made_is_an_error_before_the_training(name, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as error:
        run(load(name), tmp_path / "file")
    assert error.value.code == 2 and "File exists" in capsys.readouterr().err


@every_example
def test_a_folder_that_takes_no_files_is_an_error_before_the_training(name, capsys, monkeypatch):
    monkeypatch.setattr(load("training"), "train", None)
    module = load(name)
    if name != "recurrent_ppo":  # which `training` trains
        monkeypatch.setattr(module, "train" if hasattr(module, "train") else "measure", None)
    with pytest.raises(SystemExit) as error:
        run(module, "/proc")  # a folder in which nobody can make a file, not even root
    assert error.value.code == 2 and "'/proc" in capsys.readouterr().err


def test_ctrl_c_keeps_what_an_agent_has_learned(tmp_path, capsys, interrupt_at):
    module = load("recurrent_ppo")
    interrupt_at(module, 4)  # three calls were reported before
    with pytest.raises(SystemExit, match="interrupted"):
        run(module, tmp_path)
    (result,) = written(module, tmp_path)
    assert (result["implementation"], result["finished"], result["total_steps"]) == ("auto", False, 3 * 32)
    assert np.shape(result["curve"]["return"]) == (1, 3) and result["curve"]["steps"] == [32, 64, 96]
    assert math.isfinite(result["steps_per_second"]) and result["steps_per_second"] > 0
    assert (tmp_path / "recurrent_ppo_cartpole.png").exists()
    assert "jaxrnn, stopped" in capsys.readouterr().out


def test_ctrl_c_keeps_the_agents_that_were_trained_before(tmp_path, interrupt_at):
    module = load("recurrent_ppo")
    interrupt_at(module, 21)  # the first call of the control
    with pytest.raises(SystemExit, match="interrupted"):
        run(module, tmp_path)
    (result,) = written(module, tmp_path)
    assert (result["implementation"], result["finished"], result["total_steps"]) == ("auto", True, 640)


def test_ctrl_c_at_once_leaves_nothing(tmp_path, capsys, interrupt_at):
    module = load("recurrent_ppo")
    interrupt_at(module, 1)
    with pytest.raises(SystemExit, match="interrupted"):
        run(module, tmp_path)
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


def test_ctrl_c_keeps_what_many_seeds_have_learned(tmp_path, capsys, interrupt_at):
    module = load("many_seeds")
    interrupt_at(module, 6)  # the third call of the second training
    with pytest.raises(SystemExit, match="interrupted"):
        run(module, tmp_path)
    one, many = written(module, tmp_path)
    assert (one["finished"], np.shape(one["losses"])) == (True, (1, 30))
    assert (many["finished"], np.shape(many["losses"])) == (False, (2, 20))
    assert "2, stopped" in capsys.readouterr().out
    assert (tmp_path / "many_seeds.png").exists()


def test_ctrl_c_keeps_the_measurements_so_far(tmp_path, interrupt_at):
    module = load("packing_and_resets")
    interrupt_at(module, 5)
    with pytest.raises(SystemExit, match="interrupted"):
        run(module, tmp_path)
    assert [entry["mean_length"] for entry in written(module, tmp_path, "measurements")] == [2]


@pytest.mark.torch
def test_ctrl_c_keeps_the_policies_so_far(tmp_path, interrupt_at):
    module = load("torch_policy")
    interrupt_at(module, 25)
    with pytest.raises(SystemExit, match="interrupted"):
        run(module, tmp_path)
    assert [entry["name"] for entry in written(module, tmp_path)] == ["torch.nn, packed"]
