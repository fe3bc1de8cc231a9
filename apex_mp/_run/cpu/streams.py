"""Streams, events and contexts for a "GPU" that is the CPU."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


class Stream:
    """A stream whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = 0
        self.priority = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority, as torch does."""
        return 0, -1

    def query(self) -> bool:
        """Return True: the work is complete."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event with the present time."""
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Do nothing: the work is complete."""

    def wait_event(self, event: Event) -> None:
        """See synchronize."""

    def wait_stream(self, stream: Stream) -> None:
        """See synchronize."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """An event with a time by the clock of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the present time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another."""
        return (end_event._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        """Return True: the event is complete."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for nothing."""


class Context(contextlib.AbstractContextManager[Any]):
    """A context manager for a device, a stream or a range."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = self.prev_idx = 0

    def __exit__(self, *_: object) -> None:
        return None
