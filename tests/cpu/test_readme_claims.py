"""README.md agrees with the repository: figures, commands, extras, names, versions and links.

The figures of suite `cells` in docs/performance.md are checked here, too.

`test_readme.py` runs its snippets, `test_orders.py` checks its table of orders, and `test_benchmarks.py` how the tables
of results are made.
"""

import importlib
import inspect
import itertools
import re
import shlex
import tomllib
from pathlib import Path

import jax
import pytest
from example_modules import load

from benchmarks import __main__ as command
from benchmarks import cases, choice
from benchmarks.oracle import tolerance
from benchmarks.report import markdown
from benchmarks.results import Report

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())  # in which sentences are not broken into lines
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "benchmarks/README.md", "benchmarks/NOTES.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]  # fmt: skip
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}


def results(suite, machine="nvidia-h200"):
    return Report.load(ROOT / "benchmarks" / "results" / machine / f"{suite}.json")


def values(report):
    """Returns the figures of a report by case and provider, at least one."""
    found = {(row.case, row.provider): row.value for row in report.rows if row.value is not None}
    assert found
    return found


def rounded(value, text):
    """Returns a figure with as many decimals as a text has."""
    return f"{value:.{len(text.partition('.')[2])}f}"


def cells_of(line):
    return [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]


def table(heading, page="README.md"):
    """Returns the headings of the table whose first line begins with `heading`, and its other rows by their labels."""
    (block,) = re.findall(rf"^(\| {re.escape(heading)} \|.*\n(?:\|.*\n)+)", TEXTS[page], re.MULTILINE)
    headings, _, *rows = map(cells_of, block.splitlines())
    return headings, {label: cells for label, *cells in rows}


# Figures


def test_headline_table_is_made_from_the_results():
    lines = markdown(results("headline")).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 16 and set(rows) <= set(README.splitlines())
    sentences = [one for line in lines if line and line not in rows for one in re.split(r"(?<=\.) (?=[A-Z1])", line)]
    assert len(sentences) == 6 and [one for one in sentences if one not in PROSE] == []


def test_rows_of_another_commit_are_those_that_the_readme_names():
    report = results("headline")
    assert "The two figures of 9b79f30 are those of TorchRL's LSTM." in PROSE
    older = [row for row in report.rows if row.note.endswith("at 9b79f30")]
    assert {(row.case, row.provider) for row in older} == {
        ("LSTM 2048,256,128", "torchrl"),
        ("LSTM 2048,256,128", "torchrl-bf16"),
    }
    assert set(report.commits()) == {"9b79f30", report.machine["commit"]}


def test_figures_below_ours_are_those_that_the_readme_names():
    found = values(results("headline"))
    below = {}
    for (case, provider), value in found.items():
        ours = "jaxrnn-bf16" if provider.endswith("-bf16") else "jaxrnn"
        if not provider.startswith("jaxrnn") and value < found[case, ours]:
            below[case, provider] = value / found[case, ours]
    ratio, case = re.search(
        r"One figure of another implementation is below ours of the same precision: in bfloat16, cuDNN with packed "
        r"episodes takes ([\d.]+) times our time for (GRU [\d,]+)\. ", PROSE,
    ).groups()  # fmt: skip
    assert [*below] == [(case, "torch-cudnn-packed-bf16")]
    assert rounded(*below.values(), ratio) == ratio


def test_figures_of_the_faster_scan_are_those_of_an_h100():
    commit, *quoted = re.search(
        r"At commit (\w+), whose scan is faster, it takes ([\d.]+) ms on an H100, and cuDNN with packed episodes "
        r"(\d+\.\d+)\. ", PROSE,
    ).groups()  # fmt: skip
    report = results("headline", "as-rtx3090-on-nvidia-h100-80gb-hbm3")
    found = values(report)
    times = [found["GRU 512,32,1024", name] for name in ("jaxrnn-default", "torch-cudnn-packed")]
    assert report.machine["commit"] == commit and report.machine["as"] == "rtx3090"
    assert [rounded(x, y) for x, y in zip(times, quoted, strict=True)] == quoted


