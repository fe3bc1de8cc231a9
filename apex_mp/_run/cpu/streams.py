"""Streams, events and contexts of a GPU that is the CPU."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


class Stream:
    """A stream on which everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0
        self.priority = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority, as torch does."""
        return 0, -1

    def query(self) -> bool:
        """All is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event of now."""
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for nothing; likewise the others."""

    def wait_event(self, event: Event) -> None:
        """See synchronize."""

    def wait_stream(self, stream: Stream) -> None:
        """See synchronize."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """A moment, by the clock of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Remember now."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another."""
        return (end_event._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for nothing."""


class Context(contextlib.AbstractContextManager[Any]):
    """A device, a stream or a range that a script enters for a block."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = self.prev_idx = 0

    def __exit__(self, *_: object) -> None:
        return None
