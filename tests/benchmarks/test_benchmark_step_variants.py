"""benchmarks.step --extensions compares builds that cannot share a process."""

from __future__ import annotations

import json
import math
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


def test_a_build_that_ended_and_a_case_that_failed_in_one_are_left_out():
    rounds = [
        {"A": taken(one=1.0, other=1.0), "B": taken(one=1.0), "C": taken(one=2.0)},
        {"A": taken(one=1.0, other=1.0), "C": taken(one=2.0)},
    ]
    why = {"B": "its process ended with status -6", "C": {"other": "RuntimeError: no"}}
    found = step_variants.summary(QUICK[0], ["A", "B", "C"], rounds, why)
    assert [(row["case"], [*row["builds"]]) for row in found["rows"]] == [("one", ["A", "C"])]
    assert found["failed"] == why
    none = step_variants.summary(QUICK[0], ["A"], [{}], {"A": "its process ended with status 1"})
    assert none["rows"] == []
    assert step_variants.table(none).endswith("\n\nNo build ran.")


@pytest.mark.slow
def test_a_workload_for_which_no_time_is_left_is_named(tmp_path, capsys):
    arguments = ["--device=stub", "--quick", "--seconds=0", f"--results={tmp_path}"]
    results = benchmark.main([*arguments, "--extensions", str(ROOT)])
    assert [(each["workload"], each["rounds"], each["rows"]) for each in results["builds"]] == [
        (workload.name, 0, []) for workload in QUICK
    ]
    assert capsys.readouterr().out.count("No build ran: no time was left.") == len(QUICK)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder whose processes run, in place of the benchmark, what the test writes."""
    (tmp_path / "apex_mp").mkdir()
    (tmp_path / "apex_mp" / "__init__.py").touch()
    monkeypatch.setattr(step_variants, "SERVER", [sys.executable, "-ISc", "input(); input()"])
    return tmp_path


def test_a_build_that_does_not_answer_is_ended_and_named_in_each_workload(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(step_variants, "SECONDS_TO_ANSWER", 0.2)
    arguments = ["--device=stub", "--quick", f"--results={folder}", "--extensions", str(folder)]
    results = benchmark.main(arguments)
    why = {folder.name: "it did not answer in 0.2 seconds"}
    assert [each["failed"] for each in results["builds"]] == [why, why]
    assert f"FAILED: {folder.name}, 30 x 1000: it did not answer" in capsys.readouterr().out


def test_a_build_has_a_little_longer_than_the_run_to_answer(monkeypatch):
    monkeypatch.setattr(step_variants.time, "monotonic", lambda: 100.0)
    seconds = {left: step_variants.patience(100.0 + left) for left in (math.inf, 60.0, -9.0)}
    assert seconds == {math.inf: 300.0, 60.0: 60.0, -9.0: 20.0}


def test_a_folder_without_a_package_and_two_of_one_name_are_refused(tmp_path):
    def run(*folders: Path) -> None:
        arguments = ["--quick", f"--results={tmp_path}", "--extensions", *map(str, folders)]
        benchmark.main(["--device=stub", *arguments])

    with pytest.raises(FileNotFoundError, match=r"^--extensions: .* holds no apex_mp package$"):
        run(tmp_path)
    with pytest.raises(ValueError, match="the folders need names of their own, not "):
        run(tmp_path / "a" / "build", tmp_path / "b" / "build")


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
