"""How much of the processors others took while a benchmark ran, and what machines are called."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")


class Clock(NamedTuple):
    """Seconds since the start of the machine, or of this process."""

    wall: float
    busy: float  # of all processors, with anything
    stolen: float  # by other virtual machines
    own: float


def clock(stat: str, own: float, wall: float, ticks: int) -> Clock:
    """Read the first line of /proc/stat, whose numbers are in ticks."""
    user, nice, system, _idle, _wait, irq, soft_irq, stolen = map(int, stat.split()[1:9])
    busy = user + nice + system + irq + soft_irq
    return Clock(wall, busy / ticks, stolen / ticks, own)


def now() -> Clock | None:
    """Return the clocks, or None where there is no /proc/stat."""
    if not STAT.exists():
        return None
    own = sum(os.times()[:4])
    return clock(STAT.read_text().splitlines()[0], own, time.monotonic(), os.sysconf("SC_CLK_TCK"))


def slug(name: str) -> str:
    """Return the name of a device as part of a path: "NVIDIA H200" is "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def taken_by_others(begin: Clock | None, end: Clock | None) -> dict[str, float] | None:
    """Return which part of all processors other programs and other machines have taken."""
    if begin is None or end is None:
        return None
    room = (end.wall - begin.wall) * (os.cpu_count() or 1)
    others = (end.busy - begin.busy) - (end.own - begin.own)
    return {
        "programs": round(max(0.0, others) / room, 3),
        "machines": round((end.stolen - begin.stolen) / room, 3),
    }
