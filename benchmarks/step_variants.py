"""Compare builds of apex_mp: `python -m benchmarks.step --extensions FOLDER FOLDER`.

Each folder holds an apex_mp package with its extension. Two builds register the same operators, so
each has a process of its own, which keeps its tensors; in each round every process times all cases,
one process after the other, and ratios are those of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apex_mp
from benchmarks import step
from benchmarks.step_device import DEVICES
from benchmarks.step_report import markdown, significant
from benchmarks.step_shapes import QUICK, WORKLOADS, Workload
from benchmarks.step_timing import Measurement, Reference, Time

ROOT = Path(__file__).resolve().parents[1]
SERVER = [sys.executable, "-m", "benchmarks.step_variants"]
SECONDS_TO_END = 30.0
SECONDS_TO_ANSWER = 300.0  # at most
SECONDS_OVER = 20.0  # for a round that began within --seconds; `make gpu` stops it after 25


def patience(end: float) -> float:
    """Return for how many seconds to wait for an answer, if the run has to end at `end`."""
    return min(SECONDS_TO_ANSWER, max(SECONDS_OVER, end - time.monotonic()))


class Build:
    """A process that times the apex_mp of a folder.

    Args:
        folder: It holds the package; the process finds the rest here.

    Raises:
        FileNotFoundError: There is no package in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        if not (self.folder / "apex_mp" / "__init__.py").exists():
            raise FileNotFoundError(f"--extensions: {folder} holds no apex_mp package")
        # Python looks into the current folder first, then into PYTHONPATH.
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            SERVER,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, seconds: float, **request: Any) -> dict[str, Any] | str:
        """Return the result of a round, or why there is none; then the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended: there is no line to read.
            print(json.dumps(request), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.process.kill()
            return f"it did not answer in {seconds:.3g} seconds"
        line = self.process.stdout.readline()
        if not line:
            return f"its process ended with status {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        if not Path(answer["package"]).is_relative_to(self.folder):
            raise RuntimeError(f"{self.folder} was to be timed, but {answer['package']} was")
        return answer

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended, with a request unread.
            self.process.stdin.close()
        try:
            self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def serve() -> None:
    """Answer each request, a line of JSON, with the times of a round."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a package prints must not mix with the answers.
    name, measurement, rounds = None, None, None
    for line in sys.stdin:
        request = json.loads(line)
        device = DEVICES[request["device"]]()
        cases = step.cases_of(device.kind, request["cases"])
        if request["workload"] != name:
            measurement = rounds = None
            gc.collect()
            name = request["workload"]
            (workload,) = [each for each in (*WORKLOADS, *QUICK) if each.name == name]
            reference = Reference(device, request["reference_mebibytes"])
            measurement = Measurement(workload, cases, reference)
            rounds = measurement.run(sys.maxsize, math.inf)
            for _ in cases:
                next(rounds)
        assert measurement is not None
        assert rounds is not None
        next(rounds)
        answer = {
            "package": apex_mp.__file__,
            "times": {case: times[-1] for case, times in measurement.times.items()},
            "failed": measurement.failed,
        }
        print(json.dumps(answer), file=answers, flush=True)


Round = dict[str, dict[str, Time]]  # by build, by case


def compare(
    args: argparse.Namespace, say: Callable[[str], None], write: Callable[[list[Any]], None]
) -> None:
    """Time each workload with each build in turns; write the results after each round."""
    names = [folder.resolve().name for folder in args.extensions]
    if len(set(names)) < len(names):
        raise ValueError(f"--extensions: the folders need names of their own, not {names}")
    workloads = step.workloads_of(args)
    budget = step.TimeBudget(args.seconds, weight=len(workloads))
    found: list[dict[str, Any]] = []
    failed: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        builds = {}
        for name, folder in zip(names, args.extensions, strict=True):
            builds[name] = Build(folder)
            stack.callback(builds[name].end)
        for workload in workloads:
            request = {
                "workload": workload.name,
                "device": args.device,
                "cases": args.cases or ["ours"],
                "reference_mebibytes": args.reference_mebibytes,
            }
            rounds: list[Round] = []
            failed = {name: why for name, why in failed.items() if name not in builds}
            deadline, begin, took = budget.next(1), time.monotonic(), 0.0
            found.append(summary(workload, names, rounds, failed))
            write(found)
            while len(rounds) < args.rounds and begin + took < deadline:
                rounds.append(take_round(builds, request, budget.end, failed))
                took, begin = time.monotonic() - begin, time.monotonic()
                found[-1] = summary(workload, names, rounds, failed)
                write(found)
            say(table(found[-1]))


def take_round(
    builds: dict[str, Build], request: dict[str, Any], end: float, failed: dict[str, Any]
) -> Round:
    """Ask each build, in any order; one that does not answer is left out from then on."""
    taken: Round = {}
    for name in random.sample(list(builds), len(builds)):
        answer = builds[name].ask(patience(end), **request)
        if isinstance(answer, str):
            failed[name] = answer
            del builds[name]
            continue
        taken[name] = {case: Time(*each) for case, each in answer["times"].items()}
        if answer["failed"]:
            failed[name] = answer["failed"]
    return taken


def summary(
    workload: Workload, names: Sequence[str], rounds: Sequence[Round], failed: dict[str, Any]
) -> dict[str, Any]:
    """Return the medians of each build, and of its ratios to the first, by case.

    Of builds that took part in all rounds, and cases that run in all of them.
    """
    builds = [name for name in names if rounds and all(name in each for each in rounds)]
    cases = [
        case
        for case in (rounds[0][builds[0]] if builds else ())
        if all(case in rounds[0][name] for name in builds)
    ]
    rows = []
    for case in cases:
        row: dict[str, Any] = {"case": case, "builds": {}}
        for name in builds:
            row["builds"][name] = {
                "ms": 1e3 * statistics.median(each[name][case].seconds for each in rounds),
                "host_ms": 1e3 * statistics.median(each[name][case].host for each in rounds),
                "ratio": statistics.median(
                    each[name][case].seconds / each[builds[0]][case].seconds for each in rounds
                ),
                "copy_GB_per_s": statistics.median(
                    each[name][case].reference / 1e9 for each in rounds
                ),
            }
        rows.append(row)
    return {
        "workload": workload.name,
        "parameters": workload.parameters,
        "rounds": len(rounds),
        "rows": rows,
        "failed": dict(failed),
    }


def table(found: dict[str, Any]) -> str:
    """Return a workload as a Markdown table: the first build's ms, and ratios to it."""
    lines = [f"{found['workload']}: ms of the first build, and what the others take of it", ""]
    if not found["rows"]:
        timely = found["rounds"] or found["failed"]
        return "\n".join([*lines, "No build ran." if timely else "No build ran: no time was left."])
    first, *others = found["rows"][0]["builds"]
    rows = [
        [
            row["case"],
            significant(row["builds"][first]["ms"]),
            *(f"{row['builds'][name]['ratio']:.3f}" for name in others),
        ]
        for row in found["rows"]
    ]
    return "\n".join([*lines, *markdown(["case", f"{first}, ms", *others], rows)])


if __name__ == "__main__":
    serve()
