"""benchmarks.step --extensions compares builds that cannot share a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step as benchmark
from benchmarks import step_variants
from benchmarks.step_shapes import QUICK
from benchmarks.step_timing import Time

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

ROOT = Path(benchmark.__file__).resolve().parents[1]


def taken(**seconds: float) -> dict[str, Time]:
    return {case: Time(each, each / 10, 2e9, 4e9) for case, each in seconds.items()}


def test_ratios_are_those_of_a_round_to_the_first_build():
    rounds = [
        {"B": taken(one=1.0, other=8.0), "A": taken(one=2.0, other=4.0)},
        {"B": taken(one=3.0, other=8.0), "A": taken(one=4.0, other=4.0)},
        {"B": taken(one=9.0, other=8.0), "A": taken(one=1.0, other=4.0)},
    ]
    found = step_variants.summary(QUICK[0], ["A", "B"], rounds, {})
    assert found == {
        "workload": "30 x 1000",
        "parameters": 30_000,
        "rounds": 3,
        "rows": [
            {"case": "one", "builds": {
                "A": {"ms": 2000.0, "host_ms": 200.0, "ratio": 1.0, "copy_GB_per_s": 3.0},
                "B": {"ms": 3000.0, "host_ms": 300.0, "ratio": 0.75, "copy_GB_per_s": 3.0},
            }},
            {"case": "other", "builds": {
                "A": {"ms": 4000.0, "host_ms": 400.0, "ratio": 1.0, "copy_GB_per_s": 3.0},
                "B": {"ms": 8000.0, "host_ms": 800.0, "ratio": 2.0, "copy_GB_per_s": 3.0},
            }},
        ],
        "failed": {},
    }  # fmt: skip
    assert step_variants.table(found) == (
        "30 x 1000: ms of the first build, and what the others take of it\n\n"
        "| case  | A, ms |     B |\n"
        "| ----- | ----: | ----: |\n"
        "| one   |  2000 | 0.750 |\n"
        "| other |  4000 | 2.000 |"
    )


@pytest.mark.slow
def test_builds_are_compared_and_one_that_dies_is_named(tmp_path):
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "apex_mp").symlink_to(ROOT / "apex_mp")
    (tmp_path / "C" / "apex_mp").mkdir(parents=True)
    (tmp_path / "C" / "apex_mp" / "__init__.py").write_text("raise SystemExit(3)\n")
    command = [sys.executable, "-m", "benchmarks.step", "--device=stub", "--quick", "--rounds=2"]
    command += ["--cases", "ours fp16", "--results", str(tmp_path / "out"), "--threads", "1"]
    command += ["--extensions", *(str(tmp_path / name) for name in "ABC")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    results = json.loads((tmp_path / "out" / "step-variants-stub.json").read_text())
    assert done.returncode == 1
    assert "FAILED: C, 30 x 1000: its process ended with status 3\n" in done.stdout
    assert [each["workload"] for each in results["builds"]] == [each.name for each in QUICK]
    for each in results["builds"]:
        assert each["rounds"] == 2
        assert [row["case"] for row in each["rows"]] == [
            "ours fp16", "ours fp16, clip", "ours fp16, split", "ours fp16, split, bf16 moments",
            "ours fp16, split, bf16 moments, stochastic", "ours fp16, replayed",
        ]  # fmt: skip
        assert all([*row["builds"]] == ["A", "B"] for row in each["rows"])
        assert step_variants.table(each) in done.stdout
