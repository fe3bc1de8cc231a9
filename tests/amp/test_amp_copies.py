"""amp.initialize: what copies and pickles of models and optimizers with masters do."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amp_level_cases import (
    F32,
    OPTIMIZERS,
    Net,
    backward,
    batches,
    everything,
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


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def optimizer_first(value: Any) -> Any:
    return copy.deepcopy([*value][::-1])[::-1]


HOW: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
    "deepcopy, optimizer first": optimizer_first,
    "pickle of a deepcopy": lambda value: pickled(copy.deepcopy(value)),
}
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


# Random programs. Each pair of model and optimizer has a history of what trains it. Between its
# entries there is what must not change anything: copies, refusals, blocks that raise.


class Pair:
    def __init__(self, make: Any) -> None:
        self.make = make
        model = nn.Sequential(linear(1 / 3, -2 / 3), nn.Tanh())
        self.objects = initialize(model, make(model.parameters()), opt_level="O2", verbosity=0)
        (scaler,) = _amp_state.loss_scalers
        scaler.load_state_dict({"loss_scale": 2.0**18, "unskipped": 1998})
        self.scale = amp.state_dict()
        self.history: list[Any] = []

    def loss(self, slope: float) -> torch.Tensor:
        model, _ = self.objects
        return (
            (model(torch.tensor([[1.0, 2.0], [slope, -1.0], [0.5, slope]])) * slope).square().sum()
        )

    def live(self, event: Any) -> None:
        """Do what one entry of the history says, at this pair's own loss scale."""
        kind, slope = event
        model, optimizer = self.objects
        amp.load_state_dict(self.scale)
        optimizer.zero_grad(set_to_none=kind != "zeros")
        if kind == "load":
            model.load_state_dict(
                {**model.state_dict(), "0.weight": torch.tensor([[slope, 1 / 7]])}
            )
        if kind != "idle":
            backward(optimizer, self.loss(slope))
        if kind == "twice":
            backward(optimizer, self.loss(1 - slope))
        if kind == "clip":
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        self.scale = amp.state_dict()
        self.history.append(event)

    def copied(self, how: Any) -> Pair:
        pair = copy.copy(self)
        pair.objects, pair.history = how(self.objects), [*self.history]
        return pair

    def numbers(self) -> list[torch.Tensor]:
        amp.load_state_dict(self.scale)
        return everything(*self.objects)

    # What changes nothing.

    def is_interrupted(self) -> None:
        def interrupted() -> None:
            with amp.scale_loss(self.loss(2.0), self.objects[1]) as scaled_loss:
                scaled_loss.backward()
                raise KeyError

        with pytest.raises(KeyError):
            interrupted()

    def is_refused_a_second_time(self) -> None:
        with pytest.raises(RuntimeError, match=r"passed through amp\.initialize once"):
            initialize(linear(1.0), [sgd(linear(1.0)), self.objects[1]], opt_level="O2")

    def is_refused_beside_another(self) -> None:
        bad = torch.optim.SGD([nn.Parameter(torch.ones(1, device="meta"))], lr=1.0)
        model = linear(1.0)
        with pytest.raises(TypeError, match="is on meta"):
            initialize(model, [sgd(model), bad], opt_level="O2")
        assert (model.weight.dtype, amp.state_dict()) == (F32, self.scale)

    def has_a_plain_backward(self) -> None:
        optimizer = self.objects[1]
        optimizer.zero_grad()
        self.loss(2.0).backward()
        with pytest.raises(RuntimeError, match="call backward in"):
            optimizer.step()

    def loses_its_optimizer(self) -> None:
        lone = copy.deepcopy(self.objects[1])
        with pytest.raises(RuntimeError, match="without its model"):
            backward(lone, self.loss(2.0))

    def is_averaged(self) -> None:
        average = copy.deepcopy(self.objects[0])
        for param in average.parameters():
            param.data.mul_(0.5)


NOTHING = [
    Pair.is_interrupted,
    Pair.is_refused_a_second_time,
    Pair.is_refused_beside_another,
    Pair.has_a_plain_backward,
    Pair.loses_its_optimizer,
    Pair.is_averaged,
]


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_train_each_copy_as_its_own_history_says(seed: int) -> None:
    chance = random.Random(seed)
    make = MAKE[[*MAKE][seed]]
    pairs = [Pair(make)]
    for _ in range(30):
        pair = chance.choice(pairs)
        what = chance.random()
        if what < 0.15 and len(pairs) < 4:
            pairs.append(pair.copied(chance.choice([*HOW.values()])))
        elif what < 0.5:
            amp.load_state_dict(pair.scale)
            chance.choice(NOTHING)(pair)
        else:
            kind = chance.choice(["plain", "zeros", "idle", "twice", "clip", "load"])
            pair.live((kind, chance.choice([0.25, 0.5, 2.0, -3.0])))
    assert len(pairs) > 1
    for pair in pairs:
        again = Pair(make)
        for event in pair.history:
            again.live(event)
        for ours, theirs in zip(pair.numbers(), again.numbers(), strict=True):
            assert_same_bits(ours, theirs)
