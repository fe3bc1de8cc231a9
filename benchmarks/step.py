"""What one optimizer step costs: ours, torch's and others', on one machine in one process.

    python -m benchmarks.step                   print the tables; write JSON and a chart
    python -m benchmarks.step --modes           our ways to keep masters and moments
    python -m benchmarks.step --masters         MasterWeights beside FusedAdam
    python -m benchmarks.step --host            time of the host for each of many tiny tensors
    python -m benchmarks.step --quick           seconds, to see that it works
    python -m benchmarks.step --device stub     the same code as on a GPU, without one
    python -m benchmarks.step --extensions A B  compare builds, each an apex_mp in a folder A, B

All cases take turns, in another order each round, and memory's speed is measured before and after
each batch of steps, because it changes by the minute on a machine that is shared. The JSON is
written after each round, so a run that is killed leaves what it knew.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from apex_mp import __version__
from benchmarks import step_cases, step_machine, step_peers, step_profile, step_report
from benchmarks.amp import environment
from benchmarks.step_arena import Arena, Case
from benchmarks.step_device import DEVICES, Cpu, Cuda
from benchmarks.step_shapes import HOST, HOST_QUICK, QUICK, WORKLOADS, Workload
from benchmarks.step_timing import (
    Measurement,
    Reference,
    batch,
    reference_mebibytes,
    start,
    take_turns,
)

RESULTS = Path(__file__).resolve().parent / "results"
EXTENSIONS = "compare the apex_mp packages in these folders"
# For --extensions: every process holds the tensors of a workload at the same time.
MOST_PARAMETERS = 500_000_000
# For --modes and --masters: with fewer, calls cost more than bytes; with more, memory is short.
FEWEST_OF_PART, MOST_OF_MASTERS = 20_000_000, 200_000_000
PARTS = {
    "modes": (*step_cases.MODES_BESIDE, *(case.name for case in step_cases.MODES)),
    "masters": (*step_cases.MASTERS_BESIDE, *(case.name for case in step_cases.MASTERS)),
}
CASES = (
    *step_cases.CASES,
    *step_cases.MODES,
    *step_peers.CASES,
    *step_cases.REPLAYED,
)


def cases_of(device: str, names: Sequence[str] | None) -> list[Case]:
    """Return the cases for a device whose names contain one of `names`; None for all.

    Those of --masters are not among all, because memory would be short.
    """
    known = (*CASES, *step_cases.MASTERS) if names == PARTS["masters"] else CASES
    fitting = [case for case in known if device in case.devices]
    return [case for case in fitting if names is None or any(name in case.name for name in names)]


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """Return what is to be stepped."""
    if args.host:
        return list(HOST_QUICK if args.quick else HOST)
    kind = DEVICES[args.device].kind
    fitting = [each for each in (QUICK if args.quick else WORKLOADS) if kind in each.devices]
    if args.extensions:
        fitting = [each for each in fitting if each.parameters <= MOST_PARAMETERS]
    if args.part and not args.quick:
        fitting = [each for each in fitting if each.parameters >= FEWEST_OF_PART]
    if args.part == "masters":
        fitting = [each for each in fitting if each.parameters <= MOST_OF_MASTERS]
    if args.workloads is None:
        return fitting
    return [each for each in fitting if each.name in args.workloads]


def left_out(args: argparse.Namespace) -> list[str]:
    """Return a line for each workload that was asked for and is not one of `workloads_of`."""
    options = [f"--{name}" for name in ("host", "quick", "extensions") if getattr(args, name)]
    said = " ".join(["it is not a workload for --device", args.device, *options])
    taken = {each.name for each in workloads_of(args)}
    return [f"Left out: {name}: {said}" for name in args.workloads or [] if name not in taken]


def measure_host(workload: Workload, cases: Sequence[Case], rounds: int, device: Cpu) -> Any:
    """Return the time that the host takes for each tensor; a first round warms up."""
    tensors = len(workload.shapes)
    # Each in an arena of its own: ours would notice if another case wrote its weights.
    started = {
        case.name: start(case, Arena(workload.shapes, device.tensors), device) for case in cases
    }
    running = {name: each for name, each in started.items() if not isinstance(each, str)}

    def take(name: str) -> float:
        running[name].prepare()
        return batch(running[name], 1, device)[1][0]

    *_, found = take_turns(running, rounds + 1, math.inf, take)
    return {
        "tensors": tensors,
        "rows": [
            {"case": name, "ns_per_tensor": 1e9 * statistics.median(times[1:]) / tensors}
            for name, times in found.items()
        ],
        "not_run": {name: each for name, each in started.items() if isinstance(each, str)},
    }


def surroundings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    device = DEVICES[args.device]
    return {
        **environment(device.tensors),
        **({} if device.is_real else {"device": args.device}),
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "apex_mp": __version__,
        "rounds": args.rounds,
        "reference_MiB": args.reference_mebibytes,
        "packages": step_peers.versions(device.kind),
    }


def place_of(args: argparse.Namespace, facts: dict[str, Any]) -> Path:
    """Return where the JSON goes: beside the published results only if everything was measured."""
    whole = not args.quick and args.workloads is None and (args.part or args.cases is None)
    whole = whole and DEVICES[args.device].is_real and args.seconds == math.inf
    whole = whole and not args.extensions
    folder = args.results or (RESULTS if whole else Path("build") / "bench")
    slug = step_machine.slug(facts["device"])
    which = "host-" if args.host else "variants-" if args.extensions else ""
    which = f"{args.part}-" if args.part else which
    return Path(folder) / f"step-{which}{slug}.json"


def write(results: dict[str, Any], path: Path) -> None:
    """Write the JSON; a reader never finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def write_chart(results: dict[str, Any], path: Path, part: str | None = None) -> str:
    """Draw the chart of two workloads, or of --modes; return what to say of it."""
    if part == "masters":
        return "No chart of --masters"
    if not any(workload["rows"] for workload in results["workloads"]):
        return "No chart: nothing was measured"
    if not part and not step_report.shown(results):
        return "No chart: no case of another package was measured beside ours"
    if importlib.util.find_spec("matplotlib") is None:
        return "No chart: matplotlib is not installed"
    from benchmarks import step_chart  # Nothing else here needs matplotlib.

    (step_chart.draw_modes if part else step_chart.draw)(results, path)
    return f"Written: {path}"


