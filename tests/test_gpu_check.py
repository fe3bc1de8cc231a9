"""benchmarks/gpu_check.py on a machine that is made of stubs: outcomes, limits, kills, the JSON."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from op_cases import LISTS

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_torch,
    pytest.mark.cpu_only,
    pytest.mark.skipif(sys.platform == "win32", reason="the stubs are scripts"),
]

# Stands for python, compute-sanitizer, nvidia-smi, nvcc and git: does what the first rule says
# whose pattern is found in its command line, and notes the call.
STUB = """#!{python} -IS
import json, os, re, sys, time
from pathlib import Path

folder = Path({folder!r})
call = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([call, dict(os.environ)]) + "\\n")
for pattern, rule in json.loads((folder / "rules").read_text()):
    if re.search(pattern, call, re.DOTALL):
        break
else:
    sys.exit("no rule for " + call)
for name in re.findall("--lines=([^ ]+)", call):
    Path(name).write_text("".join(json.dumps(line) + "\\n" for line in rule.get("lines", [])))
print(rule.get("out", ""), flush=True)
time.sleep(rule.get("sleep", 0))
sys.exit(rule.get("status", 0))
"""
GPU = {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 10, "multiprocessors": 132}
PROBE = {"torch": "2.11.0+cu130", "cuda": "13.0", "python": "3.12.3", "gpu": GPU}


def result(name: str, outcome: str = "passed", text: str = "", kind: str = "test") -> Any:
    return {"kind": kind, "name": name, "outcome": outcome, "seconds": 0.5, "text": text}


# Patterns of the commands.
PROBING, BUILD, REPORT = "^python -c .*is_available", "setup.py build_ext", "-m apex_mp"
PLANTED, MEMCHECK = "--tool=memcheck.* -c", "--tool=memcheck.*pytest"
RACECHECK, TESTS = "--tool=racecheck.*pytest", "^python -m pytest"

CLEAN = "========= ERROR SUMMARY: 0 errors"
LINES = [{"kind": "deselected", "count": 7}, result("a.py::one"), result("a.py::two")]
RULES: dict[str, dict[str, Any]] = {
    "nvidia-smi": {"out": "580.159, 345 MHz, 1980 MHz, 3201 MHz, 700.00 W"},
    "nvcc --version": {"out": "Cuda compilation tools, release 13.0, V13.0.88"},
    "compute-sanitizer --version": {"out": "Version 2025.3.1.0 (build 1)"},
    "git rev-parse": {"out": "0123abc"},
    "git status": {"out": ""},
    PROBING: {"out": json.dumps(PROBE)},
    PLANTED: {
        "out": "========= Invalid __global__ read of size 16 bytes\n"
        "========= ERROR SUMMARY: 128 errors",
        "status": 99,
    },
    MEMCHECK: {"out": CLEAN, "lines": LINES},
    RACECHECK: {
        "out": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
        "lines": LINES,
    },
    BUILD: {},
    REPORT: {"out": "apex_mp 0.1.0"},
    TESTS: {"lines": LINES},
}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    before = signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("benchmarks.gpu_check")
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def gpu_stages(gpu_check: ModuleType) -> ModuleType:
    return sys.modules["benchmarks.gpu_stages"]


class Desk:
    """A folder with the stubs, and what came out of a run with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        for name in ("bin/python", "bin/nvidia-smi", "bin/git"):
            self.add_stub(name)
        for name in ("cuda/bin/nvcc", "cuda/bin/compute-sanitizer"):
            self.add_stub(name)
        self.set_rules({})

    def add_stub(self, name: str) -> None:
        stub = self.folder / name
        stub.parent.mkdir(exist_ok=True, parents=True)
        stub.write_text(STUB.format(python=sys.executable, folder=str(self.folder)))
        stub.chmod(0o755)

    def set_rules(self, changed: dict[str, dict[str, Any]]) -> None:
        assert changed.keys() <= RULES.keys()
        (self.folder / "rules").write_text(json.dumps([*{**RULES, **changed}.items()]))

    def arguments(self, *more: str) -> list[str]:
        folders = [f"--results={self.results}", f"--logs={self.folder / 'logs'}"]
        return [f"--python={self.folder / 'bin' / 'python'}", *folders, *more]

    @property
    def path(self) -> Path:
        (path,) = self.results.glob("*.json")
        return path

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def stage(self, name: str) -> dict[str, Any]:
        return self.json["stages"][name]

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: facts["outcome"] for name, facts in self.json["stages"].items()}

    @property
    def calls(self) -> list[tuple[str, dict[str, str]]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def environment_of(self, part: str) -> dict[str, str]:
        return next(environment for call, environment in self.calls if part in call)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return Desk(tmp_path)


STAGES = ["build", "report", "tests", "planted", "memcheck", "racecheck"]


# Where all is well


def test_a_sound_machine_passes_and_its_json_says_what_it_was(
    gpu_check: ModuleType, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(desk.arguments()) == 0
    assert desk.outcomes == dict.fromkeys(STAGES, "passed")
    facts = desk.json
    assert facts["passed"] is True
    assert desk.path.name == f"gpu-check-nvidia-h200-{facts['date'].translate(to_file_name)}.json"
    assert facts["hardware"].items() >= GPU.items()
    assert facts["hardware"]["nvidia_smi"] == {
        "driver_version": "580.159",
        "clocks.sm": "345 MHz",
        "clocks.max.sm": "1980 MHz",
        "clocks.mem": "3201 MHz",
        "power.limit": "700.00 W",
    }
    assert facts["versions"] == {
        "torch": "2.11.0+cu130",
        "cuda_of_torch": "13.0",
        "nvcc": "13.0",
        "compute_sanitizer": "2025.3.1.0",
        "python": "3.12.3",
        "apex_mp": importlib.import_module("apex_mp").__version__,
        "commit": "0123abc",
        "changed_since_commit": False,
    }
    assert "the first and the last case" in desk.stage("memcheck")["note"]
    assert desk.stage("report")["report"] == ["apex_mp 0.1.0"]
    assert desk.stage("tests")["counts"].items() >= {"passed": 2, "deselected": 7}.items()
    printed = capsys.readouterr().out
    assert "tests      passed" in printed
    assert "2 passed, 7 deselected" in printed
    assert str(desk.path) in printed


to_file_name = str.maketrans({"-": "", ":": "", "T": "-", "Z": ""})


def test_the_stages_get_the_environment_that_they_need(gpu_check: ModuleType, desk: Desk) -> None:
    gpu_check.main(desk.arguments("--pytest-args=-k 'a b' -x"))
    build = desk.environment_of("setup.py")
    assert (build["FORCE_CUDA"], build["TORCH_CUDA_ARCH_LIST"]) == ("1", "9.0")
    assert int(build["MAX_JOBS"]) >= 1
    for part in ("--tool=memcheck", "--tool=racecheck"):
        assert desk.environment_of(part)["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    (tests,) = [call for call, _ in desk.calls if "-k a b -x" in call]
    assert tests.startswith("python -m pytest")
    assert "--device cuda" in tests
    for call, _ in desk.calls:
        if "--tool=" in call:
            assert "--kernel-name=kns=apex_mp" in call
            assert "--error-exitcode=99" in call


def test_nothing_is_installed_or_fetched(gpu_check: ModuleType, desk: Desk) -> None:
    gpu_check.main(desk.arguments())
    words = {word for call, _ in desk.calls for word in call.split()}
    assert not words & {"pip", "ensurepip", "venv", "install", "develop", "fetch", "curl", "wget"}


def test_only_the_stages_asked_for_run(gpu_check: ModuleType, desk: Desk) -> None:
    assert gpu_check.main(desk.arguments("--stages=racecheck build")) == 0
    expected = dict.fromkeys(STAGES, "not asked") | {"build": "passed", "racecheck": "passed"}
    assert desk.outcomes == expected
    assert not [call for call, _ in desk.calls if "-m apex_mp" in call]


def test_an_unknown_stage_is_refused(
    gpu_check: ModuleType, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(desk.arguments("--stages=build test"))
    assert stopped.value.code == 2
    assert "'test' is no stage; it must be one of: build report tests" in capsys.readouterr().err


def test_what_cannot_be_known_is_null(gpu_check: ModuleType, desk: Desk) -> None:
    for name in ("bin/git", "bin/nvidia-smi", "cuda/bin/nvcc"):
        (desk.folder / name).unlink()
    assert gpu_check.main(desk.arguments("--stages=build")) == 0
    unknown = dict.fromkeys(["nvcc", "commit", "changed_since_commit"])
    assert desk.json["versions"].items() >= unknown.items()
    assert desk.json["hardware"]["nvidia_smi"] is None


def test_the_caller_may_name_the_commit(gpu_check: ModuleType, desk: Desk) -> None:
    gpu_check.main(desk.arguments("--stages=build", "--commit=fedc"))
    assert desk.json["versions"]["commit"] == "fedc"


# Where something is amiss


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"out": json.dumps({**PROBE, "gpu": None})}, "sees no GPU"),
        ({"status": 1}, "cannot import torch; set PYTHON to one that can"),
    ],
)
def test_without_a_gpu_or_torch_a_sentence_says_so_and_nothing_runs(
    rule: dict[str, Any],
    sentence: str,
    gpu_check: ModuleType,
    desk: Desk,
    capsys: pytest.CaptureFixture[str],
) -> None:
    desk.set_rules({PROBING: rule})
    assert gpu_check.main(desk.arguments()) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("make gpu: ")
    assert sentence in printed
    assert not desk.results.exists()
    assert len(desk.calls) == 1


