"""What torch.amp.GradScaler's step leaves in .grad: as torch's fused optimizers, the true ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import reference
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    give_grads,
    grad_for,
    make_params,
    make_scaler,
)
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import FP16_Optimizer, FusedAdam, FusedSGD

Make: TypeAlias = Callable[..., Any]


def adam(params: Any, **options: Any) -> FusedAdam:
    return FusedAdam(params, **{"lr": 0.01, "weight_decay": 0.1, **options})


def sgd(params: Any, **options: Any) -> FusedSGD:
    return FusedSGD(params, **{"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, **options})


OF_TORCH: dict[Make, Make] = {
    adam: lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    sgd: lambda params: torch.optim.SGD(
        params, lr=0.01, momentum=0.9, weight_decay=0.1, fused=True
    ),
}
each_optimizer = pytest.mark.parametrize("make", OF_TORCH, ids=lambda make: make.__name__)


def scaled_grad(param: Tensor, value: float = 1.0) -> Tensor:
    return torch.full_like(param, 1024.0 * value, requires_grad=False)


def step_in_scaler(
    optimizer: Any, device: torch.device, scale: float = 1024.0, dtype: torch.dtype = F32
) -> None:
    make_scaler(device, dtype, init_scale=scale).step(optimizer)


@pytest.mark.parametrize("scale", [1024.0, 1000.0])
@pytest.mark.parametrize("option", [None, True, False])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
@each_optimizer
def test_the_option_and_the_dtype_decide_which_gradients_are_unscaled(
    make: Make, dtype: torch.dtype, option: bool | None, scale: float, device: torch.device
) -> None:
    params = make_params(device, dtype)
    give_grads(params, 0, factor=512.0)
    expected = [param.grad.clone() for param in params]
    if option or (option is None and dtype != F16):
        expected = [reference.unscaled(grad, 1 / scale, grad) for grad in expected]
    # Another factor for the step than for the gradients.
    step_in_scaler(make(params, unscale_grads=option, max_grad_norm=0.1), device, scale, dtype)
    for param, wanted in zip(params, expected, strict=True):
        assert_same_bits(param.grad, wanted)


@each_optimizer
def test_the_option_may_change_between_steps(make: Make, device: torch.device) -> None:
    params = make_params(device)
    optimizer = make(params)
    for step, option in enumerate([False, True, False]):
        optimizer.unscale_grads = option
        give_grads(params, step, factor=1024.0)
        step_in_scaler(optimizer, device)
        for index, param in enumerate(params):
            grad = grad_for(param, step, index)
            assert_same_bits(param.grad, grad if option else grad * 1024.0)


# --- When nothing is written


def versions(params: list[Parameter]) -> list[int]:
    return [param.grad._version for param in params]


@pytest.mark.cpu_only  # On CUDA the host does not know that the step is skipped.
@pytest.mark.parametrize("skipped", [False, True])
@each_optimizer
def test_a_gradient_that_is_written_has_a_new_version(
    make: Make, skipped: bool, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = make(params)
    give_grads(params, 0, factor=1024.0)
    before = versions(params)
    optimizer.found_inf = torch.tensor(float(skipped), device=device)
    optimizer.grad_scale = torch.tensor(1024.0, device=device)
    optimizer.step()
    assert versions(params) == [version + (not skipped) for version in before]


@each_optimizer
def test_without_grad_scaler_gradients_are_only_read(make: Make, device: torch.device) -> None:
    params = make_params(device)
    give_grads(params, 0)
    before = versions(params)
    optimizer = make(params, unscale_grads=True)
    optimizer.step()
    optimizer.step(grads=[param.grad for param in params], scale=8.0)
    assert versions(params) == before
    halves = make_params(device, BF16)
    outer = FP16_Optimizer(make(halves, unscale_grads=True), verbose=False)
    give_grads(halves, 0)
    before = versions(halves)
    outer.step()
    assert versions(halves) == before


# --- Gradients that lie in a peculiar way


@each_optimizer
def test_a_shared_gradient_is_unscaled_once(make: Make, device: torch.device) -> None:
    # torch's optimizers unscale it twice, and step the second parameter with that.
    params = [Parameter(torch.ones(6, device=device)) for _ in range(3)]
    grad = scaled_grad(params[0])
    for param in params:
        param.grad = grad
    alone = Parameter(params[0].detach().clone())
    alone.grad = scaled_grad(alone)
    step_in_scaler(make(params), device)
    step_in_scaler(make([alone]), device)
    assert grad.tolist() == [1.0] * 6
    for param in params:
        assert_same_bits(param.detach(), alone.detach())


@each_optimizer
def test_gradients_that_overlap_otherwise_are_refused(make: Make, device: torch.device) -> None:
    params = [Parameter(torch.ones(4, device=device)) for _ in range(2)]
    bucket = scaled_grad(torch.empty(6, device=device))
    params[0].grad, params[1].grad = bucket[:4], bucket[2:]
    with pytest.raises(RuntimeError, match="two gradients overlap in memory without being the sam"):
        step_in_scaler(make(params), device)
    assert bucket.tolist() == [1024.0] * 6
    assert all(param.tolist() == [1.0] * 4 for param in params)
    step_in_scaler(make(params, unscale_grads=False), device)
    assert all(max(param.tolist()) < 1.0 for param in params)


@each_optimizer
def test_a_gradient_in_another_order_is_unscaled_where_it_lies(
    make: Make, device: torch.device
) -> None:
    params = [Parameter(torch.ones(3, 4, device=device)) for _ in range(2)]
    values = 1024.0 * torch.arange(12.0, device=device).view(3, 4)
    params[0].grad = values.t().contiguous().t()
    params[1].grad = values.clone()
    wanted = values / 1024.0
    lying = params[0].grad
    step_in_scaler(make(params), device)
    assert params[0].grad is lying
    assert lying.stride() == (1, 3)
    assert_same_bits(lying.contiguous(), wanted)
    assert_same_bits(params[0].detach(), params[1].detach())


@each_optimizer
def test_an_expanded_gradient_is_refused_before_anything_is_changed(
    make: Make, device: torch.device
) -> None:
    first, second = (Parameter(torch.ones(2, 3, device=device)) for _ in range(2))
    optimizer = make([first, second])
    first.grad, second.grad = scaled_grad(first), scaled_grad(second)[:1, :1].expand(2, 3)
    optimizer.grad_scale = torch.full((), 1024.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    with pytest.raises(RuntimeError, match=r"strides \[3, 0\]|strides \[0, 0\].*clone\(\) it"):
        optimizer.step()
    assert_same_bits(first.detach(), torch.ones_like(first))
    assert_same_bits(first.grad, scaled_grad(first))
    second.grad = second.grad[:1, :1].clone().expand(2, 3).contiguous()
    optimizer.step()
    assert_same_bits(second.detach(), first.detach())


@each_optimizer
def test_a_copy_has_the_option_and_a_checkpoint_does_not(make: Make, device: torch.device) -> None:
    optimizer = make(make_params(device), unscale_grads=False)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.unscale_grads is False
    assert all("unscale_grads" not in group for group in optimizer.state_dict()["param_groups"])
    old = optimizer.__getstate__()
    del old["unscale_grads"]  # as it was pickled before there was the option
    other = type(optimizer).__new__(type(optimizer))
    other.__setstate__(old)
    assert other.unscale_grads is None
