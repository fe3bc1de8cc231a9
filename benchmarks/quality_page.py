"""The table and the picture of benchmarks.quality."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.step_chart import INK, LOOK
from benchmarks.step_report import markdown

# Okabe and Ito's colours.
COLORS = ("#999999", "#0072b2", "#e69f00", "#009e73", "#d55e00")


def mean_curve(runs: list[dict[str, Any]]) -> list[float]:
    curves = [run["curve"] for run in runs]
    return [statistics.fmean(losses) for losses in zip(*curves, strict=True)]


def distance(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Return the largest distance of two curves, each the mean of its seeds.

    Without the first tenth, in which all fall steeply; of seeds that both have.
    """
    count = min(len(runs), len(others))
    pairs = [*zip(mean_curve(runs[:count]), mean_curve(others[:count]), strict=True)]
    return max(abs(mine - theirs) for mine, theirs in pairs[len(pairs) // 10 :])


def page(results: dict[str, Any]) -> str:
    """Return the table: the mean loss on unseen data, by how the optimizer keeps its state."""
    rows = []
    for each in results["runs"]:
        reference, *_ = each["ways"].values()
        for way, runs in each["ways"].items():
            scores = [run["score"] for run in runs]
            beyond = [a - b["score"] for a, b in zip(scores, reference)]  # noqa: B905
            rows.append(
                [
                    f"{each['task']}, {each['dtype']}, {each['steps']:,} steps",
                    way,
                    f"{statistics.fmean(scores):.4f}",
                    f"{min(scores):.4f} to {max(scores):.4f}",
                    f"{statistics.fmean(beyond):+.4f}",
                    f"{distance(runs, reference):.4f}",
                ]
            )
    head = ["task", "masters and moments", "loss", "of seeds", "beyond", "curves"]
    facts = results["environment"]
    said = (
        f"{facts['processor']}, torch {facts['torch']}. Loss: on unseen data, mean of the seeds, "
        "and least and most of them. Beyond: how much more it is than with float32 masters, same "
        "seeds. Curves: the largest distance of the training losses from those with float32 "
        "masters, behind the first tenth of the run."
    )
    return "\n".join([said, "", *markdown(head, rows)])


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
        figure.tight_layout()
        figure.savefig(path)


def _draw_one(ax: Axes, each: dict[str, Any]) -> None:
    (name, reference), *others = each["ways"].items()
    base = mean_curve(reference)
    steps = [each["steps"] * (i + 0.5) / len(base) for i in range(len(base))]
    seeds = [[run["curve"][i] - base[i] for run in reference] for i in range(len(base))]
    low, high = ([pick(losses) for losses in seeds] for pick in (min, max))
    ax.fill_between(steps, low, high, color="#dddddd", label=f"seeds of {name}")
    for (way, runs), color in zip(others, COLORS[1:], strict=True):
        same_seeds = mean_curve(reference[: len(runs)])
        difference = [a - b for a, b in zip(mean_curve(runs), same_seeds, strict=True)]
        ax.plot(steps, difference, color=color, label=way)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_title(f"{each['task']}, {each['dtype']} weights: loss beyond that with {name}")
