"""amp.initialize: what copies and pickles of models and optimizers with masters do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amp_level_cases import (
    OPTIMIZERS,
    Net,
    backward,
    batches,
    initialize,
    linear,
    sgd,
    train,
)
from fp16_cases import pull
from tolerances import assert_same_bits
from torch import nn

from apex_mp import amp
from apex_mp.amp import _amp_state
from apex_mp.optimizers import FusedSGD
from apex_mp.parallel import LARC

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


hows = pytest.mark.parametrize("how", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "LARC": lambda params: LARC(torch.optim.SGD(params, lr=0.05, momentum=0.9), 2.0),
}


def pair(*weights: float) -> tuple[nn.Linear, torch.optim.SGD]:
    model = linear(*weights)
    return initialize(model, sgd(model), opt_level="O2", max_loss_scale=2.0**10)


@hows
@pytest.mark.parametrize("make", ["SGD", "LARC"])
def test_an_optimizer_copied_without_its_model_is_refused_by_scale_loss(
    make: str, how: Any
) -> None:
    model = Net()
    optimizer = MAKE[make](model.parameters())
    initialize(model, optimizer, opt_level="O2")
    lone, its_model = how(optimizer), how(model)
    images, _ = next(batches(1))
    loss = its_model(images).sum()
    with (
        pytest.raises(
            RuntimeError,
            match=f"this {type(optimizer).__name__} was copied or pickled without its model, .*; "
            r"copy both in one call, copy\.deepcopy\(\(model, optimizer\)\)",
        ),
        amp.scale_loss(loss, lone),
    ):
        raise AssertionError("the block must not be entered")
    train(model, optimizer, 1)  # The original goes on.
    again = how((its_model, lone))
    with pytest.raises(RuntimeError, match="without its model"):
        backward(again[1], loss)


@pytest.mark.parametrize("wrap", [lambda o: amp.OptimWrapper(o, _amp_state.handle, 1), LARC])
def test_an_optimizer_around_one_with_masters_is_copied_with_them(wrap: Any) -> None:
    model, optimizer = pair(1.0)
    _amp_state.handle = amp.init(device_type="cpu", loss_scale=8.0)
    model, wrapped = copy.deepcopy((model, wrap(optimizer)))
    block = getattr(wrapped, "scale_loss", lambda loss: amp.scale_loss(loss, wrapped))
    with block(pull((model.weight, [[0.25]]))) as scaled_loss:
        scaled_loss.backward()
    wrapped.step()
    assert model.weight.item() < 1.0
    assert_same_bits(model.state_dict()["weight"], next(amp.master_params(wrapped)).detach())


class WithoutState(torch.optim.SGD):
    def __reduce__(self) -> Any:
        return WithoutState, ([*self.param_groups[0]["params"]],)


@hows
def test_a_copy_that_its_class_makes_without_state_is_refused(how: Any) -> None:
    model = linear(1.0)
    pair = initialize(model, WithoutState(model.parameters()), opt_level="O2")
    with pytest.raises(TypeError, match=r"WithoutState\.__reduce__ returns no state, so a copy"):
        how(pair)
