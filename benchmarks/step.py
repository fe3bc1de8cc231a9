"""What one optimizer step costs: ours, torch's and others', on one machine in one process.

    python -m benchmarks.step                   print the tables; write JSON and a chart
    python -m benchmarks.step --host            time of the host for each of many tiny tensors
    python -m benchmarks.step --quick           seconds, to see that it works

All cases take turns, in another order each round, and memory's speed is looked at before and after
each step, because it changes by the minute on a machine that is shared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from apex_mp import __version__
from benchmarks import step_cases, step_machine, step_peers, step_report
from benchmarks.amp import environment
from benchmarks.step_arena import Arena, Case
from benchmarks.step_shapes import HOST, HOST_QUICK, QUICK, WORKLOADS, Workload
from benchmarks.step_timing import (
    Reference,
    build,
    measure,
    reference_mebibytes,
    take_host_turns,
)

RESULTS = Path(__file__).resolve().parent / "results"
CASES = (*step_cases.CASES, *step_peers.CASES)


def cases_of(device: str, names: Sequence[str] | None) -> list[Case]:
    """Return the cases for a device whose names contain one of `names`; None for all."""
    fitting = [case for case in CASES if device in case.devices]
    return [case for case in fitting if names is None or any(name in case.name for name in names)]


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """Return what is to be stepped."""
    if args.host:
        return list(HOST_QUICK if args.quick else HOST)
    fitting = [each for each in (QUICK if args.quick else WORKLOADS) if args.device in each.devices]
    if args.workloads is None:
        return fitting
    return [each for each in fitting if each.name in args.workloads]


def measure_host(workload: Workload, cases: Sequence[Case], rounds: int, device: str) -> Any:
    """Return the time that the host takes for each tensor."""
    running, not_run = build(cases, Arena(workload.shapes, device))
    tensors = len(workload.shapes)
    return {
        "tensors": tensors,
        "rows": [
            {"case": name, "ns_per_tensor": 1e9 * statistics.median(times) / tensors}
            for name, times in take_host_turns(running, rounds, device).items()
        ],
        "not_run": not_run,
    }


def surroundings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        **environment(args.device),
        "cores": os.cpu_count(),
        "apex_mp": __version__,
        "rounds": args.rounds,
        "reference_MiB": args.reference_mebibytes,
        "packages": step_peers.versions(args.device),
    }


def place_of(args: argparse.Namespace, facts: dict[str, Any]) -> Path:
    """Return where the JSON goes: beside the published results only if everything was measured."""
    whole = not args.quick and args.workloads is None and args.cases is None
    folder = args.results or (RESULTS if whole else Path("build") / "bench")
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    return Path(folder) / f"step-{'host-' if args.host else ''}{slug}.json"


def write(results: dict[str, Any], path: Path) -> list[str]:
    """Write JSON and, of workloads, the chart; return what to say of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    said = [f"Written: {path}"]
    if results["workloads"]:
        if importlib.util.find_spec("matplotlib") is None:
            return [*said, "No chart: matplotlib is not installed"]
        from benchmarks.step_chart import draw  # Nothing else here needs matplotlib.

        draw(results, path.with_suffix(".png"))
        said.append(f"Written: {path.with_suffix('.png')}")
    return said


def say(text: str) -> None:
    """Print a paragraph now: the next one may take minutes."""
    print(text, end="\n\n", flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--rounds", type=int, help="of which medians are taken [9; quick 3]")
    parser.add_argument("--threads", type=int, help="of the CPU [as many as torch takes]")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, metavar="NAME", help=str(names))
    parser.add_argument("--cases", nargs="+", metavar="PART", help="cases with this in their name")
    parser.add_argument("--host", action="store_true", help="time the host, on tiny tensors")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="for JSON and chart")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 9)
    args.reference_mebibytes = 2 if args.quick else reference_mebibytes(args.device)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    facts, begin = surroundings(args), step_machine.now()
    cases, workloads = cases_of(args.device, args.cases), workloads_of(args)
    results: dict[str, Any] = {"environment": facts, "workloads": [], "host": []}
    say(step_report.surroundings(facts))
    if args.host:
        results["host"] = [measure_host(w, cases, args.rounds, args.device) for w in workloads]
        say(step_report.host_table(results["host"]))
    else:
        reference = Reference(args.device, args.reference_mebibytes)
        for workload in workloads:
            results["workloads"].append(measure(workload, cases, args.rounds, reference))
            say(step_report.table(results["workloads"][-1]))
    facts["taken_by_others"] = step_machine.taken_by_others(begin, step_machine.now())
    say(step_report.notes(results))
    say("\n".join(write(results, place_of(args, facts))))
    return results


if __name__ == "__main__":
    main()
