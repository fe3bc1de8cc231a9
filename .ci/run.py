"""Runs the table below in a clean clone; `make nightly` runs all of it and writes NIGHTLY.

A target with paths runs where git's hash of one of them is not the one with which the target has
passed in NIGHTLY. `.ci/run.py --nightly NAME...` runs these targets, and keeps what NIGHTLY says of
the others.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

EACH_TIME: tuple[str, ...] = ()
NIGHTLY_ONLY = None
TRAINER_PAGES = ("docs/trainers.md", "examples/trainers")
OPERATORS = ("csrc", "tests/op_cases.py", "tests/operators/test_operators.py")
STEPPING = tuple(f"apex_mp/{name}" for name in ("grads", "masters", "engine", "optimizers"))
BY_PROCESSOR = ("apex_mp/amp", "apex_mp/normalization", "apex_mp/RNN")
# Sanitized kernels pass their tests; the planted bugs, which test those tests, are nightly.
SHORT = ("PYTEST_ARGS=--short --ignore=tests/cuda_on_cpu/test_planted_bugs.py",)
NOT_SLOW = ("PYTEST_ARGS=-m 'not slow'",)


class Target(NamedTuple):
    """A target of the Makefile.

    Attributes:
        core_minutes: What it costs in CI, on two cores of the processor that NIGHTLY names.
        when: Each time, by `make nightly` only, or where one of these paths has changed.
        in_ci: What CI hands to make beside the name, to run a part; `make nightly` runs all of it.
    """

    name: str
    core_minutes: float
    when: tuple[str, ...] | None
    in_ci: tuple[str, ...] = ()


# One after another. Then those for one core, two at a time, the longest first.
ON_BOTH_CORES = [
    Target("build", 4, EACH_TIME),
    Target("test", 3, EACH_TIME),
    Target("test-slow", 6, EACH_TIME),
    Target("test-offload", 6, ("csrc", "apex_mp", "tests/optimizers", "tests/amp")),
    Target("processors", 1, ("csrc", *BY_PROCESSOR, "tests/amp")),
    Target("cuda-on-cpu", 15, (*OPERATORS, *STEPPING, "tests/cuda_on_cpu"), SHORT),
    Target("recipes", 8, ("csrc", "apex_mp", "tests/recipes", "examples"), NOT_SLOW),
    Target("every-case", 12, NIGHTLY_ONLY),
    Target("cuda-tests", 12, NIGHTLY_ONLY),
    Target("torch-oldest", 15, NIGHTLY_ONLY),
    Target("release-check", 10, NIGHTLY_ONLY),
    Target("mutants", 11, NIGHTLY_ONLY),
    Target("random-programs", 25, NIGHTLY_ONLY),
]
ON_ONE_CORE = [
    Target("cuda-link", 20, ("csrc", "setup.py")),
    Target("clients", 6, ("csrc", "apex_mp", "tests/clients")),
    Target("trainers", 1, ("csrc", "apex_mp", "tests/trainers", *TRAINER_PAGES)),
    # Each time csrc/ changes, once it is at 100 % again: not all rules run with all dtypes.
    Target("coverage", 9, NIGHTLY_ONLY),
    Target("docs", 0.5, EACH_TIME),
    Target("types", 0.5, EACH_TIME),
    Target("sdist", 0.5, EACH_TIME),
]

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "ci"
NIGHTLY = ROOT / "benchmarks" / "results" / "nightly.json"
LIMIT = 2700  # seconds for a target: more than any takes, and less than CI as a whole may take
SHOWN = 400  # last lines of a target that failed


def trees(target: Target) -> dict[str, str]:
    """Return git's hash of each path of a target."""
    return {path: git("rev-parse", f"HEAD:{path}") for path in target.when or ()}


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def is_due(target: Target, last: dict[str, Any]) -> bool:
    """Return whether CI runs a target, given its result in the last nightly run."""
    if target.when is NIGHTLY_ONLY:
        return False
    return target.when == EACH_TIME or not last.get("passed") or last["trees"] != trees(target)


def run(target: Target, *arguments: str) -> dict[str, Any]:
    """Run `make target`, print how it ended, and return its entry in NIGHTLY."""
    start = time.monotonic()
    log = LOGS / f"{target.name}.log"
    with log.open("w") as output:
        # A process group, so that what the target has started is stopped with it.
        process = subprocess.Popen(
            ["make", target.name, *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            ending = "passed" if process.wait(LIMIT) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # pytest prints the stacks of its processes.
            time.sleep(1)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ending = f"FAILED, stopped after {LIMIT} s"
    seconds = round(time.monotonic() - start)
    lines = log.read_text(errors="replace").splitlines()
    passed = ending == "passed"
    summary = [f"make {target.name}: {ending} in {seconds} s", *lines[-4 if passed else -SHOWN :]]
    print("\n  ".join(summary), flush=True)
    return {
        "passed": passed,
        "seconds": seconds,
        "commit": git("rev-parse", "HEAD"),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}",
        "processor": processor(),
        "trees": trees(target),
    }


def processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    nightly, wanted = sys.argv[1:2] == ["--nightly"], sys.argv[2:]
    if nightly and git("status", "--porcelain"):
        sys.exit("make nightly: the result belongs to a commit; commit what has changed first")
    LOGS.mkdir(parents=True, exist_ok=True)
    os.environ["CI"] = "1"  # Tests that are skipped where a tool is missing fail.
    # Threads that wait leave their core to others.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    start = time.monotonic()
    last = json.loads(NIGHTLY.read_text()) if NIGHTLY.exists() else {}
    every = ON_BOTH_CORES + ON_ONE_CORE
    if not {*wanted} <= {target.name for target in every}:
        sys.exit(f"{' '.join(wanted)}: the targets are {' '.join(each.name for each in every)}")
    if nightly:
        due = {target for target in every if target.name in wanted or not wanted}
    else:
        due = {target for target in every if is_due(target, last.get(target.name, {}))}
    for target in every:
        if target.when and target not in due and not nightly:
            print(f"make {target.name}: passed in {NIGHTLY.name} with the same {target.when}")
    results = {}

    def run_due(target: Target) -> dict[str, Any]:
        return run(target, *(() if nightly else target.in_ci))

    for target in ON_BOTH_CORES:
        if target in due:
            results[target.name] = run_due(target)
            if target.name == "build" and not results["build"]["passed"]:
                sys.exit("The rest was not run.")
    with ThreadPoolExecutor(2) as pool:
        others = [target for target in ON_ONE_CORE if target in due]
        results |= zip((t.name for t in others), pool.map(run_due, others), strict=True)
    seconds = round(time.monotonic() - start)
    failed = [name for name, result in results.items() if not result["passed"]]
    print(f"Failed: {', '.join(failed)}" if failed else "Everything passed", f"({seconds} s)")
    if nightly:
        NIGHTLY.write_text(json.dumps({**last, **results}, indent=2) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
