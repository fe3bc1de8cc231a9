"""handle.scale_loss: one skipped step after an overflow, and what is said of it."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from fp16_cases import F16, INF, NAN, pull
from scale_loss_cases import SCALE, PlainSgd, backward, optimizers, overflow, param, sgd
from torch import nn

from apex_mp import amp
from apex_mp.amp import scaling
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("amp_off")

# Overflow.


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1e36])
@optimizers
def test_an_overflow_skips_the_step_and_nothing_changes(
    make: Any, value: float, handle: Any, device: torch.device
) -> None:
    weight, other = param([1.0, 2.0], device), param([3.0], device)
    optimizer = make([weight, other])
    backward(handle, pull((weight, 1.0), (other, 1.0)), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy([[weight, other], [*getattr(optimizer, "state", {}).values()]])
    backward(handle, pull((weight, [1.0, value]), (other, 1.0)), optimizer)
    assert optimizer.step() is None
    assert amp.step_was_skipped(optimizer) is True
    after = [[weight, other], [*getattr(optimizer, "state", {}).values()]]
    assert str(after) == str(before)
    assert handle._default_scaler.loss_scale() == SCALE / 2
    optimizer.zero_grad()
    backward(handle, pull((weight, 1.0), (other, 1.0)), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is False
    assert not torch.equal(weight, before[0][0])


def test_however_many_losses_overflow_one_step_is_skipped(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    for value in (INF, NAN, 1.0, INF):
        backward(handle, pull((weight, value)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]
    optimizer.zero_grad()
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [0.5]
    assert handle._default_scaler.loss_scale() == SCALE / 8


def test_an_overflow_that_nobody_clears_skips_steps_until_somebody_does(
    handle: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    overflow(handle, optimizer)
    optimizer.step()
    for _ in range(2):
        backward(handle, pull((weight, 1.0)), optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is True
    assert weight.tolist() == [1.0]
    assert len(caplog.messages) == 3
    # It is not the scale's fault.
    assert handle._default_scaler.loss_scale() == SCALE / 2
    optimizer.zero_grad(set_to_none=False)
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_a_loss_that_is_not_finite_is_no_overflow(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)) + INF, optimizer)
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_a_large_finite_sum_is_no_overflow(handle: Any, device: torch.device) -> None:
    handle._default_scaler._loss_scale = 1.0
    weight = param([1.0] * 4, device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 2e38)), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is False


def test_endless_overflow_keeps_a_positive_scale(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(200):
            optimizer.zero_grad()
            overflow(handle, optimizer)
            optimizer.step()
    assert handle._default_scaler.loss_scale() == 2.0**-126
    assert weight.tolist() == [1.0]


def test_fifty_skipped_steps_in_a_row_warn_once(handle: Any, device: torch.device) -> None:
    weight = param([1.0, 1.0], device)
    optimizer = sgd([weight])

    def skip(times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            overflow(handle, optimizer)
            overflow(handle, optimizer)
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        skip(49)
        optimizer.zero_grad()
        backward(handle, pull((weight, 0.0)), optimizer)
        optimizer.step()
        skip(49)
        assert caught == []
        skip(30)
        assert len(caught) == 1
    assert caught[0].category is RuntimeWarning
    assert caught[0].filename == __file__
    assert "amp: SGD has skipped 50 steps in a row" in str(caught[0].message)
    assert "The worst: group 0, parameter 0 [2]: 2 inf, 0 NaN." in str(caught[0].message)


# What it says.


def test_the_message_names_the_worst_parameters(
    handle: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, device=device) for name in "abc"})
    model.forward = lambda x: sum(layer(x).float().sum() for layer in model.values())
    optimizer = sgd(model.parameters())
    model(torch.ones(1, 2, device=device))
    b, c = model["b"], model["c"]
    b_weight = (b.weight, [[NAN, INF], [INF, 1.0]])
    caplog.set_level(logging.WARNING, "apex_mp.amp")
    backward(
        handle,
        pull(b_weight, (b.bias, [INF, 1.0]), (c.weight, INF), (c.bias, INF)),
        optimizer,
    )
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("apex_mp.amp", "WARNING")
    ]
    assert caplog.messages[0].splitlines() == [
        "Gradient overflow, skipping update; the loss scale goes from 65536.0 to 32768.0",
        "  c.weight [2, 2]: 4 inf, 0 NaN",
        "  b.weight [2, 2]: 2 inf, 1 NaN",
        "  c.bias [2]: 2 inf, 0 NaN",
        "  and 1 more parameters",
    ]


def test_without_a_model_the_message_names_group_and_index(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    handle: Any = amp.init(loss_scale=8.0, device_type=device.type)
    first, second, named = (param([1.0], device) for _ in range(3))
    optimizer = sgd([first])
    optimizer.add_param_group({"params": [first.new_zeros(1).requires_grad_(), second]})
    backward(handle, pull((second, NAN)), optimizer)
    with_names = sgd([("head.bias", named)])
    backward(handle, pull((named, NAN)), with_names)
    assert [message.splitlines() for message in caplog.messages] == [
        [
            "Gradient overflow, skipping update; the loss scale stays 8.0",
            "  group 1, parameter 1 [1]: 0 inf, 1 NaN",
        ],
        [
            "Gradient overflow, skipping update; the loss scale stays 8.0",
            "  head.bias [1]: 0 inf, 1 NaN",
        ],
    ]


def test_gradients_in_low_precision_are_remarked_on_once(
    handle: Any,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "_warned_of_low_precision", False)
    weight = param([1.0], device, F16)
    optimizer = sgd([weight])
    for _ in range(2):
        backward(handle, pull((weight, 2.0**-10)), optimizer)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("Incoming grads are not fp32 (not master grads).")


@pytest.mark.parametrize("make", [sgd, PlainSgd, FusedAdam], ids=["SGD", "PlainSgd", "FusedAdam"])
def test_an_optimizer_whose_loss_was_never_scaled_skipped_nothing(
    make: Any, device: torch.device
) -> None:
    optimizer = make([param([1.0], device)])
    assert amp.step_was_skipped(optimizer) is False
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is False


def test_a_skipped_step_of_an_fp16_optimizer_is_told(device: torch.device) -> None:
    weight = param([1.0], device, F16)
    optimizer = FP16_Optimizer(sgd([weight]), dynamic_loss_scale=True, verbose=False)
    for value in (INF, 2.0**-20):
        optimizer.backward(pull((weight, value)))
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is (value == INF)
        optimizer.zero_grad()


def test_only_optimizers_can_be_asked() -> None:
    with pytest.raises(TypeError, match="optimizer is a int; it must be an optimizer"):
        amp.step_was_skipped(3)
