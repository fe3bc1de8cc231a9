"""A check of gradients before their step: the step is that which checks and clips by itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import passes_over
from fused_adam_cases import assert_same_state
from plan_cases import params_of
from several_devices_cases import side_of, spread
from torch import Tensor
from torch.nn import Parameter

from apex_mp.engine import devices as engine_devices
from apex_mp.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex_mp.step.scaled_step import GradCheck, ScaledStep, take

SHAPES = ((5,), (40, 30), (), (6,), (7, 2))
MAKE: dict[str, Any] = {
    "FusedAdam": FusedAdam,
    "FusedSGD": lambda params, **options: FusedSGD(params, lr=0.1, momentum=0.9, **options),
    "FusedLAMB": FusedLAMB,
}
each_optimizer = pytest.mark.parametrize("make", MAKE.values(), ids=[*MAKE])


def give(optimizer: Any, step: int, bad: float | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params_of(optimizer):
        param.grad = torch.randn(param.shape, generator=generator).to(param) * 64.0
    if bad is not None:
        params_of(optimizer)[1].grad[3, 3] = bad


def trained(make: Any, device: torch.device, steps: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return two optimizers after the same steps, with gradients."""
    optimizers = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(7)
        params = [Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES]
        groups = [{"params": params[:2]}, {"params": params[2:], "max_grad_norm": 0.3}]
        optimizers.append(make(groups, **options))
        for step in range(steps):
            give(optimizers[-1], step)
            optimizers[-1].step()
        give(optimizers[-1], steps)
    return optimizers[0], optimizers[1]


def scaled_step(scale: Any = 64.0, clip_to: float = 0.5, **options: Any) -> ScaledStep:
    return ScaledStep(scale=scale, check=True, clip_to=clip_to, **options)


def norm_of(optimizer: Any) -> float:
    return math.hypot(*(param.grad.double().norm().item() for param in params_of(optimizer)))


def check_and_step(
    optimizer: Any, between: Callable[[Any], Any] = lambda _: None, **options: Any
) -> GradCheck:
    found = optimizer.check_gradients(scaled_step(**options))
    found = GradCheck(found.found_inf.clone(), found.norm.clone(), found.dtypes)
    between(optimizer)
    take(optimizer, scaled_step(**options))
    return found


@each_optimizer
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.4])
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later"])
@pytest.mark.parametrize("clip_to", [0.5, 1e6, 0.0])
def test_a_step_after_a_check_is_that_which_checks(
    make: Any, max_grad_norm: float, steps: int, clip_to: float, device: torch.device
) -> None:
    optimizer, twin = trained(make, device, steps, max_grad_norm=max_grad_norm)
    found = check_and_step(optimizer, clip_to=clip_to)
    take(twin, scaled_step(clip_to=clip_to))
    assert_same_state(optimizer, twin)
    assert found.norm.item() == pytest.approx(norm_of(twin) / 64.0, rel=1e-7)
    assert found.found_inf.item() == 0.0
    assert [*found.dtypes] == [torch.float32]


@each_optimizer
def test_clipping_is_that_of_torch(make: Any, device: torch.device) -> None:
    optimizer, twin = trained(make, device)
    check_and_step(optimizer)
    for param in params_of(twin):
        param.grad /= 64.0
    torch.nn.utils.clip_grad_norm_(params_of(twin), 0.5)
    twin.step()
    for ours, theirs in zip(params_of(optimizer), params_of(twin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@each_optimizer
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "later"])
def test_a_check_that_finds_inf_changes_nothing(
    make: Any, bad: float, steps: int, device: torch.device
) -> None:
    optimizer, twin = trained(make, device, steps)
    give(optimizer, 5, bad)
    found = check_and_step(optimizer)
    assert found.found_inf.item() != 0.0
    for param, before in zip(params_of(optimizer), params_of(twin), strict=True):
        torch.testing.assert_close(param, before, rtol=0, atol=0)
    assert_same_state(optimizer, twin)


def test_a_check_makes_no_state(device: torch.device) -> None:
    optimizer, _ = trained(FusedAdam, device, 0, master_weights=True)
    optimizer.check_gradients(scaled_step())
    assert not optimizer.state


# --- What changes between the check and the step counts in the step.


