"""The chart of benchmarks.activations: what each mode holds of a model at one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.activation_report import finding_in_short, where
from benchmarks.step_chart import FAINT, INK, LOOK, OTHERS, OURS, TORCH

# The parts of a bar, of which the first is the leftmost.
PARTS = {
    "weights": ("weights", "#444444"),
    "gradients": ("gradients", "#8c8c8c"),
    "optimizer": ("masters and moments", TORCH),
    "fixed": ("fp16 copies of weights", OTHERS),
    "activations": ("held for backward", OURS),
    "inputs": ("inputs", "#009e73"),
}


def parts(row: dict[str, Any], batch: int) -> dict[str, int]:
    """Return the bytes of a bar, part by part."""
    state = row["state"]
    return {
        "weights": state["weights"],
        "gradients": state["gradients"],
        "optimizer": state["masters"] + state["moments"],
        "fixed": row["fixed"],
        "activations": batch * row["per_sample"],
        "inputs": batch * row["inputs"],
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the chart of `results` as a PNG."""
    models = results["models"]
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(11.5, 4.9), dpi=140, facecolor="white")
        grid = figure.add_gridspec(
            1, len(models), left=0.155, right=0.955, top=0.745, bottom=0.22, wspace=0.2
        )
        for place, model in enumerate(models):
            axes = figure.add_subplot(grid[0, place])
            _draw_model(axes, model, results["budget"], named=place == 0)
        figure.suptitle(
            finding_in_short(models[0]), x=0.02, y=0.955, ha="left", fontsize=14, fontweight="bold"
        )
        figure.text(0.02, 0.865, where(results), color=FAINT, va="center")
        figure.legend(
            handles=[Patch(color=color, label=label) for label, color in PARTS.values()],
            loc="lower left", ncols=len(PARTS), frameon=False, bbox_to_anchor=(0.01, 0.01),
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_model(axes: Axes, model: dict[str, Any], budget: int, *, named: bool) -> None:
    rows = model["rows"]
    batch = max(1, rows[0]["largest_batch"])
    bars = [parts(row, batch) for row in rows]
    starts = [0.0] * len(rows)
    for name, (_, color) in PARTS.items():
        widths = [bar[name] / 2**30 for bar in bars]
        axes.barh(range(len(rows)), widths, left=starts, color=color, height=0.66)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, (end, row) in enumerate(zip(starts, rows, strict=True)):
        axes.annotate(
            f"{end:.1f}   largest batch {row['largest_batch']}", (end, place), (5, 0),
            textcoords="offset points", va="center", color=INK, fontsize=8.5,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["mode"] for row in rows] if named else [])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(0, 1.45 * max(starts))
    axes.set_title(f"{model['model']}: GiB at a batch of {batch}", fontsize=9.5)
    axes.set_xlabel(f"GiB; largest batch: that fits in {budget / 2**30:g} GiB", color=FAINT)
    axes.grid(axis="x")
