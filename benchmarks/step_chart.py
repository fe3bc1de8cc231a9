"""The chart of benchmarks.step: a step of ours beside the fastest other that does the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.step_report import count, finding, pairs, shown, significant, surroundings, timed

# Okabe and Ito's colours, which people distinguish with any colour vision.
OURS, TORCH, OTHERS = "#0072b2", "#c9c9c9", "#e69f00"
INK, FAINT = "#222222", "#777777"
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


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the chart of `results` as a PNG."""
    workloads = shown(results)
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(13, 4.4), dpi=140, facecolor="white")
        panels = figure.subplots(1, len(workloads), squeeze=False)[0]
        for axes, workload in zip(panels, workloads, strict=True):
            _draw_workload(axes, workload, named=axes is panels[0])
        figure.subplots_adjust(left=0.165, right=0.99, top=0.76, bottom=0.19, wspace=0.06)
        figure.suptitle(
            finding(results), x=0.01, y=0.975, ha="left", fontsize=13, fontweight="bold"
        )
        figure.text(0.01, 0.875, surroundings(results), color=FAINT)
        figure.legend(
            handles=[
                Patch(color=OURS, label="apex_mp"),
                Patch(color=TORCH, label="fastest other: torch"),
                Patch(color=OTHERS, label="fastest other: another package"),
            ],
            loc="lower left", ncols=3, frameon=False, bbox_to_anchor=(0.0, -0.01),
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def finding_of_modes(workloads: list[dict[str, Any]]) -> str:
    """Return what the chart of modes shows, in a sentence."""

    def times(dtype: str) -> str:
        rows = [{row["case"]: row["ms"] for row in each["rows"]} for each in workloads]
        narrow = f"ours {dtype}, split, bf16 moments"
        found = [row[narrow] / row[f"ours {dtype}"] for row in rows if narrow in row]
        return f"{min(found):.2f} to {max(found):.2f}"

    return (
        "Split masters and bf16 moments: 10 bytes less a parameter, "
        f"{times('bf16')} of the time in bf16, {times('fp16')} in fp16"
    )


def draw_modes(results: dict[str, Any], path: Path) -> None:
    """Write the chart of a run with --modes: a bar for each way to keep masters and moments."""
    workloads = timed(results)
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(13, 4.6), dpi=140, facecolor="white")
        panels = figure.subplots(1, len(workloads), squeeze=False)[0]
        for axes, workload in zip(panels, workloads, strict=True):
            rows = workload["rows"]
            names = [row["case"] for row in rows] if axes is panels[0] else []
            for y, row in enumerate(rows):
                ms = row["ms"]
                said = f"{significant(ms)} ms, {row['bytes_per_parameter']} bytes"
                axes.barh([y], [ms], color=OURS if "ours" in row["case"] else OTHERS, height=0.7)
                axes.annotate(
                    said, (ms, y), (4, 0), textcoords="offset points", va="center", size=8
                )
            axes.set_yticks(range(len(rows)), names)
            axes.tick_params(axis="y", length=0)
            axes.set_ylim(len(rows) - 0.45, -0.55)
            axes.set_xlim(0, 1.7 * max(row["ms"] for row in rows))
            axes.set_title(workload["workload"])
            axes.set_xlabel("ms a step", color=FAINT)
            axes.grid(axis="x")
        figure.subplots_adjust(left=0.22, right=0.99, top=0.78, bottom=0.12, wspace=0.06)
        figure.text(0.01, 0.945, finding_of_modes(workloads), fontsize=12, fontweight="bold")
        said = f"{surroundings(results)}. Bytes: read and written for each parameter."
        figure.text(0.01, 0.885, said, color=FAINT)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_workload(axes: Axes, workload: dict[str, Any], *, named: bool) -> None:
    found = pairs(workload)
    longest = max(max(pair.ours, pair.other) for pair in found)
    for place, pair in enumerate(found):
        color = TORCH if "torch" in pair.name else OTHERS
        axes.barh([place - 0.2], [pair.ours], color=OURS, height=0.36)
        axes.barh([place + 0.2], [pair.other], color=color, height=0.36)
        theirs = f"{significant(pair.other)} ms, {pair.ratio:.2f} times"
        labels = [(pair.ours, place - 0.2, f"{significant(pair.ours)} ms")]
        if pair.other >= 0.5 * longest:  # The name fits into the bar.
            labels += [(pair.other, place + 0.2, theirs), (0.0, place + 0.2, pair.name)]
        else:
            labels.append((pair.other, place + 0.2, f"{theirs}: {pair.name}"))
        for ms, y, said in labels:
            axes.annotate(said, (ms, y), (5, 0), textcoords="offset points", va="center", size=8)
    axes.set_yticks(range(len(found)), [pair.asked for pair in found] if named else [])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(found) - 0.45, -0.55)
    axes.set_xlim(0, 1.33 * longest)
    axes.set_title(f"{workload['workload']}: {count(workload)}")
    axes.set_xlabel("ms a step", color=FAINT)
    axes.grid(axis="x")
