"""The loss scale where the gradients are, so that the host waits for no device between steps.

The host gets to know of an overflow later: `send` has a few numbers copied to it behind the work
under way, `settle` tells what has arrived, in the order in which it was sent. A block and a step
settle what is there without waiting; whoever looks at a scale, or asks for a skipped step, waits.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from apex_mp import _ops
from apex_mp.loss_scale import DynamicLossScale, StaticLossScale

# Where a scale may live. On a CPU there is nobody to wait for.
DEVICE_TYPES = {"cuda"}


class Transfer:
    """Numbers on their way to the host.

    Args:
        values: A vector on a device.
        tell: Is called with the numbers once they have arrived.
    """

    def __init__(self, values: Tensor, tell: Callable[[list[float]], None]) -> None:
        self._tell = tell
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cpu":
            self._values = values
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Whether the host need not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Wait, if need be, and tell."""
        if self._event is not None:
            self._event.synchronize()
        self._tell(self._values.tolist())


_in_flight: collections.deque[Transfer] = collections.deque()


def send(values: Sequence[Tensor], tell: Callable[[list[float]], None]) -> None:
    """Have numbers told to the host when they have arrived.

    Args:
        values: Tensors of one element on one device.
        tell: Is called with them, as float64, by a later `settle`.
    """
    vector = torch.stack([value.detach().reshape(()).double() for value in values])
    _in_flight.append(Transfer(vector, tell))


def settle(*, wait: bool) -> None:
    """Tell what has arrived.

    Args:
        wait: Wait for the rest.
    """
    while _in_flight and (wait or _in_flight[0].has_arrived()):
        _in_flight.popleft().finish()


class DeviceScale:
    """A loss scale and its state on a device.

    Args:
        value: The scale that it starts as.
        device: Where it lives.

    Attributes:
        scale: 0-dim float32; `update` writes it.
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
