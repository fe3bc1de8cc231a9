"""Runs of benchmarks.step in processes of their own: of other builds, and of CUDA graphs.

Two builds register the same operators, and an error in a graph leaves a CUDA context that cannot
be used. One process runs after another: a large model fits into a GPU's memory only once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import step
from benchmarks.step_report import markdown, significant, surroundings
from benchmarks.step_shapes import Workload

ROOT = Path(__file__).resolve().parents[1]
SECONDS_OVER = 60.0  # for what comes before and after the measuring
PASSES = 2  # over all builds
Found = dict[str, Any]


def run_apart(
    args: argparse.Namespace, folder: Path, cases: Sequence[str], seconds: float
) -> tuple[list[Found], str]:
    """Measure cases in a process of their own.

    Args:
        args: Those of this run: device, rounds, threads and workloads are the same.
        folder: Where Python finds apex_mp.
        cases: Parts of the names of cases.
        seconds: To measure.

    Returns:
        What was found, by workload; and why the process failed, or an empty string.
    """
    named = (
        ["--quick"] if args.quick else ["--workloads", *(w.name for w in step.workloads_of(args))]
    )
    command = [sys.executable, "-m", "benchmarks.step", "--apart", "--device", args.device, *named]
    command += [f"--rounds={args.rounds}", f"--seconds={seconds}"]
    command += [f"--threads={args.threads}"] * bool(args.threads)
    # Python looks into the current folder first, then into PYTHONPATH.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as results:
        try:
            status = subprocess.run(
                [*command, f"--results={results}", "--cases", *cases],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=subprocess.DEVNULL,
                timeout=seconds + SECONDS_OVER if seconds < math.inf else None,
            ).returncode
            why = f"its process ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"its process was stopped after {seconds + SECONDS_OVER:.0f} seconds"
        found = [json.loads(path.read_text()) for path in Path(results).glob("step-*.json")]
    workloads: list[Found] = found[0]["workloads"] if found else []
    return workloads, why


def add_graphs(
    args: argparse.Namespace, names: Sequence[str], workloads: list[Found], seconds: float
) -> None:
    """Measure cases that run in graphs, and add their rows to those of each workload."""
    found, why = run_apart(args, ROOT, names, seconds)
    by_name = {each["workload"]: each for each in found if each}
    for workload in workloads:
        theirs = by_name.get(workload["workload"], {"rows": [], "not_run": {}, "failed": {}})
        for key in ("not_run", "failed"):
            workload[key].update(theirs[key])
        workload["rows"] += theirs["rows"]
        known = {row["case"] for row in theirs["rows"]} | {*theirs["not_run"], *theirs["failed"]}
        for name in names:
            if why and name not in known:
                workload["failed"][name] = why


def compare(
    args: argparse.Namespace, say: Callable[[str], None], write: Callable[[list[Any]], None]
) -> None:
    """Time all workloads with each build in turn, twice; write the results after each build.

    Raises:
        FileNotFoundError: A folder holds no apex_mp.
        ValueError: Two folders have one name.
    """
    folders = {folder.resolve().name: folder.resolve() for folder in args.extensions}
    if len(folders) < len(args.extensions):
        raise ValueError(f"--extensions: the folders need names of their own, not {[*folders]}")
    for folder in folders.values():
        if not (folder / "apex_mp" / "__init__.py").exists():
            raise FileNotFoundError(f"--extensions: {folder} holds no apex_mp package")
    passes: dict[str, list[list[Found]]] = {name: [] for name in folders}
    failed: dict[str, str] = {}
    budget = step.TimeBudget(args.seconds, weight=PASSES * len(folders))
    for _ in range(PASSES):
        for name in [name for name in folders if name not in failed]:
            seconds = budget.next(1) - time.monotonic()
            found, why = run_apart(args, folders[name], args.cases or ["ours"], seconds)
            passes[name].append(found)
            if why:
                failed[name] = why
            write([summary(each, passes, failed) for each in step.workloads_of(args)])
    for each in step.workloads_of(args):
        say(table(summary(each, passes, failed)))


def summary(
    workload: Workload, passes: dict[str, list[list[Found]]], failed: dict[str, str]
) -> Found:
    """Return the medians of each build that has not failed, and of its ratios to the first."""
    times: dict[str, list[dict[str, float]]] = {}
    for name, of_build in passes.items():
        if name not in failed and of_build:
            times[name] = [
                {row["case"]: row["ms"] for each in found for row in each.get("rows", ())
                 if each["workload"] == workload.name}
                for found in of_build
            ]  # fmt: skip
    count = min((len(each) for each in times.values()), default=0)
    builds = [*times]
    cases = [
        case
        for case in (times[builds[0]][0] if count else ())
        if all(case in taken for name in builds for taken in times[name][:count])
    ]
    rows = [
        {
            "case": case,
            "builds": {
                name: {
                    "ms": statistics.median(taken[case] for taken in times[name][:count]),
                    "ratio": statistics.median(
                        times[name][i][case] / times[builds[0]][i][case] for i in range(count)
                    ),
                }
                for name in builds
            },
        }
        for case in cases
    ]
    return {
        "workload": workload.name,
        "parameters": workload.parameters,
        "rounds": count,
        "rows": rows,
        "failed": dict(failed),
    }


def page(results: Found) -> str:
    """Return what docs/data.md shows of results, in paragraphs."""
    tables = [table(each) for each in results["builds"] if each["rows"]]
    lost = {name: why for each in results["builds"] for name, why in each["failed"].items()}
    tables += [f"Not measured: {name}: {why}" for name, why in lost.items()]
    return "\n\n".join([surroundings(results), *tables])


def table(found: Found) -> str:
    """Return a workload as a Markdown table: the first build's ms, and ratios to it."""
    lines = [f"{found['workload']}: ms of the first build, and what the others take of it", ""]
    if not found["rows"]:
        return "\n".join([*lines, "No build ran."])
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
