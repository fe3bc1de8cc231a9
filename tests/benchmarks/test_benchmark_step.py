"""benchmarks.step: its runs, clocks, profile, report, and the comparison of builds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step as benchmark
from benchmarks import (
    step_cases,
    step_peers,
    step_report,
    step_variants,
)
from benchmarks.step_shapes import QUICK

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

NAMED = {case.name: case for case in (*step_cases.CASES, *step_cases.MODES)}


@pytest.fixture
def no_packages(monkeypatch):
    """Hide the other packages, whatever is installed."""
    monkeypatch.setattr(step_peers, "version", lambda package: None)


@pytest.mark.slow
@pytest.mark.usefixtures("no_packages")
def test_a_quick_run_measures_every_case_and_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    results = benchmark.main(
        ["--device=cpu", "--quick", "--rounds=1", "--threads=1", f"--results={tmp_path}"]
    )
    assert json.loads((tmp_path / "step-cpu.json").read_text()) == results
    assert [each["workload"] for each in results["workloads"]] == [each.name for each in QUICK]
    for workload in results["workloads"]:
        assert [row["case"] for row in workload["rows"]] == [*NAMED]
        for row in workload["rows"]:
            assert row["ms"] > 0
            moved = row["bytes_per_parameter"] * workload["parameters"]
            assert row["GB_per_s"] == pytest.approx(moved / row["ms"] / 1e6)
            assert row["ns_per_parameter"] == pytest.approx(
                1e6 * row["ms"] / workload["parameters"]
            )
    assert results["environment"]["threads"] == 1
    assert results["environment"]["packages"]["deepspeed"] is None
    printed = capsys.readouterr().out
    for workload in results["workloads"]:
        assert step_report.table(workload) in printed
    assert step_report.notes(results) in printed
    assert "Not run: DeepSpeed CPUAdam: deepspeed is not installed\n" in printed
    assert "Not run: bitsandbytes AdamW, 32 bit: bitsandbytes is not installed\n" in printed
    assert "No chart: matplotlib is not installed" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("no_packages")
def test_a_run_on_a_gpu_adds_the_host_and_a_profile(tmp_path, capsys):
    """On the stub, which shares all but events, graphs and the profiler's CUDA events."""
    arguments = ["--quick", "--rounds=1", "--cases", "ours fp16", "AdamW, fused"]
    results = benchmark.main(["--device=stub", *arguments, f"--results={tmp_path}"])
    assert json.loads((tmp_path / "step-stub.json").read_text()) == results
    printed = capsys.readouterr().out
    for workload in results["workloads"]:
        assert (workload["reference"], workload["rounds"]) == ("copied", 1)
        assert [row["case"] for row in workload["rows"]] == [
            "ours fp16", "ours fp16, clip", "torch AdamW, fused", "ours fp16, split",
            "ours fp16, split, bf16 moments", "ours fp16, split, bf16 moments, stochastic",
            "ours fp16, split, one-byte moments",
            "torch AdamW, fused, replayed", "ours fp16, replayed",
        ]  # fmt: skip
        for row in workload["rows"]:
            assert 0 < row["host_ms"] <= row["ms"]
            assert row["ms_again"] is None
            assert ("profile" in row) != ("replayed" in row["case"])
            profile = row.get("profile", {"launches": 1, "kernels_ms": 1.0})
            assert profile["launches"] > 0
            assert profile["kernels_ms"] > 0
        for of_graphs in (False, True):
            rows = [row for row in workload["rows"] if ("replayed" in row["case"]) is of_graphs]
            assert step_report.table({**workload, "rows": rows}) in printed
        assert "| of copy | times ours | host, ms |" in step_report.table(workload)
        assert step_report.profile_table(workload) in printed


ROOT = Path(benchmark.__file__).resolve().parents[1]


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
        assert each["rounds"] == step_variants.PASSES
        assert [row["case"] for row in each["rows"]] == [
            "ours fp16", "ours fp16, clip", "ours fp16, split", "ours fp16, split, bf16 moments",
            "ours fp16, split, bf16 moments, stochastic", "ours fp16, split, one-byte moments",
            "ours fp16, replayed",
        ]  # fmt: skip
        assert all([*row["builds"]] == ["A", "B"] for row in each["rows"])
        assert step_variants.table(each) in done.stdout
