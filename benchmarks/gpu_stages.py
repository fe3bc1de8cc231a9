"""The stages of gpu_check: what each runs, how it is judged, and the table of all.

A further stage is a row of `STAGES`, a function that returns its command, and one that judges it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu_machine import Facts
from benchmarks.gpu_pytest import SAMPLES

# Packages that a test may need and a machine may lack: its absence is reported, it is no failure.
TEST_PACKAGES = ("hypothesis", "matplotlib", "numpy", "setuptools", "sklearn", "tqdm")
ERROR_EXIT_CODE = 99
SHOWN = 20  # failures and lines that are kept


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the stages need to know of the machine and of the call."""

    python: str
    capability: str  # "9.0"
    sanitizer: str | None
    logs: Path
    pytest_args: Sequence[str] = ()

    def lines(self, stage: str) -> Path:
        """Return the file into which pytest's reports go."""
        return self.logs / f"{stage}.jsonl"


@dataclasses.dataclass(frozen=True)
class Command:
    """What a stage runs; argv is None if what it needs is missing, and `note` says what."""

    argv: Sequence[str] | None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """How a command ended; status is None if it was stopped at the limit."""

    status: int | None
    output: str
    lines: Path


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of the table. `judge` returns whether the run is a success, and what to record."""

    name: str
    limit: float  # seconds
    command: Callable[[Machine], Command]
    judge: Callable[[Run], tuple[bool, Facts]]
    ends_all: bool = False  # without it the later stages mean nothing


# --- The commands


def build(machine: Machine) -> Command:
    environment = {
        "FORCE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": machine.capability,
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0)))),
    }
    return Command([machine.python, "setup.py", "build_ext", "--inplace"], environment)


def report(machine: Machine) -> Command:
    return Command([machine.python, "-m", "apex_mp"])


def pytest_command(machine: Machine, stage: str, *arguments: str) -> list[str]:
    command = [machine.python, "-m", "pytest", "-p", "benchmarks.gpu_pytest"]
    return [*command, f"--lines={machine.lines(stage)}", "--device", "cuda", "-q", *arguments]


# Plugins that happen to be installed there are none of ours, and our warnings are errors.
PYTEST_ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def tests(machine: Machine) -> Command:
    going_on = "--continue-on-collection-errors"
    command = pytest_command(machine, "tests", going_on, *machine.pytest_args)
    return Command(command, PYTEST_ENVIRONMENT)


# Our kernels alone, by a part of their mangled names. Errors of CUDA calls are not counted: torch
# tries some that fail, and those of our launches are raised. Only the stage has a limit of time.
SANITIZER_OPTIONS = [
    f"--error-exitcode={ERROR_EXIT_CODE}",
    "--kernel-name=kns=apex_mp",
    "--report-api-errors=no",
    "--target-processes=all",
    "--launch-timeout=0",
]
# A cached block is larger than its tensor, and belongs to nobody or to another one.
SANITIZER_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **PYTEST_ENVIRONMENT}

# check_ is given 4096 numbers of which 16 are there. Were the kernels filtered by a wrong name, or
# did the tool not work here, nothing would be found.
PLANTED = """
import torch
from apex_mp import _ops
grad = torch.zeros(4096, device="cuda")
grad.untyped_storage().resize_(64)
found_inf = torch.zeros(1, device="cuda")
_ops.check_([grad], [0], found_inf, torch.zeros(1, dtype=torch.float64, device="cuda"))
torch.cuda.synchronize()
"""


def sanitized(machine: Machine, tool: str, command: Sequence[str], note: str) -> Command:
    if machine.sanitizer is None:
        return Command(None, note="compute-sanitizer is neither in CUDA_HOME nor on the PATH")
    argv = [machine.sanitizer, f"--tool={tool}", *SANITIZER_OPTIONS, *command]
    return Command(argv, SANITIZER_ENVIRONMENT, note)


def planted(machine: Machine) -> Command:
    note = "reads beyond a tensor on purpose: memcheck must find it"
    return sanitized(machine, "memcheck", [machine.python, "-c", PLANTED], note)


def operator_tests(machine: Machine, tool: str, sample: str) -> Command:
    arguments = [f"--sample={sample}", "tests/test_operators.py"]
    return sanitized(machine, tool, pytest_command(machine, tool, *arguments), SAMPLES[sample][0])


def memcheck(machine: Machine) -> Command:
    return operator_tests(machine, "memcheck", "all operators")


def racecheck(machine: Machine) -> Command:
    return operator_tests(machine, "racecheck", "operators with shared memory")


# --- The judges


def judge_status(run: Run) -> tuple[bool, Facts]:
    return run.status == 0, {}


def judge_report(run: Run) -> tuple[bool, Facts]:
    return run.status == 0, {"report": run.output.splitlines()}


def judge_tests(run: Run) -> tuple[bool, Facts]:
    """Demand that tests passed and none failed; pytest's status is 1 also if a file was not run."""
    facts = read_lines(run.lines)
    counts = facts["counts"]
    sound = counts["passed"] > 0 and counts["failed"] == 0 and facts["unfinished"] is None
    return sound and (run.status == 0 or (run.status == 1 and counts["not_run"] > 0)), facts