def test_figures_that_the_headline_leaves_out_are_first_calls_that_took_too_long():
    seconds = int(re.search(r"for TorchRL means that its first call was unfinished after (\d+) s or more", PROSE)[1])
    missing = [row for row in results("headline").rows if "torchrl" in row.provider and row.value is None]
    assert missing and {row.status for row in missing} <= {"unfinished", "skipped", "unsupported"}
    limits = [int(x) for row in missing for x in re.findall(r"unfinished after (\d+) s", row.reason)]
    assert len(limits) == len(missing) and min(limits) == seconds
    (unfinished,) = {row.case for row in missing if row.status == "unfinished"}
    assert f"s or more ({unfinished}), or was not tried (the others)." in PROSE


def test_ratios_to_flax_are_those_of_the_results():
    found = values(results("headline"))
    narrow, wide = [], []
    for (case, provider), ours in found.items():
        if provider == "jaxrnn":
            units = int(case.split(",")[2])
            (narrow if units <= 256 else wide).append(found[case, "flax"] / ours)
    assert (len(narrow), len(wide)) == (8, 6)
    words = {"seventh": 7, "thirty-seventh": 37}
    low, high = re.search(r"up to 256 hidden units take a ([\w-]+) to a ([\w-]+) of the time of Flax's", PROSE).groups()
    assert (words[low], words[high]) == (round(min(narrow)), round(max(narrow)))
    low, high = re.search(r"Those with more units take ([\d.]+) to ([\d.]+) of its time", PROSE).groups()
    assert (rounded(1 / max(wide), low), rounded(1 / min(wide), high)) == (low, high)


def test_ratios_to_cudnn_are_those_of_the_results():
    found, cases = values(results("small")), [f"GRU {batch},128,128" for batch in (1, 2, 4, 8, 16, 32, 64)]
    suites = found, values(results("headline"))
    for provider, pattern in (
        ("torch-cudnn", r"cuDNN takes ([\d.]+) to ([\d.]+) times our time without any reset"),
        ("torch-cudnn-packed", r"without any reset, and (\d+) to (\d+) times with its episodes packed"),
    ):
        ratios = [
            suite[case, provider] / suite[case, "jaxrnn"]
            for suite in suites
            for case in cases
            if (case, provider) in suite
        ]
        assert len(ratios) > len(cases)
        low, high = re.search(pattern, PROSE).groups()
        assert (rounded(min(ratios), low), rounded(max(ratios), high)) == (low, high)
    pattern = (
        r"takes ([\d.]+) ms at B=1, ([\d.]+) ms at 8, ([\d.]+) ms at 32 and ([\d.]+) ms at 64; "
        r"ours takes ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) ms \(`small`\)"
    )
    quoted = re.search(pattern, " ".join(TEXTS["benchmarks/NOTES.md"].split())).groups()
    times = [found[f"GRU {batch},128,128", name] for name in ("torch-cudnn", "jaxrnn") for batch in (1, 8, 32, 64)]
    assert [rounded(x, y) for x, y in zip(times, quoted, strict=True)] == [*quoted]
    found = values(results("sweep"))
    theirs, ours = found["GRU 64,128,32", "torch-cudnn"], found["GRU 64,128,32", "jaxrnn"]
    quoted = re.search(r"without resets takes ([\d.]+) times our time \(([\d.]+) and ([\d.]+) ms, `sweep`\)", PROSE)
    assert [rounded(x, y) for x, y in zip((theirs / ours, theirs, ours), quoted.groups(), strict=True)] == [
        *quoted.groups()
    ]


