"""`make gpu` and `make gpu-prepare` without a GPU: outcomes, limits, what is left after a kill."""

from __future__ import annotations

import json
import re
import subprocess
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
slow = pytest.mark.slow
Facts = dict[str, Any]

GPU = {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 10, "multiprocessors": 132}
CLEAN = "========= ERROR SUMMARY: 0 errors"
FOUND = "========= Invalid __global__ read of size 16 bytes\n========= ERROR SUMMARY: 8 errors"


def stage(name: str, code: str = "", limit: float = 20.0, **more: Any) -> Stage:
    return Stage(name, limit, [sys.executable, "-ISc", code], **more)


def report(name: str, outcome: str = "passed", text: str = "") -> Facts:
    return {"name": name, "outcome": outcome, "seconds": 0.5, "text": text}


class Desk:
    """Runs gpu_check in this process, with a table of stages of its own and a GPU that is not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results, self.logs = folder / "results", folder / "logs"
        self.probed: Facts = {"torch": "2.11.0+cu130", "gpu": GPU}
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(gpu_check, "LOGS", self.logs)
        monkeypatch.setattr(gpu_check, "probe", lambda: dict(self.probed))

    def run(self, table: list[Stage], *arguments: str) -> int:
        self.monkeypatch.setattr(gpu_check, "stages", lambda *facts: table)
        return gpu_check.main([f"--results={self.results}", *arguments])

    @property
    def json(self) -> Facts:
        (path,) = self.results.glob("*.json")
        return json.loads(path.read_text())

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: facts["outcome"] for name, facts in self.json["stages"].items()}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


# The loop over stages


def test_sound_stages_pass_and_two_files_are_left(desk: Desk, capsys: Any) -> None:
    built = f"print('built in', {str(ROOT)!r})"
    assert desk.run([stage("build", built, tells=True), stage("report", part=1)]) == 0
    assert desk.outcomes == {"build": "passed", "report": "passed"}
    assert desk.json["passed"] is True
    assert desk.json["cut_short"] == []
    assert desk.json["hardware"].items() >= GPU.items()
    assert desk.json["versions"]["torch"] == "2.11.0+cu130"
    assert desk.json["stages"]["build"]["tail"] == ["built in ."]
    assert sys.executable not in desk.json["stages"]["build"]["command"]
    assert re.search(r"^build +passed +\d", capsys.readouterr().out, re.MULTILINE)
    archive, record = sorted(path.name for path in desk.results.iterdir())[::-1]
    assert re.fullmatch(r"gpu-check-nvidia-h200-\d{8}-\d{6}\.(json|tar\.gz)", record)
    with tarfile.open(desk.results / archive) as logs:
        assert {Path(name).name for name in logs.getnames()} >= {"build.log", "report.log"}


def test_a_stage_that_fails_is_reported_and_the_others_run(desk: Desk, capsys: Any) -> None:
    table = [stage("a", "print('so it is', flush=True); raise SystemExit(3)"), stage("b")]
    assert desk.run(table) == 1
    assert desk.outcomes == {"a": "failed", "b": "passed"}
    assert desk.json["stages"]["a"]["status"] == 3
    assert desk.json["passed"] is False
    assert "so it is" in capsys.readouterr().out


NEVER_ENDS = """
import os, sys, time
if os.fork() == 0:
    while True:
        open(sys.argv[1], "a").write("alive\\n")
        time.sleep(0.02)
