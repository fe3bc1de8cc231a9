"""Random programs, written by hypothesis: training in mixed precision beside plain float32.

Gradients, scales and learning rates are powers of two or sums of a few, so mixed precision rounds
nothing: masters must equal the weights of `torch.optim.SGD` on a float32 model to the bit, whatever
is copied, saved, refused, interrupted or run in another thread in between.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    INF,
    BackwardError,
    assert_grads,
    master_grads,
    pull,
    raise_in_backward,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.amp import _amp_state
from apex_mp.amp.casts import current as _current
from apex_mp.optimizers import FusedAdam, FusedSGD

# The same programs each time, so that CI is red for a reason; RANDOM_PROGRAMS=2000 tries others.
_COUNT = os.environ.get("RANDOM_PROGRAMS")
SETTINGS = settings(
    max_examples=int(_COUNT or 40),
    derandomize=_COUNT is None,
    stateful_step_count=20,
    deadline=None,
    database=None,
)
LEARNING_RATE, MOMENTUM = 2.0**-4, 0.5

grads = st.sampled_from([0.25, -0.5, 1.0])
which = st.sampled_from([("a",), ("b", "c"), ("a", "b", "c")])
ways_to_copy = st.sampled_from(["deepcopy", "pickle", "torch.save"])


class Weights(nn.Module):
    """Some weights, which the losses pull at."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 0.5]]))
        self.b = nn.Parameter(torch.tensor([0.5, -2.0]))
        self.c = nn.Parameter(torch.tensor([4.0]))

    def forward(self, inside: Callable[[Weights], Any]) -> Any:
        """Call a function in a forward."""
        return inside(self)


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)