def say(text: str) -> None:
    """Print a paragraph now: the next one may take minutes."""
    print(text, end="\n\n", flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=[*DEVICES], default="cuda" if gpu else "cpu")
    parser.add_argument("--rounds", type=int, help="of which medians are taken [9; GPU 5; quick 3]")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to measure [no limit]")
    parser.add_argument("--threads", type=int, help="of the CPU [as many as torch takes]")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, metavar="NAME", help=str(names))
    parser.add_argument("--cases", nargs="+", metavar="PART", help="cases with this in their name")
    for name, said in (
        ("modes", "our ways to keep masters and moments"),
        ("masters", "MasterWeights beside FusedAdam"),
    ):
        parser.add_argument(f"--{name}", dest="part", action="store_const", const=name, help=said)
    parser.add_argument("--host", action="store_true", help="time the host, on tiny tensors")
    parser.add_argument("--extensions", nargs="+", type=Path, metavar="FOLDER", help=EXTENSIONS)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="for JSON and chart")
    # Set by step_variants: no process for graphs, and no profile.
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = DEVICES[args.device]
    if args.part:
        args.cases = PARTS[args.part]
    args.rounds = args.rounds or (3 if args.quick else device.rounds)
    args.reference_mebibytes = 2 if args.quick else reference_mebibytes(device.tensors)
    return args


class TimeBudget:
    """A time limit that parts of a run share by weight; what one leaves goes to later ones."""

    def __init__(self, seconds: float, weight: float) -> None:
        self.end, self.weight = time.monotonic() + seconds, weight

    def next(self, weight: float) -> float:
        """Return the time.monotonic() at which the next part has to end."""
        now = time.monotonic()
        part = (self.end - now) * weight / self.weight
        self.weight -= weight
        return now + part


def measure_workloads(args: argparse.Namespace, results: dict[str, Any], path: Path) -> None:
    """Time all workloads; then, on a GPU, profile their steps."""
    device = DEVICES[args.device]()
    cases, workloads = cases_of(device.kind, args.cases), workloads_of(args)
    reference = Reference(device, args.reference_mebibytes)
    in_graphs = [case for case in cases if case in step_cases.REPLAYED and not args.apart]
    cases = [case for case in cases if case not in in_graphs]
    budget = TimeBudget(args.seconds, weight=5 * len(workloads))
    for workload in workloads:
        results["workloads"].append({})
        for found in Measurement(workload, cases, reference).run(args.rounds, budget.next(3)):
            results["workloads"][-1] = found
            write(results, path)
        say(step_report.table(results["workloads"][-1]))
    if not isinstance(device, Cuda) or args.apart:
        return
    if in_graphs:
        from benchmarks.step_variants import add_graphs  # It imports this module.

        torch.cuda.empty_cache()
        seconds = budget.next(len(workloads)) - time.monotonic()
        names = [case.name for case in in_graphs]
        add_graphs(args, names, results["workloads"], seconds)
        write(results, path)
        for measured in results["workloads"]:
            rows = [row for row in measured["rows"] if row["case"] in names]
            say(step_report.table({**measured, "rows": rows}))
    for workload, measured in zip(workloads, results["workloads"], strict=True):
        step_profile.profile(workload, cases, measured, device, budget.next(1))
        write(results, path)
        if step_report.profiled(measured):
            say(step_report.profile_table(measured))


def measure_builds(args: argparse.Namespace, results: dict[str, Any], path: Path) -> None:
    """Compare the packages of `--extensions`."""
    from benchmarks.step_variants import compare  # It imports this module.

    def write_what(found: list[dict[str, Any]]) -> None:
        results["builds"] = found
        write(results, path)

    compare(args, say, write_what)


def measure_hosts(args: argparse.Namespace, results: dict[str, Any], path: Path) -> None:
    """Time the host for each tensor."""
    device = DEVICES[args.device]()
    cases = cases_of(device.kind, args.cases)
    results["host"] = [measure_host(w, cases, args.rounds, device) for w in workloads_of(args)]
    say(step_report.host_table(results["host"]))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    facts, begin = surroundings(args), step_machine.now()
    path = place_of(args, facts)
    results: dict[str, Any] = {"environment": facts, "workloads": [], "host": []}
    results["left_out"] = left_out(args)
    say(step_report.machine(facts))
    work = measure_workloads
    work = measure_hosts if args.host else measure_builds if args.extensions else work
    try:
        work(args, results, path)
    except Exception as error:
        results["ended_by"] = f"{type(error).__name__}: {error}"
        write(results, path)
        raise
    facts["taken_by_others"] = step_machine.taken_by_others(begin, step_machine.now())
    write(results, path)
    say(step_report.notes(results))
    lines = [f"Written: {path}"]
    if results["workloads"]:
        lines.append(write_chart(results, path.with_suffix(".png"), args.part))
    say("\n".join(lines))
    return results


if __name__ == "__main__":
    sys.exit(1 if step_report.failures(main()) else 0)
