"""handle.scale_loss: closures, schedulers, and the method `step` of the optimizer."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import F16, INF, pull
from scale_loss_cases import SCALE, Larc, PlainSgd, backward, overflow, param, sgd
from torch import Tensor, nn
from torch.optim import lr_scheduler

from apex_mp import amp
from apex_mp.optimizers import FusedAdam

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


def test_a_closure_runs_with_casts(handle: Any, device: torch.device) -> None:
    handle._default_scaler._loss_scale = 1024.0
    layer = nn.Linear(2, 2, device=device)
    optimizer = sgd(layer.parameters())
    dtypes = []

    def closure() -> Tensor:
        output = layer(torch.ones(1, 2, device=device))
        dtypes.append(output.dtype)
        backward(handle, output.float().sum(), optimizer)
        dtypes.append(layer(torch.ones(1, 2, device=device)).dtype)
        return output

    optimizer.step(closure)
    overflow(handle, optimizer)
    optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step(closure)
    assert dtypes == [F16] * 4
    assert torch.is_autocast_enabled(device.type)


def test_a_first_step_whose_closure_never_stops_overflowing_is_undone_and_says_so(
    device: torch.device,
) -> None:
    handle: Any = amp.init(loss_scale=128.0, device_type=device.type)
    weight = param([4.0, -3.0], device)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=3)
    count = iter([1.0, INF])
    closure = closure_with_scale_loss(
        handle, optimizer, lambda: ((weight - 1.0).square() * next(count)).sum(), []
    )
    with pytest.raises(RuntimeError, match="the step was undone"):
        optimizer.step(closure)
    assert weight.tolist() == [4.0, -3.0]
    assert torch.is_autocast_enabled(device.type)
    optimizer.step(
        closure_with_scale_loss(handle, optimizer, lambda: (weight - 1.0).square().sum(), [])
    )
    assert weight.tolist() != [4.0, -3.0]


def test_what_a_closure_raises_comes_through(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)), optimizer)

    def closure() -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    assert torch.is_autocast_enabled(device.type)
    optimizer.step()
    assert weight.tolist() == [0.5]


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


def test_a_scheduler_on_an_optimizer_inside_another_is_told_of_skipped_steps(
    handle: Any, device: torch.device
) -> None:
    optimizer = Larc(sgd([param([1.0], device)]))
    scheduler = lr_scheduler.StepLR(optimizer.optim, step_size=1)
    overflow(handle, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert amp.step_was_skipped(optimizer)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < scheduler.base_lrs[0]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("make", [sgd, FusedAdam, PlainSgd], ids=["SGD", "FusedAdam", "PlainSgd"])
def test_step_stays_a_method_with_its_name_and_signature(
    make: Any, scheduled: bool, handle: Any, device: torch.device
) -> None:
    optimizer = make([param([1.0], device)])
    before = inspect.signature(optimizer.step), optimizer.step.__doc__
    if scheduled and make is not PlainSgd:
        lr_scheduler.StepLR(optimizer, step_size=1)
    overflow(handle, optimizer)
    assert inspect.ismethod(optimizer.step)
    assert optimizer.step.__self__ is optimizer
    assert optimizer.step.__func__.__name__ == optimizer.step.__name__ == "step"
    assert (inspect.signature(optimizer.step), optimizer.step.__doc__) == before


def test_arguments_of_step_get_there(handle: Any, device: torch.device) -> None:
    seen = []

    class Odd(PlainSgd):
        def step(self, factor: float, *more: Any, times: int = 1) -> Any:
            seen.append((factor, *more, times))
            return "done"

    optimizer = Odd([param([1.0], device)])
    backward(handle, pull((optimizer.param_groups[0]["params"][0], 1.0)), optimizer)
    assert optimizer.step(0.5, "a", times=2) == "done"
    assert seen == [(0.5, "a", 2)]


def test_the_legacy_call_of_fused_adam_gets_through(handle: Any, device: torch.device) -> None:
    weight, out = param([1.0], device), param([0.0], device, F16)
    optimizer = FusedAdam([weight], lr=0.5)
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.step(grads=[torch.full((1,), 8.0, device=device)], output_params=[out], scale=8.0)
    assert out.tolist() == [0.5]


def test_a_step_borrowed_from_another_object_is_called_on_that(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    inner, outer = sgd([weight]), PlainSgd([weight], lr=100.0)
    outer.step = inner.step
    backward(handle, pull((weight, 1.0)), outer)
    outer.step()
    assert weight.tolist() == [0.5]


def test_hooks_run_once_for_each_real_step(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    assert calls == ["pre", "post"]
    overflow(handle, optimizer)
    optimizer.step()
    assert calls == ["pre", "post"]


def test_grad_scaler_may_step_the_optimizer_afterwards(handle: Any, device: torch.device) -> None:
    for make in (sgd, FusedAdam):
        weight = param([1.0], device)
        optimizer = make([weight], lr=0.5)
        backward(handle, pull((weight, 1.0)), optimizer)
        optimizer.step()
        stepped = weight.item()
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        for value in (INF, 1.0):
            optimizer.zero_grad()
            scaler.scale(pull((weight, value))).backward()
            scaler.step(optimizer)
            scaler.update()
            assert (weight.item() == stepped) is (value == INF)
        assert weight.item() == 0.0