def test_steps_per_second_are_those_of_the_results():
    report = results("ppo")
    found, checked = values(report), 0
    cases = {
        "64": "PPO, 64 envs",
        "16 seeds of 64 at once (`--num-seeds 16`)": "PPO, 16 seeds of 64 envs",
        "1024": "PPO, 1024 envs",
    }
    providers = ["jaxrnn", "jaxrnn-xla", "flax", "no recurrence"]
    headings, rows = table("environments")
    assert headings == ["environments", "jaxrnn", 'jaxrnn, `implementation="xla"`', "Flax GRU", "no recurrence"]
    assert list(rows) == list(cases)
    for label, cells in rows.items():
        for provider, cell in zip(providers, cells, strict=True):
            if cell:
                number, unit = cell.split()
                steps = found[cases[label], provider] / {"k": 1e3, "M": 1e6}[unit]
                assert rounded(steps, number) == number, (label, provider)
                checked += 1
    assert checked == 11
    older, commit = re.search(r"are of commit (\w+), those of 16 seeds of (\w+)\.", PROSE).groups()
    assert commit == report.machine["commit"] and set(report.commits()) == {commit, older}
    of_older = {row.case for row in report.rows if row.note.endswith(f"at {older}")}
    assert of_older == set(cases.values()) - {"PPO, 16 seeds of 64 envs"}
    assert set(report.commits()[commit]) == {"PPO, 16 seeds of 64 envs"}


def test_steps_per_second_on_several_gpus_are_those_of_the_results():
    report = results("ppo", "nvidia-h100-80gb-hbm3")
    found, (commit,) = values(report), report.commits()
    pattern = r"one H100 runs ([\d.]+) M steps per second, two run ([\d.]+) M and four run ([\d.]+) M \(commit (\w+),"
    *quoted, at = re.search(pattern, PROSE).groups()
    cases = ["PPO, 1024 envs on 1 GPU", "PPO, 2048 envs on 2 GPUs", "PPO, 4096 envs on 4 GPUs"]
    assert at == commit
    assert [rounded(found[case, "jaxrnn"] / 1e6, text) for case, text in zip(cases, quoted, strict=True)] == quoted


def test_what_the_readme_says_of_an_h100_agrees_with_the_results():
    report = results("headline", "nvidia-h100-80gb-hbm3")
    found, (commit,) = values(report), report.commits()
    cases = {case for case, _ in found}
    assert len(cases) == 10 and f"measured at commit {commit}: ten GRUs of `headline`, beside Flax," in PROSE
    assert {name for _, name in found} >= {"flax", "hoisted-scan", "torch-cudnn", "torch-cudnn-packed"}
    for case, name in found:  # first in each, in TF32 and in bfloat16
        if not name.startswith("jaxrnn"):
            assert found[case, "jaxrnn-bf16" if name.endswith("-bf16") else "jaxrnn"] < found[case, name]


CELLS = {
    "GRU": "GRU",
    "MGU": "MGU",
    "simple RNN (tanh)": "SIMPLE_TANH",
    "simple RNN (ReLU)": "SIMPLE_RELU",
    "normed GRU (RMSNorm)": "RMS_NORM_GRU",
    "normed GRU (LayerNorm)": "LAYER_NORM_GRU",
}
OURS = ("jaxrnn", "jaxrnn-bf16")
TF32 = ("jaxrnn", "flax", "hoisted-scan")  # all that suite `cells` times in TF32 and that have a ReLU


def times_of_the_gru(found, case):
    """Returns our time divided by that of the GRU of the same size, in TF32 and in bfloat16; None without a time."""
    gru = f"GRU {case.split()[1]}"
    return [found[case, name] / found[gru, name] if (case, name) in found else None for name in OURS]


def test_times_of_other_cells_are_those_of_the_results():
    report, page = results("cells"), "docs/performance.md"
    found, prose = values(report), " ".join(TEXTS[page].split())
    headings, rows = table("B, T, H | jaxrnn, TF32 / bfloat16", page)
    assert headings[2:] == ["times the GRU's time", "Flax", "`lax.scan`, hoisted"]
    labels = {label: f"{CELLS[label.rpartition(' ')[0]]} {label.rpartition(' ')[2]}" for label in rows}
    assert list(labels.values()) == list(dict.fromkeys(row.case for row in report.rows))
    for label, (times, ratios, *peers) in rows.items():
        case = labels[label]
        expected = [found.get((case, name)) for name in (*OURS, "flax", "hoisted-scan")] + times_of_the_gru(found, case)
        cells = [*times.split(" / "), *peers, *ratios.split(" / ")]
        assert ["-" if x is None else rounded(x, y) for x, y in zip(expected, cells, strict=True)] == cells, label
    normed = [case for case in labels.values() if "NORM" in case]
    older, newer = re.search(r"\(`cells`, commit (\w+), normed GRUs (\w+)\)", prose).groups()
    assert report.commits() == {newer: normed, older: [case for case in labels.values() if case not in normed]}
    tf32, bf16 = re.search(
        r"At 1024,128,256 they take (.*?) times the GRU's time in TF32, and (.*?) times in bfloat16\.", prose
    ).groups()
    normed = [times_of_the_gru(found, f"{cell} 1024,128,256") for cell in ("RMS_NORM_GRU", "LAYER_NORM_GRU")]
    for ratios, text in zip(zip(*normed, strict=True), (tf32, bf16), strict=True):
        assert_range(ratios, text)


