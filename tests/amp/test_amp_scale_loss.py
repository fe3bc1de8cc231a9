"""scale_loss: what is scaled, unscaled and skipped, and what it leaves behind."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, F64, INF, NAN, assert_grads, pull
from scale_loss_cases import (
    SCALE,
    backward,
    grads,
    overflow,
    param,
    sgd,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler

from apex_mp import amp

pytestmark = pytest.mark.usefixtures("amp_off")


# The scaled loss.


@pytest.mark.parametrize(
    ("loss", "kind"), [(1.0, "float"), (None, "NoneType"), (torch.ones(1).long(), "torch.int64")]
)
def test_a_loss_that_is_none_is_named(loss: Any, kind: str, handle: Any) -> None:
    with (
        pytest.raises(TypeError, match=rf"loss is a {kind}; it must be a floating tensor"),
        handle.scale_loss(loss, sgd([torch.ones(1)])),
    ):
        pass


# Unscaled gradients.


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_gradients_of_every_dtype_are_unscaled(
    dtype: torch.dtype, handle: Any, device: torch.device
) -> None:
    handle._default_scaler._loss_scale = 1024.0
    weight = param([1.0, 2.0], device, dtype)
    optimizer = sgd([weight])
    for total in (2.0, 4.0):
        backward(handle, pull((weight, 2.0)), optimizer)
        assert weight.grad.dtype is dtype
        assert_grads(grads(weight), total)


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, sgd], ids=["SparseAdam", "SGD"])
def test_sparse_gradients_are_unscaled(make: Any, handle: Any, device: torch.device) -> None:
    layer = nn.Embedding(4, 2, sparse=True, device=device)
    other = copy.deepcopy(layer)
    rows = torch.tensor([1, 3, 1], device=device)
    optimizer, reference = make(layer.parameters()), make(other.parameters())
    for count in (1.0, 2.0):  # Two blocks add up.
        backward(handle, layer(rows).sum(), optimizer)
        other(rows).sum().backward()
        assert layer.weight.grad.is_sparse
        wanted = torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2]) * count
        assert torch.equal(layer.weight.grad.to_dense().cpu(), wanted)
    optimizer.step()
    reference.step()
    assert torch.equal(layer.weight, other.weight)
    optimizer.zero_grad()
    backward(handle, (layer(rows) * NAN).sum(), optimizer)
    before = layer.weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("clear", ["to none", "to zero", "by the model"])
def test_blocks_before_a_step_add_their_gradients(
    clear: str, handle: Any, device: torch.device
) -> None:
    model = nn.ParameterList([param([1.0], device), param([1.0, 1.0], device)])
    first, second = model
    optimizer = sgd(model.parameters())
    for _ in range(2):
        for value in (1.0, 10.0, 100.0):
            backward(handle, pull((first, value), (second, -value)), optimizer)
            handle._default_scaler._loss_scale *= 0.5
        assert_grads(grads(first, second), 111.0, -111.0)
        optimizer.step()
        if clear == "by the model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clear == "to none")
    assert first.tolist() == [1.0 - 111.0]


# Several optimizers.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inf_of_one_loss_does_not_skip_an_optimizer_that_only_the_next_is_for(
    dtype: torch.dtype, handle: Any, device: torch.device
) -> None:
    shared, own = (torch.ones(1, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    first, second = sgd([shared]), sgd([own])
    backward(handle, pull((shared, INF)), first)
    backward(handle, pull((shared, 1.0), (own, 1.0)), [first, second])
    assert handle._default_scaler.loss_scale() == SCALE / 2
    first.step()
    second.step()
    assert [amp.step_was_skipped(each) for each in (first, second)] == [True, False]
    assert_grads(grads(own), 1.0)


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


def test_a_gradient_may_lie_otherwise_than_the_one_before(
    handle: Any, device: torch.device
) -> None:
    weight = torch.arange(6.0, device=device).reshape(2, 3).t().contiguous().t().requires_grad_()
    weight.grad = torch.arange(6.0, device=device).reshape(2, 3)  # Contiguous, as weight is not.
    backward(handle, (weight * weight.detach()).sum(), sgd([weight]))
    assert weight.grad.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_the_loss_is_scaled_in_its_own_range(dtype: torch.dtype, handle: Any) -> None:
    optimizer = sgd([param([1.0], torch.device("cpu"))])
    with handle.scale_loss(torch.tensor(3.0, dtype=dtype), optimizer) as scaled_loss:
        assert scaled_loss.item() == 3.0 * SCALE
        assert scaled_loss.dtype is (F64 if dtype is F64 else F32)


def test_a_sum_that_overflows_float16_skips_the_step(handle: Any, device: torch.device) -> None:
    handle._default_scaler._loss_scale = 1.0
    weight = param([1.0], device, F16)
    optimizer = sgd([weight])
    for _ in range(2):
        backward(handle, pull((weight, 40000.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]
    optimizer.zero_grad()
    handle._default_scaler._loss_scale = 0.25  # Finite as it comes, inf when unscaled.
    backward(handle, pull((weight, 80000.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]


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
