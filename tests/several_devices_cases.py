"""Two devices where there is one: parameters of odd and of even size count for different ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apex_mp.engine.devices import DevicePlans
from apex_mp.engine.engine import Engine
from apex_mp.optimizers import FusedAdam


def side_of(param: Tensor) -> torch.device:
    """One of two devices that differ when they are compared, and are the same memory."""
    kind = param.device.type
    return torch.device(kind, 0) if param.numel() % 2 else torch.device(kind)


def spread(optimizer: Any) -> Any:
    """Have an optimizer step as with parameters on several devices; a copy of it does not."""
    engine = optimizer._present_engine()
    engine.plan = DevicePlans(optimizer._public_name, engine.new_plan)
    return optimizer


class UnwaitedPlan(DevicePlans):
    """Steps parameters of any devices, also of one, without telling the host of the outcome."""

    can_run = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]


def step_unwaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fused optimizers step as on a GPU that the host does not wait for."""
    step_all = Engine.step

    def step(engine: Engine, optimizer: Any, *args: Any) -> Any:
        engine.plan = UnwaitedPlan(type(optimizer).__name__, engine.new_plan)
        return step_all(engine, optimizer, *args)

    monkeypatch.setattr(Engine, "step", step)


def count_of_plans(optimizer: FusedAdam) -> int:
    plan = optimizer._engine.plan
    assert isinstance(plan, DevicePlans)
    return len(plan._plans)
