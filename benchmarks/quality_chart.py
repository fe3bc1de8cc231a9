"""The picture of benchmarks.quality."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.quality_report import mean_curve
from benchmarks.step_chart import INK, LOOK

# Okabe and Ito's colours.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture: how far each way's training loss is from that with float32 masters."""
    longest = max(each["steps"] for each in results["runs"])
    shown = [each for each in results["runs"] if each["steps"] == longest]
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(10.5, 1.2 + 2.9 * len(shown)), dpi=150, facecolor="white")
        axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for ax, each in zip(axes, shown, strict=True):
            _draw_one(ax, each)
        axes[-1].set_xlabel(f"step of {longest:,}")
        axes[0].legend(loc="upper left", frameon=False, ncols=2)
        figure.suptitle(finding(shown), x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        figure.tight_layout()
        figure.savefig(path)


def finding(shown: list[dict[str, Any]]) -> str:
    """Return what the picture shows, in a sentence: the last fifth of the curves."""

    def beyond(each: dict[str, Any], way: str) -> float:
        runs = each["ways"][way]
        (reference, *_) = each["ways"].values()
        pairs = zip(mean_curve(runs), mean_curve(reference[: len(runs)]), strict=True)
        differences = [a - b for a, b in pairs]
        return statistics.mean(differences[-len(differences) // 5 :])

    worst = max(shown, key=lambda each: beyond(each, "no masters"))
    split = max(abs(beyond(each, "split masters")) for each in shown)
    return (
        f"{worst['dtype']} weights end with a loss {beyond(worst, 'no masters'):.2f} higher "
        f"without masters, with split masters as with float32 ones (± {split:.4f})"
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
    ax.set_title(f"{each['task']}, {each['dtype']} weights: loss beyond that with {name}")
