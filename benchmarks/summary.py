"""Print ours beside the fastest other: `python -m benchmarks.summary step-cpu.json`."""

from __future__ import annotations

import json
import sys

from benchmarks.published import RESULTS
from benchmarks.step_report import summary

if __name__ == "__main__":
    print(summary(json.loads((RESULTS / sys.argv[1]).read_text("utf-8"))))