def test_times_of_other_cells_on_an_h100_are_those_of_the_results():
    report = results("cells", "nvidia-h100-80gb-hbm3")
    found, (commit,) = values(report), report.commits()
    prose = " ".join(TEXTS["docs/performance.md"].split())
    ratios, times = re.search(
        rf"at commit {commit}, .*? at 64,128,128 take (.*?) times the GRU's time, in the order of the table\. "
        r"The GRU takes ([\d.]+ / [\d.]+) ms\.",
        prose,
    ).groups()
    cells = [f"{cell} 64,128,128" for cell in CELLS.values()]
    pairs = re.findall(r"([\d.]+) / ([\d.]+)", ratios)
    assert len(pairs) == len(cells) - 1  # all but the GRU
    for case, pair in zip(cells[1:], pairs, strict=True):
        assert [rounded(x, y) for x, y in zip(times_of_the_gru(found, case), pair, strict=True)] == list(pair), case
    expected = [rounded(found[cells[0], name], y) for name, y in zip(OURS, times.split(" / "), strict=True)]
    assert expected == times.split(" / ")


def test_errors_of_a_relu_are_those_of_the_results():
    prose = " ".join(TEXTS["docs/performance.md"].split())
    error, allowed = re.search(
        r"All implementations are off by (.*?) from float64 in TF32.*? allows ([\d.]+) for a ReLU\.", prose
    ).groups()
    relu = [row for row in results("cells").rows if row.case.startswith("SIMPLE_RELU") and row.provider in TF32]
    assert len(relu) == 2 * len(TF32)
    assert_range([row.error for row in relu], error)
    assert float(allowed) == tolerance("simple_relu", "tf32")


def test_times_of_remat_are_those_of_the_results():
    found = values(results("headline"))
    ours, remat = (found["GRU 2048,256,128", name] for name in ("jaxrnn", "jaxrnn-remat"))
    longer, shorter = re.search(
        r"The pass then takes ([\d.]+) ms instead of ([\d.]+) ms in TF32", TEXTS["docs/performance.md"]
    ).groups()
    assert [rounded(remat, longer), rounded(ours, shorter)] == [longer, shorter]
    (ratio,) = re.findall(r"instead of 1\.9 GB, and ([\d.]+) times as long", TEXTS["docs/troubleshooting.md"])
    assert rounded(remat / ours, ratio) == ratio
    assert f"| `remat`, 2048,256,128 | {remat:.2f} ms; on an H100" in TEXTS["benchmarks/NOTES.md"]


def test_rows_that_miss_their_target_are_those_of_the_results():
    """Compares the rows of suite `headline`, which stand before those of other suites, in benchmarks/NOTES.md."""
    headings, rows = table("row | is", "benchmarks/NOTES.md")
    assert headings == ["row", "is", "target", "what bounds it"]
    found, listed = values(results("headline")), {}
    for label, (times, targets, _) in rows.items():
        if not re.match(r"(GRU|LSTM) [\d, ]+$", label):
            break
        cell, _, sizes = label.partition(" ")
        for size, *pair in zip(sizes.split(", "), times.split(", "), targets.split(", "), strict=True):
            listed[f"{cell} {size}"] = pair
    assert list(listed) and set(listed) == {str(case) for case in cases.HEADLINE}
    for case, target in cases.HEADLINE.items():
        times, targets = (text.split(" / ") for text in listed[str(case)])
        assert [rounded(found[str(case), name], x) for name, x in zip(OURS, times, strict=True)] == times, case
        assert [float(x) for x in targets] == [*target], case


