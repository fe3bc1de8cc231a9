"""What a step makes a GPU do: launches, waits of the host, and the time of each kernel.

It comes after all timing: once the profiler was on, launches may take longer.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch.autograd import DeviceType

from benchmarks.step_arena import Arena, Case
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
) -> Iterator[None]:
    """Add a profile to each row of a workload that was measured."""
    arena = Arena(workload.shapes, device.tensors)
    rows = {row["case"]: row for row in measured["rows"]}
    for case in cases:
        if time.monotonic() > deadline:
            return
        row = rows.get(case.name)
        if row is None or row["host_ms"] > HOST_MS:
            continue
        running = start(case, arena, device)
        if not isinstance(running, str):
            row["profile"] = summary(device.trace(running))
            add_speeds(row["profile"]["kernels"], case, workload.parameters)
            yield


def summary(events: Sequence[Any], steps: int = TRACED) -> dict[str, Any]:
    """Return what the profiler's events say of a step.

    Counted are calls within the block STEP, and kernels and copies that start within WHOLE, which
    ends when the device is done.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    calls = Counter(
        event.name for event in _within(on_host, STEP, on_host) if CALL.match(event.name)
    )
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    names = {event.name for event in on_host}  # blocks, which a trace may show on the device too
    done = [event for event in _within(on_device, WHOLE, on_host) if event.name not in names]
    kernels: dict[str, list[float]] = {}
    for event in done:
        kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    found = [
        {"name": name[:NAME], "count": len(ms) / steps, "ms": sum(ms) / steps}
        for name, ms in kernels.items()
    ]
    return {
        "steps": steps,
        "launches": _sum(calls, r"Launch") / steps,
        "synchronizations": _sum(calls, r"Synchronize|^cudaMem(cpy|set)$") / steps,
        "pageable_copies": sum("Pageable" in event.name for event in done) / steps,
        "calls": {name: count / steps for name, count in calls.most_common()},
        "kernels_ms": sum(kernel["ms"] for kernel in found),
        "kernels": sorted(found, key=lambda kernel: -kernel["ms"])[:LONGEST],
    }


def _within(events: Sequence[Any], block: str, on_host: Sequence[Any]) -> list[Any]:
    ranges = [event.time_range for event in on_host if event.name == block]
    return [
        event
        for event in events
        if any(each.start <= event.time_range.start <= each.end for each in ranges)
    ]


def _sum(calls: Counter[str], pattern: str) -> int:
    return sum(count for name, count in calls.items() if re.search(pattern, name))


def add_speeds(kernels: list[dict[str, Any]], case: Case, parameters: int) -> None:
    """Add GB/s to each kernel that makes a pass of ours by itself."""
    for each in case.passes:
        if each.kernel:
            mine = [kernel for kernel in kernels if each.kernel in kernel["name"]]
            if len(mine) == 1 and mine[0]["ms"]:
                moved = (each.read + each.written) * parameters
                mine[0]["GB_per_s"] = moved / mine[0]["ms"] / 1e6
