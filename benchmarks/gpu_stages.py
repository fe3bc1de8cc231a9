"""The stages of gpu_check: what each runs, and how it is judged; the most useful come first."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_machine import PREPARED, ROOT, Facts, find_tool

ERROR_EXIT_CODE = 99
SHOWN = 20  # failures and lines that are kept

STEPS = ["tests/optimizers/test_cuda_steps.py"]
FUSED = ("fused_*", "fp16_optimizer_*", "step_*", "device_scale", "unscaled_grads", "grad_versions")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of the table."""

    name: str
    limit: float  # seconds
    argv: Sequence[str] | None  # None: what it needs is missing, and `note` says what
    part: int | None = None  # 1 or 2; None: both begin with it
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""
    kind: str = "command"  # or tests, sanitizer, planted: how it is judged
    ends_all: bool = False  # without it the later stages mean nothing
    tells: bool = False  # its last lines belong to the record
    prepared: str = ""  # a folder of PREPARED, into which gpu_build has put packages

    def lines(self, logs: Path) -> Path:
        """Return the file into which pytest's reports go."""
        return logs / f"{self.name}.jsonl"


def stages(device: str, capability: str, results: Path, logs: Path) -> list[Stage]:
    """Return the table. Part 1 and part 2 take nine minutes each at most."""
    python = [sys.executable]
    fused = [str(p) for name in FUSED for p in sorted((ROOT / "tests").glob(f"*/test_{name}.py"))]
    rest = [f"--ignore={path}" for path in STEPS + fused]
    on = f"--device={device}"
    step = [*python, "-m", "benchmarks.step", f"--results={results}", "--device"]
    step += ["cuda"] if device == "cuda" else ["stub", "--quick"]
    variants = sorted(str(path) for path in (PREPARED / "variants").glob("*"))
    compare = [*step, "--seconds=75", "--extensions", ".", *variants]
    activations = [*python, "-m", "benchmarks.activations", f"--results={results}"]
    activations += ["--device=cuda"] if device == "cuda" else ["--device=cpu", "--quick"]
    build = [*python, "-m", "benchmarks.gpu_build", f"--capability={capability}"]
    bugs = [*python, "-m", "benchmarks.gpu_bugs", on]
    programs = [*python, "-m", "benchmarks.gpu_programs", on]

    def tests(name: str, limit: float, part: int, workers: int, files: Sequence[str]) -> Stage:
        command = [*python, "-m", "pytest", "-p", "benchmarks.gpu_pytest", on, "-q"]
        command += [f"--lines={logs / name}.jsonl", "--continue-on-collection-errors"]
        found = find_spec("xdist")
        if found:
            command += ["-p", "xdist", f"-n{workers}", "--dist=worksteal"]
        note = "" if found else "in one process: pytest-xdist is not installed"
        argv = [*command, *files]
        return Stage(name, limit, argv, part, PYTEST_ENVIRONMENT, note, kind="tests")

    def sanitized(tool: str, limit: float, name: str = "", kind: str = "sanitizer") -> Stage:
        sanitizer = find_tool("compute-sanitizer")
        if sanitizer is None:
            missing = "compute-sanitizer is neither in CUDA_HOME nor on the PATH"
            return Stage(name or tool, limit, None, 2, note=missing)
        kernels = [] if tool == "initcheck" else ["--kernel-name=kns=apex_mp"]
        argv = [sanitizer, f"--tool={tool}", *SANITIZER_OPTIONS, *kernels, *programs]
        # No summary is written by a process that is killed: the programs end before.
        argv += ["beyond"] if kind == "planted" else [f"--seconds={limit / 2:.0f}"]
        return Stage(name or tool, limit, argv, 2, SANITIZER_ENVIRONMENT, kind=kind)

    workers = min(8, os.cpu_count() or 1)
    return [
        Stage("build", 200, build, ends_all=True, tells=True),
        Stage("report", 30, [*python, "-m", "apex_mp"], tells=True),
        Stage("bugs", 60, bugs, 1, tells=True, prepared="bugs"),
        tests("steps", 45, 1, 1, STEPS),
        Stage("benchmark", 170, [*step, "--seconds=140"], 1, tells=True),
        tests("fused", 90, 1, workers, fused),
        Stage("variants", 100, compare, 1, prepared="variants"),
        Stage("activations", 45, activations, 1, tells=True),
        tests("tests", 150, 2, workers, [*rest, "tests"]),
        Stage("programs", 40, [*programs, *["--profile"] * (device != "cpu")], 2),
        sanitized("memcheck", 40, "planted", "planted"),
        sanitized("memcheck", 80),
        sanitized("racecheck", 60),
        sanitized("synccheck", 60),
        sanitized("initcheck", 80),
    ]


# Without other installed plugins: their warnings would be errors here.
PYTEST_ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# Errors of CUDA calls are not counted: torch tries some that fail, and those of our launches are
# raised. Tools that check only our kernels find them by a part of their mangled names;
# initcheck must see all, or memory that a kernel of torch has written counts as unwritten.
SANITIZER_OPTIONS = [
    f"--error-exitcode={ERROR_EXIT_CODE}",
    "--report-api-errors=no",
    "--target-processes=all",
    "--launch-timeout=0",
    "--print-limit=100",
]
# A cached block is larger than its tensor, and belongs to no tensor or to another one.
SANITIZER_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def judge(stage: Stage, status: int | None, output: str, logs: Path) -> tuple[bool, Facts]:
    """Return whether the run is a success, and what to record."""
    if stage.kind == "tests":
        facts = read_lines(stage.lines(logs))
        return status == 0 and facts["counts"]["passed"] > 0 and not facts["unfinished"], facts
    if stage.kind == "command":
        return status == 0, {}
    errors = sanitizer_errors(output)
    said = ["no summary" if errors is None else f"{errors} errors found"]
    found = {"found": ", ".join(said + re.findall(r"^\w+: left out$", output, re.MULTILINE))}
    if stage.kind == "planted":
        return status == ERROR_EXIT_CODE and "Invalid __global__" in output and bool(errors), found
    return status == 0 and errors == 0, found


def sanitizer_errors(output: str) -> int | None:
    """Add up the summaries of a tool, of every process; None if there is none."""
    counts = re.findall(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    return sum(map(int, counts)) if counts else None


def read_lines(path: Path) -> Facts:
    """Return counts, failures, what was skipped and why, and tests that a kill interrupted."""
    counts = dict.fromkeys(("passed", "failed", "skipped", "xfailed"), 0)
    texts: dict[str, dict[str, str]] = {"failed": {}, "skipped": {}}
    seconds: dict[str, float] = {}
    running: set[str] = set()
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            each = json.loads(line)
        except json.JSONDecodeError:  # The last line of a run that was killed.
            break
        name, outcome = each["name"], each.get("outcome")
        if outcome is None:
            running.symmetric_difference_update({name})
        elif name not in texts["failed"]:  # A test that has ended its process is reported twice.
            counts[outcome] += 1
            seconds[name] = each["seconds"]
            if outcome in texts:
                texts[outcome][name] = each["text"]
    return {
        "counts": counts,
        "failures": dict(list(texts["failed"].items())[:SHOWN]),
        "skipped": texts["skipped"],
        "unfinished": sorted(running - texts["failed"].keys()),
        "slowest": dict(sorted(seconds.items(), key=lambda pair: -pair[1])[:5]),
    }
