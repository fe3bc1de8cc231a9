"""Print what a file of benchmarks/results/ holds: `python -m benchmarks.published step-cpu.json`.

The site shows it: docs/data.md has a line for each file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    activation_report,
    amp,
    memory_report,
    monitor,
    offload,
    quality_report,
    rivals,
    sass,
    sass_volta,
    step_report,
    step_variants,
    training,
)

RESULTS = Path(__file__).resolve().parent / "results"


def _activations(results: dict[str, Any]) -> str:
    tables = [activation_report.modules_table(model) for model in results["models"]]
    return "\n\n".join([activation_report.page(results), *tables])


PAGES: dict[str, Callable[[Any], str]] = {
    "activations-cpu.json": _activations,
    "amp-cpu.json": amp.table,
    "memory-cpu.json": memory_report.page,
    "monitor-cpu.json": monitor.page,
    "offload-cpu.json": offload.page,
    "quality-cpu.json": quality_report.page,
    "rivals-cpu.json": rivals.page,
    "sass.json": sass.page,
    "sass-sm70.json": sass_volta.page,
    "step-cpu.json": step_report.page,
    "step-host-cpu.json": step_report.page,
    "step-masters-cpu.json": step_report.page,
    "step-modes-cpu.json": step_report.page,
    "step-nvidia-h100-80gb-hbm3.json": step_report.page,
    "step-variants-nvidia-h100-80gb-hbm3.json": step_variants.page,
    "training-nvidia-h100-80gb-hbm3.json": training.page,
}


def text(name: str) -> str:
    """Return the tables and notes of a file of results in Markdown."""
    return PAGES[name](json.loads((RESULTS / name).read_text("utf-8")))


if __name__ == "__main__":
    print(text(sys.argv[1]))
