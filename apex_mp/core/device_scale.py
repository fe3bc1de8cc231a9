"""The loss scale where the gradients are, so that the host waits for no device between steps.

The host learns of an overflow later: `send` copies a few numbers to it after the work under way,
and `settle` calls back for those that have arrived, in the order in which they were sent. A block
and a step settle without waiting; reading a scale, or whether a step was skipped, waits. What is
under way when the process ends is settled then.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import log, ops
from apex_mp.loss_scale import DynamicLossScale, StaticLossScale

# Where a scale may live. The host never waits for a CPU.
DEVICE_TYPES = {"cuda"}
# How long a process that ends waits for what is on its way to the host.
SECONDS_AT_EXIT = 5.0
_LOG = log.logger("apex_mp.device_scale")


def bring(values: Tensor, device: torch.device) -> Tensor:
    """Return numbers on a device without waiting; but the CPU would read them too early."""
    return values.to(device, non_blocking=device.type != "cpu")


class Transfer:
    """Numbers on their way to the host.

    Args:
        values: A tensor on a device; it may be written again at once.
        tell: Is called with its copy on the CPU once that has arrived.
    """

    def __init__(self, values: Tensor, tell: Callable[[Tensor], None]) -> None:
        self._tell = tell
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cpu":
            self._values = values.clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Whether the host need not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait, if need be."""
        if self._event is not None and not self.has_arrived():
            self._event.synchronize()

    def finish(self) -> None:
        """Tell what has arrived."""
        self._tell(self._values)


_in_flight: collections.deque[Transfer] = collections.deque()
_lock = threading.RLock()
_is_telling = False


def send(values: Sequence[Tensor], tell: Callable[[list[float]], None]) -> None:
    """Have numbers told to the host when they have arrived.

    Args:
        values: Tensors of one element on one device.
        tell: Is called with them, as float64, by a later `settle`.
    """
    vector = torch.stack([value.detach().reshape(()).double() for value in values])
    send_tensor(vector, lambda arrived: tell(arrived.tolist()))


def send_tensor(values: Tensor, tell: Callable[[Tensor], None]) -> None:
    """As `send`, for a tensor of any shape and dtype; the callback gets a copy on the CPU."""
    _in_flight.append(Transfer(values, tell))


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph instead; then nothing can be sent."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def settle(*, wait: bool) -> None:
    """Call back for all that has arrived, except within a callback or the capture of a graph.

    Args:
        wait: Wait for the rest.
    """
    global _is_telling
    with _lock:
        if _is_telling or is_capturing():
            return
        _is_telling = True
        try:
            while _in_flight and (wait or _in_flight[0].has_arrived()):
                _in_flight[0].wait()  # An interrupt here loses no result.
                _in_flight.popleft().finish()
        finally:
            _is_telling = False


def _settle_at_exit() -> None:
    """Call back for all that has arrived when the process ends, and wait a short time for the rest.

    The wait is limited: a device that waits for another process, which has died, never answers.
    """
    deadline = time.monotonic() + SECONDS_AT_EXIT
    settle(wait=False)
    while _in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
        settle(wait=False)
    if _in_flight:
        _LOG.warning(
            "%d results of steps are lost, with their messages of an overflow: the device has not "
            "answered within %g seconds of the end of the process"
            + log.see("results-that-were-lost"),
            len(_in_flight),
            SECONDS_AT_EXIT,
        )


atexit.register(_settle_at_exit)
if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_in_flight.clear)  # The results are for the parent.


class DeviceScale:
    """A loss scale and its state on a device.

    Args:
        value: The scale that it starts as.
        device: Where it lives.

    Attributes:
        scale: 0-dim float32; `update`, or the step, writes it.
        device: Where it lives.
    """

    def __init__(self, value: DynamicLossScale | StaticLossScale, device: torch.device) -> None:
        self._value = value
        self.device = device
        counts = (0, 0)
        if isinstance(value, DynamicLossScale):
            counts = value.good_steps, value.overflows
        self.scale = torch.full((), value.scale, dtype=torch.float32, device=device)
        self._good_steps, self._overflows = (
            torch.full((), count, dtype=torch.int32, device=device) for count in counts
        )

    def assign(self, value: DynamicLossScale | StaticLossScale) -> None:
        """Take another value; a captured graph that has the tensors goes on from it."""
        other = DeviceScale(value, self.device)
        self._value = value
        self.scale.copy_(other.scale)
        self._good_steps.copy_(other._good_steps)
        self._overflows.copy_(other._overflows)

    def for_step(self) -> _C.DeviceLossScale | None:
        """Return it for a fused step, which updates it; None if it never changes."""
        value = self._value
        if not isinstance(value, DynamicLossScale):
            return None
        return _C.DeviceLossScale(
            self.scale,
            self._good_steps,
            self._overflows,
            growth_factor=value.growth_factor,
            backoff_factor=value.backoff_factor,
            growth_interval=value.growth_interval,
            min_scale=value.min_scale,
            max_scale=value.max_scale,
            hysteresis=value.hysteresis,
        )

    def update(self, found_inf: Tensor) -> None:
        """Adjust the scale after a block; `apex_mp.loss_scale` has the rule."""
        value = self._value
        if not isinstance(value, DynamicLossScale):
            return
        ops.update_scale_(
            self.scale,
            self._good_steps,
            self._overflows,
            found_inf,
            growth_factor=value.growth_factor,
            backoff_factor=value.backoff_factor,
            growth_interval=value.growth_interval,
            min_scale=value.min_scale,
            max_scale=value.max_scale,
            hysteresis=value.hysteresis,
        )

    def read(self) -> DynamicLossScale | StaticLossScale:
        """Return the scale as a value; the host waits for it."""
        settle(wait=True)
        if not isinstance(self._value, DynamicLossScale):
            return self._value
        state = torch.stack([x.double() for x in (self.scale, self._good_steps, self._overflows)])
        scale, good_steps, overflows = state.tolist()
        return dataclasses.replace(
            self._value, scale=scale, good_steps=int(good_steps), overflows=int(overflows)
        )
