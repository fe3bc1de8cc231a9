"""What a step makes a GPU do: launches, waits of the host, and the time of each kernel.

It comes after all timing: once the profiler was on, launches may take longer.
"""

from __future__ import annotations

import bisect
import gc
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.autograd import DeviceType

from benchmarks.step_arena import Arena, Case, Running
from benchmarks.step_device import STEP, TRACED, WHOLE, Cuda
from benchmarks.step_shapes import Workload
from benchmarks.step_timing import start

# A step for which the host takes longer makes a trace of many seconds to read.
HOST_MS = 100.0
CALL = re.compile(r"cu(da)?[A-Z]")
LONGEST = 12  # kernels that are kept
NAME = 160  # characters of a kernel's name that are kept


def profile(
    workload: Workload,
    cases: Sequence[Case],
    measured: dict[str, Any],
    device: Cuda,
    deadline: float,
) -> None:
    """Add a profile to each row of a workload that was measured."""
    gc.collect()  # tensors of the workload before
    rows = {row["case"]: row for row in measured["rows"]}
    arena = Arena(workload.shapes, device.tensors)
    running = {}
    for case in cases:
        if time.monotonic() > deadline:
            return
        if case.name in rows and rows[case.name]["host_ms"] <= HOST_MS:
            started = start(case, arena, device)
            if isinstance(started, Running):
                running[case.name] = started
    for name, seen in summaries(device.trace(running, deadline)).items():
        rows[name]["profile"] = seen
        (case,) = [case for case in cases if case.name == name]
        add_speeds(seen["kernels"], case, workload.parameters)


def summaries(events: Sequence[Any], steps: int = TRACED) -> dict[str, dict[str, Any]]:
    """Return what the profiler's events say of a step of each case.

    Counted are calls within the case's blocks STEP, and kernels and copies that start within its
    blocks WHOLE, which end when the device is done.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    names = {event.name for event in on_host}  # blocks, which a trace may show on the device too
    calls = _by_block((event for event in on_host if CALL.match(event.name)), on_host, STEP)
    done = _by_block((event for event in on_device if event.name not in names), on_host, WHOLE)
    return {case: _summary(calls[case], done[case], steps) for case in calls}


def _by_block(events: Iterable[Any], on_host: Sequence[Any], prefix: str) -> dict[str, list[Any]]:
    """Return the events that start within the blocks of each case."""
    blocks = [event for event in on_host if event.name.startswith(prefix)]
    blocks.sort(key=lambda block: block.time_range.start)
    starts = [block.time_range.start for block in blocks]
    found: dict[str, list[Any]] = {block.name.removeprefix(prefix): [] for block in blocks}
    for event in events:
        place = bisect.bisect_right(starts, event.time_range.start) - 1
        if place >= 0 and event.time_range.start <= blocks[place].time_range.end:
            found[blocks[place].name.removeprefix(prefix)].append(event)
    return found


def _summary(called: Sequence[Any], done: Sequence[Any], steps: int) -> dict[str, Any]:
    calls = Counter(event.name for event in _outermost(called))
    kernels: dict[str, list[float]] = {}
    for event in done:
        kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    found = [
        {"name": name[:NAME], "count": len(ms) / steps, "ms": sum(ms) / steps}
        for name, ms in kernels.items()
    ]
    launches = _sum(calls, r"Launch")
    return {
        "steps": steps,
        "launches": launches / steps,
        "synchronizations": _sum(calls, r"Synchronize|^cudaMem(cpy|set)$") / steps,
        "pageable_copies": sum("Pageable" in event.name for event in done) / steps,
        "calls": {name: count / steps for name, count in calls.most_common()},
        "kernels_lost": max(0, launches - sum(_is_kernel(event) for event in done)) / steps,
        "kernels_ms": sum(kernel["ms"] for kernel in found),
        "kernels": sorted(found, key=lambda kernel: -kernel["ms"])[:LONGEST],
    }


def _outermost(called: Sequence[Any]) -> Iterator[Any]:
    """Yield the calls that are not within another: those of the driver within the runtime's."""
    end = 0.0
    for event in sorted(called, key=lambda event: (event.time_range.start, -event.time_range.end)):
        if event.time_range.start >= end:
            end = event.time_range.end
            yield event


def _is_kernel(event: Any) -> bool:
    return not event.name.startswith(("Memcpy", "Memset"))


def _sum(calls: Counter[str], pattern: str) -> int:
    return sum(count for name, count in calls.items() if re.search(pattern, name))


def add_speeds(kernels: list[dict[str, Any]], case: Case, parameters: int) -> None:
    """Add GB/s to each kernel that makes a pass of ours by itself."""
    for each in case.passes:
        if each.kernel:
            mine = [kernel for kernel in kernels if each.kernel in kernel["name"]]
            is_whole = all(kernel["count"] % 1 == 0 for kernel in mine)  # else some were lost
            if len(mine) == 1 and mine[0]["ms"] and is_whole:
                moved = (each.read + each.written) * parameters
                mine[0]["GB_per_s"] = moved / mine[0]["ms"] / 1e6