print("begun", flush=True)
time.sleep(60)
"""


def test_what_meets_its_limit_is_stopped_with_its_children_and_named(
    desk: Desk, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    argv = [sys.executable, "-ISc", NEVER_ENDS, str(child)]
    assert desk.run([Stage("a", 1.0, argv), stage("b")]) == 1
    assert desk.outcomes == {"a": "timed out", "b": "passed"}
    assert desk.json["cut_short"] == ["a"]
    assert desk.json["stages"]["a"]["tail"] == ["begun"]
    written = child.read_text()
    time.sleep(0.2)
    assert child.read_text() == written != ""


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], ["build", "one", "two"]),
        (["--part=1"], ["build", "one"]),
        (["--part=2"], ["build", "two"]),
        (["--stages=two one"], ["one", "two"]),
    ],
)
def test_only_what_is_asked_for_runs(arguments: list[str], asked: list[str], desk: Desk) -> None:
    table = [stage("build"), stage("one", part=1), stage("two", part=2)]
    assert desk.run(table, *arguments) == 0
    others = {each.name for each in table} - {*asked}
    assert desk.outcomes == dict.fromkeys(asked, "passed") | dict.fromkeys(others, "not asked")


@pytest.mark.parametrize(
    ("probed", "arguments", "sentence"),
    [
        ({}, [], "cannot import torch; set PYTHON to one that can"),
        ({"gpu": None}, [], "sees no GPU"),
        ({"gpu": GPU}, ["--stages=test"], "'test' is no stage; it must be one of: build"),
    ],
)
def test_what_cannot_begin_says_why(
    probed: Facts, arguments: list[str], sentence: str, desk: Desk
) -> None:
    desk.probed = probed
    with pytest.raises(SystemExit, match=sentence):
        desk.run([stage("build")], *arguments)


# The table of stages


def table_of(device: str = "cuda") -> list[Stage]:
    return gpu_stages.stages(device, "9.0", Path("/results"), Path("/logs"))


@pytest.mark.parametrize("part", [1, 2])
def test_the_stages_of_a_part_fit_into_nine_minutes(part: int) -> None:
    # With a prebuilt extension, whose stage takes a second in place of its limit.
    limits = [each.limit for each in table_of() if each.part in (part, None)][1:]
    assert sum(limits) <= 540
    assert table_of()[0].name == "build"


def test_no_test_file_is_run_twice_or_left_out() -> None:
    stages = {each.name: each.argv or [] for each in table_of()}
    first = [word for name in ("steps", "fused") for word in stages[name] if ".py" in word]
    ignored = [word.removeprefix("--ignore=") for word in stages["tests"] if "--ignore" in word]
    assert ignored == first
    assert len(set(first)) == len(first) > 20


@pytest.mark.parametrize(
    ("kind", "status", "output", "passes"),
    [
        ("command", 0, "", True),
        ("command", 1, "", False),
        ("sanitizer", 0, CLEAN, True),
        ("sanitizer", 0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", True),
        ("sanitizer", 99, "========= RACECHECK SUMMARY: 2 hazards displayed (1 error)", False),
        ("sanitizer", 99, FOUND, False),
        ("sanitizer", 0, f"{FOUND}\n{CLEAN}", False),
        ("sanitizer", 1, CLEAN, False),
        ("sanitizer", 0, "========= Error: Target application terminated", False),
        ("planted", 99, FOUND, True),
        ("planted", 0, CLEAN, False),
        ("planted", 99, "Device not supported\n========= ERROR SUMMARY: 1 error", False),
    ],
)
def test_a_run_is_judged_by_its_status_and_by_what_the_sanitizer_found(
    kind: str, status: int, output: str, passes: bool, tmp_path: Path
) -> None:
    assert gpu_stages.judge(stage("a", kind=kind), status, output, tmp_path)[0] is passes


GOOD, BEGUN = [report("a"), report("b")], {"name": "c"}


@pytest.mark.parametrize(
    ("status", "lines", "passes"),
    [
        (0, GOOD, True),
        (0, [*GOOD, BEGUN, BEGUN], True),
        (0, [], False),
        (0, [*GOOD, BEGUN], False),
        (1, [*GOOD, report("c", "failed")], False),
        (3, GOOD, False),
    ],
)
def test_tests_pass_if_some_did_and_none_failed_or_hangs(
    status: int, lines: list[Facts], passes: bool, tmp_path: Path
) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"name": "cut by a ki'
    (tmp_path / "a.jsonl").write_text(text)
    judged = gpu_stages.judge(stage("a", kind="tests"), status, "", tmp_path)
    assert judged[0] is passes


# The programs for sanitizers


def test_the_programs_are_there_for_every_kernel() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))]
    written = [name for text in sources for name in re.findall(r"\b(\w+)_kernel\(const", text)]
    assert len(written) == sum(text.count("__global__") for text in sources)
    named = {name for each in gpu_programs.PROGRAMS.values() for name in each.kernels}
    rules = (ROOT / "csrc" / "math" / "rules.h").read_text()
    each_rule = re.findall(r"\w+", re.findall(r"using AllRules = RuleList<(.*)>;", rules)[0])
    expected = {*written, *(f"step<{rule}>" for rule in each_rule)} - {"step", "measure", "ratio"}
    expected |= {"measure<Lamb>", "ratio<Lamb>"}
    assert named == expected


@pytest.mark.parametrize("name", gpu_programs.PROGRAMS)
def test_each_program_runs(name: str) -> None:
    gpu_programs.PROGRAMS[name]("cpu")


# Planted bugs, and the prebuilt extension

CHANGES = {**gpu_bugs.BUGS, **gpu_build.VARIANTS}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_bug_or_variant_can_be_planted(change: gpu_bugs.Change) -> None:
    text = (ROOT / change.file).read_text()
    assert change.plant(text) != text
    with pytest.raises(ValueError, match="must hold this once, not 2 times"):
        change.plant(text + text)


@slow
def test_the_tests_that_are_to_catch_bugs_are_there() -> None:
    wanted = [bug.tests.partition(" -k ")[::2] for bug in gpu_bugs.BUGS.values()]
    files = {where.partition("::")[0] for where, _ in wanted}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--device=cuda", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    ids = done.stdout.splitlines()
    for where, names in wanted:
        assert [each for each in ids if each.startswith(where) and names in each], where


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (1, "E  cudaStreamSynchronize\nFAILED tests/a.py::b", "caught"),
        (0, "4 passed", "NOT CAUGHT"),
        (1, "ImportError: cudaStreamSynchronize", "NOT CAUGHT"),
        (1, "FAILED tests/a.py::b", "not caught: the tests failed, but did not say"),
        (
            1,
            ">   cudaStreamSynchronize\nE   assert 0\nFAILED tests/a.py::b",
            "not caught: the tests",
        ),
        (None, "", "not caught: the tests did not end in 45 seconds"),
    ],
)
def test_a_bug_is_caught_if_a_test_fails_in_its_words(
    status: int | None, output: str, verdict: str
) -> None:
    assert gpu_bugs.judge(gpu_bugs.BUGS["the-host-waits"], status, output).startswith(verdict)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    monkeypatch.setattr(gpu_build, "PREPARED", tmp_path)
    return {**gpu_build.facts(), "archs": ["9.0"]}


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        ({}, ""),
        ({"torch": "2.10.0"}, f"it has torch 2.10.0, and here it is {torch.__version__}"),
        ({"file": "_C.so"}, f"it has file _C.so, and here it is {gpu_build.PLACE.name}"),
        ({"sources": "0"}, f"it has sources 0, and here it is {gpu_build.facts()['sources']}"),
        ({"archs": ["8.0"]}, "it is for ['8.0'], and this GPU is 9.0"),
    ],
    ids=["", "torch", "file", "sources", "archs"],
)
def test_an_extension_for_another_machine_or_of_other_sources_is_not_taken(
    changed: Facts, obstacle: str, prepared: Facts, tmp_path: Path
) -> None:
    (tmp_path / "_C.json").write_text(json.dumps({**prepared, **changed}))
    assert gpu_build.obstacle("9.0") == obstacle