def test_nothing_follows_a_build_that_fails(
    gpu_check: ModuleType, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.set_rules({BUILD: {"status": 1, "out": "error: no such header"}})
    assert gpu_check.main(desk.arguments()) == 1
    assert desk.outcomes == dict.fromkeys(STAGES, "not reached") | {"build": "failed"}
    assert desk.stage("build")["tail"] == ["error: no such header"]
    assert desk.json["passed"] is False
    assert "error: no such header" in capsys.readouterr().out


FAILURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "the report": ("report", REPORT, {"status": 1}),
    "a test": ("tests", TESTS, {"status": 1, "lines": [*LINES, result("b", "failed")]}),
    "no test": ("tests", TESTS, {"status": 5}),
    "pytest": ("tests", TESTS, {"status": 3, "lines": LINES}),
    "an unfinished test": (
        "tests",
        TESTS,
        {"status": 0, "lines": [*LINES, {"kind": "started", "name": "b"}]},
    ),
    "memcheck, with errors": (
        "memcheck",
        MEMCHECK,
        {"status": 99, "lines": LINES, "out": "========= ERROR SUMMARY: 3 errors"},
    ),
    "memcheck, with a failed test": (
        "memcheck",
        MEMCHECK,
        {"status": 1, "lines": [*LINES, result("b", "failed")], "out": CLEAN},
    ),
    "memcheck, without a summary": ("memcheck", MEMCHECK, {"lines": LINES}),
    "memcheck, without a test": ("memcheck", MEMCHECK, {"out": CLEAN}),
    "racecheck": (
        "racecheck",
        RACECHECK,
        {
            "status": 99,
            "lines": LINES,
            "out": "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)",
        },
    ),
    "the planted error, not found": ("planted", PLANTED, {"out": CLEAN}),
    "the planted error, for another reason": (
        "planted",
        PLANTED,
        {"status": 99, "out": "Device not supported\n========= ERROR SUMMARY: 1 error"},
    ),
}


