"""The table of benchmarks.quality."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.step_report import markdown


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
