"""Draw a run: loss scale with skipped steps, gradient norm, and a table of the parameters."""

from __future__ import annotations

import math
import os
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from apex_mp.monitor._report import power, rounded
from apex_mp.monitor.exponents import LARGEST, SMALLEST, SMALLEST_NORMAL
from apex_mp.monitor.history import History

# From the palette of Okabe and Ito, which people with any colour vision can distinguish.
_SCALE, _NORM, _SKIPPED, _CLIPPED = "#0072b2", "#009e73", "#d55e00", "#e69f00"
_INK, _FAINT = "#222222", "#777777"
_LOOK: Any = {
    "font.size": 10.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#aaaaaa",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "grid.color": "#e8e8e8",
}
_ROWS_SHOWN = 12


def draw(history: History, path: str | os.PathLike[str] | None) -> Figure:
    """Return the picture of a run, written if there is a path, whose suffix gives the format."""
    if not history.steps:
        raise ValueError("Monitor.plot: there are no steps yet")
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(11.5, 6.2), dpi=150, facecolor="white")
        grid = figure.add_gridspec(
            2, 2, width_ratios=(2.15, 1), left=0.07, right=0.945, top=0.81, bottom=0.09,
            wspace=0.38, hspace=0.38,
        )  # fmt: skip
        scale = figure.add_subplot(grid[0, 0])
        norm = figure.add_subplot(grid[1, 0], sharex=scale)
        _draw_scale(scale, history)
        _draw_norm(norm, history)
        last = figure.add_subplot(grid[:, 1])
        if history.samples:
            _draw_exponents(last, history)
        else:
            _draw_overflows(last, history)
        figure.suptitle(
            _finding(history), x=0.07, y=0.955, ha="left", fontsize=15.5, fontweight="bold"
        )
        figure.text(0.07, 0.89, _subtitle(history), color=_FAINT, va="center")
        if path is not None:
            figure.savefig(path)
    return figure


def _finding(history: History) -> str:
    if not history.skipped:
        return f"None of {history.total} steps was skipped"
    share = 100.0 * history.skipped / history.total
    return f"{history.skipped} of {history.total} steps were skipped ({rounded(share)} %)"


def _subtitle(history: History) -> str:
    first, last = history.steps[0], history.steps[-1]
    return (
        f"Steps {first.number} to {last.number}; the loss scale is {_power(last.scale)} at the end"
    )


def _power(scale: float) -> str:
    text = power(scale)
    return f"2$^{{{text[2:]}}}$" if text.startswith("2^") else text


def _draw_scale(axes: Axes, history: History) -> None:
    steps = [*history.steps]
    axes.plot(
        [step.number for step in steps], [step.scale for step in steps],
        color=_SCALE, linewidth=1.6, drawstyle="steps-post",
    )  # fmt: skip
    skipped = [step for step in steps if step.skipped]
    if skipped:
        axes.plot(
            [step.number for step in skipped], [step.scale for step in skipped], "X",
            color=_SKIPPED, markersize=8, markeredgecolor="white", zorder=5,
            label="skipped: a gradient held inf or NaN",
        )  # fmt: skip
        axes.legend(frameon=False, loc="best")
    axes.set(title="Loss scale")
    if any(step.scale for step in steps):  # torch's GradScaler can sink to 0.
        axes.set_yscale("log", base=2)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.15)
    axes.grid(axis="y")


def _draw_norm(axes: Axes, history: History) -> None:
    axes.set(title="Gradient norm, before clipping", xlabel="step")
    measured = [step for step in history.steps if step.grad_norm is not None]
    if not measured:
        axes.text(0.5, 0.5, "not measured", ha="center", color=_FAINT, transform=axes.transAxes)
        axes.set_yticks([])
        return
    axes.plot(
        [step.number for step in measured], [step.grad_norm or 0.0 for step in measured],
        color=_NORM, linewidth=1.2,
    )  # fmt: skip
    clipped = [step for step in measured if step.clip is not None and step.clip < 1.0]
    if clipped:
        axes.plot(
            [step.number for step in clipped],
            [(step.grad_norm or 0.0) * (step.clip or 0.0) for step in clipped],
            ".", color=_CLIPPED, markersize=3, label="after clipping",
        )  # fmt: skip
        axes.legend(frameon=False, loc="best")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="y")


def _draw_exponents(axes: Axes, history: History) -> None:
    """Draw how many elements of each gradient lie in each power of two."""
    sample = history.samples[-1]
    by_name = history.overflows_by_name()
    grads = [grad for grad in sample.grads if grad.total]
    # All that overflowed, then those that underflow most, in the order of the model.
    worst = sorted(
        grads, key=lambda g: (by_name.get(g.name, 0), g.underflows / g.total), reverse=True
    )
    shown = [grad for grad in grads if any(grad is each for each in worst[:_ROWS_SHOWN])]
    first, last = SMALLEST - 2, LARGEST + 1
    for row, grad in enumerate(shown):
        for exponent, count in grad.counts.items():
            place = min(max(exponent, first), last)
            share = math.sqrt(count / max(grad.counts.values()))
            axes.barh(row, 1, left=place, height=0.72, color=_SCALE, alpha=0.08 + 0.92 * share)
        skips = by_name.get(grad.name)
        if skips:
            axes.annotate(
                f"{skips} skips", (1, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", va="center", color=_SKIPPED, fontsize=9,
            )  # fmt: skip
    for edge in (SMALLEST, SMALLEST_NORMAL, LARGEST + 1):
        axes.axvline(edge, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(shown)), [_short(g.name) for g in shown], color=_INK, fontsize=9)
    axes.set_ylim(max(len(shown), 6) - 0.45, -0.55)
    axes.set_xlim(first, last + 1)
    axes.set_xticks([SMALLEST, SMALLEST_NORMAL, 0, LARGEST + 1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2$^{{{value:.0f}}}$"))
    axes.set(
        title=f"Scaled gradients of step {sample.step}",
        xlabel="fewer digits below 2$^{-14}$, inf from 2$^{16}$",
    )
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _draw_overflows(axes: Axes, history: History) -> None:
    counts = [*history.overflows_by_name().items()]
    axes.set(title="Which gradients held inf or NaN")
    if not counts:
        axes.text(0.5, 0.5, "none", ha="center", color=_FAINT, transform=axes.transAxes)
        axes.set_axis_off()
        return
    shown = counts[:_ROWS_SHOWN]
    bars = axes.barh(range(len(shown)), [count for _, count in shown], color=_SKIPPED, height=0.6)
    axes.bar_label(bars, padding=4)
    axes.set_yticks(range(len(shown)), [_short(name) for name, _ in shown], color=_INK, fontsize=9)
    axes.set_ylim(max(len(shown), 6) - 0.45, -0.55)
    axes.set(xlabel="skipped steps", xlim=(0, 1.2 * shown[0][1]))
    if len(counts) > len(shown):
        axes.annotate(
            f"and {len(counts) - len(shown)} more", (1, 0), xycoords="axes fraction",
            xytext=(0, 4), textcoords="offset points", ha="right", color=_FAINT,
        )  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="x")


def _short(name: str) -> str:
    return name if len(name) <= 26 else "…" + name[-25:]
