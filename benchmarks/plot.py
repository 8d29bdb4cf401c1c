"""Draws figures of the results, as PNG files beside the JSON files."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, TypeGuard

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks import cases, norms
from benchmarks.report import measured_on
from benchmarks.results import AccuracyRow, Report, Row

if TYPE_CHECKING:
    from pathlib import Path

# Colour, marker and legend of the providers in figures, all of which use TF32. The palette is that of Okabe and Ito,
# which color-blind readers can tell apart.
STYLES = {
    "jaxrnn": ("#0072b2", "o", "jaxrnn"),
    "flax": ("#d55e00", "s", "Flax ScannedRNN"),
    "hoisted-scan": ("#e69f00", "^", "lax.scan, hoisted"),
    "torchrl": ("#009e73", "D", "TorchRL Triton"),
    "torch-cudnn-packed": ("#cc79a7", "v", "cuDNN, packed"),
    "torch-cudnn": ("#999999", "X", "cuDNN, no resets"),
}
# The text in place of a bar.
GAPS = {
    "unavailable": "not installed",
    "unsupported": "not supported",
    "unfinished": "first call unfinished",
    "skipped": "not tried",
    "wrong": "wrong result",
    "failed": "raises an error",
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
    axes.set_ylabel("milliseconds (log scale; lower is better)")
    _say_where(figure, report)
    return figure


def _values(report: Report) -> dict[tuple[str, str], float]:
    return {
        (row.case, row.provider): row.value for row in report.rows if isinstance(row, Row) and row.value is not None
    }


def headline(report: Report) -> Figure:
    """Draws bars of the milliseconds of forward and backward in TF32, by case and provider.

    The text over a bar is its time divided by that of `jaxrnn`. The text in place of a bar says why there is none.
    """
    figure = _figure(report, "Forward and backward with every gradient, TF32", 13)
    (axes,) = figure.axes
    values = _values(report)
    gaps = {(row.case, row.provider): GAPS[row.status] for row in report.rows if _has_gap(row)}
    labels = [str(case) for case in cases.HEADLINE if any(label == str(case) for label, _ in values)]
    shown = [name for name in STYLES if any(provider == name for _, provider in values)]
    width = 0.85 / max(len(shown), 1)
    for k, name in enumerate(shown):
        color, _, legend = STYLES[name]
        at = [i for i, label in enumerate(labels) if (label, name) in values]
        places = [i + (k - (len(shown) - 1) / 2) * width for i in at]
        heights = [values[labels[i], name] for i in at]
        axes.bar(places, heights, width, color=color, label=legend)
        for i, place, height in zip(at, places, heights, strict=True):
            ours = values.get((labels[i], "jaxrnn"))
            if ours is not None and name != "jaxrnn":
                axes.text(place, height * 1.05, f"{height / ours:.1f}x", **_VERTICAL)
        for i in sorted({*range(len(labels))} - {*at}):
            place = i + (k - (len(shown) - 1) / 2) * width
            text = gaps.get((labels[i], name), "not measured")
            # at the bottom of the axes: x in data coordinates, y in those of the axes
            axes.text(place, 0.01, text, color=color, transform=axes.get_xaxis_transform(), **_VERTICAL)
    axes.set_xticks(range(len(labels)), [label.replace(" ", "\n", 1) for label in labels], fontsize=8)
    axes.set_xlabel("B, T, H: sequences, steps, units")
    axes.margins(x=0.01, y=0.12)
    axes.legend(
        frameon=False, ncols=len(shown), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2),
        title="2.0x over a bar: 2.0 times the time of jaxrnn", title_fontsize=8,
    )  # fmt: skip
    return figure


_VERTICAL: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 5.5, "rotation": 90}


def _has_gap(row: Row | AccuracyRow) -> TypeGuard[Row]:
    """Returns whether a row has no value, because its provider could not be measured."""
    return isinstance(row, Row) and row.value is None


def small(report: Report) -> Figure:
    """Draws lines of milliseconds against B, for a GRU with T=128 and H=128."""
    figure = _figure(report, "GRU, T=128, H=128: forward and backward with every gradient, TF32", 7.5)
    (axes,) = figure.axes
    values = _values(report)
    chosen = [case for case in cases.SMALL if (case.T, case.H) == (128, 128) and not case.reset_state]
    for name, (color, marker, legend) in STYLES.items():
        points = [(case.B, values.get((str(case), name), math.nan)) for case in chosen]  # NaN interrupts the line
        if any(name == provider for _, provider in values):
            axes.plot(*zip(*points, strict=True), color=color, label=legend, marker=marker, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks([case.B for case in chosen], [str(case.B) for case in chosen])
    axes.set_xlabel("B, the number of sequences (log scale)")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


NORM_STYLES = {
    "torch_bridge": ("#0072b2", "o", "torch_bridge", "-"),
    "jaxrnn": ("#56b4e9", "P", "jaxrnn in jit", "--"),
    "torch-compile": ("#e69f00", "^", "torch.compile", "-"),
    "torch": ("#d55e00", "s", "PyTorch", "-"),
    "xla": ("#009e73", "D", "XLA", "-"),
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
            axes.set_xticks(sorted(largest), [str(n) for n in sorted(largest)], fontsize=7)
            axes.set_ylim(0, 1.15)
    for axes in panels[1]:
        axes.set_xlabel("length of a row, in the case with the most rows (log scale)")
    figure.supylabel("bandwidth divided by that of a device copy (higher is better; 1 is a copy)", fontsize=10)
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    _say_where(figure, report)
    return figure


# The functions that draw figures, keyed by suite.
FIGURES = {"headline": headline, "small": small, "norm": norm}
