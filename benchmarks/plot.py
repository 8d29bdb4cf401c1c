"""Draws figures of the results, each as an SVG file for a light page and one for a dark page, beside the JSON files."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from benchmarks import cases
from benchmarks.report import number, times, versions
from benchmarks.results import AgentRow, Report, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Color, marker and legend of the providers in figures, all of which use TF32. The colors are those of a theme.
STYLES = {
    "jaxrnn": ("C0", "o", "jaxrnn"),
    "flax": ("C1", "s", "Flax ScannedRNN"),
    "hoisted-scan": ("C2", "^", "lax.scan (hoisted)"),
    "torchrl": ("C3", "D", "TorchRL Triton"),
    "torch-cudnn-packed": ("C4", "v", "cuDNN (packed)"),
    "torch-cudnn": ("C5", "X", "cuDNN (no resets)"),
}
NORM_STYLES = {
    "torch_bridge": ("C0", "o", "torch_bridge", "-"),
    "jaxrnn": ("C4", "P", "jaxrnn in jit", "--"),
    "torch-compile": ("C2", "^", "torch.compile", "-"),
    "torch": ("C1", "s", "PyTorch", "-"),
    "xla": ("C3", "D", "XLA", "-"),
}
AGENT_STYLES = {
    "jaxrnn": ("C0", "jaxrnn"),
    "jaxrnn-xla": ("C3", 'jaxrnn, "xla"'),
    "flax": ("C1", "Flax"),
    "no recurrence": ("C5", "no recurrence"),
}
# The text in place of a figure that is missing.
GAPS = {
    "unavailable": "not installed",
    "unsupported": "not supported",
    "unfinished": "first call unfinished",
    "skipped": "not tried",
    "wrong": "wrong result",
    "failed": "raises an error",
}

# The palette of Okabe and Ito, which color-blind readers can tell apart; its blue is another one on dark pages.
_COLORS = ["#d55e00", "#e69f00", "#009e73", "#cc79a7", "#8a8a8a"]


def _theme(paper: str, ink: str, blue: str) -> dict[Any, Any]:
    of_ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    return {
        "figure.facecolor": paper, "savefig.facecolor": paper, "axes.facecolor": paper, **dict.fromkeys(of_ink, ink),
        "axes.prop_cycle": cycler(color=[blue, *_COLORS]), "font.size": 9, "axes.titlesize": 10,
        "axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.2, "legend.frameon": False,
        "svg.fonttype": "none", "svg.hashsalt": "jaxrnn",
    }  # fmt: skip


THEMES = {"light": _theme("#ffffff", "#24292f", "#0072b2"), "dark": _theme("#0d1117", "#d1d7e0", "#58a6ff")}
_WIDTH = 8.3  # 830 pixels, the width of a page on GitHub, at 100 to the inch


def draw(folder: Path) -> list[Path]:
    """Draws the figures whose suites have results in `folder`, and returns their paths."""
    images = []
    for name, (suites, figure) in FIGURES.items():
        paths = [folder / f"{suite}.json" for suite in suites]
        if not all(path.exists() for path in paths):
            continue
        reports = [_with_ours(Report.load(path)) for path in paths]
        for theme, settings in THEMES.items():
            with mpl.rc_context(settings):
                drawn = figure(*reports)
                if drawn is not None:
                    images.append(folder / f"{name}-{theme}.svg")
                    drawn.savefig(images[-1], metadata={"Date": None})
    return images


def _with_ours(report: Report) -> Report:
    """Returns the results with those of our default as ours, if nothing else of ours was measured."""
    if "jaxrnn" in {row.provider for row in report.rows if isinstance(row, Row)}:
        return report
    rows = [
        dataclasses.replace(row, provider="jaxrnn")
        if isinstance(row, Row) and row.provider == "jaxrnn-default"
        else row
        for row in report.rows
    ]
    return dataclasses.replace(report, rows=rows)


def _figure(report: Report, height: float) -> Figure:
    """Returns an empty figure of the width of a page, with the machine and the versions below."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.supxlabel(versions(report), fontsize=6.5, alpha=0.7)
    return figure


