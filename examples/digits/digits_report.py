"""What examples/digits/digits.py shows: a table, notes, a picture, and a file of results."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from digits_measure import Run

sys.path.append(str(Path(__file__).resolve().parents[1]))
import machine


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    settings = ("optimizer", "learning_rate", "epochs", "batch_size", "scale_window", "seeds")
    return {
        **machine.describe(args.device),
        "settings": {name: getattr(args, name) for name in settings},
    }


def summarise(runs: Sequence[Run], environment: dict[str, Any]) -> dict[str, Any]:
    """Return everything that is shown, as plain values: a row for each precision, and curves."""
    names = list(dict.fromkeys(run.name for run in runs))
    return {
        "environment": environment,
        "rows": [_row([run for run in runs if run.name == name]) for name in names],
        "curves": [_curve([run for run in runs if run.name == name]) for name in names],
    }


def _row(runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0]
    return {
        "run": first.name,
        "scaled": first.scaled,
        "seeds": [run.seed for run in runs],
        "accuracy": [round(run.accuracy, 6) for run in runs],
        "forward_backward_ms": _median([ms for run in runs for ms in run.forward_backward_ms]),
        "step_ms": _median([ms for run in runs for ms in run.step_ms]),
        "state_bytes_per_param": round(first.state_bytes_per_param, 3),
        "activation_bytes_per_image": round(first.activation_bytes_per_image, 1),
        "steps": sum(len(run.losses) for run in runs),
        "skipped": sum(len(run.skipped) for run in runs),
        "final_scale": [run.final_scale for run in runs],
        "first_overflow": [run.first_overflow for run in runs if run.skipped][:1],
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _curve(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "run": runs[0].name,
        "losses": [run.losses for run in runs],
        "scales": [run.scales for run in runs],
        "skipped": [run.skipped for run in runs],
    }


# The table: heading, and the text of a cell.
COLUMNS = (
    ("run", lambda row: row["run"]),
    ("test accuracy, %", lambda row: _accuracy(row)),
    ("fwd+bwd, ms", lambda row: f"{row['forward_backward_ms']:.2f}"),
    ("step, ms", lambda row: f"{row['step_ms']:.2f}"),
    ("state, B/param", lambda row: f"{row['state_bytes_per_param']:.1f}"),
    ("held, KiB/image", lambda row: f"{row['activation_bytes_per_image'] / 1024:.1f}"),
    ("skipped", lambda row: f"{row['skipped']}/{row['steps']}"),
    ("final scale", lambda row: _final_scale(row)),
)


def _accuracy(row: dict[str, Any]) -> str:
    each = [100.0 * value for value in row["accuracy"]]
    spread = f" ({min(each):.1f}-{max(each):.1f})" if len(each) > 1 else ""
    return f"{statistics.mean(each):.2f}{spread}"


def _final_scale(row: dict[str, Any]) -> str:
    if not row["scaled"]:
        return "none"
    ends = [_power(scale) for scale in (min(row["final_scale"]), max(row["final_scale"]))]
    return "-".join(dict.fromkeys(ends))


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"2**{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def table(results: dict[str, Any]) -> str:
    """Return the rows as a table that reads well in a terminal and is Markdown."""
    lines = [[heading for heading, _ in COLUMNS]]
    lines += [[text(row) for _, text in COLUMNS] for row in results["rows"]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    cells = [
        [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]
        for line in (lines[0], rule, *lines[1:])
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def finding(results: dict[str, Any]) -> str:
    """Say in a sentence what the accuracies show, fp16 with a dynamic scale against fp32."""
    mean = {row["run"]: 100.0 * statistics.mean(row["accuracy"]) for row in results["rows"]}
    half, single = mean["fp16 dynamic"], mean["fp32"]
    numbers = f"{half:.1f} % against {single:.1f} % of unseen digits right"
    if half < single - 1.0:
        return f"fp16 falls {single - half:.1f} points short of fp32: {numbers}"
    return f"fp16 {'comes within a point of' if half <= single + 1.0 else 'passes'} fp32: {numbers}"


def notes(results: dict[str, Any]) -> str:
    """Return what a reader of the table must know, from the figures themselves."""
    rows = {row["run"]: row for row in results["rows"]}
    half, single = rows["fp16 dynamic"], rows["fp32"]
    settings = results["environment"]["settings"]
    memory = half["activation_bytes_per_image"] / single["activation_bytes_per_image"]
    time = half["forward_backward_ms"] / single["forward_backward_ms"]
    lines = [
        finding(results) + ".",
        _spread(len(single["seeds"])),
        "Times: medians, of forward with backward and of the optimizer's step.",
        "State: weights, gradients, fp32 masters, moments.",
        f"Held: what autograd keeps from forward for backward; fp16 {memory:.2f} of fp32's.",
        "Skipped: steps of all seeds whose gradients overflowed.",
        f"The dynamic scale doubles after {settings['scale_window']} good steps, not 1000, so that "
        "a run this short shows it; that of amp after 2000.",
    ]
    if "fp16 amp" in rows:
        lines += ["amp's norms hold float32 too, beside the fp16 of the layers around them."]
    if results["environment"]["device"] == "cpu" and time > 1.2:
        lines += [
            f"This processor emulates fp16 arithmetic: forward and backward take {time:.1f} times",
            "the time of fp32. On such a CPU fp16 saves memory, not time.",
        ]
    lines += [f"First skipped step: {where}" for where in half["first_overflow"]]
    return "\n".join(lines)


def _spread(seeds: int) -> str:
    if seeds == 1:
        return "Test accuracy: of one seed, and seeds differ by a point; --seeds 5 tells the mean."
    return f"Test accuracy: mean of {seeds} seeds (lowest-highest)."


def save(results: dict[str, Any], path: Path) -> None:
    """Write the figures, without the curves, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {key: value for key, value in results.items() if key != "curves"}
    path.write_text(json.dumps(figures, indent=2) + "\n")
