"""The chart of benchmarks.step: each case's time for a step, beside what its bytes alone take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.step_report import count, finding, surroundings

# Okabe and Ito's colours, which people tell apart with any colour vision.
OURS, TORCH, OTHERS = "#0072b2", "#c9c9c9", "#e69f00"
INK, FAINT, LIMIT = "#222222", "#777777", "#d55e00"
LOOK: Any = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#aaaaaa",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "grid.color": "#e8e8e8",
}
COLUMNS = 3
SMALL = 10_000  # parameters a tensor: below, the number of tensors decides, not their size
GAP = 0.6  # between cases that do different work


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the chart of `results` as a PNG."""
    workloads = [each for each in results["workloads"] if each["rows"]]
    columns = min(COLUMNS, len(workloads))
    lines = -(-len(workloads) // columns)
    cases = max(len(workload["rows"]) for workload in workloads)
    names = max(len(row["case"]) for workload in workloads for row in workload["rows"])
    width = 0.08 * names  # of the longest name, in inches
    size = (0.8 + width + 3.9 * columns, 1.9 + lines * (1.1 + 0.21 * cases))
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=size, dpi=140, facecolor="white")
        left, edge = (width + 0.25) / size[0], 0.25 / size[0]
        grid = figure.add_gridspec(
            lines, columns, left=left, right=1 - edge, top=1 - 1.25 / size[1],
            bottom=0.95 / size[1], wspace=0.08, hspace=0.33,
        )  # fmt: skip
        for place, workload in enumerate(workloads):
            axes = figure.add_subplot(grid[place // columns, place % columns])
            _draw_workload(axes, workload, named=place % columns == 0)
        figure.suptitle(
            finding(results), x=edge, y=1 - 0.3 / size[1], ha="left", fontsize=14,
            fontweight="bold",
        )  # fmt: skip
        figure.text(edge, 1 - 0.62 / size[1], surroundings(results), color=FAINT)
        _legend(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _legend(figure: Figure) -> None:
    figure.legend(
        handles=[
            Patch(color=OURS, label="apex_mp"),
            Patch(color=TORCH, label="torch"),
            Patch(color=OTHERS, label="other packages"),
            Line2D([], [], color=LIMIT, linewidth=2, label="its bytes at the speed of memory"),
        ],
        loc="lower left", ncols=4, frameon=False, bbox_to_anchor=(0.01, 0.0),
    )  # fmt: skip


def _draw_workload(axes: Axes, workload: dict[str, Any], *, named: bool) -> None:
    rows, places = workload["rows"], _places(workload["rows"])
    small = workload["parameters"] / workload["tensors"] < SMALL
    # Microseconds a tensor, or nanoseconds a parameter.
    each = workload["tensors"] / 1e3 if small else workload["parameters"] / 1e6
    values = [row["ms"] / each for row in rows]
    axes.barh(places, values, color=[_color(row) for row in rows], height=0.78)
    # Torch's own kernels and the rest lie an order apart: cut what would make the rest invisible.
    end = 1.25 * max(values) if small else min(1.2 * max(values), 3.2 * sorted(values)[0])
    for place, value, row in zip(places, values, rows, strict=True):
        limit = 0.0 if small else value * row["of_reference"]
        if limit:
            axes.plot([limit, limit], [place - 0.39, place + 0.39], color=LIMIT, linewidth=2)
        cut = value > end
        # Right of the bar and of the mark; on a bar that is cut, at the end of what is seen.
        where = 1.12 * end if cut else max(value, limit)
        axes.annotate(
            f"{value:.2f}" + (" →" if cut else ""), (where, place),
            (-4 if cut else 4, 0), textcoords="offset points", va="center",
            ha="right" if cut else "left", fontsize=8.5,
        )  # fmt: skip
    axes.set_yticks(places, [row["case"] for row in rows] if named else [])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(places) + 0.6, -0.6)
    if small:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 2, 3 * max(values))
    else:
        axes.set_xlim(0, 1.12 * end)
    axes.set_title(f"{workload['workload']}: {count(workload)}", loc="left", fontsize=9.5)
    axes.set_xlabel("µs a tensor, logarithmic" if small else "ns a parameter", color=FAINT)
    axes.grid(axis="x")


def _places(rows: list[dict[str, Any]]) -> list[float]:
    """Where each bar goes: cases that do the same work stand together."""
    places: list[float] = []
    for index, row in enumerate(rows):
        other = index and row["compared_with"] != rows[index - 1]["compared_with"]
        places.append(places[-1] + 1.0 + (GAP if other else 0.0) if places else 0.0)
    return places


def _color(row: dict[str, Any]) -> str:
    if row["case"].startswith("ours"):
        return OURS
    return TORCH if "torch" in row["case"] else OTHERS
