"""Steps after scale_loss, with closures and schedulers, and gradients that it leaves scaled."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import F16, INF, assert_grads, pull
from scale_loss_cases import SCALE, PlainSgd, backward, param, sgd
from torch import Tensor, nn
from torch.optim import lr_scheduler

from apex_mp import amp
from apex_mp.amp._scale_loss import block
from apex_mp.optimizers import FusedAdam
from apex_mp.scale.amp_scaler import LossScaler

pytestmark = pytest.mark.usefixtures("amp_off")


# Closures.


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make", [sgd, PlainSgd, FusedAdam], ids=["SGD", "PlainSgd", "FusedAdam"])
def test_a_step_takes_a_closure_before_and_after_an_overflow(
    make: Any, by_name: bool, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = make([weight])
    calls = []

    def closure() -> Any:
        calls.append(weight.item())
        return 7.0

    for value, loss in ((1.0, 7.0), (INF, None), (1.0, 7.0)):
        optimizer.zero_grad()
        backward(handle, pull((weight, value)), optimizer)
        before = weight.item(), len(calls)
        result = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert result == loss
        assert len(calls) == before[1] + (loss is not None)  # Not on a skipped step.
        assert (weight.item() != before[0]) is (loss is not None)


def closure_with_scale_loss(
    handle: Any, optimizer: Any, loss: Callable[[], Tensor], scales: list[float]
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        scales.append(handle._default_scaler.loss_scale())
        with handle.scale_loss(value, optimizer) as scaled_loss:
            scaled_loss.backward()
        return value.detach()

    return closure


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_closure_that_overflows_is_called_with_a_smaller_scale(
    steps_before: int, by_name: bool, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    scales: list[float] = []
    closure = closure_with_scale_loss(
        handle, optimizer, lambda: pull((weight, 2.0**112 + 0.0)), scales
    )
    for _ in range(steps_before):  # In the first step, scale_loss is new to the optimizer.
        backward(handle, pull((weight, 0.0)), optimizer)
        optimizer.step()
    handle._default_scaler._loss_scale = 2.0**18
    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss.item() == 2.0**112
    assert scales == [2.0**18, 2.0**17, 2.0**16, 2.0**15]
    assert weight.tolist() == [-(2.0**111)]
    assert amp.step_was_skipped(optimizer) is False


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_finds_the_minimum_through_overflows(
    line_search: Any, handle: Any, device: torch.device
) -> None:
    weight = param([4.0, -3.0], device)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, line_search_fn=line_search)
    handle._default_scaler._loss_scale = 2.0**127
    handle._default_scaler._unskipped = 0
    scales: list[float] = []
    closure = closure_with_scale_loss(
        handle, optimizer, lambda: (weight - 1.0).square().sum(), scales
    )
    for _ in range(5):
        optimizer.step(closure)
    assert scales[0] == 2.0**127
    assert scales[-1] < 2.0**127
    assert torch.allclose(weight, torch.ones_like(weight), atol=1e-3)
    assert amp.step_was_skipped(optimizer) is False


# Schedulers and introspection.


@pytest.mark.parametrize("first", [INF, 1.0])
@pytest.mark.parametrize("built", ["before", "after", "both"])
def test_schedulers_step_without_a_warning(
    built: str, first: float, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    make = functools.partial(lr_scheduler.StepLR, optimizer, step_size=1, gamma=0.5)
    schedulers = [make()] if built in ("before", "both") else []
    for step, value in enumerate((first, 1.0, INF, 1.0)):
        optimizer.zero_grad()
        backward(handle, pull((weight, value)), optimizer)
        if step == 0 and built in ("after", "both"):
            schedulers.append(make())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # The ini file lets torch's pass.
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 * 0.5 ** (4 * len(schedulers))
    skips = 1 + (first == INF)
    assert handle._default_scaler.loss_scale() == SCALE * 0.5**skips


# Delayed unscaling, which amp.scale_loss offers.


def delayed(scaler: Any, loss: Tensor, optimizer: Any, **delay: bool) -> None:
    with block.scaled_backward(loss, [optimizer], scaler, **delay) as scaled_loss:
        scaled_loss.backward()


def test_sparse_gradients_left_scaled_add_up_even_if_the_scale_changes(
    handle: Any, device: torch.device
) -> None:
    scaler = handle._default_scaler
    layer = nn.Embedding(2, 1, sparse=True, device=device)
    optimizer = torch.optim.SparseAdam(layer.parameters())
    for count, scale in enumerate((8.0, 2.0, 1024.0, 4.0), 1):
        scaler._loss_scale, is_last = scale, scale == 4.0
        loss = layer(torch.tensor([0, 1, 1], device=device)).sum()
        delayed(scaler, loss, optimizer, delay_unscale=not is_last)
        factor = count if is_last else scale * count
        assert layer.weight.grad.to_dense().flatten().tolist() == [factor, 2 * factor]


@pytest.mark.parametrize("step_between", [False, True])
def test_an_overflow_whose_check_is_delayed_skips_one_step_and_lowers_the_scale_later(
    step_between: bool, handle: Any, device: torch.device
) -> None:
    weight, other = param([1.0], device), param([1.0], device)
    optimizer = sgd([weight, other])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, INF)), optimizer, delay_overflow_check=True)
    assert scaler.loss_scale() == SCALE
    if step_between:
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is True
        optimizer.zero_grad()
    delayed(scaler, pull((other, 1.0)), optimizer)
    assert scaler.loss_scale() == SCALE / 2
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is not step_between
    assert_grads([weight, other], 1.0, 0.5 if step_between else 1.0)


@pytest.fixture
def with_master(device: torch.device) -> tuple[nn.Parameter, nn.Parameter, Any]:
    model, master = param([1.0], device, F16), param([1.0], device)
    optimizer = sgd([master])
    optimizer._amp_model_of = {master: model}
    return model, master, optimizer


def test_gradients_of_a_model_with_masters_may_be_left_scaled(
    handle: Any, with_master: Any
) -> None:
    model, master, optimizer = with_master
    scaler = handle._default_scaler
    scaler._loss_scale = 8.0
    backward(handle, pull((model, 1.0)), optimizer)
    for scale in (8.0, 16.0):
        scaler._loss_scale = scale
        delayed(scaler, pull((model, 1.0)), optimizer, delay_unscale=True)
        with pytest.raises(RuntimeError, match="still scaled"):
            optimizer.step()
    with pytest.raises(KeyError), block.scaled_backward(pull((model, 1.0)), [optimizer], scaler):
        raise KeyError
    delayed(scaler, pull((model, 1.0)), optimizer)
    assert_grads([master.grad], 4.0)
    optimizer.step()
    assert_grads([master], 1.0 - 2.0)


@pytest.mark.parametrize("same", [True, False])
def test_an_overflow_left_scaled_is_found_by_the_last_block_and_lowers_the_scale_of_each_loss(
    same: bool, handle: Any, device: torch.device
) -> None:
    weight, other = param([1.0], device), param([1.0], device)
    optimizer = sgd([weight, other])
    first = handle._default_scaler
    second = first if same else LossScaler()
    delayed(first, pull((weight, INF)), optimizer, delay_unscale=True)
    assert first.loss_scale() == SCALE
    delayed(second, pull((other, 1.0)), optimizer)
    assert first.loss_scale() == second.loss_scale() == SCALE / 2
    optimizer.step()
    assert_grads([weight, other], 1.0, 1.0)


def test_a_block_that_raises_leaves_masters_as_they_were(handle: Any, with_master: Any) -> None:
    model, master, optimizer = with_master
    handle._default_scaler._loss_scale = 8.0
    backward(handle, pull((model, 1.0)), optimizer)
    kept = model.grad, master.grad
    with pytest.raises(KeyError), handle.scale_loss(pull((model, 1.0)), optimizer):
        raise KeyError
    assert model.grad is kept[0]
    assert master.grad is kept[1]
    assert_grads([master.grad], 1.0)


def test_a_step_whose_closure_never_stops_overflowing_is_abandoned(device: torch.device) -> None:
    handle: Any = amp.init(loss_scale=128.0, device_type=device.type)
    weight = param([4.0, -3.0], device)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=3)
    scales: list[float] = []
    loss = {"value": lambda: (weight - 1.0).square().sum()}
    closure = closure_with_scale_loss(handle, optimizer, lambda: loss["value"](), scales)
    optimizer.step(closure)
    before = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    left = [2]

    def overflow_later() -> Tensor:
        left[0] -= 1
        factor = 1.0 if left[0] >= 0 else INF
        return ((weight - 2.0).square() * factor).sum()

    loss["value"] = overflow_later
    assert optimizer.step(closure) is None
    assert left[0] < 0
    assert torch.equal(weight, before[0])
    assert str(optimizer.state_dict()) == str(before[1])
    assert amp.step_was_skipped(optimizer) is True
    assert torch.is_autocast_enabled(device.type)
    loss["value"] = lambda: (weight - 1.0).square().sum()
    assert optimizer.step(closure) is not None
    assert amp.step_was_skipped(optimizer) is False
