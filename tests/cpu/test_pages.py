"""What pages name exists: extras, versions, commands, names and links. Their figures are those of the results.

`test_readme.py` runs the snippets of pages, and `test_orders.py` checks the table of orders.
"""

import dataclasses
import importlib
import inspect
import json
import re
import shlex
import tomllib
from pathlib import Path

import jax
import pytest
from example_modules import load

from benchmarks import __main__ as command
from benchmarks import cases, choice, examples, pages
from benchmarks.results import AgentRow, Report

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "tests/README.md", "benchmarks/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]  # fmt: skip
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
FOR_USERS = [page for page in PAGES if page == "README.md" or page.startswith("docs/")]


# Figures


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_figures_of_a_page_are_those_of_the_results(page):
    """If this fails, run `python -m benchmarks pages`."""
    text = page.read_text()
    assert text.count("<!-- results: ") == text.count("<!-- end -->") > 0
    assert pages.written(text) == text


def test_every_block_of_figures_is_on_a_page():
    found = [name for page in pages.PAGES for name in re.findall(r"<!-- results: ([\w-]+) -->", page.read_text())]
    assert set(found) == set(pages.BLOCKS)


def test_what_is_outside_of_blocks_stays(monkeypatch):
    monkeypatch.setattr(pages, "BLOCKS", {"a": lambda: "new\n\nlines", "b": lambda: "more"})
    text = "1\n<!-- results: {} -->\n{}\n<!-- end -->\n2\n<!-- results: {} -->\n<!-- end -->\n"
    assert pages.written(text.format("a", "old", "b")) == text.format("a", "new\n\nlines", "b").replace(
        "b -->\n", "b -->\nmore\n"
    )


def test_agents_are_shown_with_their_returns_and_apart_from_those_on_several_gpus(monkeypatch, tmp_path):
    speeds = {"flax": 1e6, "jaxrnn": 8e6, "no recurrence": 16e6}
    rows = [
        AgentRow(f"PPO, {seeds} agents", name, value=seeds * speed, envs=1024, seeds=seeds, share=speed / 16e6,
                 trained=16, returned=0.9, returned_low=0.85, returned_high=0.951)
        for seeds in (1, 16) for name, speed in speeds.items()
    ]  # fmt: skip
    rows += [
        AgentRow("PPO, 1024 envs on 1 GPU", "jaxrnn", value=9e6, envs=1024, trained=1, returned=1.0),
        AgentRow("PPO, 2048 envs on 2 GPUs", "jaxrnn", value=17e6, envs=2048, gpus=2, trained=1, returned=0.8),
        AgentRow("PPO, 1024 envs on 2 GPUs", "jaxrnn", value=12e6, envs=1024, gpus=2, trained=1, returned=0.7),
        AgentRow("PPO, 4096 envs on 4 GPUs", "jaxrnn", "unavailable", "needs 4 GPUs", envs=4096, gpus=4),
    ]
    reports = {
        ("ppo", pages.H100): Report("ppo", {"gpu": "NVIDIA H100 80GB HBM3"}, {}, rows),
        ("scripts", pages.DEVICE): results("scripts"),
    }
    monkeypatch.setattr(pages, "AGENTS", pages.H100)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)  # without results of examples
    monkeypatch.setattr(pages, "load", lambda suite, device=pages.DEVICE: reports[suite, device])
    lines = pages.whole_agents().splitlines()
    assert [line.split("|")[1:3] for line in lines[2:8]] == [
        [f" PPO, {seeds} agents ", f" {name} "] for seeds in (1, 16) for name in ("jaxrnn", "Flax", "none")
    ]
    assert lines[2] == "| PPO, 1 agents | jaxrnn | 8.00 M | 50 % | 0.90 (0.85 to 0.95) | 16 |"
    claim = " ".join(pages.claim().split())
    assert re.findall(r"[\d.]+ M", claim) == ["128 M", "16.0 M"] and "on an H100" in claim
    assert pages.learning_curves() == ""
    curve = {"steps": [1.0], "seconds": [1.0], "mean": [0.9], "low": [0.8], "high": [1.0]}
    rows[3] = dataclasses.replace(rows[3], curve=curve)
    assert f"{pages.H100}/learning-light.svg" in pages.learning_curves()
    several = " ".join(pages.several_gpus().split())
    assert "1 and 2 H100s, an agent makes 9.00 M and 17.0 M" in several and "1.00 and 0.80" in several
    rows[:] = [row for row in rows if (row.provider, row.seeds) != ("flax", 16)]
    with pytest.raises(ValueError, match="no agents of several seeds with flax"):
        pages.claim()


