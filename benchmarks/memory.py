"""What one optimizer step takes of memory, and what is held between steps: ours and torch's.

    python -m benchmarks.memory                 print the tables; write JSON
    python -m benchmarks.memory --quick         seconds, to see that it works

All in bytes for each parameter of the model. docs/memory.md says how each figure is come by.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from apex_mp import __version__
from benchmarks import memory_probe, memory_report, step_machine
from benchmarks.amp import environment
from benchmarks.memory_cases import (
    CASES,
    QUICK,
    WORKLOADS,
    OwnArena,
    build,
    looks_for_overflow,
    overflow,
)
from benchmarks.step_arena import Case
from benchmarks.step_shapes import Workload

RESULTS = Path(__file__).resolve().parent / "results"
# A process of its own for the resident set, which imports from where this one does.
RESIDENT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
RESIDENT += "from benchmarks import memory; memory.print_resident(*sys.argv[1:])"


@contextlib.contextmanager
def without_what_is_there() -> Iterator[None]:
    """Make gc.collect() quick: it looks only at what is made within."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_case(case: Case, workload: Workload, rounds: int, device: str) -> dict[str, Any]:
    """Return what a case holds, and what its steps take beyond that, in bytes a parameter."""
    gc.collect()
    arena = OwnArena(workload.shapes, device)
    running = build(case, arena)

    def step() -> int:
        running.prepare()
        return memory_probe.allocated(running.step, device).peak

    first = step()
    steps = [step() for _ in range(rounds + 1)][1:]
    held = {name: size / workload.parameters for name, size in arena.held().items()}
    skipped = None
    if looks_for_overflow(case):
        running.prepare()
        with overflow(arena):
            skipped = memory_probe.allocated(running.step, device).peak / workload.parameters
    return {
        "case": case.name,
        "held": held,
        "first_step": first / workload.parameters,
        "step": statistics.median(steps) / workload.parameters,
        "skipped_step": skipped,
    }


def measure_resident(case: Case, workload: Workload, rounds: int) -> float:
    """Return by how much a step makes the resident set grow, in bytes a parameter."""
    gc.collect()
    running = build(case, OwnArena(workload.shapes, "cpu"))
    for _ in range(2):
        running.prepare()
        running.step()
    peaks = []
    for _ in range(rounds):
        running.prepare()
        peaks.append(memory_probe.resident(running.step).peak)
    return statistics.median(peaks) / workload.parameters


def print_resident(name: str, rounds: str) -> None:
    """In a process of its own: print the resident peaks of all cases on a workload."""
    (workload,) = [each for each in (*WORKLOADS, *QUICK) if each.name == name]
    with without_what_is_there():
        peaks = {case.name: measure_resident(case, workload, int(rounds)) for case in CASES}
    print(json.dumps(peaks))


def residents(workload: Workload, rounds: int, device: str) -> dict[str, float]:
    """Return the resident peak of each case; nothing where that says nothing."""
    if device != "cpu" or not memory_probe.can_see_resident():
        return {}
    command = [sys.executable, "-c", RESIDENT, workload.name, str(rounds), json.dumps(sys.path)]
    done = subprocess.run(
        command, env=os.environ | memory_probe.MALLOC, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(
    workload: Workload,
    cases: Sequence[Case],
    rounds: int,
    device: str,
    resident_of: Callable[[Workload, int, str], dict[str, float]] = residents,
) -> dict[str, Any]:
    """Return a row for each case."""
    with without_what_is_there():
        rows = [measure_case(case, workload, rounds, device) for case in cases]
    resident = resident_of(workload, rounds, device)
    return {
        "workload": workload.name,
        "tensors": len(workload.shapes),
        "parameters": workload.parameters,
        "rows": [row | {"step_resident": resident.get(row["case"])} for row in rows],
    }


def place_of(args: argparse.Namespace, facts: dict[str, Any]) -> Path:
    """Return where the JSON goes: beside the published results only if everything was measured."""
    slug = step_machine.slug(facts["device"])
    folder = args.results or (Path("build") / "bench" if args.quick else RESULTS)
    return Path(folder) / f"memory-{slug}.json"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are taken")
    # torch's allocator reports what the calling thread makes; so it should make all.
    parser.add_argument("--threads", type=int, default=1, help="but for the resident set [1]")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="for the JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    facts = {
        **environment(args.device),
        "cores": os.cpu_count(),
        "apex_mp": __version__,
        "rounds": args.rounds,
    }
    workloads = QUICK if args.quick else WORKLOADS
    results: dict[str, Any] = {
        "environment": facts,
        "workloads": [measure(each, CASES, args.rounds, args.device) for each in workloads],
    }
    print(memory_report.page(results))
    path = place_of(args, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\nWritten: {path}")
    return results


if __name__ == "__main__":
    main()