PROFILES = {"as an A100": "a100", "as an RTX 3090": "rtx3090", "as an RTX 4090": "rtx4090"}


def results_as(profile, suite):
    return results(suite, f"as-{profile}-on-nvidia-h200")


def assert_range(values, text):
    """Checks a text such as `14.1 to 14.2`, or `1.6` for figures that are all rounded to it."""
    bounds = text.split(" to ")
    assert [rounded(min(values), bounds[0]), rounded(max(values), bounds[0])] == [bounds[0], bounds[-1]]


def test_figures_as_other_gpus_are_those_of_the_results():
    headings, rows = table("B, T, H | as an A100")
    peers = {"Flax": "flax", "`lax.scan`, hoisted": "hoisted-scan", "cuDNN, packed": "torch-cudnn-packed"}
    assert headings == ["B, T, H", *PROFILES, *peers]
    found, commits, cases = {}, {"headline": set(), "sweep": set()}, set()
    for profile, suite in itertools.product(PROFILES.values(), commits):
        report = results_as(profile, suite)
        found |= {(*key, profile): value for key, value in values(report).items()}
        ((commit, measured),) = report.commits().items()
        commits[suite].add(commit)
        cases |= {*measured}
    assert cases == set(rows) and len(cases) == 6
    behind = []
    for case, cells in rows.items():
        for profile, cell in zip(PROFILES.values(), cells, strict=False):
            times = [found[case, f"jaxrnn-default{dtype}", profile] for dtype in ("", "-bf16")]
            assert [rounded(x, y) for x, y in zip(times, cell.split(" / "), strict=True)] == cell.split(" / ")
            others = [found.get((case, name, profile)) for name in peers.values()]
            behind += [(case, profile, times[0] / other) for other in others if other and other < times[0]]
        for name, text in zip(peers.values(), cells[len(PROFILES) :], strict=True):
            of_all = [found[case, name, profile] for profile in PROFILES.values() if (case, name, profile) in found]
            if text == "-":
                assert not of_all
            else:
                assert_range(of_all, text)
    ((case, profile, ratio),) = behind
    named = next(text for text, name in PROFILES.items() if name == profile)
    (text,) = re.findall(rf"{named}, {case} takes ([\d.]+) times the time of cuDNN with packed episodes;", PROSE)
    assert rounded(ratio, text) == text
    quoted = re.search(r"Without any reset, cuDNN is faster there in both: (.*?) / (.*?) ms\.", PROSE).groups()
    for dtype, text in zip(("", "-bf16"), quoted, strict=True):
        assert_range([found[case, f"torch-cudnn{dtype}", profile] for profile in PROFILES.values()], text)
        for profile in PROFILES.values():
            assert found[case, f"torch-cudnn{dtype}", profile] < found[case, f"jaxrnn-default{dtype}", profile]
    packed = values(results("headline"))[case, "torch-cudnn-packed-bf16"]
    (text,) = re.findall(r"In bfloat16, cuDNN with packed episodes takes ([\d.]+) ms for that GRU", PROSE)
    assert rounded(packed, text) == text
    assert all(packed < found[case, "jaxrnn-default-bf16", profile] for profile in PROFILES.values())
    (newer,), (older,) = commits["headline"], commits["sweep"]
    assert f"jax 0.11.2, triton 3.6.0, commits {newer} (GRU 64,128,32: {older}) and, for the table" in PROSE


def test_figures_of_wide_states_as_other_gpus_are_those_of_the_results():
    headings, rows = table("B, T, H, wider")
    assert headings == ["B, T, H, wider", *PROFILES, '`implementation="xla"`'] and len(rows) == 5
    reports = {profile: results_as(profile, "choice") for profile in PROFILES.values()}
    found = {profile: values(report) for profile, report in reports.items()}
    of = {
        profile: {commit for commit, cases in report.commits().items() if set(cases) & set(rows)}
        for profile, report in reports.items()
    }
    (older,), (newer,) = of["a100"] | of["rtx4090"], of["rtx3090"]
    assert f"and, for the table from `choice`, {older} (as an RTX 3090, {newer})." in PROSE
    for case, (*ours, scan) in rows.items():
        times = [found[profile][case, "default"] for profile in PROFILES.values()]
        assert [rounded(x, y) for x, y in zip(times, ours, strict=True)] == ours
        assert_range([found[profile][case, "xla"] for profile in PROFILES.values()], scan)


