"""How benchmarks.step takes times: in rounds, each step between two looks at memory's speed."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import step_peers
from benchmarks.step_arena import Arena, Case, Running
from benchmarks.step_shapes import Workload

SMALL = 4_000_000  # parameters: what steps with fewer take is the host's work
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def reference_mebibytes(device: str, caches: Path = CACHES) -> int:
    """Return how large the reference is to be: four times any cache, so that it is not found there.

    Some processors have 300 MiB of cache. Where nothing is known of it, 512 MiB must do.
    """
    if device == "cuda":
        return 1024
    kibibytes = [int(size.read_text().strip().removesuffix("K")) for size in caches.glob("*/size")]
    return max(128, 4 * max(kibibytes) // 1024) if kibibytes else 512


class Reference:
    """An in-place read-modify-write of a tensor, as fast as memory goes for what a step does.

    It also empties the caches before each step, as a forward and backward does.
    """

    def __init__(self, device: str, mebibytes: int) -> None:
        self.device = device
        self.tensor = torch.ones(mebibytes << 18, device=device)

    @property
    def bytes(self) -> int:
        """Bytes that one pass reads and writes."""
        return 2 * self.tensor.nbytes

    def once(self, factor: float = 1.0) -> None:
        """Read, multiply and write every element."""
        self.tensor.mul_(factor)

    def speed(self) -> float:
        """Return bytes per second, the median of three passes."""
        took = [seconds(self.once, self.device) for _ in range(3)]
        return self.bytes / statistics.median(took)


class Time(NamedTuple):
    """One step: how long it took, and how fast memory was just before and after.

    `again` is what a further step takes with its caches warm; None where models do not fit in them.
    """

    seconds: float
    before: float
    after: float
    again: float | None = None

    @property
    def reference(self) -> float:
        """Bytes per second of the reference around this step."""
        return (self.before + self.after) / 2


def seconds(work: Callable[[], object], device: str) -> float:
    """Return how long something takes, until the device has done it."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def warm_seconds(case: Running, device: str) -> float:
    """Return how long a step takes that comes right behind others, each with new gradients."""
    took = 0.0
    for _ in range(3):
        case.prepare()
        took = seconds(case.step, device)
    return took


def host_seconds(work: Callable[[], object], device: str) -> float:
    """Return how long the host is busy; the device may still be."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def build(cases: Sequence[Case], arena: Arena) -> tuple[dict[str, Running], dict[str, str]]:
    """Return the cases that can run here, each after one step; and why the others cannot."""
    gc.collect()  # what the last workload has left
    running: dict[str, Running] = {}
    not_run: dict[str, str] = {}
    for case in cases:
        if case.package and step_peers.version(case.package) is None:
            not_run[case.name] = f"{case.package} is not installed"
            continue
        try:
            built = case.build(arena)
            built.prepare()
            built.step()
        except torch.OutOfMemoryError:
            not_run[case.name] = "the device has too little memory"
        # A package of others can fail in any way, which is told; ours and torch must not.
        except Exception as error:
            if not case.package:
                raise
            said = str(error).strip().splitlines()
            not_run[case.name] = f"{type(error).__name__}: {said[0] if said else ''}"
        else:
            running[case.name] = built
    return running, not_run


def take_turns(
    running: dict[str, Running], rounds: int, reference: Reference, is_small: bool
) -> dict[str, list[Time]]:
    """Time every case once a round, in another order each round; if small, with warm caches too."""
    times: dict[str, list[Time]] = {name: [] for name in running}
    order = list(running)
    shuffler = random.Random(0)
    with _no_garbage_collection():
        for number in range(rounds + 1):
            shuffler.shuffle(order)
            for name in order:
                running[name].prepare()
                before = reference.speed()
                took = seconds(running[name].step, reference.device)
                after = reference.speed()
                again = warm_seconds(running[name], reference.device) if is_small else None
                if number:  # The first round warms up.
                    times[name].append(Time(took, before, after, again))
    return times


def take_host_turns(
    running: dict[str, Running], rounds: int, device: str
) -> dict[str, list[float]]:
    """As `take_turns`, what the host does alone."""
    times: dict[str, list[float]] = {name: [] for name in running}
    with _no_garbage_collection():
        for number in range(rounds + 1):
            for name, case in running.items():
                case.prepare()
                took = host_seconds(case.step, device)
                if number:
                    times[name].append(took)
    return times


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(
    workload: Workload, cases: Sequence[Case], rounds: int, reference: Reference
) -> dict[str, Any]:
    """Return what the table says of one workload."""
    running, not_run = build(cases, Arena(workload.shapes, reference.device))
    times = take_turns(running, rounds, reference, workload.parameters < SMALL)
    speeds = [time.reference for each in times.values() for time in each] or [reference.speed()]
    return {
        "workload": workload.name,
        "tensors": len(workload.shapes),
        "parameters": workload.parameters,
        "reference_GB_per_s": {
            "median": statistics.median(speeds) / 1e9,
            "lowest": min(speeds) / 1e9,
            "highest": max(speeds) / 1e9,
        },
        "rows": [
            summarise(case, times, workload.parameters) for case in cases if case.name in times
        ],
        "not_run": not_run,
    }


def summarise(case: Case, times: dict[str, list[Time]], parameters: int) -> dict[str, Any]:
    """Return the medians of a case: of its times, and of what each round makes of them."""
    mine, moved = times[case.name], case.bytes * parameters
    took = [time.seconds for time in mine]
    return {
        "case": case.name,
        "bytes_per_parameter": case.bytes,
        "passes": [str(each) for each in case.passes],
        "ms": 1e3 * statistics.median(took),
        "ms_lowest": 1e3 * min(took),
        "ms_highest": 1e3 * max(took),
        "ms_again": _median_ms([time.again for time in mine if time.again is not None]),
        "ns_per_parameter": 1e9 * statistics.median(took) / parameters,
        "GB_per_s": moved / statistics.median(took) / 1e9,
        "of_reference": statistics.median(moved / t.seconds / t.reference for t in mine),
        "compared_with": case.ours,
        "times_ours": _ratio(mine, times.get(case.ours)),
    }


def _median_ms(took: list[float]) -> float | None:
    return 1e3 * statistics.median(took) if took else None


def _ratio(mine: list[Time], ours: list[Time] | None) -> float | None:
    """The median of the rounds' ratios; None if ours was not measured."""
    if ours is None:
        return None
    return statistics.median(a.seconds / b.seconds for a, b in zip(mine, ours, strict=True))
