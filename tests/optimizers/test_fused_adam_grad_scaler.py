"""FusedAdam inside torch.amp.GradScaler: unscaling, skipping, and what torch allows beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    BF16,
    F16,
    Optimizer,
    Unchanged,
    assert_same_state,
    assert_same_trajectory,
    copies_of,
    give_grads,
    make_params,
)
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdam

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
OVERFLOWS = {0, 5, 6, 17, 30}


def make_scaler(device: torch.device, **options: Any) -> torch.amp.GradScaler:
    options = {"init_scale": 2.0**10, "growth_interval": 4, **options}
    scaler = torch.amp.GradScaler(device.type, **options)
    scaler.scale(torch.zeros((), device=device))  # makes the scale, as the first loss does
    return scaler


def scaled_step(
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    params: list[Parameter],
    step: int,
    *,
    bad: float | None = None,
    unscale: bool = False,
    max_norm: float = 0.0,
) -> float:
    """Take a step with scaled gradients, one of them `bad`, and return the next scale."""
    give_grads(params, step, factor=scaler.get_scale(), values=BF16)
    if bad is not None:
        params[-1].grad.view(-1)[-1] = bad
    if unscale:
        scaler.unscale_(optimizer)
    if max_norm:
        torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_trajectory_is_that_of_torch_under_the_same_overflows(
    bad: float, device: torch.device
) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer = FusedAdam(params, **OPTIONS)
    expected = torch.optim.AdamW(expected_params, fused=True, **OPTIONS)
    scaler, expected_scaler = make_scaler(device), make_scaler(device)
    scales = []
    for step in range(40):
        now = bad if step in OVERFLOWS else None
        scale = scaled_step(scaler, optimizer, params, step, bad=now)
        assert scale == scaled_step(expected_scaler, expected, expected_params, step, bad=now)
        scales.append(scale)
    assert_same_trajectory(optimizer, params, expected, expected_params)
    assert int(optimizer.state[params[0]]["step"]) == 40 - len(OVERFLOWS)
    assert min(scales) < 2.0**10 < max(scales)  # it both backed off and grew


@pytest.mark.cpu_only  # On CUDA the host does not know that the step is skipped.
def test_a_skipped_step_does_not_invalidate_a_graph(device: torch.device) -> None:
    # Nothing was written, so backward through the old weights is right.
    param = Parameter(torch.ones(3, device=device))
    optimizer, scaler = FusedAdam([param]), make_scaler(device)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    param.grad.fill_(math.inf)
    scaler.step(optimizer)
    param.grad = None
    loss.backward()
    assert param.grad.tolist() == [2.0] * 3


# --- unscale_


def test_torch_refuses_to_unscale_float16_gradients_and_the_step_still_works(
    device: torch.device,
) -> None:
    params = make_params(device, F16)
    expected_params = copies_of(params)
    optimizer, expected = FusedAdam(params), FusedAdam(expected_params)
    give_grads(params, 0, factor=1024.0)
    with (
        Unchanged(optimizer),
        pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"),
    ):
        make_scaler(device).unscale_(optimizer)
    make_scaler(device).step(optimizer)
    give_grads(expected_params, 0)
    expected.step()
    assert_same_state(optimizer, expected)


# --- Round about


def test_grads_of_ones_own_are_refused_because_nobody_has_checked_them(
    device: torch.device,
) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    give_grads(params, 0)
    bad = [torch.full_like(p, math.inf) for p in params]
    with Unchanged(optimizer), pytest.raises(ValueError, match="grads was given inside GradScaler"):
        make_scaler(device).step(optimizer, grads=bad)
