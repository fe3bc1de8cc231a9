"""Runs of benchmarks.step: what is written and printed, what fails, and how time is shared."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import step as benchmark
from benchmarks import step_cases, step_device, step_peers, step_profile, step_report, step_timing
from benchmarks.step_arena import Arena, Case, Running
from benchmarks.step_device import Cpu, Stub
from benchmarks.step_shapes import QUICK

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

ROOT = Path(benchmark.__file__).resolve().parents[1]
NAMED = {case.name: case for case in (*step_cases.CASES, *step_cases.MODES)}
FLOAT16 = [
    *("ours fp16", "ours fp16, clip", "ours fp16, split", "ours fp16, split, bf16 moments"),
    *("ours fp16, split, bf16 moments, stochastic", "ours fp16, replayed"),
]
ON_GPUS = NAMED | {case.name: case for case in step_cases.REPLAYED}


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
        assert step_report.table(workload) in printed
        assert "| of copy | times ours | host, ms |" in step_report.table(workload)
        assert step_report.profile_table(workload) in printed


@pytest.mark.slow
@pytest.mark.usefixtures("no_packages")
def test_the_json_is_written_after_each_case_and_each_round(tmp_path, monkeypatch):
    seen = []
    write = benchmark.write

    def spy(results, path):
        write(results, path)
        seen.append(json.loads(path.read_text()))

    monkeypatch.setattr(benchmark, "write", spy)
    arguments = ["--device=stub", "--quick", "--rounds=2", "--cases", "ours fp16"]
    benchmark.main([*arguments, f"--results={tmp_path}"])
    first = [each["workloads"][0] for each in seen if len(each["workloads"]) == 1]
    # The cases are looked at one by one, then two rounds.
    count = len(FLOAT16)
    looked = [(done + 1, 0) for done in range(count)]
    assert [(len(each["rows"]), each["rounds"]) for each in first] == [
        *looked, (count, 1), (count, 2)
    ]  # fmt: skip
    behind = seen[count + 2 :]
    assert [len(each["workloads"]) for each in behind] == [2] * len(behind)


@pytest.mark.slow
def test_what_time_is_not_left_for_is_named(tmp_path, capsys):
    arguments = ["--device=stub", "--quick", "--cases", "ours fp16", "--seconds=0"]
    results = benchmark.main([*arguments, f"--results={tmp_path}"])
    for workload in results["workloads"]:
        assert workload["rows"] == []
        assert workload["not_run"] == dict.fromkeys(FLOAT16, "no time was left")
    printed = capsys.readouterr().out
    assert "Not run: ours fp16: no time was left\n" in printed
    assert "No chart: nothing was measured" in printed
    assert "Medians of 0 rounds.\n" in printed
    assert "3 rounds" not in printed
    assert step_report.failures(results) == ["FAILED: nothing was measured"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        (["--device=cpu"], "1 x 1000M", "--device cpu"),
        (["--device=stub", "--extensions", str(ROOT)], "1 x 1000M", "--device stub --extensions"),
        (["--device=cpu", "--quick"], "ResNet-50", "--device cpu --quick"),
    ],
)
def test_a_workload_that_is_left_out_is_named_and_a_run_of_nothing_fails(
    options, name, said, tmp_path, capsys
):
    results = benchmark.main([*options, "--workloads", name, f"--results={tmp_path}"])
    printed = capsys.readouterr().out
    assert f"Left out: {name}: it is not a workload for {said}\n" in printed
    assert "FAILED: nothing was measured\n" in printed
    assert step_report.failures(results) == ["FAILED: nothing was measured"]


@pytest.mark.slow
def test_a_device_with_too_little_memory_is_told_and_a_run_of_nothing_fails(
    tmp_path, capsys, monkeypatch
):
    def fill(arena: Arena) -> Running:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(benchmark, "CASES", (Case("ours", "ours", (), fill),))
    results = benchmark.main(["--device=stub", "--quick", f"--results={tmp_path}"])
    printed = capsys.readouterr().out
    assert "Not run: ours: the device has too little memory\n" in printed
    assert step_report.failures(results) == ["FAILED: nothing was measured"]


def fail(arena: Arena) -> Running:
    raise OSError("no compiler\nand more")


@pytest.mark.slow
def test_a_failure_of_ours_is_told_and_the_other_cases_go_on(tmp_path, capsys, monkeypatch):
    cases = (Case("ours", "ours", (), fail), ON_GPUS["ours bf16"])
    monkeypatch.setattr(benchmark, "CASES", cases)
    results = benchmark.main(["--device=stub", "--quick", f"--results={tmp_path}"])
    for workload in results["workloads"]:
        assert workload["failed"] == {"ours": "OSError: no compiler"}
        assert [row["case"] for row in workload["rows"]] == ["ours bf16"]
    assert step_report.failures(results)[0] == "FAILED: ours, 30 x 1000: OSError: no compiler"
    assert step_report.failures(results)[0] in capsys.readouterr().out


def test_a_device_that_is_not_usable_any_more_ends_the_run(tmp_path, monkeypatch):
    class Dead(Stub):
        def wait(self) -> None:
            if dead:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    dead = []

    def kill(arena: Arena) -> Running:
        dead.append(True)
        raise RuntimeError("it did")

    monkeypatch.setitem(step_device.DEVICES, "stub", Dead)
    cases = (ON_GPUS["ours bf16"], Case("ours", "ours", (), kill), ON_GPUS["ours fp32"])
    monkeypatch.setattr(benchmark, "CASES", cases)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        benchmark.main(["--device=stub", "--quick", f"--results={tmp_path}"])
    left = json.loads((tmp_path / "step-stub.json").read_text())
    assert left["ended_by"].startswith("RuntimeError: CUDA error: an illegal memory access")
    (workload,) = left["workloads"]
    assert [row["case"] for row in workload["rows"]] == ["ours bf16"]
    assert workload["failed"] == {"ours": "RuntimeError: it did"}


@pytest.mark.usefixtures("no_packages")
def test_host_time_is_given_for_each_tensor(tmp_path, capsys):
    results = benchmark.main(
        ["--device=cpu", "--quick", "--host", "--rounds=1", f"--results={tmp_path}"]
    )
    assert json.loads((tmp_path / "step-host-cpu.json").read_text()) == results
    (host,) = results["host"]
    assert [row["case"] for row in host["rows"]] == [*NAMED]
    assert all(row["ns_per_tensor"] > 0 for row in host["rows"])
    assert "| host, ns a tensor" in capsys.readouterr().out


def test_what_cannot_run_is_named_but_a_failure_of_ours_raises():
    arena = Arena([(3,)], "cpu")
    other = Case("theirs", "ours fp32", (), fail, package="torch")
    assert step_timing.start(other, arena, Cpu()) == "OSError: no compiler"

    def fill(arena: Arena) -> Running:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    large = Case("ours", "ours", (), fill)
    assert step_timing.start(large, arena, Cpu()) == "the device has too little memory"
    with pytest.raises(OSError, match="no compiler"):
        step_timing.start(Case("ours", "ours", (), fail), arena, Cpu())


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "benchmarks/results"),
        (["--host"], "benchmarks/results"),
        (["--quick"], "build/bench"),
        (["--cases", "ours"], "build/bench"),
        (["--workloads", "BERT-base"], "build/bench"),
        (["--seconds", "60"], "build/bench"),
        (["--device", "stub"], "build/bench"),
        (["--quick", "--results", "here"], "here"),
    ],
)
def test_only_a_whole_run_goes_beside_the_published_results(arguments, folder):
    args = benchmark.parse_args(["--device=cpu", *arguments])
    name = "step-host-nvidia-h200.json" if "--host" in arguments else "step-nvidia-h200.json"
    path = benchmark.place_of(args, {"device": "NVIDIA H200"})
    assert path.as_posix().endswith(f"{folder}/{name}")


def test_parts_of_a_run_share_what_is_left_of_its_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])
    budget = benchmark.TimeBudget(80.0, weight=8)
    assert budget.next(3) == 130.0
    now[0] = 105.0  # It took less: 75 seconds and a weight of 5 are left.
    assert budget.next(3) == 150.0
    now[0] = 170.0
    assert [budget.next(1), budget.next(1)] == [175.0, 180.0]
    assert benchmark.TimeBudget(math.inf, weight=1).next(1) == math.inf


def test_a_kernel_that_was_partly_lost_has_no_speed() -> None:
    case = next(case for case in step_cases.CASES if case.name == step_cases.FP32)
    seen = [{"name": "step_kernel", "count": 2 / 3, "ms": 1.0}]
    step_profile.add_speeds(seen, case, 1000)
    assert "GB_per_s" not in seen[0]
