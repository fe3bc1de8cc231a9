"""The loss scale where the gradients are, so that the host waits for no device between steps.

The host gets to know of an overflow later: `send` has a few numbers copied to it behind the work
under way, `settle` tells what has arrived, in the order in which it was sent. A block and a step
settle what is there without waiting; whoever looks at a scale, or asks for a skipped step, waits.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from apex_mp import _C, _ops
from apex_mp.loss_scale import DynamicLossScale, StaticLossScale

# Where a scale may live. On a CPU there is nobody to wait for.
DEVICE_TYPES = {"cuda"}


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
    """As `send`, for a tensor of any shape and dtype, which is told as a tensor on the CPU."""
    _in_flight.append(Transfer(values, tell))


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph instead; then nothing can be sent."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def settle(*, wait: bool) -> None:
    """Tell what has arrived. Does nothing where somebody is being told, or in a graph's capture.

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
                _in_flight[0].wait()  # Whoever interrupts this loses nothing.
                _in_flight.popleft().finish()
        finally:
            _is_telling = False


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
        _ops.update_scale_(
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