@pytest.mark.parametrize(("stage", "pattern", "rule"), FAILURES.values(), ids=FAILURES)
def test_a_stage_that_fails_is_told_and_the_others_run(
    stage: str, pattern: str, rule: dict[str, Any], gpu_check: ModuleType, desk: Desk
) -> None:
    desk.set_rules({pattern: rule})
    assert gpu_check.main(desk.arguments()) == 1
    assert desk.outcomes == dict.fromkeys(STAGES, "passed") | {stage: "failed"}


def test_failed_tests_are_named_with_their_message(gpu_check: ModuleType, desk: Desk) -> None:
    lines = [*LINES, result("a.py::three", "failed", "assert 1 == 2")]
    desk.set_rules({TESTS: {"status": 1, "lines": lines}})
    gpu_check.main(desk.arguments("--stages=tests"))
    assert desk.stage("tests")["counts"]["failed"] == 1
    assert desk.stage("tests")["failures"] == {"a.py::three": "assert 1 == 2"}


def test_a_missing_sanitizer_is_missing_and_not_passed_over(
    gpu_check: ModuleType, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk.folder / "cuda/bin/compute-sanitizer").unlink()
    assert gpu_check.main(desk.arguments()) == 1
    missing = dict.fromkeys(["planted", "memcheck", "racecheck"], "missing")
    assert desk.outcomes == dict.fromkeys(STAGES, "passed") | missing
    assert "compute-sanitizer is neither in CUDA_HOME nor on the PATH" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["file", "test"])
