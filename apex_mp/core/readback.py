"""Readbacks: numbers that are copied from a device to the host without waiting for the device.

`submit` queues a copy behind the device's current work. `poll` calls back for the copies that have
arrived, in the order in which they were submitted; `wait` waits for all. Steps and blocks of
`scale_loss` poll; reading a scale, or whether a step was skipped, waits. Readbacks that are pending
when the process ends are polled then.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from apex_mp.core import forks, log

# How long a process that ends waits for pending readbacks.
SECONDS_AT_EXIT = 5.0
_LOG = log.logger("apex_mp.readback")


class Readback:
    """A copy of a tensor on its way to the host.

    Args:
        values: A tensor on a device; it may be written again at once.
        callback: Called with the copy on the CPU, once it has arrived.
    """

    def __init__(self, values: Tensor, callback: Callable[[Tensor], None]) -> None:
        forks.leak_in_children(self)
        self._callback = callback
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cpu":
            self._values = values.clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the copy has arrived."""
        if self._event is not None and not self.has_arrived():
            self._event.synchronize()

    def finish(self) -> None:
        """Call back with the copy, in memory that is not pinned.

        A callback may keep the tensor, and pinned memory cannot be freed in a forked child.
        """
        self._callback(self._values.clone())


_pending: collections.deque[Readback] = collections.deque()
_lock = threading.RLock()
_in_callback = False


def submit(values: Sequence[Tensor], callback: Callable[[list[float]], None]) -> None:
    """Start to copy numbers to the host.

    Args:
        values: Tensors of one element on one device.
        callback: Called with the numbers, as float64, by a later `poll` or `wait`.
    """
    vector = torch.stack([value.detach().reshape(()).double() for value in values])
    submit_tensor(vector, lambda arrived: callback(arrived.tolist()))


def submit_tensor(values: Tensor, callback: Callable[[Tensor], None]) -> None:
    """As `submit`, for a tensor of any shape and dtype; the callback gets a copy on the CPU."""
    _pending.append(Readback(values, callback))


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: then nothing can be copied to the host."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def is_capturing_on(device: torch.device) -> bool:
    """Whether one is being captured on a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return is_capturing()


def poll() -> None:
    """Call back for all copies that have arrived, except in a callback or while capturing."""
    if _pending:
        _finish(wait=False)


def wait() -> None:
    """Wait for all pending copies, and call back, except in a callback or while capturing."""
    if _pending:
        _finish(wait=True)


def _finish(*, wait: bool) -> None:
    global _in_callback
    with _lock:
        if _in_callback or is_capturing():
            return
        _in_callback = True
        try:
            while _pending:
                first = _pending[0]
                if not (wait or first.has_arrived()):
                    break
                first.wait()  # An interrupt here loses no result.
                if _pending:  # In the child of a signal handler's fork there is none.
                    _pending.popleft().finish()
        finally:
            _in_callback = False


def _poll_at_exit() -> None:
    """Poll when the process ends, for a limited time.

    A device that waits for another process, which has died, never answers.
    """
    deadline = time.monotonic() + SECONDS_AT_EXIT
    poll()
    while _pending and time.monotonic() < deadline:
        time.sleep(0.01)
        poll()
    if _pending:
        _LOG.warning(
            "%d results of steps are lost, with their messages of an overflow: the device has not "
            "answered within %g seconds of the end of the process"
            + log.see("results-that-were-lost"),
            len(_pending),
            SECONDS_AT_EXIT,
        )


def _begin_in_child() -> None:
    """Forget pending readbacks, which the parent handles.

    The lock is replaced: a thread that does not exist in the child may have held it at the fork.
    """
    global _lock, _in_callback
    _pending.clear()
    _lock, _in_callback = threading.RLock(), False


atexit.register(_poll_at_exit)
if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_begin_in_child)