def test_the_default_is_at_most_3_percent_behind_the_faster_implementation():
    """The bound holds for every problem of suite `choice`, on the H200 and as each of the other GPUs."""
    reports = [results("choice"), *(results_as(profile, "choice") for profile in PROFILES.values())]
    ratios = []
    for report in reports:
        found = values(report)
        cases = {case for case, _ in found}
        assert len(cases) == len(choice.PROBLEMS) and {row.status for row in report.rows} == {"measured"}
        ratios += [found[case, "default"] / min(found[case, "triton"], found[case, "xla"]) for case in cases]
    problems, most, *named = re.search(
        r'`choice` compares `implementation=None` with "triton" and "xla" in (\d+) problems.*? '
        r"The default takes at most ([\d.]+) times the time of the faster one\. "
        r"The problems are of commits (\w+), (\w+) and (\w+);", PROSE,
    ).groups()  # fmt: skip
    assert int(problems) == len(choice.PROBLEMS) and max(ratios) <= float(most) == 1 + choice.TOLERANCE
    counts = [{commit: len(cases) for commit, cases in report.commits().items()} for report in reports]
    assert {commit for each in counts for commit in each} == set(named)
    notes = re.search(
        r"Of `choice`, on the H200, (.*?); as an A100, (.*?); as an RTX 3090, (.*?); as an RTX 4090, (.*?)\. Suites",
        " ".join(TEXTS["benchmarks/NOTES.md"].split()),
    ).groups()
    for each, text in zip(counts, notes, strict=True):
        assert sum(each.values()) == len(choice.PROBLEMS)
        numbers = [int(x) for x in re.findall(r"\b\d+\b", text)]
        assert numbers == [each[commit] for commit in named if commit in each], text
        if not text.endswith("of these"):  # of those of the H200
            assert re.findall(r"of (\w{7})\b", text) == [commit for commit in named if commit in each], text


def test_errors_are_at_most_twice_those_of_xla():
    assert "The error is at most twice XLA's own error at the same precision." in PROSE
    rows = results("accuracy").rows
    assert len(rows) > 100 and all(row.good for row in rows)


# Versions, extras and limits


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
    assert {extra for page, extra in named if page == "README.md"} >= {
        "cuda13", "cuda12", "jax", "triton", "torch", "torch-cuda13", "torch-cuda12", "examples",
    }  # fmt: skip
    assert [(page, extra) for page, extra in named if extra not in EXTRAS] == []


def test_extras_install_what_the_readme_says():
    assert "`cuda13` and `cuda12` install JAX and Triton, and no PyTorch." in PROSE
    for extra in ("cuda13", "cuda12"):
        assert {"jax", "triton"} <= required(extra) and "torch" not in required(extra)
        assert {"jax", "triton", "torch"} <= required(f"torch-{extra}")
    assert "`pip install '.[torch]'`, which brings no JAX" in PROSE
    assert {"torch", "triton"} <= required("torch") and required("torch").isdisjoint({"jax", "jaxlib", "flax"})
    assert {"jax", "flax"} <= required("jax") and required("jax").isdisjoint({"triton", "torch"})


def test_versions_are_those_that_the_package_requires():
    (python,) = set(re.findall(r"Python (3\.\d+)(?:\+| or newer)", README))
    assert PROJECT["requires-python"] == f">={python}"
    (requirement,) = EXTRAS["triton"]
    low, high = re.search(r"triton>=(3\.\d+),<3\.(\d+)", requirement).groups()
    assert f"with Triton {low} to 3.{int(high) - 1}" in PROSE


def test_widest_state_is_that_of_the_kernels():
    from torch_bridge import tiling

    per_sm, width = re.search(r"H up to (\d+) times the SMs \(([\d,]+) on an H200\)", PROSE).groups()
    device = tiling.PROFILES["h200"]
    assert tiling.max_hidden(device) == int(width.replace(",", "")) == int(per_sm) * device.multiprocessors


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
    assert {target for page, target in named if page == "README.md"} == {"demo", "test", "docs"}
    assert {target for page, target in named if page == "CONTRIBUTING.md"} > {"test", "lint", "types", "wheel"}
    assert [(page, target) for page, target in named if target not in targets] == []