def test_what_a_missing_package_keeps_from_running_is_named_and_no_failure(
    kind: str, gpu_check: ModuleType, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "E   ModuleNotFoundError: No module named 'sklearn.datasets'"
    lines = [result("tests/test_x.py", "failed", text.replace(".datasets", ""), kind), *LINES]
    desk.set_rules({TESTS: {"status": 1, "lines": lines}})
    assert gpu_check.main(desk.arguments("--stages=tests")) == 0
    assert desk.stage("tests")["not_run"] == {"tests/test_x.py": "needs sklearn"}
    assert desk.stage("tests")["counts"]["not_run"] == 1
    assert "not run: tests/test_x.py: needs sklearn" in capsys.readouterr().out


def test_a_missing_module_of_our_own_is_a_failure(gpu_check: ModuleType, desk: Desk) -> None:
    text = "E   ModuleNotFoundError: No module named 'op_cases'"
    lines = [result("tests/test_x.py", "failed", text, "file"), *LINES]
    desk.set_rules({TESTS: {"status": 1, "lines": lines}})
    assert gpu_check.main(desk.arguments("--stages=tests")) == 1
    assert [*desk.stage("tests")["failures"]] == ["tests/test_x.py"]


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= ERROR SUMMARY: 12 errors\n========= ERROR SUMMARY: 3 errors", 15),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", 1),
        ("========= Error: Target application terminated before first instrumented call", None),
    ],
)
def test_the_summary_of_the_sanitizer_is_read(
    output: str, errors: int | None, gpu_stages: ModuleType
) -> None:
    assert gpu_stages.sanitizer_errors(output) == errors


# Limits and kills


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_stage_that_meets_its_limit_is_stopped_and_tells_what_it_did(
    gpu_check: ModuleType, desk: Desk
) -> None:
    lines = [*LINES, {"kind": "started", "name": "a.py::endless"}]
    desk.set_rules({TESTS: {"sleep": 60, "lines": lines}})
    start = time.monotonic()
    assert gpu_check.main(desk.arguments("--stages=tests racecheck", "--seconds=1")) == 1
    assert time.monotonic() - start < 30
    stage = desk.stage("tests")
    assert desk.outcomes["tests"] == "timed out"
    assert desk.outcomes["racecheck"] == "not reached"  # No time is left for it.
    assert (stage["status"], stage["counts"]["passed"]) == (None, 2)
    assert stage["unfinished"] == "a.py::endless"


def test_each_stage_has_a_limit_and_all_of_a_call_fit_into_ten_minutes_or_two_calls(
    gpu_stages: ModuleType,
) -> None:
    limits = {stage.name: stage.limit for stage in gpu_stages.STAGES}
    assert max(limits.values()) < 600
    assert limits["planted"] + limits["memcheck"] + limits["racecheck"] < 600


