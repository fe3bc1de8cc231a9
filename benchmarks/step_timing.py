"""How benchmarks.step takes times: in rounds, memory's speed before and after each batch."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks import step_peers
from benchmarks.step_arena import Arena, Case, Running
from benchmarks.step_device import Cpu
from benchmarks.step_shapes import Workload

SMALL = 4_000_000  # parameters: what steps with fewer take is the host's work
BATCH_SECONDS = 0.25  # of all steps of a batch
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
T = TypeVar("T")


def reference_mebibytes(device: str, caches: Path = CACHES) -> int:
    """Return how large the reference is to be: four times any cache, so that it is not found there.

    Some processors have 300 MiB of cache. Where nothing is known of it, 512 MiB must do.
    """
    if device == "cuda":
        return 1024
    kibibytes = [int(size.read_text().strip().removesuffix("K")) for size in caches.glob("*/size")]
    return max(128, 4 * max(kibibytes) // 1024) if kibibytes else 512


class Reference:
    """Memory's speed: of a copy on a GPU, of an in-place multiplication on a CPU.

    On a CPU it also empties the caches before each step, as a forward and backward does.
    """

    def __init__(self, device: Cpu, mebibytes: int) -> None:
        self.device = device
        self.bytes, self.once = device.reference(mebibytes)

    def speed(self) -> float:
        """Return bytes per second, the median of three passes."""
        took, _ = batch(Running(lambda: None, self.once), 3, self.device)
        return self.bytes / statistics.median(took)


class Time(NamedTuple):
    """A batch of steps: how long one took, and how fast memory was just before and after.

    Attributes:
        seconds: Until the device had done a step, the median.
        host: Of the host, which waits only where the step itself does, the median.
        before: Bytes per second of the reference.
        after: The same.
        again: What a further step takes with its caches warm; None where models do not fit in them.
    """

    seconds: float
    host: float
    before: float
    after: float
    again: float | None = None

    @property
    def reference(self) -> float:
        """Bytes per second of the reference around these steps."""
        return (self.before + self.after) / 2


def batch(case: Running, steps: int, device: Cpu) -> tuple[list[float], list[float]]:
    """Return the device's and the host's time of each of some steps; nothing waits between them.

    The gradients of the first are there; those of the others come in untimed.
    """
    marks, host = [], []
    device.wait()
    for number in range(steps):
        if number:
            case.prepare()
        begin, start = device.mark(), time.perf_counter()
        case.step()
        host.append(time.perf_counter() - start)
        marks.append((begin, device.mark()))
    device.wait()
    return [device.seconds(begin, end) for begin, end in marks], host


def look(case: Running, steps: int, reference: Reference, *, again: bool) -> Time:
    """Time a batch, with memory's speed before and after."""
    case.prepare()
    before = reference.speed()
    took, host = batch(case, steps, reference.device)
    after = reference.speed()
    warm = None
    if again:
        case.prepare()
        warm = batch(case, 3, reference.device)[0][-1]
    return Time(statistics.median(took), statistics.median(host), before, after, warm)


def start(case: Case, arena: Arena, device: Cpu) -> Running | str:
    """Return a case after two steps, or why it cannot run here.

    Raises:
        Exception: It is a case of ours or of torch, and neither memory nor a package is missing.
    """
    if case.package and step_peers.version(case.package) is None:
        return f"{case.package} is not installed"
    try:
        running = case.build(arena)
        for _ in range(2):
            running.prepare()
            running.step()
        device.wait()
    except torch.OutOfMemoryError:
        return "the device has too little memory"
    # Other packages may fail in any way, which is reported; ours and torch must not.
    except Exception as error:
        if not case.package:
            raise
        return reason(error)
    return running


