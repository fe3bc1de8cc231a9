"""What benchmarks.memory prints, and docs/data.md shows: tables, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.memory_probe import HELD
from benchmarks.step_report import count, markdown, surroundings

EXTRAS = {
    "first_step": "first step",
    "step": "step",
    "skipped_step": "skipped step",
    "step_resident": "step, resident",
}
HEAD = ("case", *HELD, "held", *EXTRAS.values())


def page(results: dict[str, Any]) -> str:
    """Return all that is said, in paragraphs."""
    tables = [table(workload) for workload in results["workloads"]]
    return "\n\n".join([surroundings(results), *tables, finding(results)])


def table(workload: dict[str, Any]) -> str:
    """Return one workload as a Markdown table under a line that says what it is."""
    lines = [f"{workload['workload']}: {count(workload)}; bytes a parameter", ""]
    return "\n".join(lines + markdown(HEAD, [_cells(row) for row in workload["rows"]]))


def _cells(row: dict[str, Any]) -> list[str]:
    held = row["held"]
    return [
        row["case"],
        *(f"{held[name]:.1f}" if held[name] else "" for name in HELD),
        f"{sum(held.values()):.1f}",
        *("" if row[key] is None else f"{row[key]:.2f}" for key in EXTRAS),
    ]


def finding(results: dict[str, Any]) -> str:
    """Return what the tables say, a line a figure: the least and most of each kind."""
    rows = [
        row | {"held": sum(row["held"].values()), "workload": workload["workload"]}
        for workload in results["workloads"]
        for row in workload["rows"]
    ]
    ours = [row for row in rows if row["case"].startswith("ours")]
    around = [row for row in rows if row["case"].startswith("MasterWeights")]
    others = [row for row in rows if row not in ours and row not in around]
    figures = {"held": "held", "step": "a step", "skipped_step": "a skipped step"}
    return "\n".join(
        f"- {said}: fused {_range(ours, key)}; MasterWeights {_range(around, key)}; torch's "
        f"{_range(others, key)}"
        for key, said in figures.items()
    )


def _range(rows: Sequence[dict[str, Any]], key: str) -> str:
    """Return the least of a figure, and the most with where that is."""
    looked = [row for row in rows if row[key] is not None]
    if not looked:
        return "not measured"
    least, most = min(row[key] for row in looked), max(looked, key=lambda row: row[key])
    if f"{least:.2f}" == f"{most[key]:.2f}":
        return f"{least:.2f} in every case"
    return f"{least:.2f} to {most[key]:.2f} ({most['case']}; {most['workload']})"
