"""Print what docs/speed.md shows of `benchmarks/results/step-cpu.json`: ours, the fastest other."""

from __future__ import annotations

import json

from benchmarks.published import RESULTS
from benchmarks.step_report import summary

if __name__ == "__main__":
    print(summary(json.loads((RESULTS / "step-cpu.json").read_text("utf-8"))))
