"""Masters of amp.initialize: their values and gradients, and edits that are warned of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from amp_level_cases import (
    F32,
    INF,
    backward,
    initialize,
    linear,
    sgd,
    step,
)
from fp16_cases import pull
from torch import Tensor, nn

from apex_mp import amp, fp16_utils

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def fail_in_a_block(optimizer: Any) -> None:
    with pytest.raises(KeyError), amp.scale_loss(torch.ones(()), optimizer):
        raise KeyError


def skip_a_step(optimizer: Any) -> None:
    models = optimizer._amp_model_of.values()
    step(optimizer, pull(*((param, [[INF]]) for param in models)))
    optimizer.zero_grad(set_to_none=False)


CLEARED = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(False)": lambda model, optimizer: optimizer.zero_grad(False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p.grad.data.zero_()": lambda model, optimizer: [
        p.grad.data.zero_() for p in model.parameters() if p.grad is not None
    ],
}


@pytest.mark.parametrize("write", [lambda p: p.detach().zero_(), lambda p: p.data.zero_()])
def test_a_write_to_the_model_that_a_step_overwrites_gets_one_warning(write: Any) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    write(model.weight)
    with pytest.warns(RuntimeWarning, match=r"amp: the model's parameter of size \[1, 1\] changed"):
        step(optimizer, pull((model.weight, [[0.25]])))
    write(model.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer, pull((model.weight, [[0.25]])))


def test_a_master_that_another_optimizer_steps_gets_one_warning() -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    step(optimizer, pull((model.weight, [[0.25]])))
    for param in amp.master_params(optimizer):
        param.detach().add_(1.0)
    with pytest.warns(RuntimeWarning, match="master of the model's parameter of size"):
        step(optimizer, pull((model.weight, [[0.25]])))


def test_an_optimizer_without_masters_is_refused_at_o2_if_it_has_low_precision() -> None:
    model = linear(1.0)
    initialize(model, sgd(model), opt_level="O2")
    backward(sgd(linear(1.0)), pull((model.weight, [[0.25]])))
    with pytest.raises(RuntimeError, match=r"amp.scale_loss: the optimizer did not go through"):
        backward(sgd(model), pull((model.weight, [[0.25]])))


def test_a_later_group_gets_masters_and_duplicates_are_refused() -> None:
    first, second, third = linear(1.0), linear(1.0), linear(1.0)
    optimizer = sgd(first, lr=1.0)
    initialize([first, second, third], optimizer, opt_level="O2")
    group = {"params": second.parameters(), "lr": 0.5}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    optimizer.add_param_group({"params": third.weight})
    fresh = nn.Parameter(torch.ones(1))  # float32 is its own master
    optimizer.add_param_group({"params": [fresh]})
    assert [p.dtype for p in amp.master_params(optimizer)] == [F32] * 4
    for refused in (first.weight, [second.weight], [*amp.master_params(optimizer)][:1], [fresh]):
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter"):
            optimizer.add_param_group({"params": refused})
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(1))}})
    params = [first.weight, second.weight, third.weight, fresh]
    step(optimizer, pull(*((param, torch.full_like(param, 0.25)) for param in params)))
    assert [param.item() for param in params] == [0.75, 0.875, 0.75, 0.75]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_moments_of_earlier_float32_training_go_on(level: str) -> None:
    model = linear(1.0)
    optimizer = sgd(model, momentum=0.5)
    groups = [*optimizer.param_groups]
    pull((model.weight, [[1.0]])).backward()
    optimizer.step()
    optimizer.zero_grad()
    initialize(model, optimizer, opt_level=level, max_loss_scale=2.0**10)
    assert [*map(id, optimizer.param_groups)] == [*map(id, groups)]
    (param,) = amp.master_params(optimizer)
    buffer = optimizer.state[param]["momentum_buffer"]
    assert [*optimizer.state] == [param]
    assert (buffer.item(), buffer.dtype) == (1.0, param.dtype)
    step(optimizer, pull((model.weight, [[1.0]])))
    assert model.weight.item() == 1.0 - 1.0 - 1.5


def test_master_params_are_what_an_optimizer_steps() -> None:
    model = linear(1.0)
    plain = sgd(model)
    assert [*amp.master_params(plain)] == [model.weight]
    half = linear(1.0).half()
    wrapped = fp16_utils.FP16_Optimizer(sgd(half), verbose=False)
    (master,) = amp.master_params(wrapped)
    assert master is wrapped.fp32_from_fp16_groups[0][0]
    initialize(model, plain, opt_level="O2")
    (master,) = amp.master_params(plain)
    assert (master.dtype, master is model.weight) == (F32, False)


def after_a_step(model: Any, optimizer: Any) -> None:
    step(optimizer, pull((model.weight, [[1.0]])))


def after_a_skipped_step(model: Any, optimizer: Any) -> None:
    step(optimizer, pull((model.weight, [[INF]])))


def after_a_block_that_raised(model: Any, optimizer: Any) -> None:
    after_a_step(model, optimizer)

    def interrupted() -> None:
        with amp.scale_loss(pull((model.weight, [[1.0]])), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()


EARLIER = {
    "at first": lambda *_: None,
    "after a step": after_a_step,
    "after a skipped step": after_a_skipped_step,
    "after a block that raised": after_a_block_that_raised,
}


earlier = pytest.mark.parametrize("come_here", EARLIER.values(), ids=EARLIER.keys())


@earlier
def test_a_backward_outside_of_scale_loss_is_refused_by_the_step_of_o2(come_here: Any) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    come_here(model, optimizer)
    weight = model.weight.item()
    model.zero_grad()
    pull((model.weight, [[1.0]])).backward()
    with pytest.raises(RuntimeError, match="not in those of its float32 masters; call backward in"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert model.weight.item() == weight


@pytest.mark.parametrize(
    ("come_here", "clear"),
    [
        (how, clear)
        for how in EARLIER
        for clear in CLEARED
        # After a step the masters keep its gradient, for another step with it.
        if how != "after a step" or clear.startswith("optimizer")
    ],
)
def test_cleared_gradients_are_no_backward(come_here: str, clear: str) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    EARLIER[come_here](model, optimizer)
    weight = model.weight.item()
    CLEARED[clear](model, optimizer)
    optimizer.step()
    assert model.weight.item() == weight


def test_edits_of_the_models_gradients_after_scale_loss_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = linear(1.0)
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0**10)
    for _ in range(2):
        optimizer.zero_grad()
        backward(optimizer, pull((model.weight, [[0.25]])))
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.125)
        optimizer.step()
    assert (model.weight.item(), caplog.messages) == (0.75, [])
    for _ in range(2):
        optimizer.zero_grad()
        backward(optimizer, pull((model.weight, [[0.25]])))
        nn.utils.clip_grad_norm_(model.parameters(), 0.125)
        optimizer.step()
    assert model.weight.item() == 0.25
    (message,) = caplog.messages
    assert "which has no effect: clip, edit and average those of amp.master_params" in message


@pytest.mark.parametrize(
    "event", [None, fail_in_a_block, skip_a_step], ids=["", "failed block", "skipped step"]
)
def test_a_gradient_that_was_set_to_zero_takes_a_step_of_momentum_as_in_float32(event: Any) -> None:
    models = linear(0.0), linear(0.0)
    optimizer = sgd(*models, momentum=0.5)
    initialize([*models], optimizer, opt_level="O2", loss_scale=128.0)
    step(optimizer, pull(*((model.weight, [[1.0]]) for model in models)))
    optimizer.zero_grad(set_to_none=False)
    if event is not None:
        event(optimizer)
    step(optimizer, pull((models[0].weight, [[1.0]])))
    assert [model.weight.item() for model in models] == [-2.5, -1.5]


def test_masters_are_the_float32_values_from_before_the_cast() -> None:
    model = linear(1 / 3, 1e-9)
    before = model.weight.detach().clone()
    optimizer = sgd(model)
    initialize(model, optimizer, opt_level="O2")
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master, before)
    assert master.requires_grad
    assert torch.equal(model.weight, before.half())


def test_a_line_search_that_is_given_up_leaves_model_and_masters_as_they_were() -> None:
    model = linear(1 / 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    initialize(model, optimizer, opt_level="O2", loss_scale=1.0)
    before = model.weight.item(), next(amp.master_params(optimizer)).item()
    grads = iter([1.0, INF, INF])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = pull((model.weight, [[next(grads)]]))
        backward(optimizer, loss)
        return loss

    assert optimizer.step(closure) is None
    assert (model.weight.item(), next(amp.master_params(optimizer)).item()) == before
