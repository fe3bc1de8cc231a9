"""handle.scale_loss: copies, checkpoints, the end of casts, and the bits of a training."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import assert_grads, pull
from scale_loss_cases import SCALE, PlainSgd, backward, overflow, param, sgd
from torch import Tensor
from torch.optim import lr_scheduler

from apex_mp import amp
from apex_mp.amp.step_guard import guard_of
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("amp_off")

# Copies.


def copied(optimizer: Any, way: str) -> Any:
    return copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "make", [torch.optim.Adam, FusedAdam, PlainSgd], ids=["Adam", "FusedAdam", "PlainSgd"]
)
def test_a_copy_made_during_training_is_an_optimizer_of_its_own(
    make: Any, way: str, handle: Any, device: torch.device
) -> None:
    optimizer = make([param([1.0], device)])
    overflow(handle, optimizer)
    other = copied(optimizer, way)
    its = other.param_groups[0]["params"][0]
    other.zero_grad()
    backward(handle, pull((its, 1.0)), other)
    other.step()
    assert its.item() != 1.0
    assert amp.step_was_skipped(other) is False
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is True
    overflow(handle, other)
    other.step()
    assert amp.step_was_skipped(other) is True
    backward(handle, pull((optimizer.param_groups[0]["params"][0], 1.0)), optimizer)


def test_an_optimizer_and_its_parameters_are_freed(handle: Any, device: torch.device) -> None:
    optimizer = sgd([param([1.0], device)])
    overflow(handle, optimizer)
    optimizer.step()
    gone = weakref.ref(optimizer), weakref.ref(optimizer.param_groups[0]["params"][0])
    del optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# Switching off.


@pytest.mark.parametrize("own", [False, True])
def test_afterwards_the_optimizer_is_as_before(
    own: bool, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    if own:
        lr_scheduler.StepLR(optimizer, step_size=1)
    before = dict(vars(optimizer))
    backward(handle, pull((weight, 1.0)), optimizer)
    assert vars(optimizer) != before
    handle._deactivate()
    assert vars(optimizer) == before
    assert ("step" in vars(optimizer)) is own
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_afterwards_closures_are_left_alone(handle: Any, device: torch.device) -> None:
    handle._deactivate()
    optimizer = sgd([param([1.0], device)])
    before = dict(vars(optimizer))
    optimizer.step(lambda: 1.0)
    assert vars(optimizer) == before


def test_an_overflow_is_skipped_even_if_casts_are_switched_off_before_the_step(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    before = dict(vars(optimizer))
    overflow(handle, optimizer)
    handle._deactivate()
    optimizer.step()
    assert weight.tolist() == [1.0]
    assert vars(optimizer) == before
    optimizer.zero_grad()
    pull((weight, 1.0)).backward()
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_an_overflow_survives_another_init(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    overflow(handle, optimizer)
    other: Any = amp.init(device_type=device.type)
    backward(other, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]
    assert amp.step_was_skipped(optimizer) is True
    overflow(other, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is True


def test_a_scheduler_built_on_top_survives(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)), optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1)
    on_top = optimizer.step
    handle._deactivate()
    assert optimizer.step is on_top
    assert not hasattr(optimizer, "_amp_step_guard")
    optimizer.step()
    scheduler.step()
    assert weight.tolist() == [0.5]
    other: Any = amp.init(device_type=device.type)
    overflow(other, optimizer)
    optimizer.step()
    scheduler.step()
    assert weight.tolist() == [0.5]


def test_without_casts_the_loss_is_as_it_is(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    loss = pull((weight, 1.0))
    with handle._disable_casts(), handle.scale_loss(loss, sgd([weight])) as scaled_loss:
        assert scaled_loss is loss
    disabled: Any = amp.init(enabled=False)
    with disabled.scale_loss(loss, sgd([weight])) as scaled_loss:
        assert scaled_loss is loss


# Checkpoints of the handle.


def test_the_scale_of_a_handle_is_saved_and_loaded(handle: Any, device: torch.device) -> None:
    optimizer = sgd([param([1.0], device)])
    overflow(handle, optimizer)
    backward(handle, pull((optimizer.param_groups[0]["params"][0], 1.0)), optimizer)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other: Any = amp.init(device_type=device.type)
    other.load_state_dict(state)
    assert other._default_scaler.value == handle._default_scaler.value
    assert other._default_scaler._unskipped == 1
    with pytest.raises(ValueError, match="they must be"):
        other.load_state_dict({**state, "loss_scaler1": {}})
    disabled: Any = amp.init(enabled=False)
    disabled.load_state_dict(state)
    assert disabled.state_dict() == {}


# Numbers.


def train(optimizer: Any, weights: list[Tensor], backward: Callable[[Tensor], None]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        x = torch.randn(4, 3, generator=generator).to(weights[0].device)
        hidden = (x.unsqueeze(-1) * weights[0]).sum(1)
        loss = ((hidden * weights[1]) - x[:, :2]).square().sum()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.AdamW, functools.partial(sgd, lr=0.01)])
def test_training_outside_casts_has_the_bits_of_training_without_amp(
    make: Any, device: torch.device
) -> None:
    torch.manual_seed(2)
    start = [torch.randn(3, 2).to(device), torch.randn(2).to(device)]
    plain = [each.clone().requires_grad_() for each in start]
    train(make(plain), plain, lambda loss: loss.backward())
    ours = [each.clone().requires_grad_() for each in start]
    handle: Any = amp.init(device_type=device.type)
    optimizer = make(ours)
    train(optimizer, ours, lambda loss: backward(handle, loss, optimizer))
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_penalty_inside_the_block_is_scaled_once(
    handle: Any, device: torch.device
) -> None:
    weight = param([3.0], device)
    optimizer = sgd([weight])
    x = torch.tensor([2.0], device=device, requires_grad=True)
    with handle.scale_loss(torch.zeros((), device=device), optimizer) as zero:
        (slope,) = torch.autograd.grad((weight * x.square()).sum(), x, create_graph=True)
        (slope.square().sum() * SCALE + zero).backward(create_graph=True)
    # (2 w x)^2 has the derivative 8 w x^2.
    assert_grads([weight.grad.detach()], 96.0)


def test_one_guard_stands_before_an_optimizer(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)), optimizer)
    guard, step = guard_of(optimizer), optimizer.step
    backward(handle, pull((weight, 1.0)), optimizer)
    assert guard_of(optimizer) is guard
    assert optimizer.step == step


def test_a_step_inside_the_block_is_refused_and_changes_nothing(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    sentence = r"inside a scale_loss block.*call it after the block"
    with handle.scale_loss(weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match=sentence):
            optimizer.step()
    assert weight.item() == 1.0
    assert_grads([weight.grad], 1.0)


def test_a_closure_whose_loss_is_not_finite_is_not_called_until_the_scale_is_gone(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * float("nan")).sum()
        losses.append(loss)
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    with handle.scale_loss(weight.sum(), optimizer):  # The guard is before the step from here on.
        pass
    assert optimizer.step(closure) is None
    assert len(losses) == 1
    assert handle._default_scaler.loss_scale() == 2.0**15
    assert weight.item() == 1.0