@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGKILL, "running"), (signal.SIGTERM, "interrupted")]
)
def test_a_run_that_is_killed_leaves_what_it_knew(
    number: signal.Signals, outcome: str, desk: Desk
) -> None:
    lines = [*LINES, {"kind": "started", "name": "a.py::endless"}]
    desk.set_rules({TESTS: {"sleep": 60, "lines": lines, "out": "begun"}})
    command = [sys.executable, "-m", "benchmarks.gpu_check", *desk.arguments()]
    log = desk.folder / "logs" / "tests.log"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: log.exists() and "begun" in log.read_text())
        child = int(subprocess_of(process.pid))
        process.send_signal(number)
        process.wait(timeout=30)
    assert process.returncode != 0
    after = dict.fromkeys(STAGES, "not reached")
    assert desk.outcomes == after | {"build": "passed", "report": "passed", "tests": outcome}
    assert desk.json["passed"] is False
    if number == signal.SIGTERM:
        assert desk.stage("tests")["unfinished"] == "a.py::endless"
        wait_for(lambda: not is_alive(child))
    else:
        os.kill(child, signal.SIGKILL)


def subprocess_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]


# The plugin, under the real pytest

TEST_FILES = {
    "conftest.py": """
def pytest_addoption(parser):
    parser.addoption("--device")
""",
    "test_mixed.py": """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
@pytest.mark.xfail
def test_known(): assert False
@pytest.fixture
def broken(): raise KeyError("no such fixture")
def test_broken(broken): pass
""",
    "test_needs.py": "import hypothesis_is_not_here\n",
    "test_optional.py": "import pytest\npytest.importorskip('not_here', reason='needs not_here')\n",
}


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # From a folder that has the plugin, but no apex_mp: the one under test may lie elsewhere.
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu_pytest", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_every_report_of_pytest_is_read_back(
    gpu_stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in TEST_FILES.items():
        (tmp_path / name).write_text(text)
    lines = tmp_path / "lines.jsonl"
    done = run_pytest(tmp_path, f"--lines={lines}", "--continue-on-collection-errors")
    assert done.returncode == 1, done.stderr
    monkeypatch.setattr(gpu_stages, "TEST_PACKAGES", ("hypothesis_is_not_here",))
    facts = gpu_stages.read_lines(lines)
    assert facts["counts"] == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "xfailed": 1,
        "not_run": 2,
        "deselected": 0,
    }
    assert "assert 1 == 2" in facts["failures"]["test_mixed.py::test_bad"]
    assert "no such fixture" in facts["failures"]["test_mixed.py::test_broken"]
    assert facts["not_run"] == {
        "test_needs.py": "needs hypothesis_is_not_here",
        "test_optional.py": "Skipped: needs not_here",
        "test_mixed.py::test_skipped": "Skipped: not today",
    }
    assert facts["unfinished"] is None


def test_lines_that_a_kill_has_cut_are_read_up_to_there(
    gpu_stages: ModuleType, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jsonl"
    whole = [result("a"), {"kind": "started", "name": "b"}]
    lines.write_text("".join(json.dumps(line) + "\n" for line in whole) + '{"kind": "te')
    facts = gpu_stages.read_lines(lines)
    assert (facts["counts"]["passed"], facts["unfinished"]) == (1, "b")
    assert gpu_stages.read_lines(tmp_path / "none")["counts"]["passed"] == 0


@pytest.mark.parametrize(
    ("sample", "operators"),
    [
        ("all operators", ("check", "l2_norm", "unscale", "axpby", "adam")),
        ("operators with shared memory", ("check", "l2_norm")),
    ],
)
def test_a_sample_has_every_list_of_its_operators(
    sample: str, operators: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = [f"--lines={tmp_path / 'lines'}", f"--sample={sample}", "--collect-only", "-q"]
    done = run_pytest(tmp_path, *arguments, str(ROOT / "tests" / "test_operators.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.partition("::test_")[2] for line in done.stdout.splitlines() if "::" in line]
    for operator, case in itertools.product(operators, LISTS):
        of_case = [name for name in names if name.startswith(operator) and f"[{case}-" in name]
        assert len(of_case) == 2, (operator, case)
    assert any("2000 of 64" in name for name in names)  # Of several launches.
    assert not [name for name in names if "300_steps" in name or "5000" in name]
    if sample != "all operators":
        assert all(name.startswith(operators) for name in names)
    chosen, whole = map(int, re.findall(r"(\d+)/(\d+) tests collected", done.stdout)[0])
    assert chosen == len(names) < whole / 3
