"""The picture of examples/digits/digits.py: loss, loss scale, accuracy and memory on one page."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from digits_report import finding
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

# Okabe and Ito's colours, which people distinguish with any colour vision, as they do the dashes.
STYLES: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#b8b8b8", "linewidth": 6.0, "solid_capstyle": "round"},
    "fp16 static": {"color": "#e69f00", "linewidth": 2.0, "linestyle": (0, (6, 2))},
    "fp16 dynamic": {"color": "#0072b2", "linewidth": 1.6},
    "fp16 amp": {"color": "#cc79a7", "linewidth": 1.6, "linestyle": (0, (4, 1, 1, 1))},
    "bf16": {"color": "#009e73", "linewidth": 2.0, "linestyle": (0, (1, 1.5))},
}
SKIPPED = "#d55e00"
INK, FAINT = "#222222", "#777777"
LOOK = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#aaaaaa",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "grid.color": "#e8e8e8",
}
SMOOTHING = 21


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of `results` (of digits_report.summarise), which a phone can show."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(5.6, 8.6), dpi=140, facecolor="white")
        wide = figure.add_gridspec(2, 1, left=0.11, right=0.98, top=0.845, bottom=0.45, hspace=0.46)
        pair = figure.add_gridspec(1, 2, left=0.23, right=0.98, top=0.36, bottom=0.165, wspace=0.3)
        loss = figure.add_subplot(wide[0])
        scale = figure.add_subplot(wide[1], sharex=loss)
        _draw_loss(loss, results["curves"])
        _draw_scale(scale, results["curves"])
        accuracy, memory = (figure.add_subplot(place) for place in pair)
        _draw_accuracy(accuracy, results["rows"])
        _draw_memory(memory, results["rows"])
        memory.tick_params(axis="y", labelleft=False)  # The rows are those of the panel beside it.
        title = textwrap.fill(finding(results), 46)
        figure.text(0.02, 0.985, title, va="top", fontsize=13, fontweight="bold")
        subtitle = textwrap.fill(_subtitle(results), 66)
        figure.text(0.02, 0.93, subtitle, color=FAINT, va="top")
        caption = textwrap.fill(_caption(results), 78)
        figure.text(0.02, 0.01, caption, color=FAINT, fontsize=9, va="bottom")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _subtitle(results: dict[str, Any]) -> str:
    seeds = len(results["rows"][0]["seeds"])
    return (
        "A small convolutional network on scikit-learn's handwritten digits, "
        f"{seeds} seed{'s' if seeds > 1 else ''} for each precision, {_place(results)}"
    )


def _place(results: dict[str, Any]) -> str:
    device = results["environment"]["device"]
    return "on a CPU" if device == "cpu" else f"on {device}"


def _caption(results: dict[str, Any]) -> str:
    settings = results["environment"]["settings"]
    return (
        f"Loss: mean of the seeds and of {SMOOTHING} steps. Loss scale: one seed in full colour, "
        f"the others pale. It doubles after {settings['scale_window']} good steps instead of "
        "the usual 1000, so that a run this short shows it, and halves when a gradient overflows. "
        "Memory: amp's norms hold "
        "float32 too, beside the fp16 of the layers around them; of a "
        "larger model amp holds less than fp32."
    )


def _draw_loss(axes: Axes, curves: Sequence[dict[str, Any]]) -> None:
    for curve in curves:
        if curve["run"] not in ("fp32", "fp16 dynamic"):  # All lie on each other.
            continue
        mean = np.mean(curve["losses"], axis=0)
        axes.plot(_smooth(mean), label=curve["run"], **STYLES[curve["run"]])
    axes.set(title="Training loss", yscale="log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="y")
    axes.legend(frameon=False, ncols=2, handlelength=3.2, loc="upper right")


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return the mean over a window around each step, which is narrower at the ends."""
    window = np.ones(min(SMOOTHING, len(values)))
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def _draw_scale(axes: Axes, curves: Sequence[dict[str, Any]]) -> None:
    named = {curve["run"]: curve for curve in curves}
    axes.plot(np.log2(named["fp16 static"]["scales"][0]), **STYLES["fp16 static"])
    style = {**STYLES["fp16 dynamic"], "drawstyle": "steps-post"}
    for index, scales in reversed(list(enumerate(named["fp16 dynamic"]["scales"]))):
        first = {} if index == 0 else {"alpha": 0.25, "linewidth": 1.0}
        axes.plot(np.log2(scales), **{**style, **first})
    dynamic = named["fp16 dynamic"]
    steps, scales = dynamic["skipped"][0], np.log2(dynamic["scales"][0])
    axes.plot(
        steps, scales[steps], "X", color=SKIPPED, markersize=9, markeredgecolor="white", zorder=5,
        label="overflow: step skipped, scale halved",
    )  # fmt: skip
    static = float(np.log2(named["fp16 static"]["scales"][0][0]))
    end = len(scales) - 1
    axes.annotate(
        f"static: {_power(static)}", (end, static), (0, 7), textcoords="offset points", ha="right",
        color="#a06e00", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip
    axes.set(title="Loss scale", xlabel="step", ylim=(min(static, scales.min()) - 1.5, None))
    axes.yaxis.set_major_locator(MultipleLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.grid(axis="y")
    if steps:
        axes.legend(frameon=False, loc="center right")


def _power(exponent: float) -> str:
    return f"2$^{{{exponent:g}}}$"


def _draw_accuracy(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        values = 100.0 * np.array(row["accuracy"])
        color = STYLES[row["run"]]["color"]
        # Equal accuracies are common, since one image is a fifth of a point: shift them apart.
        axes.plot(values, place + _apart(values), "o", color=color, markersize=6.5, alpha=0.75)
        mean = statistics.mean(values)
        axes.plot([mean, mean], [place - 0.3, place + 0.3], color=INK, linewidth=1.6)
        axes.annotate(
            f"{mean:.1f}", (1.0, place), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    _name_rows(axes, rows)
    axes.set(title="Test accuracy", xlabel="%: each seed, and the mean")
    axes.grid(axis="x")
    axes.margins(x=0.08)


def _apart(values: np.ndarray) -> np.ndarray:
    shifts = np.zeros(len(values))
    for value in np.unique(values):
        same = np.flatnonzero(values == value)
        shifts[same] = (np.arange(len(same)) - (len(same) - 1) / 2) * 0.16
    return shifts


def _draw_memory(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    sizes = [row["activation_bytes_per_image"] / 1024 for row in rows]
    colors = [STYLES[row["run"]]["color"] for row in rows]
    bars = axes.barh(range(len(rows)), sizes, color=colors, height=0.55)
    axes.bar_label(bars, fmt="%.1f", padding=4)
    _name_rows(axes, rows)
    axes.set(title="Held for backward", xlabel="KiB per image", xlim=(0, 1.32 * max(sizes)))
    axes.grid(axis="x")


def _name_rows(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    axes.set_yticks(range(len(rows)), [row["run"] for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
