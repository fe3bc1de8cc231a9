"""Measure, and save results with the facts of the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import step_machine
from benchmarks.amp import environment


def measure_and_save(
    path: str,
    device: str,
    measure: Callable[[], dict[str, Any]],
    page: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """Measure, write the results with the facts of the machine, print their page, and return them.

    Args:
        path: Path of the file, in which {} stands for the device.
        device: "cpu" or "cuda".
        measure: Returns the results beside "environment".
        page: Returns the text to print.
    """
    begin = step_machine.now()
    results = {"environment": environment(device), **measure()}
    facts = results["environment"]
    facts["taken_by_others"] = step_machine.taken_by_others(begin, step_machine.now())
    file = Path(path.replace("{}", step_machine.slug(facts["device"])))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(page(results), f"Written: {file}", sep="\n\n")
    return results
