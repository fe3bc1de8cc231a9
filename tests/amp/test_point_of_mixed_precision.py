"""Why anybody does all this: what float16 alone loses, and what scale and masters keep."""

import pytest
import torch
from fp16_cases import F16, parameter, pull
from torch import Tensor

from apex_mp import fp16_utils, optimizers
from apex_mp.optimizers import FusedAdam

# The gradients by a and b start near 2**-26 (|b|, |a| are 1 and below): under 2**-25, half of
# float16's smallest denormal, they round to zero.
TINY = 2.0**-26
TARGET = 0.25


def tiny_gradient_loss(a: Tensor, b: Tensor) -> Tensor:
    product = (a * b).float()
    return TINY * 0.5 * (product - TARGET).square().mean() * product.numel()


def distance(a: Tensor, b: Tensor) -> float:
    return float(((a * b).detach().float() - TARGET).abs().max())


def train_tiny_gradients(optimizer: str, device: torch.device, **scaling: object) -> float:
    a = parameter(torch.full((8,), 1.0), F16, device)
    b = parameter(torch.full((8,), 0.75), F16, device)
    if optimizer == "sgd":
        inner: torch.optim.Optimizer = torch.optim.SGD([a, b], lr=0.25 / TINY)
        outer = fp16_utils.FP16_Optimizer(inner, verbose=False, **scaling)
    else:
        inner = FusedAdam([a, b], lr=0.02, eps=1e-14)
        outer = optimizers.FP16_Optimizer(inner, verbose=False, **scaling)
    for _ in range(120):
        outer.zero_grad()
        outer.backward(tiny_gradient_loss(a, b))
        outer.step()
    return distance(a, b)


def test_the_gradients_of_the_problem_lie_below_the_smallest_float16() -> None:
    a = torch.full((8,), 1.0, dtype=torch.float64, requires_grad=True)
    b = torch.full((8,), 0.75, dtype=torch.float64, requires_grad=True)
    product = a * b
    (TINY * 0.5 * (product - TARGET).square().sum()).backward()
    for grad in (a.grad, b.grad):
        assert grad is not None
        assert 0 < float(grad.abs().max()) < 2.0**-25 < 2.0**-24
        assert float(grad.to(F16).abs().max()) == 0.0


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_tiny_gradients_do_not_train_in_unscaled_float16(
    optimizer: str, device: torch.device
) -> None:
    assert train_tiny_gradients(optimizer, device, static_loss_scale=1.0) == 0.5


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"static_loss_scale": 2.0**16},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**16}},
        # From 1 it has to grow first, from 2**60 to back off.
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1.0, "scale_window": 2}},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**60}},
    ],
    ids=["static", "dynamic", "dynamic from 1", "dynamic from 2**60"],
)
def test_tiny_gradients_train_with_a_loss_scale(
    optimizer: str, scaling: dict[str, object], device: torch.device
) -> None:
    assert train_tiny_gradients(optimizer, device, **scaling) < 0.01


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_updates_below_half_an_ulp_add_up_in_the_master(
    optimizer: str, device: torch.device
) -> None:
    # Near 1 the ulp below is 2**-11: steps of 2**-13 round back to 1 in float16.
    step, steps = 2.0**-13, 64
    weight = parameter(torch.full((8,), 1.0), F16, device)
    if optimizer == "sgd":
        inner: torch.optim.Optimizer = torch.optim.SGD([weight], lr=step)
    else:
        inner = FusedAdam([weight], lr=step, eps=0.0)  # A constant gradient: steps of lr.
    outer = fp16_utils.FP16_Optimizer(inner, static_loss_scale=128.0, verbose=False)
    for index in range(steps):
        outer.zero_grad()
        outer.backward(pull((weight, 1.0)))
        outer.step()
        if index == 0:
            assert bool((weight == 1.0).all())  # Not seen in the model yet,
            assert bool((outer.fp32_groups_flat[0] < 1.0).all())  # but not lost.
    expected = torch.full((8,), 1.0 - steps * step)
    torch.testing.assert_close(outer.fp32_groups_flat[0].cpu(), expected, rtol=1e-6, atol=0.0)
    assert torch.equal(weight.detach().cpu(), expected.half())


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_updates_below_half_an_ulp_are_lost_without_masters(
    optimizer: str, device: torch.device
) -> None:
    weight = parameter(torch.full((8,), 1.0), F16, device)
    inner: torch.optim.Optimizer = (
        torch.optim.SGD([weight], lr=2.0**-13)
        if optimizer == "sgd"
        else FusedAdam([weight], lr=2.0**-13, eps=0.0)
    )
    for _ in range(64):
        weight.grad = torch.ones_like(weight)
        inner.step()
    assert bool((weight == 1.0).all())


def test_the_same_problem_with_ordinary_gradients_trains_unscaled(device: torch.device) -> None:
    a = parameter(torch.full((8,), 1.0), F16, device)
    b = parameter(torch.full((8,), 0.75), F16, device)
    outer = fp16_utils.FP16_Optimizer(torch.optim.SGD([a, b], lr=0.25), verbose=False)
    for _ in range(120):
        outer.zero_grad()
        outer.backward(tiny_gradient_loss(a, b) / TINY)
        outer.step()
    assert distance(a, b) < 0.01
