"""amp.initialize: what copies and pickles of models and optimizers with masters do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amp_level_cases import (
    F16,
    F32,
    OPTIMIZERS,
    Net,
    backward,
    batches,
    everything,
    initialize,
    step,
    train,
)
from fp16_cases import pull
from tolerances import assert_same_bits
from torch import nn
from torch.optim.lr_scheduler import StepLR

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


def linear(*weights: float) -> nn.Linear:
    layer = nn.Linear(len(weights), 1, bias=False)
    layer.weight.data.copy_(torch.tensor([weights]))
    return layer


def sgd(*models: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr)


def pair(*weights: float) -> tuple[nn.Linear, torch.optim.SGD]:
    model = linear(*weights)
    return initialize(model, sgd(model), opt_level="O2", max_loss_scale=2.0**10)


class Run:
    """A training whose scale overflows and grows: how each step ended, and all its numbers."""

    def __init__(self, make: Any) -> None:
        model = Net()
        optimizer = make(model.parameters())
        initialize(model, optimizer, opt_level="O2")
        (scaler,) = _amp_state.loss_scalers
        scaler.load_state_dict({"loss_scale": 2.0**20, "unskipped": 1995})
        self.objects = (model, optimizer, StepLR(optimizer, step_size=2, gamma=0.5))
        self.scale = amp.state_dict()
        self.skipped: list[bool] = []

    def go_on(self, first: int, last: int) -> None:
        model, optimizer, scheduler = self.objects
        amp.load_state_dict(self.scale)
        for number in range(first, last):
            train(model, optimizer, 1, start=number)
            self.skipped.append(amp.step_was_skipped(optimizer))
            scheduler.step()
        self.scale = amp.state_dict()

    def copied(self, how: Any) -> Run:
        run = copy.copy(self)
        run.objects, run.skipped = how(self.objects), [*self.skipped]
        return run

    def numbers(self) -> list[torch.Tensor]:
        model, optimizer, scheduler = self.objects
        rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
        return [*everything(model, optimizer), rates, torch.tensor(scheduler.last_epoch)]


@pytest.mark.parametrize(
    ("how", "make"),
    [*((how, "SGD") for how in HOW), *(("deepcopy", make) for make in MAKE if make != "SGD")],
)
@pytest.mark.filterwarnings("error")
def test_both_of_a_copied_pair_train_as_if_there_had_been_no_copy(how: str, make: str) -> None:
    torch.manual_seed(0)
    expected = Run(MAKE[make])
    expected.go_on(0, 12)
    torch.manual_seed(0)
    first = Run(MAKE[make])
    first.go_on(0, 3)
    second = first.copied(HOW[how])
    for start in range(3, 12, 3):
        for run in (second, first):
            run.go_on(start, start + 3)
    assert {True, False} == {*expected.skipped}
    for run in (first, second):
        assert run.skipped == expected.skipped
        assert run.scale == expected.scale
        for ours, theirs in zip(run.numbers(), expected.numbers(), strict=True):
            assert_same_bits(ours, theirs)
    assert {p.data_ptr() for p in first.objects[0].parameters()}.isdisjoint(
        p.data_ptr() for p in second.objects[0].parameters()
    )


@hows
def test_a_copy_saves_and_loads_its_own_masters(how: Any) -> None:
    model, optimizer = how(pair(1 / 3))
    (master,) = amp.master_params(optimizer)
    assert (model.weight.dtype, master.dtype) == (F16, F32)
    assert_same_bits(model.state_dict()["weight"], master.detach())
    model.load_state_dict({"weight": torch.tensor([[1 / 7]])})
    assert_same_bits(master.detach(), torch.tensor([[1 / 7]]))
    assert_same_bits(model.weight.detach(), torch.tensor([[1 / 7]]).half())


@hows
def test_a_copy_clears_the_gradients_of_its_model(how: Any) -> None:
    model, optimizer = how(pair(1.0))
    backward(optimizer, pull((model.weight, [[1.0]])))
    optimizer.zero_grad()
    assert [model.weight.grad, next(amp.master_params(optimizer)).grad] == [None, None]


@hows
def test_a_copy_gives_masters_to_later_groups(how: Any) -> None:
    model, optimizer = how(pair(1.0))
    later = linear(1.0).half()
    optimizer.add_param_group({"params": later.parameters(), "lr": 0.5})
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": model.weight})
    with pytest.raises(TypeError, match=r"params\[2\]\[0\] is on meta"):
        optimizer.add_param_group({"params": nn.Parameter(torch.ones(1, device="meta"))})
    step(optimizer, pull((model.weight, [[0.25]]), (later.weight, [[0.25]])))
    assert [model.weight.item(), later.weight.item()] == [0.75, 0.875]
    assert {p.dtype for p in amp.master_params(optimizer)} == {F32}


@hows
def test_the_first_step_of_a_copy_may_have_a_closure_that_overflows(how: Any) -> None:
    model, optimizer = how(pair(1.0))
    grads = iter([128.0, 0.5])  # The first overflows float16 at the scale of 2**10.

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = pull((model.weight, [[next(grads)]]))
        backward(optimizer, loss)
        return loss

    optimizer.step(closure)
    assert model.weight.item() == 0.5


@hows
def test_a_plain_backward_is_named_by_the_step_of_a_copy(how: Any) -> None:
    model, optimizer = how(pair(1.0))
    pull((model.weight, [[1.0]])).backward()
    with pytest.raises(RuntimeError, match="not in those of its float32 masters; call backward in"):
        optimizer.step()


@hows
def test_models_and_optimizers_that_share_a_weight_share_it_in_a_copy(how: Any) -> None:
    first, second = linear(1.0), linear(0.0)
    second.weight = first.weight
    one, two = sgd(first, lr=1.0), sgd(second, lr=0.5)
    initialize([first, second], [one, two], opt_level="O2")
    first, second, one, two = how((first, second, one, two))
    assert first.weight is second.weight
    assert next(amp.master_params(one)) is next(amp.master_params(two))
    backward([one, two], pull((first.weight, [[2.0**-12]])))
    one.step()
    two.step()
    assert next(amp.master_params(two)).item() == 1 - 1.5 * 2.0**-12
    assert_same_bits(second.state_dict()["weight"], torch.tensor([[1 - 1.5 * 2.0**-12]]))


def test_a_copy_of_one_optimizer_of_two_trains_its_own_part() -> None:
    first, second = linear(1.0), linear(1.0)
    one, two = sgd(first), sgd(second)
    initialize([first, second], [one, two], opt_level="O2")
    model, optimizer = copy.deepcopy((second, two))
    step(optimizer, pull((model.weight, [[0.25]])))
    assert [model.weight.item(), second.weight.item(), first.weight.item()] == [0.75, 1.0, 1.0]


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


def test_an_original_outlives_its_model() -> None:
    model, optimizer = pair(1.0)
    weight = model.weight
    del model
    step(optimizer, pull((weight, [[0.25]])))
    assert weight.item() == 0.75


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


def test_a_shallow_copy_steps_the_same_masters() -> None:
    model, optimizer = pair(1.0)
    other = copy.copy(optimizer)
    for each in (optimizer, other):
        each.zero_grad()
        step(each, pull((model.weight, [[0.25]])))
    assert model.weight.item() == 0.5


def test_a_copied_pair_goes_on_in_a_process_that_has_set_up_amp_for_no_model() -> None:
    data = pickle.dumps((pair(1.0), amp.state_dict()))
    vars(_amp_state).update(vars(type(_amp_state)()))
    (model, optimizer), scale = pickle.loads(data)
    with pytest.raises(RuntimeError, match=r"model, optimizer = amp\.initialize"):
        backward(optimizer, pull((model.weight, [[0.25]])))
    initialize([], opt_level="O2")
    amp.load_state_dict(scale)
    step(optimizer, pull((model.weight, [[0.25]])))
    assert model.weight.item() == 0.75
    assert amp.state_dict()["loss_scaler0"] == {**scale["loss_scaler0"], "unskipped": 1}


def test_the_class_of_an_optimizer_with_masters_is_its_own_in_all_that_is_seen() -> None:
    model = linear(1.0)
    optimizer, plain = sgd(model), sgd(linear(1.0))
    before = repr(optimizer)
    initialize(model, optimizer, opt_level="O2")
    for each in (optimizer, copy.deepcopy(optimizer), pickled(optimizer)):
        assert isinstance(each, torch.optim.SGD)
        assert (each.__class__.__name__, repr(each)) == ("SGD", before)
        assert type(each).__module__ == type(plain).__module__
        assert type(each) is type(optimizer)
    assert type(plain) is torch.optim.SGD


def test_the_class_of_an_optimizer_with_masters_makes_optimizers_without() -> None:
    _, optimizer = pair(1.0)
    other = type(optimizer)(linear(1.0).parameters(), **optimizer.defaults)
    assert type(other) is torch.optim.SGD


def test_the_class_of_an_optimizer_is_freed_with_it() -> None:
    class Own(torch.optim.SGD):
        pass

    model = linear(1.0)
    optimizer = Own(model.parameters())
    initialize(model, optimizer, opt_level="O2")
    reference = weakref.ref(Own)
    del Own, optimizer
    gc.collect()
    assert reference() is None


class WithoutState(torch.optim.SGD):
    def __reduce__(self) -> Any:
        return WithoutState, ([*self.param_groups[0]["params"]],)


@hows
def test_a_copy_that_its_class_makes_without_state_is_refused(how: Any) -> None:
    model = linear(1.0)
    pair = initialize(model, WithoutState(model.parameters()), opt_level="O2")
    with pytest.raises(TypeError, match=r"WithoutState\.__reduce__ returns no state, so a copy"):
        how(pair)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_copy_may_be_initialized_where_the_optimizer_was_not_changed(level: str) -> None:
    model = linear(1.0)
    _, optimizer = initialize(model, sgd(model), opt_level=level)
    copied, lone = linear(1.0), copy.deepcopy(optimizer)
    if level != "O2":
        initialize(copied, lone, opt_level=level)
        return
    with pytest.raises(RuntimeError, match=r"passed through amp\.initialize once"):
        initialize(copied, lone, opt_level=level)


def test_loading_with_assign_is_refused_while_there_are_masters() -> None:
    model, _ = pair(1.0)
    weight = model.weight
    outer = nn.Sequential(linear(5.0), model)
    with pytest.raises(RuntimeError, match=r"load_state_dict: assign is True, which puts new"):
        model.load_state_dict({"weight": torch.zeros(1, 1)}, assign=True)
    assert (model.weight is weight, weight.item()) == (True, 1.0)
    assert outer[0].weight.item() == 5.0
    copy.deepcopy(model).load_state_dict({"weight": torch.zeros(1, 1)}, assign=True)


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
