"""Two devices where there is one: parameters of odd and of even size count for different ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apex_mp.optimizers import FusedAdam
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.optimizers._several_devices import SeveralDevices


def side_of(param: Tensor) -> torch.device:
    """One of two devices that differ when they are compared, and are the same memory."""
    kind = param.device.type
    return torch.device(kind, 0) if param.numel() % 2 else torch.device(kind)


def spread(optimizer: Any) -> Any:
    """Have an optimizer step as with parameters on several devices; a copy of it does not."""
    optimizer._plan = SeveralDevices(optimizer._public_name, optimizer._new_plan)
    return optimizer


class UnwaitedPlan(SeveralDevices):
    """Steps parameters of any devices, also of one, without telling the host of the outcome."""

    can_run = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]


def step_unwaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fused optimizers step as on a GPU that the host does not wait for."""
    step_by_plan = FusedOptimizer._step_by_plan

    def step(optimizer: Any, scaled_step: Any) -> Any:
        optimizer._plan = UnwaitedPlan(optimizer._public_name, optimizer._new_plan)
        return step_by_plan(optimizer, scaled_step)

    monkeypatch.setattr(FusedOptimizer, "_step_by_plan", step)


def count_of_plans(optimizer: FusedAdam) -> int:
    assert isinstance(optimizer._plan, SeveralDevices)
    return len(optimizer._plan._plans)