def benchmark_commands():
    """Returns the arguments of every `python -m benchmarks` of a page, without placeholders such as SUITE."""
    found = [(page, one) for page, text in TEXTS.items() for one in re.findall(r"`python -m benchmarks ?(.*?)`", text)]
    return [(page, arguments) for page, arguments in found if not re.search("[A-Z]{3}", arguments)]


def test_benchmark_commands_are_accepted():
    commands = benchmark_commands()
    assert len([page for page, _ in commands if page == "README.md"]) == 3
    for page, arguments in commands:
        if "..." not in arguments:
            options = command.parse_arguments(shlex.split(arguments.replace("\n", " ")))
            assert options.view or options.suites, page


def test_every_suite_is_in_the_table_of_the_benchmarks():
    listed = re.findall(r"^\| `([\w-]+)` \|", TEXTS["benchmarks/README.md"], re.MULTILINE)
    assert sorted(listed) == sorted(command.SUITES)


def example_commands():
    """Returns the examples and options that README.md and examples/README.md call."""
    found = [
        (name, arguments.split("#")[0])
        for page in ("README.md", "examples/README.md", *[page for page in PAGES if page.startswith("docs/")])
        for name, arguments in re.findall(r"^ *python examples/(\w+)\.py(.*)$", TEXTS[page], re.MULTILINE)
        + re.findall(r"`examples/(\w+)\.py( [^`]+)`", TEXTS[page])
    ]
    markers = {"torch_policy": [pytest.mark.torch], "gymnax_ppo": [pytest.mark.gymnax]}
    markers |= {name: [pytest.mark.agents] for name in ("craftax_ppo", "jaxmarl_ippo")}
    assert len(found) >= 12 and {"recurrent_ppo", "many_seeds", *markers} <= {name for name, _ in found}
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
    """Returns the dotted names of a package that the README writes as code, such as `jaxrnn.linen.ScannedRNN`."""
    code = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    names = {name for span in re.findall(r"`([^`]+)`", code) for name in re.findall(rf"\b{package}(?:\.\w+)+", span)}
    assert len(names) >= 3
    return sorted(names)


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
    assert resolve(name) is not None


def listed(module):
    """Returns the code of the row of a module in the table of modules."""
    (contents,) = table("module")[1][f"`{module}`"]
    names = re.findall(r"`(\w+)`", contents)
    assert names
    return names


@pytest.mark.parametrize("module", ["jaxrnn.linen", "jaxrnn.nnx"])
def test_modules_and_options_in_the_table_exist(module):
    found, names = resolve(module), listed(module)
    classes = [name for name in names if name[0].isupper()]
    assert len(classes) >= 12 and set(classes) <= set(found.__all__)
    options = [name for name in names if name[0].islower()]
    assert (len(options) == 6) == (module == "jaxrnn.linen")
    for option in options:
        assert option in inspect.signature(found.LSTM if option == "proj_size" else found.GRU).parameters


def test_functions_take_the_arguments_that_the_readme_lists():
    import jaxrnn

    all_take, lstm_takes = re.search(r"All functions take (.*?); `lstm` also takes `(\w+)`\.", PROSE).groups()
    arguments = re.findall(r"`(\w+)`", all_take)
    assert len(arguments) == 6
    functions = [jaxrnn.gru, jaxrnn.lstm, jaxrnn.mgu, jaxrnn.simple_rnn, jaxrnn.norm_gru]
    for function in functions:
        parameters = inspect.signature(function).parameters
        assert set(arguments) <= set(parameters) and (lstm_takes in parameters) == (function is jaxrnn.lstm)


# Links


def anchors(text):
    """Returns the anchors of the headings of a page, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if "](" in TEXTS[page]])
def test_links_lead_to_files_and_headings(page):
    prose = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"https?:", link)]
    for link in links:
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if heading:
            assert heading in anchors(target.read_text()), link
