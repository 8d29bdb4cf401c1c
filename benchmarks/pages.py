"""Writes the tables and the sentences with measured figures into the pages for users.

A page says where they go: what is between the lines `<!-- results: NAME -->` and `<!-- end -->` is what the function of
that name in `BLOCKS` returns.
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import cases
from benchmarks.oracle import tolerance
from benchmarks.report import number, times, versions
from benchmarks.results import RESULTS, AgentRow, Report, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Figures = dict[tuple[str, str], float]  # by case and provider

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / page for page in ("README.md", "docs/performance.md", "docs/norms.md", "docs/pytorch.md", "site/home.md")
)
# The folders of the results that the pages show, and those of this repository's agents among them.
DEVICE, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
AGENTS = DEVICE
AS_OTHERS = {f"as {name}": f"as-{profile}-on-{DEVICE}" for name, profile in (
    ("an A100", "a100"), ("an RTX 3090", "rtx3090"), ("an RTX 4090", "rtx4090"),
)}  # fmt: skip

# The providers of a column, in TF32 and in bfloat16.
OURS, OUR_DEFAULT = ("jaxrnn", "jaxrnn-bf16"), ("jaxrnn-default", "jaxrnn-default-bf16")
PEERS = {
    "Flax": ("flax",),
    "`lax.scan` (hoisted)": ("hoisted-scan",),
    "TorchRL Triton": ("torchrl", "torchrl-bf16"),
    "cuDNN (packed)": ("torch-cudnn-packed", "torch-cudnn-packed-bf16"),
    "cuDNN (no resets)": ("torch-cudnn", "torch-cudnn-bf16"),
}
RECURRENCES = {"jaxrnn": "jaxrnn", "jaxrnn-xla": 'jaxrnn, `"xla"`', "flax": "Flax", "no recurrence": "none"}
CELLS = {
    "GRU": "GRU", "MGU": "MGU", "SIMPLE_TANH": "simple RNN (tanh)", "SIMPLE_RELU": "simple RNN (ReLU)",
    "RMS_NORM_GRU": "normed GRU (RMSNorm)", "LAYER_NORM_GRU": "normed GRU (LayerNorm)",
}  # fmt: skip
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write() -> list[Path]:
    """Writes the blocks of all pages anew, and returns the pages."""
    for page in PAGES:
        page.write_text(written(page.read_text()))
    return list(PAGES)


def written(text: str) -> str:
    """Returns the text of a page with its blocks written anew."""
    return _BLOCK.sub(lambda block: f"{block[1]}{BLOCKS[block[2]]()}\n{block[3]}", text)


# Parts of the blocks.


@functools.cache
def load(suite: str, device: str = DEVICE) -> Report:
    """Returns the results of a suite."""
    return Report.load(RESULTS / device / f"{suite}.json")


def rows_of(suite: str, device: str = DEVICE) -> list[Row]:
    """Returns the rows of a suite."""
    return [row for row in load(suite, device).rows if isinstance(row, Row)]


def figures(suite: str, device: str = DEVICE) -> Figures:
    """Returns the figures of a suite."""
    return load(suite, device).figures()


def measured_on(suite: str, device: str = DEVICE) -> str:
    """Returns a sentence with the machine and the versions."""
    return f"Measured on {versions(load(suite, device))}."


def gpu(suite: str, device: str = DEVICE) -> str:
    """Returns the name of the GPU of a suite's results, as in `H200`."""
    return load(suite, device).machine["gpu"].split()[1]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table whose first column is aligned to the left."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def prose(*sentences: str) -> str:
    """Returns a paragraph."""
    return textwrap.fill(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def together(*parts: str) -> str:
    """Returns tables and paragraphs below one another."""
    return "\n\n".join(parts)


def listed(items: Iterable[str]) -> str:
    """Returns items as in `one, two and three`."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def between(values: Iterable[float], form: Callable[[float], str] = number) -> str:
    """Returns the smallest and the largest value, as in `36.6 to 39.8`, or one text if both have the same."""
    low, *_, high = sorted(values) * 2
    return form(low) if form(low) == form(high) else f"{form(low)} to {form(high)}"


def entry(measured: Figures, case: str, providers: Iterable[str]) -> str:
    """Returns what a table has of several providers, as in `2.62 / 1.73`, or `-` if there is none."""
    values = [measured.get((case, provider)) for provider in providers]
    texts = ["-" if value is None else number(value) for value in values]
    return "-" if {*texts} == {"-"} else " / ".join(texts)


def speed(value: float | None) -> str:
    """Returns a speed in steps per second, as in `1.38 M`."""
    assert value is not None
    return f"{number(value / 1e6)} M" if value >= 1e6 else f"{number(value / 1e3)} k"


def percent(share: float | None) -> str:
    """Returns a share, as in `71 %`."""
    return "-" if share is None else f"{100 * share:.0f} %"


def ahead(ms: Figures, ours: Sequence[str] = OURS, of: str = "") -> str:
    """Returns a sentence with what is faster than ours of the same precision, and where; `of` follows "rows"."""
    faster = []
    for heading, providers in PEERS.items():
        for provider, name, precision in zip(providers, ours, ("TF32", "bfloat16"), strict=False):
            for case in [case for case, other in ms if other == provider and (case, name) in ms]:
                ratio = ms[case, provider] / ms[case, name]
                if ratio < 1:
                    faster.append(f"{heading}, {ratio:.2f} of our time for {case} in {precision}")
    rows = len({case for case, name in ms if name in ours})
    return f"In {rows} rows{of} (TF32, bfloat16), faster than ours: {'; '.join(faster) or 'none'}."


# Whole agents.


def agent_rows(device: str) -> list[AgentRow]:
    """Returns the rows of this repository's agents: those of suite `ppo` and, where they were taken, of examples."""
    reports = [load("ppo", device)]
    if (RESULTS / device / "examples.json").exists():
        reports.append(load("examples", device))
    rows = [row for report in reports for row in report.rows]
    return [row for row in rows if isinstance(row, AgentRow) and row.value is not None]


def agents() -> list[AgentRow]:
    """Returns the rows of agents that were compared on one GPU; recurrences have the order of `RECURRENCES`."""
    rows = [row for row in agent_rows(AGENTS) if row.gpus == 1 and row.share is not None]
    labels, names = list(dict.fromkeys(row.case for row in rows)), list(RECURRENCES)
    return sorted(rows, key=lambda row: (labels.index(row.case), names.index(row.provider)))


def final_return(row: AgentRow) -> str:
    """Returns the mean final return with its interval, as in `0.99 (0.98 to 1.00)`, or `-` if there is none."""
    if row.returned is None:  # no episode ended
        return "-"
    bounds = "" if row.returned_low is None else f" ({row.returned_low:.2f} to {row.returned_high:.2f})"
    return f"{row.returned:.2f}{bounds}"


def claim() -> str:
    """Returns a sentence with the speed-up of whole agents by the import swap, and their returns."""
    speeds = figures("scripts")
    ratios = {case: value / speeds[case, "flax"] for (case, name), value in speeds.items() if name == "jaxrnn"}
    swapped = [ratio for case, ratio in ratios.items() if case.startswith("purejaxrl")]
    (craftax,) = (ratio for case, ratio in ratios.items() if case.startswith("Craftax"))
    several = [row for row in agents() if row.seeds > 1]
    by_provider = {row.provider: row for row in several if row.case == several[0].case}
    if missing := [name for name in ("jaxrnn", "flax") if name not in by_provider]:
        raise ValueError(f"the results of suite ppo on {AGENTS} have no agents of several seeds with {listed(missing)}")
    ours, flax = by_provider["jaxrnn"], by_provider["flax"]
    where = "" if gpu("ppo", AGENTS) == gpu("scripts") else f" on an {gpu('ppo', AGENTS)}"
    return prose(
        f"**purejaxrl's PPO on CartPole trains {times(min(swapped))} to {times(max(swapped))} times as fast** on an "
        f"{gpu('scripts')} with `ScannedRNN` imported from here; Craftax_Baselines' PPO, where the environment takes "
        f"the time, {times(craftax)} times. Our example's PPO, on CartPole without velocities, runs {ours.seeds} seeds "
        f"under `vmap` at {speed(ours.value)} steps/s{where}, and at {speed(flax.value)} with Flax's GRU. Its mean "
        f"return, at most 1, is {final_return(ours)}, with Flax's {final_return(flax)}; in brackets 95 % intervals."
    )


def whole_agents() -> str:
    """The speed and the returns of agents with each recurrence."""
    headings = ("agent", "recurrence", "env steps/s", "of no recurrence", "final return (95 % interval)", "seeds")
    rows = [
        (
            row.case, RECURRENCES[row.provider], speed(row.value), percent(row.share), final_return(row),
            str(row.trained),
        )
        for row in agents()
    ]  # fmt: skip
    tasks = dict.fromkeys(row.task for row in agents() if not row.case.startswith("PPO"))
    others = f"Of other [examples](../examples/README.md): {listed(tasks)}." if tasks else ""
    return together(table(headings, rows), prose(*filter(None, (others, measured_on("ppo", AGENTS)))))


def learning_curves() -> str:
    """The figure of agents' returns over steps and over seconds, if the results have curves."""
    if all(row.curve is None for row in agents()):
        return ""
    light, dark = (f"benchmarks/results/{AGENTS}/learning-{theme}.svg" for theme in ("light", "dark"))
    alt = "Mean return of agents with each recurrence, over environment steps and over wall-clock seconds"
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return f'<picture>{source}<img alt="{alt}" src="{light}" width="830"></picture>'


def several_gpus() -> str:
    """The speed of an agent on several GPUs, with 1024 environments on each."""
    rows = [row for row in agent_rows(H100) if row.share is None and row.envs == 1024 * row.gpus]
    return prose(
        f"With 1024 environments on each of {listed(str(row.gpus) for row in rows)} {gpu('ppo', H100)}s, an agent "
        f"makes {listed(speed(row.value) for row in rows)} steps per second. The final returns, of one seed each, are "
        f"{listed(map(final_return, rows))}."
    )


def scripts() -> str:
    """The speed of other projects' scripts with each recurrence."""
    speeds, rows = figures("scripts"), []
    for case in dict.fromkeys(case for case, _ in speeds):
        ours, flax, none = (speeds[case, name] for name in ("jaxrnn", "flax", "no recurrence"))
        rows.append((case, speed(ours), speed(flax), speed(none), times(ours / flax), percent(ours / none)))
    headings = ("script", "jaxrnn", "its own class", "no recurrence", "times as fast", "of no recurrence")
    return together(table(headings, rows), prose(measured_on("scripts")))


# Recurrences.


def recurrences(ms: Figures, labels: Iterable[str], peers: Iterable[str], precisions: int) -> str:
    """Returns a table of milliseconds, in which the figures of the implementation that is fastest in TF32 are bold."""
    columns = {"jaxrnn": OURS} | {heading: PEERS[heading] for heading in peers}
    rows = []
    for case in labels:
        cells = [entry(ms, case, providers[:precisions]) for providers in columns.values()]
        values = [ms.get((case, providers[0]), math.inf) for providers in columns.values()]
        fastest = values.index(min(values))
        cells[fastest] = f"**{cells[fastest]}**"
        rows.append((case, *cells))
    return table(("B, T, H", *columns), rows)


def readme_recurrences() -> str:
    """Five rows of suite `headline` in TF32."""
    labels = "GRU 64,128,128", "GRU 2048,256,128", "GRU 512,32,1024", "GRU 8,1024,256", "LSTM 1024,128,256"
    ms = figures("headline")
    sentence = ahead(ms, of=" of [the whole table](docs/performance.md)")
    return together(recurrences(ms, labels, [*PEERS][:4], 1), prose(sentence))


def all_recurrences() -> str:
    """All rows of suite `headline`."""
    ms = figures("headline")
    narrow, wide = (
        [ms[str(case), "flax"] / ms[str(case), "jaxrnn"] for case in cases.HEADLINE if (case.H <= 256) == up_to]
        for up_to in (True, False)
    )
    unfinished = [
        f"TorchRL, {row.case}: {row.reason}."
        for row in rows_of("headline")
        if (row.provider, row.status) == ("torchrl", "unfinished")
    ]
    sentences = [
        ahead(ms),
        f"In TF32, Flax's `ScannedRNN` takes {between(narrow, times)} times our time for up to 256 units, and "
        f"{between(wide, times)} times for more.",
        "A `-` is not measured.",
        *unfinished,
        "Wider states were not tried." if unfinished else "",
        measured_on("headline"),
    ]
    return together(recurrences(ms, map(str, cases.HEADLINE), PEERS, 2), prose(*filter(None, sentences)))


def few_sequences() -> str:
    """The time of cuDNN for few sequences, divided by ours."""
    ms = figures("small")
    labels = [str(case) for case in cases.SMALL if (case.T, case.H, case.reset_state) == (128, 128, "")]
    plain, packed = (
        between([ms[x, name] / ms[x, "jaxrnn"] for x in labels if (x, name) in ms], times)
        for name in ("torch-cudnn", "torch-cudnn-packed")
    )
    return prose(
        f"For 1 to 64 sequences of 128 steps and 128 units, cuDNN takes {plain} times our time without any reset, and "
        f"{packed} times with its episodes packed. These ratios are those of suite `small`, a run of its own."
    )


def episodes() -> str:
    """The times of sequences whose episodes run side by side, by how episodes begin: half of the cases."""
    ms = figures("episodes")
    measured = {provider for _, provider in ms}
    peers = [heading for heading, providers in PEERS.items() if providers[0] in measured]
    left_out = {
        str(case)
        for case in cases.EPISODES
        if case.reset_rate > 0.01 or case.episode not in (0, 25 if case.T <= 128 else 52)  # of MPE, and of POPGym
    }
    table = recurrences(ms, [case for case in dict.fromkeys(case for case, _ in ms) if case not in left_out], peers, 2)
    sentences = [ahead(ms), *(["A `-` is not measured."] if "| - |" in table else []), measured_on("episodes")]
    return together(table, prose(*sentences))


def other_cells() -> str:
    """The times of every cell but the LSTM."""
    ms, rows = figures("cells"), []
    for case in dict.fromkeys(case for case, _ in ms):
        name, _, shape = case.partition(" ")
        ratios = [f"{ms[case, ours] / ms[f'GRU {shape}', ours]:.2f}" for ours in OURS]
        peers = [entry(ms, case, PEERS[heading]) for heading in ("Flax", "`lax.scan` (hoisted)")]
        rows.append((f"{CELLS[name]} {shape}", entry(ms, case, OURS), " / ".join(ratios), *peers))
    errors = [
        row.error for row in rows_of("cells")
        if row.case.startswith("SIMPLE_RELU") and row.error is not None and not row.provider.endswith("bf16")
    ]  # fmt: skip
    relu = (
        f"With a ReLU, all implementations are off by {between(errors, '{:.3f}'.format)} from float64 in TF32, because "
        "rounded products change the signs of sums near zero, and so the derivative. The check before the timing "
        f"allows {tolerance('simple_relu', 'tf32'):g}."
    )
    headings = ("B, T, H", "jaxrnn, TF32 / bfloat16", "times the GRU's time", "Flax", "`lax.scan` (hoisted)")
    return together(table(headings, rows), prose(relu))


def derivatives() -> str:
    """The times of tangents and of Hessian-vector products."""
    ms, rows = figures("derivatives"), []
    names = {"jvp": "tangents (`jax.jvp`)", "hvp": "Hessian-vector product"}
    columns = {RECURRENCES[name]: name for name in ("jaxrnn", "jaxrnn-xla", "flax")}
    columns |= {"`lax.scan` (hoisted)": "hoisted-scan"}
    for case in dict.fromkeys(case for case, _ in ms):
        shape, _, derivative = case.rpartition(" ")
        rows.append((shape, names[derivative], *(entry(ms, case, [name]) for name in columns.values())))
    return together(table(("B, T, H", "what", *columns), rows), prose(measured_on("derivatives")))


def many_agents() -> str:
    """The times of many models under vmap."""
    ms = figures("vmap")
    columns = OURS, PEERS["`lax.scan` (hoisted)"], PEERS["Flax"]
    rows = [(str(case.models), *(entry(ms, str(case), names) for names in columns)) for case in cases.VMAP]
    return table(("agents", "jaxrnn, TF32 / bfloat16", "`lax.scan` (hoisted)", "Flax `ScannedRNN`"), rows)


def memory() -> str:
    """The memory of a pass, and what recomputing costs."""
    gigabytes, headline, case = figures("memory"), figures("headline"), str(cases.MEMORY)
    columns = {"jaxrnn": OURS, "jaxrnn, `remat=True`": ("jaxrnn-remat",), **PEERS}
    longer, shorter = (number(headline[case, name]) for name in ("jaxrnn-remat", "jaxrnn"))
    remat = (
        "`remat=True` recomputes in chunks of time: the forward kernel runs a second time, and the pass takes "
        f"{longer} ms instead of {shorter} ms in TF32."
    )
    row = case, *(entry(gigabytes, case, names) for names in columns.values())
    return together(table(("B, T, H", *columns), [row]), prose(remat))


def first_call() -> str:
    """The seconds of a first call."""
    seconds, columns = figures("compile"), (OURS, PEERS["Flax"], PEERS["`lax.scan` (hoisted)"])
    rows = [(str(case), *(entry(seconds, str(case), names) for names in columns)) for case in cases.COMPILE]
    second = [
        f"{number(value)} s for {case.removesuffix(', second process')}"
        for (case, _), value in figures("compile", H100).items()
        if case.endswith(", second process")
    ]
    cached = (
        "Compiled kernels are cached on disk, in Triton's cache folder. Where they are found there, the first call of "
        f"another process takes {listed(second)} on an {gpu('compile', H100)}."
    )
    headings = ("B, T, H", "jaxrnn, TF32 / bfloat16", "Flax", "`lax.scan` (hoisted)")
    return together(table(headings, rows), prose(cached))


def single_steps() -> str:
    """The time of a step of a rollout, and of a launch."""
    us = {name: number(value) for (_, name), value in figures("acting").items()}
    (launch,) = (value for (_, name), value in figures("dispatch").items() if name == "our launch over a native call")
    return prose(
        f"An iteration of a jitted scan takes {us['jaxrnn']} us with it, {us['flax']} us with Flax's cell, "
        f"{us['jaxrnn-triton']} us with our kernel, and {us['three trivial ops']} us with three trivial operations. "
        f"In a jitted scan, our launch of a kernel takes {number(launch)} us more than XLA's own of the same kernel."
    )


# Other GPUs.


def other_gpus() -> str:
    """The times on another GPU, and of the kernels of other GPUs on `DEVICE`."""
    labels = "GRU 2048,256,128", "GRU 64,128,128", "GRU 8,1024,256", "GRU 512,32,1024", "LSTM 1024,128,256"
    columns = {f"an {gpu('headline', H100)}": (figures("headline", H100), OURS)}
    columns |= {name: (figures("headline", folder), OUR_DEFAULT) for name, folder in AS_OTHERS.items()}
    peers = {heading: PEERS[heading][0] for heading in ("Flax", "`lax.scan` (hoisted)", "cuDNN (packed)")}
    rows = []
    for case in labels:
        others = [
            between([ms[case, name] for ms, _ in columns.values() if (case, name) in ms]) for name in peers.values()
        ]
        rows.append((case, *(entry(ms, case, ours) for ms, ours in columns.values()), *others))
    sentences = [f"**{name[0].upper()}{name[1:]}:** {ahead(ms, ours)}" for name, (ms, ours) in columns.items()]
    return together(table(("B, T, H", *columns, *peers), rows), *map(prose, sentences))


def episodes_on_other_gpus() -> str:
    """The times of a part of suite `episodes` as other GPUs, and where a peer is faster in any of its rows."""
    columns = {name: figures("episodes", AS_OTHERS[name]) for name in ("as an A100", "as an RTX 4090")}
    names = ("`lax.scan` (hoisted)", "cuDNN (packed)", "cuDNN (no resets)")
    chosen = [str(case) for case in cases.EPISODES if case.episode == 52 or (not case.episode and not case.reset_rate)]
    rows = [
        (
            case, *(entry(ms, case, OUR_DEFAULT) for ms in columns.values()),
            *(between([ms[case, PEERS[name][0]] for ms in columns.values()]) for name in names),
        )
        for case in chosen
    ]  # fmt: skip
    sentences = [f"**{name[0].upper()}{name[1:]}:** {ahead(ms, OUR_DEFAULT)}" for name, ms in columns.items()]
    return together(table(("B, T, H", *columns, *names), rows), prose(*sentences))


def wide_on_other_gpus() -> str:
    """The times of wide states as other GPUs, and how far the default is from the faster implementation."""
    labels = "GRU 1024,128,256", "LSTM 256,128,512", "GRU 128,64,512", "GRU 8,256,1024"
    columns = {name: figures("choice", folder) for name, folder in AS_OTHERS.items()}
    rows = [
        (
            case, *(entry(ms, case, ["default"]) for ms in columns.values()),
            entry(next(iter(columns.values())), case, ["xla"]),  # the same program on each
        )
        for case in labels
    ]  # fmt: skip
    ratios = [
        ms[case, "default"] / min(ms[case, "triton"], ms[case, "xla"])
        for ms in (figures("choice"), *columns.values())
        for case in {case for case, _ in ms}
    ]
    choice = (
        f'Suite `choice` compares `implementation=None` with "triton" and "xla" in {len(ratios) // (1 + len(columns))} '
        f"problems, on an {gpu('choice')} and as each of these GPUs. The default takes at most "
        f"{math.ceil(100 * max(ratios)) / 100:.2f} times the time of the faster one."
    )
    return together(table(("B, T, H", *columns, '`implementation="xla"`'), rows), prose(choice))


# Norms.


def norm_shares(shapes: Iterable[tuple[int, int]]) -> str:
    """Returns a table of the shares of a copy's bandwidth, and where another implementation has a larger one."""
    share_of, shapes = figures("norm"), sorted(shapes, key=lambda shape: (shape[1], shape[0]))
    names = {"jaxrnn": "jaxrnn", "xla": "XLA", "torch-compile": "`torch.compile`"}
    kinds = {(case.kind, case.direction, case.dtype): None for case in cases.NORMS}
    rows, gaps = [], {}
    for kind, direction, dtype in sorted(kinds, key=lambda x: (x[0] == "layer", x[2] == "f32", x[1] == "bwd")):
        cells = []
        for shape in shapes:
            case = str(cases.NormCase(kind, direction, dtype, *shape))
            shares = [share_of[case, name] for name in names]
            cells.append(" / ".join(f"{share:.2f}" for share in shares))
            if max(shares) > shares[0]:
                best = [*names.values()][shares.index(max(shares))]
                gaps[case] = max(shares) - shares[0], f"{best} has {max(shares):.2f}, ours {shares[0]:.2f}"
        rows.append((f"{cases.NORM_NAMES[kind]} {cases.DIRECTIONS[direction]}, {cases.DTYPES[dtype]}", *cells))
    where = f"XLA or `torch.compile` has a larger share in {len(gaps)} of these {len(rows) * len(shapes)} cells."
    if gaps:
        case, (_, largest) = max(gaps.items(), key=lambda item: item[1][0])
        where += f" The largest gap is that of {case}: {largest}."
    headings = ("rows x columns", *(f"{height}x{width}" for height, width in shapes))
    return together(table(headings, rows), prose(where))


def large_norms() -> str:
    """The shares of large arrays."""
    return norm_shares(cases.WIDE_NORMS)


def small_norms() -> str:
    """The shares of the smaller arrays of an agent."""
    fewest = min(rows for rows, _ in cases.RECURRENT_NORMS)
    return norm_shares(shape for shape in cases.RECURRENT_NORMS if shape[0] == fewest)


# PyTorch.


def torch_modules() -> str:
    """The times of the modules for PyTorch, with resets, and of a call of one step."""
    ms = figures("torch")
    columns = {
        "eager": "torch_bridge",
        "`torch.compile`": "torch_bridge-compiled",
        "cuDNN (packed)": "torch-cudnn-packed",
        "cuDNN (no resets)": "torch-cudnn",
        "TorchRL Triton": "torchrl",
    }
    rows = [
        (str(case), *(entry(ms, str(case), [name]) for name in columns.values()))
        for case in cases.TORCH
        if case.reset_rate
    ]
    host = {name: number(value / 1e3) for (_, name), value in figures("torch-step").items()}
    sentences = [
        f"A call of one step without gradients takes the host {host['torch_bridge']} ms, with `torch.compile` "
        f"{host['torch_bridge-compiled']} ms, and in a CUDA graph {host['torch_bridge-cudagraphs']} ms. "
        f"`torch.nn.GRUCell` with a reset takes {host['torch-cell']} ms, and cuDNN's module {host['torch-cudnn']} ms.",
        measured_on("torch"),
    ]
    return together(table(("B, T, H", *columns), rows), prose(*sentences))


BLOCKS = {
    "claim": claim,
    "learning-curves": learning_curves,
    "readme-recurrences": readme_recurrences,
    "whole-agents": whole_agents,
    "several-gpus": several_gpus,
    "scripts": scripts,
    "recurrences": all_recurrences,
    "few-sequences": few_sequences,
    "episodes": episodes,
    "other-cells": other_cells,
    "derivatives": derivatives,
    "many-agents": many_agents,
    "memory": memory,
    "first-call": first_call,
    "single-steps": single_steps,
    "other-gpus": other_gpus,
    "episodes-on-other-gpus": episodes_on_other_gpus,
    "wide-on-other-gpus": wide_on_other_gpus,
    "large-norms": large_norms,
    "small-norms": small_norms,
    "torch-modules": torch_modules,
}
