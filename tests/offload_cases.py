"""A stand-in for a GPU beside the host: copies take place later than they are asked for.

CPU tensors are on the stand-in; what is in host memory is so by the names that the step gives it.
The streams are those of `torch.cuda` as far as `apex_mp.core.transfers` uses them. A copy waits in
its stream until something waits for it, or until chance lets it go on; until then its target holds
NaN, and its source is read only then. So a missing wait is a wrong number.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from apex_mp.core import transfers


class Stream:
    """A stream beside the current one."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self._done = 0  # copies that have taken place
        self._follows = False  # the work that the current stream was given
        gpu.streams.append(self)

    def wait_stream(self, current: Current) -> None:
        self._follows = True

    def add(self, target: Tensor, source: Tensor) -> None:
        """Ask for a copy."""
        self._gpu.asked += 1
        ordered = self._follows
        with torch.no_grad():
            _fill(target)

        def copy() -> None:
            with torch.no_grad():
                if ordered:
                    target.copy_(source)
                else:  # The source may not be there yet, the target may still be read.
                    _fill(target)

        self._queue.append(copy)
        self._gpu.let_go_on()

    def asked(self) -> int:
        return self._done + len(self._queue)

    def run(self, until: int) -> None:
        """Let copies take place, in order."""
        while self._done < until and self._queue:
            self._queue.popleft()()
            self._done += 1

    def leave(self) -> None:
        """The current stream goes on: what it is given from now on is not waited for."""
        self._follows = False


class Current:
    """The current stream, in which everything takes place at once."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu

    def wait_stream(self, stream: Stream) -> None:
        stream.run(stream.asked())
        for each in self._gpu.streams:
            each.leave()


class Event:
    """A place in a stream."""

    def record(self, stream: Stream) -> None:
        self._stream, self._place = stream, stream.asked()

    def synchronize(self) -> None:
        self._stream.run(self._place)


class _Asking(TorchDispatchMode):
    """A context in which copies are asked for, not made."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._stream.add(*args[:2])
            return args[0]
        return func(*args, **(kwargs or {}))


class LateGpu:
    """Stands for the module `torch.cuda`.

    Args:
        seed: Of chance, which lets copies go on early.

    Attributes:
        asked: The number of copies that were asked for.
        streams: Those beside the current one.
    """

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._current = Current(self)
        self.asked = 0
        self.streams: list[Stream] = []
        self.Event = Event

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        return Stream(self)

    def current_stream(self, device: torch.device) -> Current:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _Asking(stream):
            yield

    def let_go_on(self) -> None:
        """Let some copies take place that nothing waits for yet."""
        for stream in self._chance.sample(self.streams, len(self.streams)):
            if self._chance.random() < 0.3:
                stream.run(stream.asked() - self._chance.randrange(3))


def stand_in(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> LateGpu:
    """Put a stand-in in the place of the GPU, and return it."""
    gpu = LateGpu(seed)
    monkeypatch.setattr(transfers, "_cuda", gpu)
    monkeypatch.setattr(transfers, "_KIND", "cpu")
    monkeypatch.setattr(transfers, "pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    return gpu


def _fill(target: Tensor) -> None:
    target.fill_(float("nan"))
