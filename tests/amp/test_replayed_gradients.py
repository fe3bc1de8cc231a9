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


@pytest.mark.parametrize("leaves_out", [False, True])
def test_grad_scaler_clips_and_steps_as_without_a_graph(
    leaves_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for is_replayed in (False, True):
        weight = Parameter(torch.ones(4, dtype=F16))
        optimizer = FusedSGD([weight], lr=0.1, master_weights=True)
        scaler = amp.GradScaler("cpu", init_scale=SCALE)
        for number, factor in enumerate((1.0, float("inf"), 1.0, 0.25)):
            if number == 0 or not is_replayed:
                optimizer.zero_grad()
                with monkeypatch.context() as patch:
                    patch.setattr(readback, "is_capturing", [bool, lambda: True][is_replayed])
                    scaler.scale((weight.float() * factor).sum()).backward()
            else:
                replay(weight, factor * scaler.get_scale())
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            if leaves_out and not norm.isfinite():
                scaler.update(scaler.get_scale())
                continue
            scaler.step(optimizer)
            scaler.update()
        weights.append(weight.tolist())
    assert weights[0] == weights[1]
    assert weights[0][0] < 0.93


def test_a_replay_writes_gradients_of_the_present_scale_over_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [FusedSGD([param], lr=0.1) for param in params]
    scaler = amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)
    with monkeypatch.context() as patch:
        patch.setattr(readback, "is_capturing", lambda: True)
        scaler.scale(loss_of(params)).backward()
    for steps_both in (True, False, True):
        for param in params:
            replay(param, scaler.get_scale())
        for optimizer in optimizers if steps_both else optimizers[:1]:
            scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(params[0].detach(), torch.full((4,), 0.7))
    torch.testing.assert_close(params[1].detach(), torch.full((4,), 0.8))


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
