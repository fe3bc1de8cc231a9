"""Steps that are asked of a fused optimizer as FP16_Optimizer and GradScaler ask for them."""

from __future__ import annotations

from typing import Any

from apex_mp.step.scaled_step import ScaledStep, StepResult, take


def take_step(optimizer: Any, **options: Any) -> StepResult:
    """Take a step with these attributes of `ScaledStep`; return its result."""
    step = ScaledStep(**options)
    take(optimizer, step)
    assert step.result is not None
    return step.result
