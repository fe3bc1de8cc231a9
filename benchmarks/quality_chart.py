"""The picture of benchmarks.quality.

`python -m benchmarks.quality_chart benchmarks/results/quality-cpu.json` draws it again.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.quality_report import mean_curve
from benchmarks.step_chart import INK, LOOK

# Okabe and Ito's colours.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture: how far each way's training loss is from that with float32 masters."""
    longest = max(each["steps"] for each in results["runs"])
    shown = [each for each in results["runs"] if each["steps"] == longest]
    with matplotlib.rc_context({**LOOK, "font.size": 10.5}):
        height = 1.9 + 2.6 * len(shown)
        figure = Figure(figsize=(6.4, height), dpi=140, facecolor="white")
        axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for ax, each in zip(axes, shown, strict=True):
            _draw_one(ax, each)
        axes[-1].set_xlabel(f"step of {longest:,}")
        handles, labels = axes[0].get_legend_handles_labels()
        title = textwrap.fill(finding(shown), 58)
        figure.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=12, fontweight="bold")
        figure.legend(
            handles, labels, loc="lower left", ncols=2, frameon=False, bbox_to_anchor=(0.0, 0.0)
        )
        figure.tight_layout(rect=(0, 0.75 / height, 1, 1 - 0.15 / height))
        figure.savefig(path)


def beyond(each: dict[str, Any], way: str) -> float:
    """Return how much higher a training loss is than with float32 masters, in the last fifth."""
    runs = each["ways"][way]
    (reference, *_) = each["ways"].values()
    pairs = zip(mean_curve(runs), mean_curve(reference[: len(runs)]), strict=True)
    differences = [a - b for a, b in pairs]
    return statistics.mean(differences[-len(differences) // 5 :])


def finding(shown: list[dict[str, Any]]) -> str:
    """Return what the picture shows, in a sentence: the last fifth of the curves."""
    worst = max(shown, key=lambda each: beyond(each, "no masters"))
    split = max(abs(beyond(each, "split masters")) for each in shown)
    return (
        f"{worst['dtype']} weights end with a training loss "
        f"{beyond(worst, 'no masters'):.2f} higher without masters, with split masters as with "
        f"float32 ones (± {split:.4f})"
    )


def _draw_one(ax: Axes, each: dict[str, Any]) -> None:
    (name, reference), *others = each["ways"].items()
    base = mean_curve(reference)
    steps = [each["steps"] * (i + 0.5) / len(base) for i in range(len(base))]
    seeds = [[run["curve"][i] - base[i] for run in reference] for i in range(len(base))]
    low, high = ([pick(losses) for losses in seeds] for pick in (min, max))
    ax.fill_between(steps, low, high, color="#dddddd", label=f"seeds of {name}")
    for (way, runs), color in zip(others, COLORS, strict=True):
        same_seeds = mean_curve(reference[: len(runs)])
        difference = [a - b for a, b in zip(mean_curve(runs), same_seeds, strict=True)]
        ax.plot(steps, difference, color=color, label=way)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_title(f"{each['task']}, {each['dtype']}: training loss beyond {name}'")
    ax.xaxis.set_major_locator(MaxNLocator(4))


if __name__ == "__main__":
    file = Path(sys.argv[1])
    draw(json.loads(file.read_text("utf-8")), file.with_suffix(".png"))
