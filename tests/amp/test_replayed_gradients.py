"""Gradients that a replay of a CUDA graph writes: their memory changes, their versions do not."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.core import readback
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedSGD

pytestmark = pytest.mark.cpu_only
F16, SCALE = torch.float16, 1024.0


def replay(param: Tensor, value: float) -> None:
    """Write a gradient as a kernel of a replayed graph does."""
    assert param.grad is not None
    new = torch.full_like(param.grad, value)
    ctypes.memmove(param.grad.data_ptr(), new.data_ptr(), new.nbytes)


def mixed_model() -> tuple[list[Parameter], Any]:
    params = [Parameter(torch.ones(4, dtype=dtype)) for dtype in (F16, torch.float32)]
    inner = FusedSGD(params, lr=0.1)
    args = {"init_scale": SCALE}
    return params, FP16_Optimizer(
        inner, dynamic_loss_scale=True, dynamic_loss_args=args, verbose=False
    )


def loss_of(params: list[Parameter]) -> Tensor:
    return sum((param.float().sum() for param in params), torch.zeros(()))


def test_fp16_optimizer_refuses_gradients_of_float32_parameters_that_may_be_scaled() -> None:
    params, optimizer = mixed_model()
    optimizer.backward(loss_of(params))
    optimizer.step()
    before = [param.tolist() for param in params]
    for param in params:
        replay(param, SCALE)
    with pytest.raises(RuntimeError, match=r"step: no gradients have come since the last step"):
        optimizer.step()
    assert [param.tolist() for param in params] == before


def test_fp16_optimizer_steps_after_replays_of_its_own_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, optimizer = mixed_model()
    with monkeypatch.context() as patch:
        patch.setattr(readback, "is_capturing", lambda: True)
        optimizer.backward(loss_of(params))
    for _ in range(3):
        for param, scale in zip(params, (SCALE, 1.0), strict=True):
            replay(param, scale)  # backward has unscaled those of float32.
        optimizer.step()
    torch.testing.assert_close(params[1].detach(), torch.full((4,), 0.7))
    torch.testing.assert_close(params[0].float(), params[1], rtol=1e-3, atol=0)


def test_a_clip_keeps_the_scale_by_whose_address_the_step_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = Parameter(torch.ones(4))
    optimizer = FusedSGD([weight], lr=0.1)
    scaler = amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(weight.sum()).backward()
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    scales = []
    check = optimizer.check_gradients

    def noted(step: Any) -> Any:
        scales.append(weakref.ref(step.scale))
        return check(step)

    monkeypatch.setattr(optimizer, "check_gradients", noted)
    scaler.clip_grad_norm_(optimizer, 1.0)
    gc.collect()
    assert scales[0]() is not None
    scaler.step(optimizer)
    scaler.update()
    gc.collect()
    assert scales[0]() is None