def set_lr(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 3.0


def set_max_norm(optimizer: Any) -> None:
    optimizer.param_groups[1]["max_grad_norm"] = 0.01


def write_a_gradient(optimizer: Any) -> None:
    params_of(optimizer)[1].grad.mul_(0.5)


def replace_a_gradient(optimizer: Any) -> None:
    param = params_of(optimizer)[1]
    param.grad = param.grad * 2.0


def drop_a_gradient(optimizer: Any) -> None:
    params_of(optimizer)[0].grad = None


def overflow(optimizer: Any) -> None:
    params_of(optimizer)[1].grad[0, 0] = math.inf


def write_a_weight(optimizer: Any) -> None:
    with torch.no_grad():
        params_of(optimizer)[1].mul_(0.5)


def move_the_state(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value * 2.0


def add_a_group(optimizer: Any) -> None:
    param = Parameter(torch.ones(3, device=params_of(optimizer)[0].device))
    param.grad = torch.ones_like(param)
    optimizer.add_param_group({"params": [param]})


def check_another_clip(optimizer: Any) -> None:
    optimizer.check_gradients(scaled_step(clip_to=0.1))


def refresh(optimizer: Any) -> None:
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 3.0 * lr
    optimizer.refresh_hyperparameters()
    optimizer.param_groups[0]["lr"] = lr


CHANGES = (
    *(set_lr, set_max_norm, write_a_gradient, replace_a_gradient, drop_a_gradient, overflow),
    *(write_a_weight, move_the_state, add_a_group, check_another_clip, refresh),
)


@each_optimizer
@pytest.mark.parametrize("change", CHANGES, ids=[each.__name__ for each in CHANGES])
@pytest.mark.parametrize("devices", ["one", "several"])
def test_what_changes_in_between_counts(
    make: Any,
    change: Callable[[Any], None],
    devices: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, twin = trained(make, device)
    if devices == "several":
        monkeypatch.setattr(engine_devices, "device_of", side_of)
        spread(optimizer)
        spread(twin)
    check_and_step(optimizer, change)
    change(twin)
    take(twin, scaled_step())
    assert_same_state(optimizer, twin)


def test_a_step_with_another_scale_or_clip_checks_again(device: torch.device) -> None:
    for options in ({"scale": 32.0}, {"clip_to": 0.2}, {"clip_to": None}):
        optimizer, twin = trained(FusedAdam, device)
        optimizer.check_gradients(scaled_step())
        for each in (optimizer, twin):
            take(each, ScaledStep(**{"scale": 64.0, "check": True, "clip_to": 0.5, **options}))
        assert_same_state(optimizer, twin)


def test_a_write_to_a_gradient_of_inference_mode_counts_though_nothing_counts_it(
    device: torch.device,
) -> None:
    optimizer, twin = trained(FusedAdam, device)
    for each in (optimizer, twin):
        with torch.inference_mode():
            grads = [param.grad * 1.0 for param in params_of(each)]
        for param, grad in zip(params_of(each), grads, strict=True):
            param.grad = grad
    optimizer.check_gradients(scaled_step())
    for each in (optimizer, twin):
        with torch.inference_mode():
            params_of(each)[0].grad.mul_(2.0)
        take(each, scaled_step())
    assert_same_state(optimizer, twin)


def test_an_error_between_the_two_leaves_no_check_behind(device: torch.device) -> None:
    optimizer, twin = trained(FusedAdam, device)
    optimizer.check_gradients(scaled_step())
    for each in (optimizer, twin):
        lr, each.param_groups[0]["lr"] = each.param_groups[0]["lr"], -1.0
        with contextlib.suppress(ValueError):
            take(each, scaled_step())
        each.param_groups[0]["lr"] = lr
        take(each, scaled_step())
    assert_same_state(optimizer, twin)


@pytest.mark.cpu_only  # the names of passes
@each_optimizer
def test_a_step_after_a_check_reads_gradients_once_more(make: Any, device: torch.device) -> None:
    optimizer, _ = trained(make, device)
    with passes_over(1000) as names:
        optimizer.check_gradients(scaled_step())
    assert names == ["apex_mp::check_pass"]
    with passes_over(1000) as names:
        take(optimizer, scaled_step())
    assert "apex_mp::check_pass" not in names
