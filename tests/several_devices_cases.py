"""Two devices where there is one: parameters of odd and of even size count for different ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex_mp.optimizers import FusedAdam
from apex_mp.optimizers._several_devices import SeveralDevices


def side_of(param: Tensor) -> torch.device:
    """One of two devices that differ when they are compared, and are the same memory."""
    kind = param.device.type
    return torch.device(kind, 0) if param.numel() % 2 else torch.device(kind)


def spread(optimizer: Any) -> Any:
    """Have an optimizer step as with parameters on several devices; a copy of it does not."""
    optimizer._plan = SeveralDevices(optimizer._public_name, optimizer._new_plan)
    return optimizer


def count_of_plans(optimizer: FusedAdam) -> int:
    assert isinstance(optimizer._plan, SeveralDevices)
    return len(optimizer._plan._plans)