def copied(value: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(value)
    if way == "pickle":
        return pickle.loads(pickle.dumps(value))
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def values_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return float32 values: those of masters, where `state_dict` holds them."""
    return {name: value.float().tolist() for name, value in model.state_dict().items()}


class Training(RuleBasedStateMachine):
    """A model that trains in mixed precision, and the same in float32.

    Attributes:
        overflowed: A gradient was inf since the last step.
        is_cleared: No gradient came in since gradients were cleared.
        abandoned: Models that were left for a copy, and the values that they had then.
    """

    model: Any
    optimizer: Any

    def __init__(self) -> None:
        super().__init__()
        self.reference = Weights()
        self.reference_optimizer = sgd(self.reference.parameters())
        self.overflowed = False
        self.is_cleared = True
        self.abandoned: list[tuple[Any, Any, Any]] = []
        self.pool = ThreadPoolExecutor(1)

    def teardown(self) -> None:
        self.pool.shutdown()
        if _current.handle is not None:
            _current.handle._deactivate()
        vars(_amp_state).update(vars(type(_amp_state)()))

    def run(self, function: Callable[[], None], in_thread: bool) -> None:
        """Call a function here, or in a thread that lives as long as the program."""
        if in_thread:
            self.pool.submit(function).result()
        else:
            function()

    def pull(self, names: Any, grad: float, model: Any = None) -> Any:
        model = self.model if model is None else model
        return pull(*((getattr(model, name), grad) for name in names))

    def scaled_backward(self, loss: Any) -> None:
        raise NotImplementedError

    @rule(names=which, grad=grads, in_thread=st.booleans())
    def backward(self, names: Any, grad: float, in_thread: bool) -> None:
        self.is_cleared = False
        self.run(lambda: self.scaled_backward(self.pull(names, grad)), in_thread)
        self.pull(names, grad, self.reference).backward()

    @rule(names=which)
    def overflow(self, names: Any) -> None:
        self.scaled_backward(self.pull(names, INF))
        self.pull(names, 0.0, self.reference).backward()
        self.overflowed, self.is_cleared = True, False

    @rule(names=which)
    def failing_backward(self, names: Any) -> None:
        with pytest.raises(BackwardError):
            self.scaled_backward(raise_in_backward(self.pull(names, 1.0)))

    @precondition(lambda self: not self.overflowed)  # The step that is to be skipped comes first.
    @rule(to_none=st.booleans(), in_both=st.booleans())
    def zero_grad(self, to_none: bool, in_both: bool) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)
        if in_both:
            self.model.zero_grad(set_to_none=to_none)
        self.reference_optimizer.zero_grad(set_to_none=to_none)
        self.is_cleared = True

    @rule(to_none=st.booleans(), in_both=st.booleans())
    def step(self, to_none: bool, in_both: bool) -> None:
        self.optimizer.step()
        assert self.was_skipped() is self.overflowed
        if not self.overflowed:
            self.reference_optimizer.step()
        self.overflowed = False
        self.zero_grad(to_none, in_both)

    @precondition(lambda self: not self.overflowed)
    @rule(names=which, grad=grads, to_none=st.booleans())
    def train(self, names: Any, grad: float, to_none: bool) -> None:
        """Else few programs take a step with new gradients."""
        self.backward(names, grad, in_thread=False)
        self.step(to_none, in_both=False)

    def was_skipped(self) -> bool:
        return amp.step_was_skipped(self.optimizer)

    @rule(way=ways_to_copy)
    def go_on_with_a_copy(self, way: str) -> None:
        self.abandoned.append((self.model, self.optimizer, values_of(self.model)))
        self.model, self.optimizer = copied((self.model, self.optimizer), way)
        # A parameter of torch is copied without its gradient.
        self.reference, self.reference_optimizer = copied(
            (self.reference, self.reference_optimizer), way
        )
        self.overflowed, self.is_cleared = False, True

    @invariant()
    def masters_are_the_weights_of_float32(self) -> None:
        assert values_of(self.model) == values_of(self.reference)

    @invariant()
    def the_model_holds_its_masters_rounded(self) -> None:
        for name, param in self.model.named_parameters():
            assert torch.equal(param, getattr(self.reference, name).to(param.dtype)), name

    @invariant()
    def what_was_left_stays_as_it_was(self) -> None:
        for model, _, values in self.abandoned:
            assert values_of(model) == values


def edit_by_copy(weights: Weights) -> None:
    with torch.no_grad():
        weights.a.copy_(weights.a * 2)


def edit_by_add(weights: Weights) -> None:
    with torch.no_grad():
        weights.a.add_(1.0)


def edit_by_step(weights: Weights) -> None:
    optimizer = torch.optim.SGD([weights.a], lr=0.5)
    (weights.a.sum()).backward()
    optimizer.step()
    weights.a.grad = None


edits = st.sampled_from([edit_by_copy, edit_by_add, edit_by_step])


class WithCasts:
    """Rules for models whose functions are cast.

    Attributes:
        dtype: What a linear layer returns.
    """

    dtype = F16

    @rule(edit=edits, in_thread=st.booleans())
    def edit_in_forward(self: Any, edit: Any, in_thread: bool) -> None:
        """Use a weight, edit it, and use it again: each use takes the value of now."""
        x = torch.tensor([[1.0, 0.5]])

        def inside(weights: Weights) -> None:
            for _ in range(2):
                expected = (x @ weights.a.detach().t()).tolist()
                by_linear = nn.functional.linear(x, weights.a)
                by_einsum = torch.einsum("bi,oi->bo", x, weights.a)
                assert by_linear.dtype is by_einsum.dtype is self.dtype
                assert by_linear.tolist() == by_einsum.tolist() == expected
                edit(weights)

        self.run(lambda: Weights()(inside), in_thread)

    @rule(in_thread=st.booleans(), swap=st.booleans())
    def swap_between_forwards(self: Any, in_thread: bool, swap: bool) -> None:
        """Swap other weights in and out by `.data`, as averaged weights are."""
        other = Weights()
        x = torch.tensor([[1.0, 0.5]])

        def program() -> None:
            for factor in (1.0, 2.0, 1.0):
                other.a.data.copy_(Weights().a.detach() * factor)
                result = other(lambda weights: nn.functional.linear(x, weights.a))
                assert result.dtype is self.dtype
                assert result.tolist() == (x @ other.a.detach().t()).tolist()

        self.run(program, in_thread)


class HandleTraining(WithCasts, Training):
    """amp.init() and its handle."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = amp.init(max_loss_scale=1024.0)
        self.model = Weights()
        self.optimizer = sgd(self.model.parameters())

    def scaled_backward(self, loss: Any) -> None:
        with self.handle.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    @precondition(lambda self: not self.overflowed)
    @rule(dtype=st.sampled_from([F16, BF16]))
    def init_again(self, dtype: Any) -> None:
        self.handle, self.dtype = amp.init(dtype=dtype, max_loss_scale=1024.0), dtype

    @precondition(lambda self: not self.overflowed)
    @rule(by_init=st.booleans())
    def switch_off_and_look(self, by_init: bool) -> None:
        """No thread casts then, those that cast before included."""
        if by_init:
            amp.init(enabled=False)
        else:
            self.handle._deactivate()
        x = torch.ones(1, 2)

        def program() -> None:
            assert nn.functional.linear(x, self.model.a).dtype is F32
            assert not torch.is_autocast_enabled("cpu")

        for in_thread in (True, False):
            self.run(program, in_thread)
        self.handle = amp.init(dtype=self.dtype, max_loss_scale=1024.0)


class LevelTraining(Training):
    """amp.initialize at one level."""

    level: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.model, self.optimizer = self.initialize()
        self.checkpoint: Any = None

    def initialize(self) -> Any:
        model = Weights()
        return amp.initialize(
            model,
            sgd(model.parameters()),
            opt_level=self.level,
            max_loss_scale=1024.0,
            loss_scale="dynamic",
            verbosity=0,
        )

    def scaled_backward(self, loss: Any) -> None:
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    @precondition(lambda self: not self.overflowed)
    @rule()
    def save(self) -> None:
        everything = {
            "ours": [self.model.state_dict(), self.optimizer.state_dict(), amp.state_dict()],
            "reference": [self.reference.state_dict(), self.reference_optimizer.state_dict()],
        }
        self.checkpoint = copy.deepcopy(everything)

    @precondition(lambda self: self.checkpoint is not None and not self.overflowed)
    @rule(anew=st.booleans())
    def resume(self, anew: bool) -> None:
        if anew:
            self.model, self.optimizer = self.initialize()
        self.optimizer.zero_grad()
        self.reference_optimizer.zero_grad()
        model, optimizer, scales = copy.deepcopy(self.checkpoint["ours"])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        amp.load_state_dict(scales)
        model, optimizer = copy.deepcopy(self.checkpoint["reference"])
        self.reference.load_state_dict(model)
        self.reference_optimizer.load_state_dict(optimizer)

    @rule(bad=st.sampled_from(["parameter", "optimizer", "twice"]))
    def refused_initialization(self, bad: str) -> None:
        """What is refused leaves everything as it was, this training too."""
        models = [Weights(), Weights()]
        if bad == "parameter":
            models[1].d = nn.Parameter(torch.zeros(2, device="meta"))
        both: list[Any] = [sgd(each.parameters()) for each in models]
        groups = [[*each.param_groups[0]["params"]] for each in both]
        listed = {"parameter": both, "optimizer": [both[0], 7], "twice": [both[0], self.optimizer]}
        attributes = [sorted(vars(each)) for each in both]
        if bad == "parameter" and self.level != "O2":
            return  # There it is no error.
        if bad == "twice" and not hasattr(self.optimizer, "_amp_initialized"):
            return  # A copy at O1 has nothing of amp, and may be initialized.
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            amp.initialize(models, listed[bad], opt_level=self.level, verbosity=0)
        assert {param.dtype for model in models for param in [model.a, model.b]} == {F32}
        assert all(not model._forward_pre_hooks for model in models)
        assert [sorted(vars(each)) for each in both] == attributes
        for optimizer, params in zip(both, groups, strict=True):
            now = optimizer.param_groups[0]["params"]
            assert [id(param) for param in now] == [id(param) for param in params]


class O1Training(WithCasts, LevelTraining):
    level = "O1"


class O2Training(LevelTraining):
    level = "O2"


class FP16Training(Training):
    """FP16_Optimizer around an optimizer, beside that optimizer without it."""

    face: ClassVar[Any]
    inner: ClassVar[Any] = sgd

    def __init__(self) -> None:
        super().__init__()
        self.reference_optimizer = self.make_reference(self.reference.parameters())
        self.model, self.optimizer = self.make()

    make_reference = staticmethod(sgd)

    def make(self) -> Any:
        model = Weights()
        model.a.data, model.b.data = model.a.data.half(), model.b.data.bfloat16()
        arguments = {"init_scale": 1024.0, "scale_window": 5}
        inner = type(self).inner(model.parameters())
        return model, self.face(inner, 1.0, True, arguments, verbose=False)

    def scaled_backward(self, loss: Any) -> None:
        self.optimizer.backward(loss)

    @rule(names=which, grad=grads)
    def backward_without_update(self, names: Any, grad: float) -> None:
        self.is_cleared = False
        self.optimizer.backward(self.pull(names, grad), update_master_grads=False)
        self.pull(names, grad, self.reference).backward()

    @precondition(lambda self: self.is_cleared)  # The sum of the two kinds cannot be unscaled.
    @rule(names=which, grad=grads)
    def plain_backward_of_a_scaled_loss(self, names: Any, grad: float) -> None:
        self.is_cleared = False
        (self.pull(names, grad) * self.optimizer.loss_scale).backward()
        self.pull(names, grad, self.reference).backward()

    @rule(scale=st.sampled_from([4.0, 8.0, 1024.0]))
    def change_scale(self, scale: float) -> None:
        if not self.is_cleared:
            self.optimizer.update_master_grads()  # Unscaled by the scale that they were made with.
        self.optimizer.loss_scale = scale

    @precondition(lambda self: not self.is_cleared)  # What it unscaled, nothing scaled is added to.
    @rule()
    def update(self) -> None:
        self.optimizer.update_master_grads()

    @precondition(lambda self: not self.is_cleared)  # Else `overflow` is that of the last step.
    @rule()
    def read_gradients(self) -> None:
        self.optimizer.update_master_grads()
        assert bool(self.optimizer.overflow) is self.overflowed
        if not self.overflowed:
            expected = [param.grad for param in self.reference.parameters()]
            assert_grads(self.optimizer.inspect_master_grad_data()[0], *expected)
            assert_grads(master_grads(self.optimizer), *expected)
            assert self.optimizer.clip_master_grads(1e9) >= 0

    def was_skipped(self) -> bool:
        return bool(self.optimizer.overflow)

    def go_on_with_a_copy(self, way: str) -> None:
        """It is refused; see copies_are_refused."""

    @rule(way=ways_to_copy)
    def copies_are_refused(self, way: str) -> None:
        with pytest.raises(RuntimeError, match="should be serialized using state_dict"):
            copied((self.model, self.optimizer), way)

    @precondition(lambda self: not self.overflowed)
    @rule(way=ways_to_copy)
    def go_on_from_a_checkpoint(self, way: str) -> None:
        state = copied([self.model.state_dict(), self.optimizer.state_dict()], way)
        self.abandoned.append((self.model, self.optimizer, values_of(self.model)))
        self.model, self.optimizer = self.make()
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        self.reference_optimizer.zero_grad()

    @invariant()
    def masters_are_the_weights_of_float32(self) -> None:
        masters = [param.tolist() for param in self.optimizer.param_groups[0]["params"]]
        assert masters == [*values_of(self.reference).values()]


class AroundSGD(FP16Training):
    face = fp16_utils.FP16_Optimizer


class AroundFusedSGD(FP16Training):
    face = optimizers.FP16_Optimizer

    @staticmethod
    def inner(params: Any) -> Any:
        return FusedSGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)


class AroundFusedAdam(FP16Training):
    face = optimizers.FP16_Optimizer

    @staticmethod
    def inner(params: Any) -> Any:
        return FusedAdam(params, lr=LEARNING_RATE)

    make_reference = inner


def as_test(machine: type[Training]) -> Any:
    case = machine.TestCase
    case.settings = SETTINGS
    return case


TestHandle = as_test(HandleTraining)
TestO1 = as_test(O1Training)
TestO2 = as_test(O2Training)
TestAroundSGD = as_test(AroundSGD)
TestAroundFusedSGD = as_test(AroundFusedSGD)
TestAroundFusedAdam = as_test(AroundFusedAdam)
