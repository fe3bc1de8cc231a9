"""GradScaler around a fused optimizer: how much it launches on a device."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import on_cuda_kernels
import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam, FusedSGD

SHIM = on_cuda_kernels.SHIM


class Kernels(TorchDispatchMode):
    """Counts what runs kernels on a device: those of csrc/cuda, and torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view launches nothing; the scale goes to the host by a copy.
        if (
            func.namespace == "aten"
            and not func.is_view
            and func is not torch.ops.aten.clone.default
        ):
            self.of_torch[str(func)] += 1
        return result


def launches_of(work: Callable[[], Any]) -> int:
    """Return how many kernels of csrc/cuda are launched."""
    SHIM.cuda_on_cpu_capture(True)
    try:
        work()
    finally:
        SHIM.cuda_on_cpu_capture(False)
    return int(SHIM.cuda_on_cpu_replay())


@pytest.mark.parametrize("make", [FusedAdam, lambda params: FusedSGD(params, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_is_two_launches_and_one_for_the_scale(make: Any, clip: bool) -> None:
    params = [Parameter(torch.randn(50)) for _ in range(300)]
    optimizer, scaler = make(params), GradScaler("cpu", init_scale=8.0)

    def iteration() -> None:
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        for param in params:
            param.grad = torch.randn(50)
        scaler.scale(torch.ones(()))
        with Kernels() as kernels:
            iteration()
    assert kernels.of_torch == ({"aten._to_copy.default": 1} if clip else {})  # the norm, float32
    assert launches_of(iteration) == 3