def _label(axis: Axis, form: str) -> None:
    """Labels 1, 2 and 5 times each power of ten on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(form)
    axis.set_minor_formatter(NullFormatter())


# The bars of the README's figure: cases of the results of scripts and of suite `headline`.
SCRIPTS = {
    "purejaxrl ppo_rnn.py, CartPole, GRU 128, 64 envs": "purejaxrl's PPO, 64 environments",
    "purejaxrl ppo_rnn.py, CartPole, GRU 128, 8 seeds of 64 envs": "purejaxrl's PPO, 8 seeds of 64 environments",
    "Craftax_Baselines ppo_rnn.py, Craftax-Symbolic, GRU 512, 1024 envs": "Craftax_Baselines' PPO, 1024 environments",
}
ALONE = {
    "GRU 64,128,128": "GRU, 64 sequences of 128 steps, 128 units",
    "GRU 2048,256,128": "GRU, 2048 sequences of 256 steps, 128 units",
}


def speedup(scripts: Report, headline: Report) -> Figure:
    """Draws bars of the speed divided by that with Flax's cell: of whole scripts, and of recurrences alone.

    A mark shows what a script reaches without any recurrence, which is the most that a recurrence can bring.
    """
    whole, alone = scripts.figures(), headline.figures()
    figure = Figure(figsize=(_WIDTH, 3.3), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(len(SCRIPTS), len(ALONE)))
    limits = [whole[case, "no recurrence"] / whole[case, "flax"] for case in SCRIPTS]
    above.set_title("Whole training scripts", loc="left", weight="bold")
    _bars(above, {label: whole[case, "jaxrnn"] / whole[case, "flax"] for case, label in SCRIPTS.items()}, limits)
    above.scatter(
        limits, range(len(limits)), 180, color="C1", marker="|", linewidths=2.5, label="without any recurrence"
    )
    above.legend(loc="lower right")
    above.spines["bottom"].set_visible(False)
    above.tick_params(axis="x", length=0)
    below.set_title("The recurrence alone, with its gradients", loc="left", weight="bold")
    _bars(below, {label: alone[case, "flax"] / alone[case, "jaxrnn"] for case, label in ALONE.items()}, [])
    below.set_xlabel(f"times as fast as with Flax's cell ({scripts.machine['gpu']})")
    return figure


def _bars(axes: Axes, ratios: dict[str, float], limits: list[float]) -> None:
    """Draws a bar for each ratio, with its number behind it and, if there is one, behind its limit."""
    axes.barh(list(ratios), list(ratios.values()), 0.62, color="C0")
    axes.axvline(1, color="C5", linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    for place, (ratio, limit) in enumerate(itertools.zip_longest(ratios.values(), limits)):
        text = f"{times(ratio)}x" + (f" of {times(limit)}x" if limit else "")
        axes.annotate(text, (max(ratio, limit or 0), place), (6, 0), textcoords="offset points", va="center")


def learning(report: Report) -> Figure | None:
    """Draws learning curves of agents over env steps and over seconds, with 95 % intervals; None if there are none."""
    rows = {row.provider: row for row in report.rows if isinstance(row, AgentRow) and row.curve is not None}
    if not rows:
        return None
    first = next(iter(rows.values()))
    figure = _figure(report, 3.5)
    over_steps, over_seconds = figure.subplots(1, 2, sharey=True)
    over_steps.set_title(f"{first.task}, {first.case}", loc="left")
    for name, (color, label) in AGENT_STYLES.items():
        if name not in rows:
            continue
        value, curve = rows[name].value, rows[name].curve
        assert value is not None and curve is not None
        curves = {of: np.array(points, float) for of, points in curve.items()}  # None is NaN, a gap
        # Curves over steps coincide until rounding separates them: dashes show the one below.
        style = {"color": color, "linestyle": "-" if name == "jaxrnn" else (0, (4, 1.5))}
        for axes, x in (over_steps, curves["steps"]), (over_seconds, curves["seconds"]):
            axes.plot(x, curves["mean"], label=f"{label}: {number(value / 1e6)} M steps/s", **style)
            axes.fill_between(x, curves["low"], curves["high"], color=color, alpha=0.25, linewidth=0)
    for axes in (over_steps, over_seconds):
        axes.set_xlim(left=0)
        axes.grid()
    over_steps.xaxis.set_major_formatter(EngFormatter())
    over_steps.set_xlabel("env steps of an agent")
    over_steps.set_ylabel("mean return (higher is better)")
    over_seconds.set_xlabel(f"seconds in which all {first.trained} agents train, without compilation")
    figure.legend(*over_steps.get_legend_handles_labels(), loc="outside upper center", ncols=len(rows), fontsize=8)
    return figure


def headline(report: Report) -> Figure:
    """Draws a row of dots for each case: the time of a provider divided by that of `jaxrnn`.

    The text at the end of a row says which providers have no time, and why.
    """
    values = report.figures()
    labels = [str(case) for case in cases.HEADLINE if (str(case), "jaxrnn") in values]
    shown = [name for name in STYLES if any(provider == name for _, provider in values)]
    reasons = {
        (row.case, row.provider): GAPS[row.status] for row in report.rows if isinstance(row, Row) and row.value is None
    }
    figure = _figure(report, 5.4)
    axes = figure.add_subplot()
    for name in shown:
        color, marker, legend = STYLES[name]
        at = [i for i, label in enumerate(labels) if (label, name) in values]
        ratios = [values[labels[i], name] / values[labels[i], "jaxrnn"] for i in at]
        axes.scatter(ratios, at, 34, color=color, marker=marker, label=legend, zorder=3)
    for i, label in enumerate(labels):
        gaps = [
            f"{STYLES[name][2]}: {reasons.get((label, name), 'not measured')}"
            for name in shown
            if (label, name) not in values
        ]
        axes.annotate(
            "\n".join(gaps), (1, i), (4, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=7
        )
    axes.set_yticks(range(len(labels)), [f"{label} ({number(values[label, 'jaxrnn'])} ms)" for label in labels])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="both")
    axes.set_xscale("log")
    _label(axes.xaxis, "{x:g}x")
    axes.set_xlabel("time divided by that of jaxrnn, which is in brackets (log scale; right is slower)")
    axes.set_title("Forward and backward with every gradient, TF32; rows are B, T, H")
    figure.legend(loc="outside upper center", ncols=len(shown), fontsize=8, columnspacing=1, handletextpad=0.1)
    return figure


def small(report: Report) -> Figure:
    """Draws lines of milliseconds against B, for a GRU with T=128 and H=128."""
    chosen = [case for case in cases.SMALL if (case.T, case.H) == (128, 128) and not case.reset_state]
    figure, axes = _lines(report, "GRU, T=128, H=128", {case.B: case for case in chosen})
    axes.set_xscale("log", base=2)
    axes.set_xticks([case.B for case in chosen], [str(case.B) for case in chosen])
    axes.set_xlabel("B, the number of sequences (log scale)")
    return figure


def episodes(report: Report) -> Figure:
    """Draws lines of milliseconds against the share of steps that begin an episode, for a GRU of few sequences."""
    chosen = [x for x in cases.EPISODES if (x.cell, x.B, x.T, x.H, x.episode) == ("gru", 8, 1024, 256, 0)]
    figure, axes = _lines(report, "GRU, B=8, T=1024, H=256", {100 * case.reset_rate: case for case in chosen})
    axes.set_xscale("symlog")
    axes.set_xticks([100 * case.reset_rate for case in chosen], [f"{case.reset_rate:.0%}" for case in chosen])
    axes.set_xlabel("steps that begin an episode, at random")
    return figure


def _lines(report: Report, title: str, chosen: Mapping[float, cases.Case]) -> tuple[Figure, Axes]:
    """Returns a figure with a line of milliseconds for each provider, over the keys of `chosen`, and its axes."""
    figure = _figure(report, 4)
    axes = figure.add_subplot()
    axes.set_title(f"{title}: forward and backward with every gradient, TF32")
    axes.grid(axis="y")
    axes.set_yscale("log")
    _label(axes.yaxis, "{x:g}")
    axes.set_ylabel("milliseconds (log scale; lower is better)")
    values = report.figures()
    for name, (color, marker, legend) in STYLES.items():
        points = [(x, values.get((str(case), name), math.nan)) for x, case in chosen.items()]  # NaN interrupts the line
        if any(name == provider for _, provider in values):
            axes.plot(*zip(*points, strict=True), color=color, label=legend, marker=marker, markersize=5)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure, axes


def norm(report: Report) -> Figure:
    """Draws lines of the share of a copy's bandwidth against the length of rows, in bfloat16.

    For each length, it shows the case with the most rows.
    """
    figure = _figure(report, 6)
    values = report.figures()
    panels = figure.subplots(2, 2, sharex=True, sharey=True, squeeze=False)
    for i, (kind, title) in enumerate(cases.NORM_NAMES.items()):
        for j, direction in enumerate(cases.DIRECTIONS):
            axes = panels[i][j]
            axes.set_title(f"{title}, {cases.DIRECTIONS[direction]}, bfloat16")
            axes.grid()
            axes.axhline(1, color="C5", linewidth=0.8)
            chosen = [
                case for case in cases.NORMS if (case.kind, case.direction, case.dtype) == (kind, direction, "bf16")
            ]
            largest = {case.columns: case for case in sorted(chosen, key=lambda case: case.rows)}
            for name, (color, marker, legend, line) in NORM_STYLES.items():
                points = [(n, values.get((str(largest[n]), name), math.nan)) for n in sorted(largest)]
                if any(name == provider for _, provider in values):
                    axes.plot(
                        *zip(*points, strict=True),
                        color=color,
                        label=legend,
                        marker=marker,
                        markersize=5,
                        linestyle=line,
                    )
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(largest), [str(n) for n in sorted(largest)], fontsize=7, rotation=45)
            axes.set_ylim(0, 1.15)
    for axes in panels[1]:
        axes.set_xlabel("length of a row, in the case with the most rows (log scale)")
    figure.supylabel("bandwidth divided by that of a device copy (higher is better)", fontsize=9)
    panels[0][0].legend(fontsize=8, loc="lower right")
    return figure


# The figures, with the suites whose results they show.
FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure | None]]] = {
    "speedup": (("scripts", "headline"), speedup),
    "learning": (("ppo",), learning),
    "headline": (("headline",), headline),
    "small": (("small",), small),
    "episodes": (("episodes",), episodes),
    "norm": (("norm",), norm),
}
SUITES = tuple(dict.fromkeys(suite for suites, _ in FIGURES.values() for suite in suites))
