"""The picture of benchmarks.training: time and memory of a training step, ours and torch's.

`python -m benchmarks.training_chart benchmarks/results/training-....json` draws it again.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.step_chart import FAINT, LOOK, OURS, TORCH

# What the picture shows, and what it is called there.
SHOWN = {
    "torch autocast fp16 + GradScaler + AdamW(fused), fp32 weights": "torch.autocast,\n"
    "fp32 weights",
    "ours fp32 weights + autocast fp16, our GradScaler, FusedAdam": "torch.autocast,\n"
    "our GradScaler\nand FusedAdam",
    "torch bf16 weights + AdamW(fused), no masters": "bf16 weights,\nno masters (loses\n"
    "small updates)",
    "ours fp16 weights, GradScaler, split masters": "fp16 weights,\nsplit masters",
    "ours bf16 weights, split, bf16 moments, stochastic": "bf16 weights, split,\n"
    "stochastic bf16\nmoments",
}


def finding(named: dict[str, Any]) -> str:
    """Return what the picture shows, in a sentence.

    Args:
        named: Rows by case.
    """
    autocast, _, lossy, split, _ = (named[case] for case in SHOWN)
    return (
        f"16-bit weights with masters take {split['step_ms']:.0f} ms a step, without masters "
        f"{lossy['step_ms']:.0f}, torch.autocast {autocast['step_ms']:.0f}"
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of `results` as a PNG, which can be read at the width of a phone."""
    named = {row["case"]: row for row in results["rows"]}
    rows = [(label, named[case]) for case, label in SHOWN.items() if case in named]
    with matplotlib.rc_context({**LOOK, "font.size": 10.5, "axes.titlesize": 11}):
        figure = Figure(figsize=(5.4, 5.6), dpi=140, facecolor="white")
        panels = figure.subplots(1, 2)
        for axes, key, title in (
            (panels[0], "step_ms", "ms a step"),
            (panels[1], "peak_GiB", "GiB at the peak"),
        ):
            values = [row[key] for _, row in rows]
            colors = [OURS if row["case"].startswith("ours") else TORCH for _, row in rows]
            axes.barh(range(len(rows)), values, color=colors, height=0.7)
            for y, value in enumerate(values):
                axes.annotate(
                    f"{value:.1f}", (value, y), (3, 0), textcoords="offset points", va="center"
                )
            labels = [label for label, _ in rows] if axes is panels[0] else []
            axes.set_yticks(range(len(rows)), labels)
            axes.tick_params(axis="y", length=0)
            axes.set_ylim(len(rows) - 0.45, -0.55)
            axes.set_xlim(0, 1.4 * max(values))
            axes.set_title(title)
            axes.grid(axis="x")
        figure.subplots_adjust(left=0.375, right=0.985, top=0.745, bottom=0.13, wspace=0.1)
        parameters = rows[0][1]["params"] / 1e6
        facts = results["environment"]
        where = f"{facts['device']}, torch {facts['torch']}"
        said = f"A training step of a decoder of {parameters:.0f}M parameters on {where}"
        figure.text(
            0.02, 0.98, textwrap.fill(finding(named), 50), va="top", fontsize=12, fontweight="bold"
        )
        figure.text(0.02, 0.88, textwrap.fill(said, 64), va="top", color=FAINT)
        figure.legend(
            handles=[Patch(color=OURS, label="apex_mp"), Patch(color=TORCH, label="torch alone")],
            loc="lower left", ncols=2, frameon=False, bbox_to_anchor=(0.0, -0.01),
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    draw(json.loads(file.read_text("utf-8")), file.with_suffix(".png"))
