"""GradScaler beside what is around a step: hooks, wrappers, and edits between clip and step."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedSGD

SCALE, INF = 8.0, math.inf
TORCH_FUSED = functools.partial(torch.optim.SGD, fused=True)


def run(
    make: Any, of_torch: bool, device: torch.device, between: Callable[[Any, Any], Any], **how: Any
) -> tuple[list[float], float]:
    """Step with gradients of 3 and 4, clipped to 1; return weights and the next scale."""
    params = [Parameter(torch.zeros(1, device=device)) for _ in range(2)]
    optimizer = make(params, lr=1.0)
    cls: Any = torch.amp.GradScaler if of_torch else GradScaler
    scaler = cls(device.type, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=device))
    for param, grad in zip(params, how.get("grads", (3.0, 4.0)), strict=True):
        param.grad = torch.full_like(param, grad * SCALE)
    if how.get("clip", True) and of_torch:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    elif how.get("clip", True):
        scaler.clip_grad_norm_(optimizer, 1.0)
    between(optimizer, params)
    with contextlib.suppress(ZeroDivisionError):
        scaler.step(optimizer)
    scaler.update()
    left = {"scaled_step", "grad_scale", "found_inf"} & vars(optimizer).keys()
    assert of_torch or not left
    return [param.item() for param in params], scaler.get_scale()


def drop_one(optimizer: Any, params: Any) -> None:
    params[1].grad = None


def edit_in_a_hook(optimizer: Any, params: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: params[0].grad.mul_(10.0) and None)


def raise_before(optimizer: Any, params: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)


def raise_after(optimizer: Any, params: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: 1 / 0)


def leave_out(optimizer: Any, params: Any) -> None:
    optimizer.step = functools.wraps(optimizer.step)(lambda *_, **__: None)


def call_it(optimizer: Any, params: Any) -> None:
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)  # As accelerate does.


def scale_more(optimizer: Any, params: Any) -> None:
    optimizer.grad_scale = torch.tensor(4.0, device=params[0].device)


def nothing(optimizer: Any, params: Any) -> None:
    pass


@pytest.mark.parametrize("make", [FusedSGD, TORCH_FUSED], ids=["FusedSGD", "SGD fused"])
@pytest.mark.parametrize(
    ("between", "how"),
    [
        (nothing, {}),
        (nothing, {"grads": (3.0, INF)}),
        (nothing, {"grads": (1e30, 1e30), "clip": False}),
        (drop_one, {}),
        (drop_one, {"grads": (3.0, INF)}),
        (edit_in_a_hook, {}),
        *((each, {"clip": clip}) for each in (raise_before, raise_after) for clip in (0, 1)),
        (raise_before, {"grads": (3.0, INF), "clip": False}),
        *((call_it, {"grads": (3.0, bad)}) for bad in (4.0, INF)),
        (leave_out, {"clip": False}),
        (leave_out, {"grads": (3.0, INF), "clip": False}),
        (scale_more, {"clip": False}),
    ],
)
def test_it_does_what_torch_does(
    between: Any, how: dict[str, Any], make: Any, device: torch.device
) -> None:
    ours = run(make, False, device, between, **how)
    theirs = run(TORCH_FUSED, True, device, between, **how)
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]))
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("elements", [0, 100, 5000])
def test_a_gradient_that_is_gone_is_not_taken_for_another_at_its_address(
    elements: int, device: torch.device
) -> None:
    param, other = (Parameter(torch.zeros(max(n, 1), device=device)) for n in (elements, 1))
    optimizer = FusedSGD([param], lr=1.0)
    scaler = GradScaler(device.type, init_scale=SCALE)
    for number in range(60):
        for value in (1.0, 1000.0):
            optimizer.zero_grad()
            scaler.scale((param * value).sum() + other.sum()).backward()
            if value == 1.0:
                scaler.clip_grad_norm_(optimizer, 1.0)
                if number % 2:
                    scaler.update()  # The step is left out.
        if number % 2 == 0:
            with pytest.raises(RuntimeError, match="were written or replaced after"):
                scaler.step(optimizer)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()


def test_an_object_that_returns_the_step_of_another_is_refused(device: torch.device) -> None:
    class Around:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    param = Parameter(torch.zeros(2, device=device))
    param.grad = torch.ones_like(param)
    scaler = GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    outside: Any = Around(FusedSGD([param], lr=1.0))
    with pytest.raises(TypeError, match="step of this Around is that of the FusedSGD inside"):
        scaler.step(outside)
    assert not param.any()


def test_an_update_after_another_step_is_refused_where_its_flag_is_lost(
    device: torch.device,
) -> None:
    param = Parameter(torch.zeros(2, device=device))
    optimizer, scaler = FusedSGD([param], lr=1.0), GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    param.grad = torch.full_like(param, INF)
    scaler.step(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="FusedSGD was stepped again after"):
        scaler.update()


def test_a_copy_of_an_optimizer_between_clip_and_step_steps_by_itself(
    device: torch.device,
) -> None:
    param = Parameter(torch.zeros(1, device=device))
    optimizer, scaler = FusedSGD([param], lr=1.0), GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=device))
    param.grad = torch.full_like(param, 4.0 * SCALE)
    scaler.clip_grad_norm_(optimizer, 1.0)
    twin = copy.deepcopy(optimizer)
    scaler.step(optimizer)
    assert param.item() == pytest.approx(-1.0, rel=1e-6)
    (copied,) = twin.param_groups[0]["params"]
    copied.grad = torch.ones_like(copied)
    twin.step()
    assert copied.item() == -1.0
