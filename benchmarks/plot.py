"""Draws figures of the results, as PNG files beside the JSON files."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks import cases, norms
from benchmarks.report import measured_on
from benchmarks.results import Report, Row

if TYPE_CHECKING:
    from pathlib import Path

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
STYLES = {
    "jaxrnn": ("#0072b2", "jaxrnn"),
    "jaxrnn-bf16": ("#56b4e9", "jaxrnn, bfloat16"),
    "flax": ("#d55e00", "Flax ScannedRNN"),
    "hoisted-scan": ("#e69f00", "lax.scan, hoisted"),
    "torchrl": ("#009e73", "TorchRL Triton"),
    "torch-cudnn-packed": ("#cc79a7", "cuDNN, packed"),
    "torch-cudnn": ("#999999", "cuDNN, no resets"),
}


def draw(folder: Path) -> list[Path]:
    """Draws the figures of the suites that have results in `folder`, and returns their paths."""
    made = []
    for suite, figure in FIGURES.items():
        path = folder / f"{suite}.json"
        if path.exists():
            image = path.with_suffix(".png")
            figure(Report.load(path)).savefig(image, dpi=150)
            made.append(image)
    return made


def _say_where(figure: Figure, report: Report) -> None:
    """Writes below a figure what it was measured on, wrapped to the figure's width."""
    figure.supxlabel(textwrap.fill(measured_on(report), int(20 * figure.get_figwidth())), fontsize=6, color="0.4")


def _figure(report: Report, title: str, width: float) -> Figure:
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("milliseconds")
    _say_where(figure, report)
    return figure


def _values(report: Report) -> dict[tuple[str, str], float]:
    return {
        (row.case, row.provider): row.value for row in report.rows if isinstance(row, Row) and row.value is not None
    }


def headline(report: Report) -> Figure:
    """Draws bars of the milliseconds of forward and backward, by case and provider.

    The text over a bar says how many times as fast `jaxrnn` is.
    """
    figure = _figure(report, "Forward and backward with every gradient", 13)
    (axes,) = figure.axes
    values = _values(report)
    labels = [str(case) for case in cases.HEADLINE if any(label == str(case) for label, _ in values)]
    shown = [name for name in STYLES if any(provider == name for _, provider in values)]
    width = 0.85 / max(len(shown), 1)
    for k, name in enumerate(shown):
        color, legend = STYLES[name]
        at = [i for i, label in enumerate(labels) if (label, name) in values]
        places = [i + (k - (len(shown) - 1) / 2) * width for i in at]
        heights = [values[labels[i], name] for i in at]
        axes.bar(places, heights, width, color=color, label=legend)
        for i, place, height in zip(at, places, heights, strict=True):
            ours = values.get((labels[i], "jaxrnn"))
            if ours is not None and not name.startswith("jaxrnn"):
                axes.text(
                    place, height * 1.05, f"{height / ours:.1f}x", ha="center", va="bottom", fontsize=5.5, rotation=90
                )
    axes.set_xticks(range(len(labels)), [label.replace(" ", "\n", 1) for label in labels], fontsize=8)
    axes.set_xlabel("B, T, H")
    axes.margins(x=0.01, y=0.12)
    axes.legend(frameon=False, ncols=len(shown), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def small(report: Report) -> Figure:
    """Draws lines of milliseconds against B, for a GRU with T=128 and H=128."""
    figure = _figure(report, "GRU, T=128, H=128: forward and backward with every gradient", 7.5)
    (axes,) = figure.axes
    values = _values(report)
    chosen = [case for case in cases.SMALL if (case.T, case.H) == (128, 128)]
    for name, (color, legend) in STYLES.items():
        points = [(case.B, values[str(case), name]) for case in chosen if (str(case), name) in values]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, label=legend, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks([case.B for case in chosen], [str(case.B) for case in chosen])
    axes.set_xlabel("B")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


NORM_STYLES = {
    "torch_bridge": ("#0072b2", "torch_bridge", "-"),
    "jaxrnn": ("#56b4e9", "jaxrnn in jit", "--"),
    "torch-compile": ("#e69f00", "torch.compile", "-"),
    "torch": ("#d55e00", "PyTorch", "-"),
    "xla": ("#009e73", "XLA", "-"),
}


def norm(report: Report) -> Figure:
    """Draws lines of the share of a copy's bandwidth against the length of rows, in bfloat16.

    For each length, it shows the case with the most rows.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    values = _values(report)
    panels = figure.subplots(2, 2, sharex=True, sharey=True, squeeze=False)
    for i, (kind, title) in enumerate(norms.NAMES.items()):
        for j, direction in enumerate(("fwd", "bwd")):
            axes = panels[i][j]
            axes.set_title(f"{title}, {'forward' if direction == 'fwd' else 'backward'}, bfloat16", fontsize=10)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.axhline(1, color="0.6", linewidth=0.8)
            chosen = [
                case for case in norms.cases() if (case.kind, case.direction, case.dtype) == (kind, direction, "bf16")
            ]
            largest = {case.columns: case for case in sorted(chosen, key=lambda case: case.rows)}
            for name, (color, legend, line) in NORM_STYLES.items():
                points = sorted((n, values[str(c), name]) for n, c in largest.items() if (str(c), name) in values)
                if points:
                    axes.plot(
                        *zip(*points, strict=True), color=color, label=legend, marker="o", markersize=4, linestyle=line
                    )
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(largest), [str(n) for n in sorted(largest)], fontsize=7)
            axes.set_ylim(0, 1.15)
    panels[1][0].set_xlabel("length of a row")
    panels[1][1].set_xlabel("length of a row")
    figure.supylabel("share of a device copy's bandwidth", fontsize=10)
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    _say_where(figure, report)
    return figure


# The functions that draw figures, keyed by suite.
FIGURES = {"headline": headline, "small": small, "norm": norm}