def judge_sanitized_tests(run: Run) -> tuple[bool, Facts]:
    errors = sanitizer_errors(run.output)
    passed, facts = judge_tests(run)
    return passed and errors == 0 and run.status == 0, {**facts, "sanitizer_errors": errors}


def judge_planted(run: Run) -> tuple[bool, Facts]:
    errors = sanitizer_errors(run.output)
    found = run.status == ERROR_EXIT_CODE and bool(errors) and "Invalid __global__" in run.output
    return found, {"sanitizer_errors": errors}


def sanitizer_errors(output: str) -> int | None:
    """Add up the summaries of memcheck or racecheck, of every process; None if there is none."""
    counts = re.findall(r"=+ ERROR SUMMARY: (\d+) error", output)
    counts += re.findall(r"=+ RACECHECK SUMMARY: (\d+) hazard", output)
    return sum(map(int, counts)) if counts else None


def missing_package(text: str) -> str | None:
    found = re.findall(r"No module named '(\w+)", text)
    return found[-1] if found and found[-1] in TEST_PACKAGES else None


def read_lines(path: Path) -> Facts:
    """Return counts, failures, what was not run and why, and the test that a kill interrupted."""
    counts = dict.fromkeys(("passed", "failed", "skipped", "xfailed", "not_run", "deselected"), 0)
    failures: dict[str, str] = {}
    not_run: dict[str, str] = {}
    seconds: dict[str, float] = {}
    running = None
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            each = json.loads(line)
        except json.JSONDecodeError:  # The last line of a run that was killed.
            break
        name, kind = each.get("name"), each["kind"]
        if kind == "deselected":
            counts["deselected"] += each["count"]
        elif kind in ("started", "finished"):
            running = name if kind == "started" else None
        elif package := missing_package(each["text"]) if each["outcome"] == "failed" else None:
            not_run[name] = f"needs {package}"
        elif kind == "file" and each["outcome"] == "skipped":
            not_run[name] = each["text"]
        else:
            counts[each["outcome"]] += 1
            seconds[name] = each["seconds"]
            if each["outcome"] == "failed":
                failures[name] = each["text"]
            elif each["outcome"] == "skipped":
                not_run[name] = each["text"]
    counts["not_run"] = len(not_run) - counts["skipped"]
    return {
        "counts": counts,
        "failures": dict(list(failures.items())[:SHOWN]),
        "not_run": not_run,
        "unfinished": running,
        "slowest": dict(sorted(seconds.items(), key=lambda pair: -pair[1])[:5]),
    }


# --- The table. The limits leave room for two calls of ten minutes that share the stages.

STAGES = (
    Stage("build", 300, build, judge_status, ends_all=True),
    Stage("report", 60, report, judge_report),
    Stage("tests", 400, tests, judge_tests),
    Stage("planted", 90, planted, judge_planted),
    Stage("memcheck", 300, memcheck, judge_sanitized_tests),
    Stage("racecheck", 200, racecheck, judge_sanitized_tests),
)
