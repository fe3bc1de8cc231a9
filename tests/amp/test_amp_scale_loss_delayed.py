"""scale_loss: gradients that are left scaled until the last block, and masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp16_cases import F16, F32, INF, assert_grads, pull
from scale_loss_cases import SCALE, backward, grads, param, sgd
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.amp import scaling
from apex_mp.amp.scaler import LossScaler
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("amp_off")

# Delayed unscaling, which amp.scale_loss offers.


def delayed(scaler: Any, loss: Tensor, optimizer: Any, **delay: bool) -> None:
    with scaling.scaled_backward(loss, [optimizer], scaler, **delay) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("make", [sgd, FusedAdam, torch.optim.SparseAdam])
def test_gradients_left_scaled_add_up_even_if_the_scale_changes(
    make: Any, handle: Any, device: torch.device
) -> None:
    scaler = handle._default_scaler
    layer = nn.Embedding(2, 1, sparse=make is torch.optim.SparseAdam, device=device)
    rows = torch.tensor([0, 1, 1], device=device)
    optimizer = make(layer.parameters())
    delayed(scaler, layer(rows).sum(), optimizer)  # Unscaled gradients are there already.
    for count, scale in ((1, 8.0), (2, 2.0), (3, 1024.0)):
        scaler._loss_scale = scale
        delayed(scaler, layer(rows).sum(), optimizer, delay_unscale=True)
        scaled = layer.weight.grad.to_dense().flatten().tolist()
        assert scaled == [scale * (count + 1), scale * 2 * (count + 1)]
    scaler._loss_scale = 4.0
    delayed(scaler, layer(rows).sum(), optimizer)
    assert layer.weight.grad.to_dense().flatten().tolist() == [5.0, 10.0]
    optimizer.step()


def test_a_step_with_gradients_left_scaled_is_refused(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"still scaled by 65536\.0"):
            optimizer.step()
    assert weight.tolist() == [1.0]
    delayed(scaler, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [0.0]
    delayed(scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    optimizer.step()  # There is nothing to step with any more.
    pull((weight, 1.0)).backward()
    optimizer.step()
    assert weight.tolist() == [-0.5]
    optimizer.zero_grad()
    backward(handle, pull((weight, 1.0)), optimizer)
    assert_grads(grads(weight), 1.0)


def test_gradients_left_scaled_are_refused_after_casts_are_switched_off(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    delayed(handle._default_scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    handle._deactivate()
    with pytest.raises(RuntimeError, match="still scaled"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert "step" not in vars(optimizer)


def test_an_overflow_left_scaled_is_found_by_the_last_block(
    handle: Any, device: torch.device
) -> None:
    weight, other = param([1.0], device), param([1.0], device)
    optimizer = sgd([weight, other])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, INF)), optimizer, delay_unscale=True)
    assert scaler.loss_scale() == SCALE
    delayed(scaler, pull((other, 1.0)), optimizer)
    assert scaler.loss_scale() == SCALE / 2
    optimizer.step()
    assert_grads([weight, other], 1.0, 1.0)


def test_an_overflow_lowers_the_scale_of_each_loss_that_was_left_scaled(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    first, second = LossScaler(), LossScaler()
    delayed(first, pull((weight, INF)), optimizer, delay_unscale=True)
    delayed(second, pull((weight, 1.0)), optimizer)
    assert first.loss_scale() == second.loss_scale() == SCALE / 2


def test_gradients_of_one_optimizer_are_left_scaled_without_the_others(
    handle: Any, device: torch.device
) -> None:
    first, second = param([1.0], device), param([1.0], device)
    pair = [sgd([first]), sgd([second])]
    scaler = handle._default_scaler
    delayed(scaler, pull((second, 3.0)), pair[1])
    delayed(scaler, pull((first, 1.0)), pair[0], delay_unscale=True)
    with scaling.scaled_backward(pull((first, 1.0), (second, 4.0)), pair, scaler) as scaled_loss:
        scaled_loss.backward()
    assert_grads(grads(first, second), 2.0, 7.0)


def test_a_block_that_raises_keeps_gradients_left_scaled(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    scaler._loss_scale = 4.0
    for delay in (False, True):
        with (
            pytest.raises(KeyError),
            scaling.scaled_backward(pull((weight, 1.0)), [optimizer], scaler, delay_unscale=delay),
        ):
            raise KeyError
    delayed(scaler, pull((weight, 1.0)), optimizer)
    assert_grads(grads(weight), 2.0)


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


# Masters, which amp.initialize gives to an optimizer.


@pytest.fixture
def with_master(device: torch.device) -> tuple[nn.Parameter, nn.Parameter, Any]:
    model, master = param([1.0], device, F16), param([1.0], device)
    optimizer = sgd([master])
    optimizer._amp_model_of = {master: model}
    return model, master, optimizer


def test_the_master_gets_the_unscaled_gradient(handle: Any, with_master: Any) -> None:
    model, master, optimizer = with_master
    handle._default_scaler._loss_scale = 2.0**14
    tiny = 2.0**-30  # Nothing at all in float16.
    for count in (1, 2):
        backward(handle, pull((model, tiny)), optimizer)
        assert_grads([master.grad], count * tiny)
    kept = master.grad
    backward(handle, pull((model, 0.0)) * 0.0, optimizer)
    assert master.grad is kept


def test_whoever_clears_the_model_clears_its_masters(handle: Any, with_master: Any) -> None:
    model, master, optimizer = with_master
    handle._default_scaler._loss_scale = 8.0
    for delay in (False, True):
        backward(handle, pull((model, 1.0)), optimizer)
        model.grad = None
        if delay:
            delayed(handle._default_scaler, pull((model, 2.0)), optimizer, delay_unscale=True)
        backward(handle, pull((model, 4.0)), optimizer)
        assert_grads([master.grad], 4.0 + 2.0 * delay)
        model.grad = None


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
    with pytest.raises(KeyError), scaling.scaled_backward(pull((model, 1.0)), [optimizer], scaler):
        raise KeyError
    delayed(scaler, pull((model, 1.0)), optimizer)
    assert_grads([master.grad], 4.0)
    optimizer.step()
    assert_grads([master], 1.0 - 2.0)


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


def test_sparse_gradients_reach_the_master(handle: Any, device: torch.device) -> None:
    layer = nn.Embedding(3, 1, sparse=True, device=device, dtype=F16)
    master = param(layer.weight.detach(), device)
    optimizer = sgd([master])
    optimizer._amp_model_of = {master: layer.weight}
    handle._default_scaler._loss_scale = 8.0
    for count in (1.0, 2.0):
        backward(handle, layer(torch.tensor([0, 2, 2], device=device)).sum(), optimizer)
        assert master.grad.dtype is F32
        assert master.grad.to_dense().flatten().tolist() == [count, 0.0, 2 * count]
