"""benchmarks.step: its runs, clocks, profile, report, and the comparison of builds."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import math
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import step as benchmark
from benchmarks import (
    step_cases,
    step_peers,
    step_report,
    step_timing,
    step_variants,
)
from benchmarks.step_arena import Case, Running
from benchmarks.step_device import Cpu, Cuda, Stub
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


def test_a_case_that_fails_costs_its_own_row():
    left = [3 + 2]  # two steps to start it, one round to warm up, two rounds

    def break_soon() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("so it is")

    def good(arena: Any) -> Running:
        return Running(lambda: None, lambda: None)

    def bad(arena: Any) -> Running:
        return Running(lambda: None, break_soon)

    cases = [Case(name, name, (), make) for name, make in (("good", good), ("bad", bad))]
    measurement = step_timing.Measurement(QUICK[0], cases, step_timing.Reference(Stub(), 1))
    measurement._steps = lambda time: 1
    *_, found = measurement.run(4, math.inf)
    assert [row["case"] for row in found["rows"]] == ["good"]
    assert found["failed"] == {"bad": "RuntimeError: so it is"}
    assert found["rounds"] == 4


def test_the_reference_of_a_cpu_reads_and_writes_every_byte_that_it_claims(monkeypatch):
    multiplied = []
    monkeypatch.setattr(torch.Tensor, "mul_", lambda tensor, factor: multiplied.append(tensor))
    reference = step_timing.Reference(Cpu(), 1)
    reference.once()
    (tensor,) = multiplied
    assert reference.bytes == 2 * 2**20 == 2 * tensor.nbytes


def recorded() -> tuple[list[str], Running]:
    calls: list[str] = []
    return calls, Running(lambda: calls.append("prepare"), lambda: calls.append("step"))


class Ticking(Stub):
    """A device whose clock advances by a second at each mark, and which says what it is asked."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.now = calls, 0.0

    def mark(self) -> float:
        self.calls.append("mark")
        self.now += 1.0
        return self.now

    def wait(self) -> None:
        self.calls.append("wait")


def test_a_batch_waits_before_and_after_its_steps_and_times_nothing_between_them():
    calls, case = recorded()
    took, host = step_timing.batch(case, 3, Ticking(calls))
    step = ["mark", "step", "mark"]
    assert calls == ["wait", *step, "prepare", *step, "prepare", *step, "wait"]
    assert took == [1.0, 1.0, 1.0]
    assert len(host) == 3
    assert all(0.0 < each < 1.0 for each in host)


def test_the_clock_of_a_gpu_is_events_on_the_current_stream(monkeypatch):
    made = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.timed, self.recorded = enable_timing, 0
            made.append(self)

        def record(self) -> None:
            self.recorded += 1

        def elapsed_time(self, end: Event) -> float:
            assert (self, end) == (made[0], made[1])
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = Cuda()
    assert device.seconds(device.mark(), device.mark()) == 0.0025
    assert [(event.timed, event.recorded) for event in made] == [(True, 1), (True, 1)]


def test_what_is_replayed_is_a_graph_of_one_step_with_its_gradients_in_place(monkeypatch):
    calls, case = recorded()

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def capture(graph):
        assert isinstance(graph, Graph)
        calls.append("capture")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    replayed = step_cases.replayed(case, SimpleNamespace(is_cuda=True))
    step = weakref.ref(case.step)
    del case
    gc.collect()
    assert step() is not None  # It keeps the optimizer, whose memory the graph writes.
    assert calls == ["prepare", "step"] * 2 + ["prepare", "capture", "step", "end"]
    replayed.prepare()
    replayed.step()
    assert calls[8:] == ["replay"]


CASES = {case.name: case for case in (*step_cases.CASES, *step_cases.REPLAYED)}


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
            "ours fp16, split, bf16 moments, stochastic", "ours fp16, replayed",
        ]  # fmt: skip
        assert all([*row["builds"]] == ["A", "B"] for row in each["rows"])
        assert step_variants.table(each) in done.stdout