@pytest.mark.parametrize("block", ["several-gpus", "first-call", "other-gpus", "wide-on-other-gpus"])
def test_gpus_have_the_names_that_the_results_have(block, monkeypatch):
    load = pages.load.__wrapped__

    def renamed(suite, device=pages.DEVICE):
        report = load(suite, device)
        return dataclasses.replace(report, machine=report.machine | {"gpu": "NVIDIA B200"})

    monkeypatch.setattr(pages, "load", renamed)
    text = pages.BLOCKS[block]()
    assert "B200" in text and "H100" not in text and "H200" not in text


def test_norms_without_a_larger_share_elsewhere_have_no_gap(monkeypatch):
    found = {(str(case), name): 0.9 for case in cases.NORMS for name in ("jaxrnn", "xla", "torch-compile")}
    monkeypatch.setattr(pages, "figures", lambda suite: found)
    text = " ".join(pages.large_norms().split())
    assert "0.90 / 0.90 / 0.90" in text and "larger share in 0 of" in text and "gap" not in text
    found[str(cases.NORMS[0]), "xla"] = 0.95
    text = " ".join(pages.large_norms().split())
    assert "larger share in 1 of" in text and f"{cases.NORMS[0]}: XLA has 0.95, ours 0.90." in text


def test_the_table_of_episodes_has_the_peers_with_a_figure(monkeypatch):
    found = {("GRU 8,8,8", "jaxrnn"): 1.0, ("GRU 8,8,8", "flax"): 7.0, ("GRU 4,4,4", "jaxrnn"): 1.0}
    monkeypatch.setattr(pages, "figures", lambda suite: found)
    shown = pages.episodes()
    assert "| B, T, H | jaxrnn | Flax |\n" in shown and "| GRU 4,4,4 | **1.00 / -** | - |\n" in shown
    assert "A `-` is not measured." in shown
    del found["GRU 4,4,4", "jaxrnn"]
    assert "not measured" not in pages.episodes()
    found["GRU 8,8,8", "torchrl"] = 3.0
    assert "| Flax | TorchRL Triton |\n" in pages.episodes()
    found["GRU 8,1024,256 resets 10 %", "jaxrnn"] = found["GRU 8,1024,256 episodes of 52", "jaxrnn"] = 1.0
    assert "resets 10 %" not in (shown := pages.episodes()) and "episodes of 52" in shown and "In 3 rows" in shown


def test_results_of_examples_are_taken_and_shown(monkeypatch, tmp_path):
    def run(implementation, speed, returns):
        return {
            "implementation": implementation, "env": "Task", "num_envs": 8, "num_devices": 1, "seeds": [0, 1],
            "total_steps": 64, "steps_per_second": speed, "final_return": returns, "config": {"hidden": 32},
        }  # fmt: skip

    runs = [run("auto", 3e6, [1, 2]), run("flax", 1e6, [None, None]), run("none", 4e6, [1, None])]
    example = {"machine": "NVIDIA H200, jax 0.11", "runs": runs}
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    for path, gpu in zip(paths, ("H200", "H100"), strict=True):
        path.write_text(json.dumps(example).replace("H200", gpu))
    with pytest.raises(SystemExit, match="name the files of one GPU"):
        examples.take(paths, tmp_path)
    path = examples.take(paths[:1], tmp_path)
    assert path == tmp_path / "nvidia-h200" / "examples.json"
    Report("ppo", {"gpu": "NVIDIA H200", "jax": "0.11"}, {}, []).save(path.parent)
    monkeypatch.setattr(pages, "AGENTS", pages.DEVICE)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "load", pages.load.__wrapped__)
    shown = pages.whole_agents()
    assert "| Task, GRU 32, 2 seeds of 8 envs | jaxrnn | 3.00 M | 75 % | 1.50 (1.00 to 2.00) | 2 |\n" in shown
    assert "| none | 4.00 M | 100 % | 1.00 (1.00 to 1.00) | 2 |\n" in shown
    assert "| Flax | 1.00 M | 25 % | - | 2 |\n" in shown
    assert ": Task. Measured on NVIDIA H200, jax 0.11." in shown


