"""What a step with masters and moments in host memory costs, beside its two halves.

    python -m benchmarks.offload               a GPU if there is one; writes JSON
    python -m benchmarks.offload --device cpu  a stand-in for one, whose copies take place at once

Each workload is float16 weights and gradients, with float32 masters. "CPU alone" is the
step of the same tensors in host memory; "bus alone" copies gradients to the host and weights back,
both at the same time. A step that overlaps both takes the longer of the two. The stand-in has no
bus and copies on the processors that also step; "without copies" leaves copies out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import Parameter

from apex_mp.core import transfers
from apex_mp.optimizers import FusedAdam
from benchmarks import step_machine
from benchmarks.amp import environment
from benchmarks.gpu_build import commit
from benchmarks.step_report import markdown
from benchmarks.step_shapes import bert_large, equal

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = {
    "cuda": {"BERT-large": bert_large, "1 x 250M": equal(1, 250_000_000)},
    "cpu": {"100 x 1M": equal(100, 1 << 20), "1 x 100M": equal(1, 100_000_000)},
}
WARM_UP = 3


class AtOnce:
    """Stands for `torch.cuda` in `apex_mp.core.transfers`: copies take place when asked for."""

    class Event:
        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

    class Stream:
        def __init__(self, device: Any = None) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

    def current_stream(self, device: Any) -> Any:
        return self.Stream()

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()


def _copy_nothing(bus: Any, *args: Any, **kwargs: Any) -> Any:
    return AtOnce.Event()


@contextlib.contextmanager
def stand_in(device: str) -> Iterator[None]:
    """A context in which parameters on the CPU can be offloaded, if that is the device."""
    if device != "cpu":
        yield
        return
    with (
        mock.patch.object(transfers, "_cuda", AtOnce()),
        mock.patch.object(transfers, "_KIND", "cpu"),
        mock.patch.object(transfers, "pinned", lambda size: torch.zeros(size, dtype=torch.uint8)),
    ):
        yield


@contextlib.contextmanager
def without_copies() -> Iterator[None]:
    """A context in which copies take no time, and move nothing."""
    with mock.patch.object(transfers.Transfers, "_copy", _copy_nothing):
        yield


def optimizer_of(shapes: Any, device: str, offload: bool) -> FusedAdam:
    """Return an optimizer whose parameters have gradients."""
    params = [Parameter(torch.zeros(shape, dtype=torch.float16, device=device)) for shape in shapes]
    for param in params:
        torch.nn.init.normal_(param, std=0.02)
        param.grad = torch.full_like(param, 1e-3)
    return FusedAdam(params, 1e-4, master_weights="float32", offload=offload)


def bus_alone(shapes: Any, device: str) -> Callable[[], object]:
    """Return what copies as many bytes as a step does, on two streams."""
    size = sum(torch.Size(shape).numel() for shape in shapes)
    here = [torch.empty(size, dtype=torch.float16, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.float16, device=device) for _ in range(2)]
    bus = transfers.Transfers(torch.device(device))

    def copy() -> None:
        bus.to_host([(here[0], there[0])])
        bus.to_device([(there[1], here[1])]).synchronize()

    return copy


def milliseconds(step: Callable[[], object], device: str) -> float:
    """Return the time of one call, until the device has done what it was given."""
    begin = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def measure(name: str, device: str, rounds: int) -> dict[str, Any]:
    """Return the medians of one workload, taken in turns; the first rounds warm up."""
    shapes = [*SHAPES[device][name]()]
    with stand_in(device):
        offloaded = optimizer_of(shapes, device, True)
        steps: dict[str, Callable[[], object]] = {
            "CPU alone": optimizer_of(shapes, "cpu", False).step,
            "offload=True": offloaded.step,
        }
        if device == "cuda":
            steps["GPU, without offload"] = optimizer_of(shapes, device, False).step
            steps["bus alone"] = bus_alone(shapes, device)
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        times: dict[str, list[float]] = {case: [] for case in [*steps, "without copies"]}
        for _ in range(rounds):
            for case, step in steps.items():
                times[case].append(milliseconds(step, device))
            with without_copies():
                times["without copies"].append(milliseconds(offloaded.step, device))
            _agree(offloaded)
    found = {case: round(statistics.median(each), 3) for case, each in times.items()}
    bound = max(found["CPU alone"], found.get("bus alone", 0.0))
    params = sum(param.numel() for param in offloaded.param_groups[0]["params"])
    return {
        "workload": name,
        "params": params,
        "ms": found,
        "of_the_longer_half": round(found["offload=True"] / bound, 3),
        "without_copies_of_CPU_alone": round(found["without copies"] / found["CPU alone"], 3),
    }


@torch.no_grad()
def _agree(optimizer: FusedAdam) -> None:
    """Copy masters to weights that a step without copies has left as they were."""
    for param, master in optimizer._own_masters.kept.items():
        param.data.copy_(master)


def page(results: dict[str, Any]) -> str:
    """Return the table."""
    cases = [*results["rows"][0]["ms"]]
    head = ["workload", *(f"{case}, ms" for case in cases), "offload=True / longer half"]
    rows = [
        [
            row["workload"],
            *(f"{row['ms'][case]:.2f}" for case in cases),
            f"{row['of_the_longer_half']:.2f}",
        ]
        for row in results["rows"]
    ]
    return "\n".join(markdown(head, rows))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="[all of the device]")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="for JSON")
    args = parser.parse_args(argv)
    facts = environment(args.device)
    results: dict[str, Any] = {
        "commit": commit(),
        "environment": facts,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "rows": [],
    }
    kind = "cpu" if args.device == "cpu" else step_machine.slug(facts["device"])
    path = args.results / f"offload-{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in args.workloads or SHAPES[args.device]:
        results["rows"].append(measure(name, args.device, args.rounds))
        path.write_text(json.dumps(results, indent=1) + "\n")
    print(page(results))
    return results


if __name__ == "__main__":
    sys.exit(not main()["rows"])
