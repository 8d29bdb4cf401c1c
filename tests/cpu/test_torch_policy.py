"""Tests `examples/torch_policy.py`: its episodes, its policies, and training from end to end."""

import dataclasses
import json

import pytest
from example_modules import load
from torch_calls import CELLS, torch

for package in ("rich", "tqdm"):
    pytest.importorskip(package, reason="pip install '.[examples]'")


example = load("torch_policy")
SMALL = ["--symbols", "2", "--steps", "8", "--batch", "16", "--hidden", "12", "--mean-length", "4", "--lr", "3e-2"]


def test_the_target_is_the_symbol_that_the_episode_began_with():
    episodes = example.Episodes(example.Config(steps=40, batch=3, mean_length=5))
    first = [None] * 3
    for _ in range(2):  # the second draw continues where the first ended
        before, data = episodes.done, episodes.draw()
        torch.testing.assert_close(data.resets[0], before)
        assert 1 < data.resets.sum() < 60
        for t, b in ((t, b) for t in range(40) for b in range(3)):
            first[b] = int(data.inputs[t, b].argmax()) if data.resets[t, b] else first[b]
            assert data.targets[t, b] == first[b]


@pytest.mark.parametrize("cell", CELLS)
def test_packed_episodes_match_resets(cell):
    config = example.Config(cell=cell, steps=9, batch=4, hidden=6, mean_length=3)
    policies = []
    for kind in (example.Policy, example.PackedPolicy):
        torch.manual_seed(0)
        policies.append(kind(config))
    episodes, states = example.Episodes(config), [example.first_state(config)] * 2
    for _ in range(3):
        data = episodes.draw()
        (logits, ours), (want, theirs) = (
            policy(data.inputs, state, data.resets) for policy, state in zip(policies, states, strict=True)
        )
        torch.testing.assert_close(logits, want)
        torch.testing.assert_close(ours, theirs)
        states = [ours, theirs]
        gradients = [
            torch.autograd.grad(x.square().sum(), [*policy.parameters()], retain_graph=True)
            for x, policy in ((logits, policies[0]), (want, policies[1]))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_policy_learns_eager_and_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    arguments = [*SMALL, "--device", "cpu", "--updates", "60", "--out", str(tmp_path)]
    results = example.main([*arguments, "--compile", "--backend", "aot_eager"])
    assert [r.name for r in results] == ["torch.nn, packed", "torch_bridge", "torch_bridge, compiled"]
    for result in results:
        assert len(result.rewards) == 60 and result.milliseconds > 0
        assert result.rewards[0] < 0.7 and result.final_reward > 0.9
    assert results[1].rewards == pytest.approx(results[2].rewards, abs=0.02)
    printed = capsys.readouterr().out
    for text in ("RepeatFirst, 2 symbols, GRU-12", "torch_bridge.gru_backward", torch.__version__):
        assert text in printed
    report = json.loads((tmp_path / "torch_policy.json").read_text())
    assert report["flops"]["torch_bridge.gru"] == 2 * 8 * 16 * 3 * 12 * 12
    assert report["runs"][1] == dataclasses.asdict(results[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--symbols", "1"], "symbols must be at least 2, got 1"),
        (["--cell", "rnn"], "invalid choice: 'rnn'"),
        (["--lr", "-1"], "lr must be above 0 and finite, got -1.0"),
        (["--lr", "nan"], "lr must be above 0 and finite, got nan"),
        (["--entropy", "inf"], "entropy must be finite, got inf"),
        (["--device", "foo"], "PyTorch cannot compute on device 'foo': "),
        (["--device", "cuda:64"], "PyTorch cannot compute on device 'cuda:64': "),
        (["--device", "cpu", "--compile", "--backend", "nope"], "torch.compile has no backend 'nope' here; there are "),
    ],
)
def test_bad_arguments_end_with_a_message_and_a_nonzero_status(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        example.main(arguments)
    assert error.value.code != 0
    assert message in capsys.readouterr().err