def test_a_sentence_says_where_another_implementation_is_faster():
    found = {("GRU", "jaxrnn"): 1.0, ("GRU", "jaxrnn-bf16"): 0.5, ("GRU", "flax"): 7.0, ("GRU", "torchrl-bf16"): 0.5}
    assert "cuDNN" not in pages.ahead(found)
    assert "cuDNN (no resets), 0.80 of our time for GRU in bfloat16" in pages.ahead(
        found | {("GRU", "torch-cudnn-bf16"): 0.4}
    )


def results(suite, machine="nvidia-h200"):
    return Report.load(ROOT / "benchmarks" / "results" / machine / f"{suite}.json")


@pytest.mark.parametrize(
    "machine", sorted(path.parent.name for path in ROOT.glob("benchmarks/results/*/accuracy.json"))
)
def test_errors_are_at_most_twice_those_of_xla(machine):
    rows = results("accuracy", machine).rows
    assert len(rows) > 100 and all(row.good for row in rows)


@pytest.mark.parametrize(
    "machine", sorted(path.parent.name for path in ROOT.glob("benchmarks/results/*nvidia-h200/choice.json"))
)
def test_the_default_is_hardly_slower_than_the_faster_implementation(machine):
    rows = results("choice", machine).rows
    found = {(row.case, row.provider): row.value for row in rows}
    labels = {row.case for row in rows}
    assert len(labels) == len(cases.CHOICE) and {row.status for row in rows} == {"measured"}
    for case in labels:
        assert found[case, "default"] <= (1 + choice.TOLERANCE) * min(found[case, "triton"], found[case, "xla"])


# Versions, and extras


def required(extra):
    """Returns the names of all packages that an extra installs, and the extras of this project among them."""
    packages, pending = set(), [extra]
    while pending:
        for requirement in EXTRAS[pending.pop()]:
            name, options = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()
            packages.add(name)
            pending += options.split(",") if name == "jaxrnn" else []
    return packages - {"jaxrnn"}


def test_extras_that_pages_name_exist():
    named = [
        (page, extra)
        for page, text in TEXTS.items()
        for names in re.findall(r"'\.\[([\w,-]+)\]'", text)
        for extra in names.split(",")
    ]
    assert {page for page, _ in named} >= {"README.md", "docs/install.md", "docs/pytorch.md"}
    assert [(page, extra) for page, extra in named if extra not in EXTRAS] == []


def test_extras_install_one_framework_or_both():
    for extra in ("cuda13", "cuda12"):
        assert {"jax", "triton"} <= required(extra) and "torch" not in required(extra)
        assert {"jax", "triton", "torch"} <= required(f"torch-{extra}")
    assert {"torch", "triton"} <= required("torch") and required("torch").isdisjoint({"jax", "jaxlib", "flax"})
    assert {"jax", "flax"} <= required("jax") and required("jax").isdisjoint({"triton", "torch"})


def test_versions_that_pages_name_are_those_that_the_package_requires():
    texts = "".join(TEXTS[page] for page in FOR_USERS)
    assert {PROJECT["requires-python"]} == {f">={one}" for one in re.findall(r"Python (3\.\d+)(?:\+| or newer)", texts)}
    (requirement,) = EXTRAS["triton"]
    low, high = re.search(r"triton>=(3\.\d+),<3\.(\d+)", requirement).groups()
    assert set(re.findall(r"Triton (3\.\d+) to (3\.\d+)", texts)) == {(low, f"3.{int(high) - 1}")}


# Commands


def test_targets_of_make_that_pages_name_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    named = [
        (page, target)
        for page, text in TEXTS.items()
        for target in re.findall(r"(?:`|^)make (?:\w+=\S+ )*([a-z-]+)", text, re.MULTILINE)
    ]
    assert {page for page, _ in named} >= {"README.md", "CONTRIBUTING.md"}
    assert [(page, target) for page, target in named if target not in targets] == []


