"""FusedAdam inside torch.amp.GradScaler: unscaling, skipping, and what torch allows beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    NAMES,
    Optimizer,
    Unchanged,
    assert_same_state,
    assert_same_trajectory,
    copies_of,
    give_grads,
    make_params,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
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


@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=NAMES.get)
def test_low_precision_gradients_are_unscaled_in_the_step(
    dtype: torch.dtype, masters: bool, device: torch.device
) -> None:
    # GradScaler itself refuses float16 gradients only in unscale_.
    params = make_params(device, dtype)
    expected_params = copies_of(params)
    optimizer = FusedAdam(params, master_weights=masters, **OPTIONS)
    expected = FusedAdam(expected_params, master_weights=masters, **OPTIONS)
    scaler = make_scaler(device)
    for step in range(40):
        overflow = step in OVERFLOWS
        scaled_step(scaler, optimizer, params, step, bad=math.inf if overflow else None)
        if not overflow:
            give_grads(expected_params, step, values=BF16)
            expected.step()
    assert_same_state(optimizer, expected)


def test_gradients_too_small_for_float16_train_with_a_scale(device: torch.device) -> None:
    # The true gradient is 2**-26, a quarter of float16's least number.
    param = Parameter(torch.zeros(4, dtype=F16, device=device))
    optimizer = FusedAdam([param], lr=2.0**-7, eps=0.0)
    scaler = make_scaler(device, init_scale=2.0**16)
    (param.grad,) = torch.autograd.grad(scaler.scale(param.float().sum() * 2.0**-26), [param])
    assert param.grad.dtype == F16
    scaler.step(optimizer)
    assert param.tolist() == [-(2.0**-7)] * 4
    assert_same_bits(
        optimizer.state[param]["exp_avg"], torch.full((4,), 0.1 * 2.0**-26, device=device)
    )


@pytest.mark.parametrize("started", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_an_overflow_leaves_parameters_moments_and_step_counts_untouched(
    max_grad_norm: float, unscale: bool, started: bool, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = FusedAdam(
        [{"params": params[:4]}, {"params": params[4:]}], max_grad_norm=max_grad_norm, **OPTIONS
    )
    scaler = make_scaler(device)
    if started:
        scaled_step(scaler, optimizer, params, 0, unscale=unscale)
        with Unchanged(optimizer):
            scaled_step(scaler, optimizer, params, 1, bad=math.inf, unscale=unscale)
    else:
        before = copies_of(params)
        scaled_step(scaler, optimizer, params, 0, bad=math.inf, unscale=unscale)
        for param, wanted in zip(params, before, strict=True):
            assert_same_bits(param.detach(), wanted.detach())
            # As torch's fused optimizers, it has made the state.
            assert all(float(value.abs().sum()) == 0 for value in optimizer.state[param].values())
    assert scaler.get_scale() == 2.0**9


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


def test_unscale_clip_and_step_are_those_of_torch(device: torch.device) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer = FusedAdam(params, eps=0.1, **OPTIONS)
    expected = torch.optim.AdamW(expected_params, fused=True, eps=0.1, **OPTIONS)
    scaler, expected_scaler = make_scaler(device), make_scaler(device)
    for step in range(40):
        how: dict[str, Any] = {"unscale": True, "max_norm": 2.0}
        how["bad"] = math.nan if step in OVERFLOWS else None
        scaled_step(scaler, optimizer, params, step, **how)
        scaled_step(expected_scaler, expected, expected_params, step, **how)
    assert_same_trajectory(optimizer, params, expected, expected_params)


def test_clipping_inside_the_step_needs_no_unscale(device: torch.device) -> None:
    limit = 2.0
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer = FusedAdam(params, eps=0.1, max_grad_norm=limit, **OPTIONS)
    expected = torch.optim.AdamW(expected_params, fused=True, eps=0.1, **OPTIONS)
    scaler, expected_scaler = make_scaler(device), make_scaler(device)
    for step in range(40):
        bad = math.inf if step in OVERFLOWS else None
        scaled_step(scaler, optimizer, params, step, bad=bad)
        scaled_step(
            expected_scaler, expected, expected_params, step, bad=bad, unscale=True, max_norm=limit
        )
    assert_same_trajectory(optimizer, params, expected, expected_params)


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


def test_the_legacy_scale_multiplies_that_of_grad_scaler(device: torch.device) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    outputs = [torch.zeros_like(p, dtype=F16) for p in params]
    optimizer, expected = FusedAdam(params), FusedAdam(expected_params)
    scaler = make_scaler(device)
    give_grads(params, 0, factor=1024.0 * 8.0)
    scaler.step(optimizer, scale=8.0, output_params=outputs)
    give_grads(expected_params, 0)
    expected.step()
    assert_same_state(optimizer, expected)
    for output, param in zip(outputs, params, strict=True):
        assert_same_bits(output, param.detach().half())


def test_grads_of_ones_own_are_refused_because_nobody_has_checked_them(
    device: torch.device,
) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    give_grads(params, 0)
    bad = [torch.full_like(p, math.inf) for p in params]
    with Unchanged(optimizer), pytest.raises(ValueError, match="grads was given inside GradScaler"):
        make_scaler(device).step(optimizer, grads=bad)


def test_a_disabled_scaler_changes_nothing(device: torch.device) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer, expected = FusedAdam(params), FusedAdam(expected_params)
    give_grads(params, 0)
    give_grads(expected_params, 0)
    torch.amp.GradScaler(device.type, enabled=False).step(optimizer)
    expected.step()
    assert_same_state(optimizer, expected)


def test_a_step_without_gradients_does_nothing(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    with Unchanged(optimizer):
        make_scaler(device).step(optimizer)


def test_a_float16_model_trains_under_autocast_and_scaler(device: torch.device) -> None:
    inputs, targets = torch.randn(64, 8, device=device), torch.randn(64, 1, device=device)
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.03)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**30)
    losses, skipped = [], 0
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast(device.type, F16):
            loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(loss.item())
    assert skipped > 0  # 2**30 is too much for float16
    assert int(optimizer.state[model.weight]["step"]) == 60 - skipped
    # Least squares, in closed form.
    ones = torch.ones(64, 1, device=device)
    design = torch.cat([inputs, ones], 1).double()
    best = torch.linalg.lstsq(design.cpu(), targets.double().cpu())
    least = ((design.cpu() @ best.solution - targets.double().cpu()) ** 2).mean().item()
    assert losses[-1] - least < 0.1 * (losses[0] - least)


def test_the_scaled_norm_is_not_rounded_to_float16(device: torch.device) -> None:
    params = make_params(device, F16, [(6,)])
    expected_params = copies_of(params, F32)
    optimizer = FusedAdam(params, max_grad_norm=0.1, eps=0.1, master_weights=True)
    expected = FusedAdam(expected_params, max_grad_norm=0.1, eps=0.1)
    give_grads(params, 0, factor=2.0**14)  # its norm is over 65504
    give_grads(expected_params, 0)
    assert params[0].grad.isfinite().all()
    make_scaler(device, init_scale=2.0**14).step(optimizer)
    expected.step()
    master = optimizer.state[params[0]]["master_param"]
    assert_near(master, expected_params[0].detach(), TRAJECTORY_TOLERANCES[F32])


def test_a_step_without_a_scaler_is_taken_after_one_that_a_scaler_skipped(
    device: torch.device,
) -> None:
    param = Parameter(torch.ones(4, device=device))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param])
    optimizer.step()
    # As GradScaler sets it around its call; kept, so that it still says 1 afterwards.
    found_inf = torch.ones((), device=device)
    optimizer.found_inf = found_inf
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param, before)
    del optimizer.found_inf
    optimizer.step()
    assert not torch.equal(param, before)
    assert found_inf.item() == 1.0
