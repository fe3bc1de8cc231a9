"""`make gpu` and `make gpu-prepare` without a GPU: outcomes, limits, what is left after a kill."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_bugs, gpu_build, gpu_check, gpu_programs, gpu_stages
from benchmarks.gpu_stages import Stage

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.any_torch,
    pytest.mark.cpu_only,
    pytest.mark.skipif(sys.platform == "win32", reason="processes are stopped in groups"),
]
Facts = dict[str, Any]


def stage(name: str, code: str = "", limit: float = 20.0, **more: Any) -> Stage:
    return Stage(name, [sys.executable, "-ISc", code], gpu_stages.succeeds, limit, **more)


class Desk:
    """Runs gpu_check in this process, with a table of stages of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results, self.monkeypatch = folder / "results", monkeypatch
        monkeypatch.setattr(gpu_check, "LOGS", folder / "logs")

    def run(self, table: list[Stage], *arguments: str) -> int:
        self.monkeypatch.setattr(gpu_check, "stages", lambda *facts: table)
        return gpu_check.main([f"--results={self.results}", "--device=cpu", *arguments])

    @property
    def stages(self) -> Facts:
        (path,) = self.results.glob("*.json")
        return json.loads(path.read_text())["stages"]

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: facts["outcome"] for name, facts in self.stages.items()}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def test_stages_that_pass_leave_two_files_without_a_path_of_the_machine(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    table = [stage("build", f"print('built in', {str(ROOT)!r})", part=0), stage("report")]
    desk.results.mkdir()
    (desk.results / "step-of-before.json").touch()
    os.utime(desk.results / "step-of-before.json", (0, 0))
    (desk.results / "step-of-now.json").touch()
    os.utime(desk.results / "step-of-now.json", (2**33, 2**33))
    assert desk.run(table) == 0
    (desk.results / "step-of-before.json").unlink()
    (desk.results / "step-of-now.json").unlink()
    assert desk.outcomes == {"build": "passed", "report": "passed"}
    assert re.search(r"^build +passed +\d", capsys.readouterr().out, re.MULTILINE)
    archive, record = sorted(path.name for path in desk.results.iterdir())[::-1]
    assert re.fullmatch(r"gpu-check-rehearsal-\d{8}-\d{6}\.(json|tar\.gz)", record)
    assert str(ROOT) not in (desk.results / record).read_text()
    with tarfile.open(desk.results / archive) as logs:
        names = {Path(name).name for name in logs.getnames()}
    assert names == {"build.log", "report.log", "step-of-now.json", record}


def test_a_failure_is_printed_and_the_others_run(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "print('so it is', flush=True); raise SystemExit(3)"
    table = [stage("a", fails), stage("b"), stage("c", missing="gone"), stage("d", part=2)]
    assert desk.run(table) == 1
    assert desk.outcomes == {"a": "failed", "b": "passed", "c": "missing", "d": "passed"}
    assert desk.stages["a"]["found"] == "exit status 3"
    assert "so it is" in capsys.readouterr().out


def test_a_stage_may_need_a_file_that_the_build_unpacks(desk: Desk, tmp_path: Path) -> None:
    made = f"open({str(tmp_path / 'unpacked')!r}, 'w')"
    needs = [stage(name, needs=tmp_path / name) for name in ("unpacked", "absent")]
    assert desk.run([stage("build", made, part=0), *needs]) == 1
    assert desk.outcomes == {"build": "passed", "unpacked": "passed", "absent": "missing"}
    assert desk.stages["absent"]["found"] == "not built (make gpu-prepare)"


def test_nothing_runs_without_the_extension(desk: Desk) -> None:
    assert desk.run([stage("build", "raise SystemExit(1)", part=0), stage("b")]) == 1
    assert desk.outcomes == {"build": "failed", "b": "not reached"}


NEVER_ENDS = """
import os, sys, time
if os.fork() == 0:
    while True:
        open(sys.argv[1], "a").write("alive\\n")
        time.sleep(0.02)
print("begun", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_what_meets_its_limit_is_stopped_with_its_children(desk: Desk, tmp_path: Path) -> None:
    child = tmp_path / "child"
    argv = [sys.executable, "-ISc", NEVER_ENDS, str(child)]
    assert desk.run([Stage("a", argv, gpu_stages.succeeds, 1.0), stage("b")]) == 1
    assert desk.outcomes == {"a": "failed", "b": "passed"}
    assert desk.stages["a"]["found"] == "stopped after 1 seconds"
    assert desk.stages["a"]["tail"] == ["begun"]
    written = child.read_text()
    time.sleep(0.2)
    assert child.read_text() == written != ""


def test_no_stage_begins_after_the_time_for_all(desk: Desk) -> None:
    table = [stage("a", "import time; time.sleep(9)"), stage("b", part=2)]
    assert desk.run(table, "--seconds=0.5") == 1
    assert desk.outcomes == {"a": "failed", "b": "not reached"}


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], ["build", "one", "two", "two-b"]),
        (["--part=1"], ["build", "one"]),
        (["--part=2"], ["build", "two", "two-b"]),
        (["--stages=two one"], ["one", "two", "two-b"]),
        (["--stages=two-b"], ["two-b"]),
    ],
)
def test_only_what_is_asked_for_runs(arguments: list[str], asked: list[str], desk: Desk) -> None:
    table = [stage("build", part=0), stage("one"), stage("two", part=2), stage("two-b", part=2)]
    assert desk.run(table, *arguments) == 0
    assert [*desk.outcomes] == asked


def test_what_cannot_begin_says_why(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no stage begins with 'test'; there are: build"):
        desk.run([stage("build")], "--stages=test")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"sees no GPU; it must see one \(--device cpu rehearses"):
        gpu_check.main(["--part=1"])


# What a stage's output says.

CLEAN = "========= ERROR SUMMARY: 0 errors"
FOUND = "========= Invalid __global__ read of size 16 bytes\n========= ERROR SUMMARY: 8 errors"
BUG = gpu_stages.catches(gpu_bugs.BUGS["the-host-waits"])


@pytest.mark.parametrize(
    ("judge", "status", "output", "found"),
    [
        (gpu_stages.succeeds, 0, "", ""),
        (gpu_stages.tests_pass, 0, "12 passed, 1 skipped in 3.21s", "12 passed, 1 skipped"),
        (gpu_stages.is_clean, 0, CLEAN, "0 errors"),
        (gpu_stages.is_clean, 0, "= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", "0 errors"),
        (gpu_stages.finds_reads_beyond, 99, FOUND, "8 errors"),
        (BUG, 1, "E  cudaStreamSynchronize\nFAILED tests/a.py::b", "caught"),
    ],
)
def test_a_success_says_what_was_found(
    judge: gpu_stages.Judge, status: int, output: str, found: str
) -> None:
    assert judge(status, output) == found


@pytest.mark.parametrize(
    ("judge", "status", "output", "why"),
    [
        (gpu_stages.succeeds, 1, "", "exit status 1"),
        (gpu_stages.tests_pass, 0, "5 deselected in 0.10s", "5 deselected"),
        (gpu_stages.tests_pass, 1, "1 failed, 12 passed in 3.21s", "1 failed, 12 passed"),
        (gpu_stages.tests_pass, 3, "INTERNALERROR", "pytest printed no result"),
        (gpu_stages.is_clean, 99, "= RACECHECK SUMMARY: 2 hazards displayed", "2 errors"),
        (gpu_stages.is_clean, 99, FOUND, "8 errors"),
        (gpu_stages.is_clean, 0, f"{FOUND}\n{CLEAN}", "8 errors"),
        (gpu_stages.is_clean, 1, CLEAN, "0 errors"),
        (gpu_stages.is_clean, 0, "Error: Target application terminated", "no summary"),
        (gpu_stages.finds_reads_beyond, 0, CLEAN, "not found: 0 errors"),
        (gpu_stages.finds_reads_beyond, 99, "Device not supported", "not found: no summary"),
        (BUG, 0, "4 passed", "NOT CAUGHT"),
        (BUG, 1, "ImportError: cudaStreamSynchronize", "NOT CAUGHT"),
        (BUG, 1, "> cudaStreamSynchronize\nE  assert 0\nFAILED tests/a.py::b", "did not say"),
    ],
)
def test_a_failure_says_why(judge: gpu_stages.Judge, status: int, output: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        judge(status, output)


# The table of stages


def test_every_stage_of_a_gpu_names_files_and_tests_that_are_there() -> None:
    table = gpu_stages.stages("cuda", Path("/results"), Path("/logs"))
    names = [each.name for each in table]
    assert len({*names}) == len(names)
    for each in table:
        for word in each.argv:
            path = Path(word.removeprefix("--ignore=").partition("::")[0])
            assert path.suffix != ".py" or path.exists(), word
    for bug in gpu_bugs.BUGS.values():
        where, _, test = bug.tests.partition(" -k ")[0].partition("::")
        assert f"def {test}(" in (ROOT / where).read_text() or not test


def test_the_timed_stages_fit_into_their_part() -> None:
    table = gpu_stages.stages("cuda", Path("/results"), Path("/logs"))
    assert sum(each.limit for each in table if each.part == 2) <= 230.0  # of 240 s


def test_the_programs_are_there_for_every_kernel() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))]
    written = [name for text in sources for name in re.findall(r"\b(\w+)_kernel\(const", text)]
    assert len(written) == sum(text.count("__global__") for text in sources)
    named = {name for each in gpu_programs.PROGRAMS.values() for name in each.kernels}
    rules = (ROOT / "csrc" / "math" / "rules.h").read_text()
    each_rule = re.findall(r"\w+", re.findall(r"using AllRules = RuleList<(.*)>;", rules)[0])
    expected = {*written, *(f"step<{rule}>" for rule in each_rule)} - {
        "step",
        "codes",
        "measure",
        "ratio",
    }
    expected |= {"codes<Adam>", "measure<Lamb>", "ratio<Lamb>"}
    assert named == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu_programs.PROGRAMS)
def test_each_program_runs(name: str) -> None:
    gpu_programs.PROGRAMS[name]("cpu")


# As the profiler of torch 2.11 says it on an H100.
STEP_OF_ADAM = (
    "void apex_mp::cuda::(anonymous namespace)::step_kernel<apex_mp::math::Adam, "
    "(apex_mp::DType)2>(apex_mp::cuda::StepUpdate)"
)


@pytest.mark.parametrize(
    ("kernel", "name", "same"),
    [
        ("step<Adam>", STEP_OF_ADAM, True),
        ("step<Adagrad>", STEP_OF_ADAM, False),
        ("step<Ada>", STEP_OF_ADAM, False),
        ("check", "apex_mp::cuda::(anonymous namespace)::check_kernel(int)", True),
        ("few_check", "apex_mp::cuda::(anonymous namespace)::check_kernel(int)", False),
    ],
)
def test_a_kernel_is_known_by_the_name_that_the_profiler_gives(
    kernel: str, name: str, same: bool
) -> None:
    assert gpu_programs.is_kernel(kernel, name) is same


# Planted bugs, and the prebuilt extension

CHANGES = {**gpu_bugs.BUGS, **gpu_build.VARIANTS}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_bug_or_variant_can_be_planted(change: gpu_bugs.Change) -> None:
    text = (ROOT / change.file).read_text()
    assert change.plant(text) != text
    with pytest.raises(ValueError, match="must hold this once, not 2 times"):
        change.plant(text + text)


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        ({}, ""),
        ({"torch": "2.10.0"}, f"it has torch 2.10.0, and here it is {torch.__version__}"),
        ({"sources": "0"}, f"it has sources 0, and here it is {gpu_build.facts()['sources']}"),
        ({"archs": ["8.0"]}, "it is for ['8.0'], and this GPU is 9.0"),
    ],
    ids=["", "torch", "sources", "archs"],
)
def test_an_extension_for_another_machine_or_of_other_sources_is_not_taken(
    changed: Facts, obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_build, "PREPARED", tmp_path)
    record = {**gpu_build.facts(), "archs": ["9.0"], **changed}
    (tmp_path / "_C.json").write_text(json.dumps(record))
    assert gpu_build.obstacle("9.0") == obstacle