def test_benchmark_commands_are_accepted():
    """Placeholders such as SUITE and `...` stand for arguments, so commands with them are left out."""
    found = [(page, one) for page, text in TEXTS.items() for one in re.findall(r"`python -m benchmarks ?(.*?)`", text)]
    commands = [(page, arguments) for page, arguments in found if not re.search(r"[A-Z]{3}|\.\.\.", arguments)]
    assert {page for page, _ in commands} >= {"docs/performance.md", "benchmarks/README.md"}
    for page, arguments in commands:
        options = command.parse_arguments(shlex.split(arguments.replace("\n", " ")))
        assert options.view or options.suites, page


def test_every_suite_is_in_the_table_of_the_benchmarks():
    listed = re.findall(r"^\| `([\w-]+)` \|", TEXTS["benchmarks/README.md"], re.MULTILINE)
    assert sorted(listed) == sorted(command.SUITES)


def example_commands():
    """Returns the examples and options that the pages for users and examples/README.md call."""
    found = [
        (name, arguments.split("#")[0])
        for page in (*FOR_USERS, "examples/README.md")
        for name, arguments in re.findall(r"^ *python examples/(\w+)\.py(.*)$", TEXTS[page], re.MULTILINE)
        + re.findall(r"`(?:python )?examples/(\w+)\.py( [^`]+)`", TEXTS[page])
    ]
    markers = {"torch_policy": [pytest.mark.torch], "gymnax_ppo": [pytest.mark.gymnax]}
    markers |= {name: [pytest.mark.agents] for name in ("craftax_ppo", "jaxmarl_ippo")}
    assert {"recurrent_ppo", "many_seeds", *markers} <= {name for name, _ in found}
    return [
        pytest.param(
            name, arguments, marks=[*markers.get(name, ()), *[pytest.mark.torch] * ("triton" in arguments)],
            id=f"{name}{arguments}".strip(),
        )
        for name, arguments in dict.fromkeys(found)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), example_commands())
def test_example_commands_are_accepted(name, arguments, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_: None)  # the other process, with its GPU, is not there
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert load(name).parse_arguments(shlex.split(arguments))


# Names


def dotted_names(package):
    """Returns the dotted names of a package, such as `jaxrnn.linen.RNN`, that the pages for users write as code."""
    code = [re.sub(r"^ *```.*?^ *```", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE) for page in FOR_USERS]
    spans = [span for text in code for span in re.findall(r"`([^`]+)`", text)]
    return sorted({name for span in spans for name in re.findall(rf"(?<![\w./]){package}(?:\.\w+)+", span)})


def resolve(dotted):
    """Returns what a dotted name refers to: a module, or an attribute of one."""
    module, *attributes = dotted.split(".")
    found = importlib.import_module(module)
    for name in attributes:
        if inspect.ismodule(found) and not hasattr(found, name):
            importlib.import_module(f"{found.__name__}.{name}")
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", dotted_names("jaxrnn"))
def test_names_of_jaxrnn_exist(name):
    assert resolve(name) is not None


@pytest.mark.torch
@pytest.mark.parametrize("name", dotted_names("torch_bridge"))
def test_names_of_torch_bridge_exist(name):
    """An operator may be named without `torch.ops`."""
    import torch

    import torch_bridge  # noqa: F401  # registers the operators

    operator = getattr(torch.ops.torch_bridge, name.partition(".")[2], None)
    assert (operator or resolve(name)) is not None


MODULES = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", TEXTS["docs/layouts.md"].split("## Order")[0], re.MULTILINE))


@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=[pytest.mark.torch] * name.startswith("torch")) for name in MODULES]
)
def test_contents_of_a_module_exist(module):
    names = re.findall(r"`(\w+)`", MODULES[module])
    assert set(names) <= set(resolve(module).__all__) and (names or module == "jaxrnn.convert")


# Links


def anchors(text):
    """Returns the anchors of the headings of a page, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/README.md"])
def test_files_of_tests_that_a_page_names_exist(page):
    named = re.findall(r"\btests/[\w/]+\.py", TEXTS[page])
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if "](" in TEXTS[page]])
def test_links_lead_to_files_and_headings(page):
    prose = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|srcset)="([^"]+)"', prose)
    for link in [link for link in links if not re.match(r"https?:", link)]:
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if heading:
            assert heading in anchors(target.read_text()), link
