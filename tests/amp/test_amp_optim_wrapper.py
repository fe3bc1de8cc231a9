"""OptimWrapper: several losses for one optimizer, each with a scale of its own."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from fp16_cases import F32, INF, parameter, pull
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.amp import OptimWrapper
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("amp_off")


sgd = functools.partial(torch.optim.SGD, lr=0.5)
inners = pytest.mark.parametrize(
    "make", [sgd, torch.optim.Adam, FusedAdam], ids=["SGD", "Adam", "FusedAdam"]
)


@pytest.fixture
def weight(device: torch.device) -> nn.Parameter:
    return parameter([1.0], F32, device)


def backward(optimizer: Any, loss: Tensor) -> None:
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()


def scales(wrapped: Any) -> list[float]:
    return [scaler.loss_scale() for scaler in wrapped._loss_scaler]


# Losses.


@pytest.mark.parametrize("num_loss", [1, 2])
def test_more_losses_than_num_loss_are_refused(num_loss: int, handle: Any, weight: Any) -> None:
    wrapped = handle.wrap_optimizer(sgd([weight]), num_loss)
    for _ in range(num_loss):
        backward(wrapped, pull((weight, 1.0)))
    with pytest.raises(
        RuntimeError,
        match=f"called {num_loss + 1} times since the last step, but num_loss is {num_loss}",
    ):
        backward(wrapped, pull((weight, 1.0)))
    wrapped.step()
    backward(wrapped, pull((weight, 1.0)))


# Old rules.


def test_a_closure_is_refused_in_the_old_words(handle: Any, weight: Any) -> None:
    wrapped = handle.wrap_optimizer(sgd([weight]))
    with pytest.raises(
        NotImplementedError,
        match=r"^The `closure` argument is unsupported by the amp optimizer wrapper\.$",
    ):
        wrapped.step(lambda: 1.0)


@pytest.mark.parametrize(
    ("optimizer", "num_loss", "error", "sentence"),
    [
        (None, 1, TypeError, "optimizer is a NoneType"),
        ("wrapped", 1, TypeError, "not wrapped yet"),
        ("plain", 0, ValueError, "num_loss is 0; it must be at least 1"),
        ("plain", 1.0, TypeError, "num_loss is 1.0; it must be an int"),
        ("plain", True, TypeError, "num_loss is True; it must be an int"),
    ],
)
def test_wrong_arguments_are_named(
    optimizer: Any, num_loss: Any, error: type[Exception], sentence: str, handle: Any, weight: Any
) -> None:
    made = {"plain": sgd([weight]), "wrapped": handle.wrap_optimizer(sgd([weight]))}
    with pytest.raises(error, match=sentence):
        handle.wrap_optimizer(made.get(optimizer), num_loss)


# Without casts.


@pytest.mark.parametrize("how", ["NoOpHandle", "deactivated", "disabled"])
def test_an_inactive_handle_hands_everything_on(
    how: str, device: torch.device, weight: Any
) -> None:
    handle: Any = amp.init(enabled=how != "NoOpHandle", device_type=device.type)
    wrapped = handle.wrap_optimizer(sgd([weight]))
    if how == "deactivated":
        handle._deactivate()
    with handle._disable_casts():
        loss = pull((weight, 1.0))
        for _ in range(3):  # Nobody counts.
            with wrapped.scale_loss(loss) as scaled_loss:
                assert scaled_loss is loss
        loss.backward()
        assert wrapped.step(lambda: 5.0) == 5.0
        assert weight.tolist() == [0.5]
        assert wrapped.step() is None
        assert weight.tolist() == [0.0]


@inners
def test_grad_scaler_takes_a_wrapper_only_without_casts(
    make: Any, handle: Any, device: torch.device, weight: Any
) -> None:
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    wrapped = handle.wrap_optimizer(make([weight], lr=0.5))
    scaler.scale(pull((weight, 1.0))).backward()
    with pytest.raises(RuntimeError, match="scales losses itself"):
        scaler.step(wrapped)
    disabled: Any = amp.init(enabled=False)
    wrapped = disabled.wrap_optimizer(make([weight], lr=0.5))
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    for value, after in ((INF, 1.0), (1.0, 0.5)):
        wrapped.zero_grad()
        scaler.scale(pull((weight, value))).backward()
        scaler.step(wrapped)
        scaler.update()
        assert weight.item() == pytest.approx(after)


# A torch optimizer to everyone else.


def test_a_wrapper_is_an_optimizer_with_the_attributes_of_the_one_inside(
    handle: Any, weight: Any
) -> None:
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    inner.note = "mine"
    wrapped = handle.wrap_optimizer(inner, num_loss=2)
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert isinstance(wrapped, OptimWrapper)
    assert wrapped._optimizer is inner
    for name in ("param_groups", "state", "defaults", "note"):
        assert getattr(wrapped, name) is getattr(inner, name)
    assert repr(wrapped) == repr(inner)
    wrapped.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    assert [*inspect.signature(wrapped.step).parameters] == ["closure"]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wrapped.nonsense


# Checkpoints.


def trained(handle: Any, weight: Any, *values: float, num_loss: int = 2) -> Any:
    wrapped = handle.wrap_optimizer(torch.optim.Adam([weight]), num_loss)
    for value in values:
        wrapped.zero_grad()
        backward(wrapped, pull((weight, 1.0)))
        if num_loss > 1:
            backward(wrapped, pull((weight, value)))
        wrapped.step()
    return wrapped


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda s: s.pop(), ValueError, "there are 1 loss_scalers and num_loss is 2"),
        (lambda s: s.append(s[0]), ValueError, "there are 3 loss_scalers"),
        (lambda s: s[1].update(loss_scale=-1.0), ValueError, "scale is -1"),
        (lambda s: s[1].pop("unskipped"), KeyError, "unskipped"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    change: Any, error: type[Exception], sentence: str, handle: Any, weight: Any
) -> None:
    state = copy.deepcopy(trained(handle, weight, INF, INF).state_dict())
    change(state["loss_scalers"])
    wrapped = trained(handle, weight, 1.0)
    before = str(wrapped.state_dict())
    with pytest.raises(error, match=sentence):
        wrapped.load_state_dict(state)
    assert str(wrapped.state_dict()) == before


GRAD_SCALER = {
    "scale": 2.0**10,
    "growth_factor": 4.0,
    "backoff_factor": 0.125,
    "growth_interval": 7,
    "_growth_tracker": 3,
}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (GRAD_SCALER, [2.0**10, 2.0**10]),
        (
            {
                "loss_scaler1": {"loss_scale": 4.0, "unskipped": 1},
                "loss_scaler0": {"loss_scale": 2.0, "unskipped": 0},
            },
            [2.0, 4.0],
        ),
    ],
    ids=["GradScaler", "amp.state_dict"],
)
def test_scales_alone_are_loaded_and_leave_the_optimizer_as_it_is(
    state: Any, expected: list[float], handle: Any, weight: Any
) -> None:
    wrapped = trained(handle, weight, 1.0, 2.0)
    before = str(wrapped._optimizer.state_dict())
    wrapped.load_state_dict(state)
    assert scales(wrapped) == expected
    assert str(wrapped._optimizer.state_dict()) == before