def reason(error: Exception) -> str:
    """Return an error in one line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"


def take_turns(
    running: dict[str, Running], rounds: int, deadline: float, take: Callable[[str], T | None]
) -> Iterator[dict[str, list[T]]]:
    """Yield all results of `take` after each round; each has another order of cases.

    Args:
        running: The cases.
        rounds: How many.
        deadline: Of time.monotonic(); no round starts that would end after it.
        take: Gets a case's name; a case for which it returns None is left out from then on.
    """
    found: dict[str, list[T]] = {name: [] for name in running}
    order = list(running)
    shuffler, took = random.Random(0), 0.0
    for _ in range(rounds):
        begin = time.monotonic()
        if begin + took > deadline:
            return
        shuffler.shuffle(order)
        with _no_garbage_collection():
            for name in [*order]:
                taken = take(name)
                if taken is None:
                    order.remove(name)
                    del found[name]
                else:
                    found[name].append(taken)
        took = time.monotonic() - begin
        yield found


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Measurement:
    """One workload: its cases are started and timed once; then they take turns.

    Args:
        workload: What is stepped.
        cases: The rows of the table.
        reference: For memory's speed, and the device.
    """

    def __init__(self, workload: Workload, cases: Sequence[Case], reference: Reference) -> None:
        gc.collect()  # tensors of the workload before
        self.workload, self.cases, self.reference = workload, cases, reference
        self.arena = Arena(workload.shapes, reference.device.tensors)
        self.running: dict[str, Running] = {}
        self.not_run: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.times: dict[str, list[Time]] = {}
        self.rounds = 0

    def run(self, rounds: int, deadline: float) -> Iterator[dict[str, Any]]:
        """Yield the results after each case, whose first time is a warm-up, and each round."""
        for case in self.cases:
            self._start(case, deadline)
            yield self.result()
        steps = {name: self._steps(time) for name, (time,) in self.times.items()}
        for times in take_turns(
            self.running, rounds, deadline, lambda name: self._try(name, steps[name])
        ):
            self.times, self.rounds = times, self.rounds + 1
            yield self.result()

    def _start(self, case: Case, deadline: float) -> None:
        if time.monotonic() > deadline:
            self.not_run[case.name] = "no time was left"
            return
        try:
            running = start(case, self.arena, self.reference.device)
        except Exception as error:
            self._fail(case.name, error)
            return
        if isinstance(running, str):
            self.not_run[case.name] = running
            return
        self.running[case.name] = running
        first = self._try(case.name, 1)
        if first is None:
            del self.running[case.name]
        else:
            self.times[case.name] = [first]

    def _fail(self, name: str, error: Exception) -> None:
        self.failed[name] = reason(error)
        self.reference.device.wait()  # Raises if the device is not usable any more.

    def _try(self, name: str, steps: int) -> Time | None:
        try:
            return self._look(name, steps)
        except Exception as error:
            self._fail(name, error)
            return None

    def _look(self, name: str, steps: int) -> Time:
        is_small = self.workload.parameters < SMALL
        again = is_small and self.reference.device.steps == 1
        return look(self.running[name], steps, self.reference, again=again)

    def _steps(self, time: Time) -> int:
        """Return how many steps fit into a batch."""
        fitting = int(BATCH_SECONDS / max(time.seconds, time.host, 1e-9))
        return max(1, min(self.reference.device.steps, fitting))

    def result(self) -> dict[str, Any]:
        """Return the results so far."""
        times = self.times
        speeds = [time.reference for each in times.values() for time in each] or [0.0]
        return {
            "workload": self.workload.name,
            "tensors": len(self.workload.shapes),
            "parameters": self.workload.parameters,
            "reference_GB_per_s": {
                "median": statistics.median(speeds) / 1e9,
                "lowest": min(speeds) / 1e9,
                "highest": max(speeds) / 1e9,
            },
            "reference": self.reference.device.reference_is,
            "rounds": self.rounds,
            "rows": [
                summarise(case, times, self.workload.parameters)
                for case in self.cases
                if case.name in times
            ],
            "not_run": self.not_run,
            "failed": self.failed,
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
        "host_ms": 1e3 * statistics.median(time.host for time in mine),
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
