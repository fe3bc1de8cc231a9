"""What benchmarks.step prints of its results."""

from __future__ import annotations

import pytest

from benchmarks import step_report

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


def row(case: str, ours: str, ms: float, ratio: float | None, part: float = 0.5) -> dict:
    return {
        "case": case, "compared_with": ours, "times_ours": ratio, "of_reference": part,
        "bytes_per_parameter": 30, "passes": ["a R1"], "ms": ms, "ns_per_parameter": ms / 2,
        "GB_per_s": 60.0 / ms, "ms_again": None,
    }  # fmt: skip


FIXED = {
    "environment": {
        "device": "cpu", "processor": "A processor", "threads": 2, "cores": 4, "rounds": 5,
        "cpu_level": "avx2", "torch": "2.13.0", "apex_mp": "0.1.0",
        "taken_by_others": {"programs": 0.25, "machines": 0.0},
    },
    "workloads": [
        {
            "workload": "BERT-base", "tensors": 2, "parameters": 2_000_000,
            "reference_GB_per_s": {"median": 50.0, "lowest": 40.0, "highest": 61.25},
            "rows": [
                row("ours fp16", "ours fp16", 1.0, 1.0, 0.97),
                row("plain torch fp16, foreach", "ours fp16", 1.75, 1.76),
                row("ours fp16, clip", "ours fp16, clip", 1.0, 1.0),
                row("plain torch fp16, foreach, clip", "ours fp16, clip", 122.2, 122.15),
                row("theirs", "ours fp32", 12.0, None),
            ],
            "not_run": {"apex FusedAdam": "apex is not installed"},
        }
    ],
    "host": [],
}  # fmt: skip


def test_the_summary_sets_ours_beside_the_fastest_other():
    assert step_report.summary(FIXED).splitlines()[2:] == [
        "| step                  |     model | ours, ms | fastest other, ms | times ours "
        "|                       the other |",
        "| --------------------- | --------: | -------: | ----------------: | ---------: "
        "| ------------------------------: |",
        "| float16 weights, clip | BERT-base |     1.00 |               122 |     122.15 "
        "| plain torch fp16, foreach, clip |",
    ]
