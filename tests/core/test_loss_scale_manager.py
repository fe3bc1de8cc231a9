"""The names of tf.contrib.mixed_precision, against a restatement of TensorFlow's rule."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from apex_mp.amp import fp16_compute
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleOptimizer,
)
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.cpu_only

ONE = np.float32(1)


@dataclasses.dataclass(frozen=True)
class TensorFlowRule:
    """From the documentation of tf.contrib.mixed_precision, in float32 as there."""

    scale: np.float32
    incr_every: int
    decr_every: int
    incr: np.float32
    decr: np.float32
    good: int = 0
    bad: int = 0

    def after(self, finite: bool) -> TensorFlowRule:
        good, bad = (self.good + 1, self.bad) if finite else (0, self.bad + 1)
        if finite and good >= self.incr_every:
            with np.errstate(over="ignore"):
                larger = self.scale * self.incr
            taken = larger if np.isfinite(larger) else self.scale
            return dataclasses.replace(self, scale=taken, good=0, bad=0)
        if not finite and bad >= self.decr_every:
            smaller = max(ONE, self.scale * self.decr)
            return dataclasses.replace(self, scale=smaller, good=0, bad=0)
        return dataclasses.replace(self, good=good, bad=bad)


@pytest.mark.parametrize("start", [2**32, 1, 2.0**127])
@pytest.mark.parametrize("ratios", [(2, 0.8), (2, 0.5)])
@pytest.mark.parametrize("decr_every", [1, 2, 3])
@pytest.mark.parametrize("incr_every", [1, 2, 3, 4])
def test_every_sequence_of_12_steps_gives_the_scales_of_tensorflow(
    start: float, ratios: tuple[float, float], incr_every: int, decr_every: int
) -> None:
    manager = ExponentialUpdateLossScaleManager(start, incr_every, decr_every, *ratios)
    incr, decr = (np.float32(ratio) for ratio in ratios)
    rule = TensorFlowRule(np.float32(start), incr_every, decr_every, incr, decr)
    # Sequences that lead to the same state go on alike, so they are counted, not repeated.
    reached = Counter({(tuple(manager.state_dict().items()), rule): 1})
    for _ in range(12):
        before, reached = reached, Counter()
        for (state, rule), sequences in before.items():
            for finite in (True, False):
                manager.load_state_dict(dict(state))
                manager.update_loss_scale(finite)
                after = rule.after(finite)
                ours, theirs = manager.state_dict(), (after.scale, after.good, after.bad)
                assert tuple(ours.values()) == theirs
                reached[tuple(ours.items()), after] += sequences
    assert reached.total() == 2**12


def test_the_published_call_starts_at_2_to_the_32_and_halves_at_the_second_bad_step() -> None:
    manager = ExponentialUpdateLossScaleManager(
        init_loss_scale=2**32, incr_every_n_steps=1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5
    )
    assert manager.get_loss_scale() == 2.0**32
    manager.update_loss_scale(finite_grads=False)
    assert manager.get_loss_scale() == 2.0**32
    manager.update_loss_scale(finite_grads=False)
    assert manager.get_loss_scale() == 2.0**31
    for _ in range(1000):
        assert manager.get_loss_scale() == 2.0**31
        manager.update_loss_scale(finite_grads=True)
    assert manager.get_loss_scale() == 2.0**32


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FixedLossScaleManager(0.5), "FixedLossScaleManager: loss_scale is 0.5; it must"),
        (lambda: FixedLossScaleManager("128"), "loss_scale is '128'; it must be a number"),
        (lambda: FixedLossScaleManager(math.inf), "loss_scale is inf; it must lie in"),
        (
            lambda: ExponentialUpdateLossScaleManager(0, 1000),
            "ExponentialUpdateLossScaleManager: init_loss_scale is 0; it must lie in",
        ),
        (lambda: ExponentialUpdateLossScaleManager(8, 0), "incr_every_n_steps is 0; it must lie"),
        (lambda: ExponentialUpdateLossScaleManager(8, 1e3), "is 1000.0; it must be an int"),
        (lambda: ExponentialUpdateLossScaleManager(8, 9, 0), "decr_every_n_nan_or_inf is 0"),
        (lambda: ExponentialUpdateLossScaleManager(8, 9, 2, 0.5), "incr_ratio is 0.5; it must"),
        (lambda: ExponentialUpdateLossScaleManager(8, 9, 2, 2, 1), "decr_ratio is 1; it must"),
        (lambda: LossScaleOptimizer([], FixedLossScaleManager(8)), "opt is a list; it must be"),
        (lambda: LossScaleOptimizer(sgd(nn.Linear(1, 1)), 8.0), "loss_scale_manager is 8.0; it"),
    ],
)
def test_a_bad_argument_is_refused_in_a_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        make()


# The optimizer.


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def adam(model: nn.Module) -> FusedAdam:
    return FusedAdam(model.parameters(), lr=0.25)


def doubling() -> ExponentialUpdateLossScaleManager:
    return ExponentialUpdateLossScaleManager(64.0, 3, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def small() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).float().square().mean()


VARIABLES = {
    "float32": lambda model: model,
    "float32-computing-in-float16": fp16_compute,
    "float16": lambda model: model.half(),
}
kinds = pytest.mark.parametrize("kind", VARIABLES)
inner = pytest.mark.parametrize("make", [sgd, adam])


@kinds
@inner
def test_minimize_is_the_loop_of_fp16_optimizer_with_the_same_scale(
    kind: str, make: Callable[[nn.Module], Any]
) -> None:
    models = [VARIABLES[kind](small()) for _ in range(2)]
    ours = LossScaleOptimizer(make(models[0]), doubling())
    theirs = FP16_Optimizer(make(models[1]), dynamic_loss_scale=doubling()._value, verbose=False)
    dtype = torch.float32 if kind == "float32" else torch.float16
    for step in range(5):
        inputs = torch.full((3, 4), math.inf if step == 3 else 1.0 + step, dtype=dtype)
        ours.minimize(loss_of(models[0], inputs))
        theirs.zero_grad()
        theirs.backward(loss_of(models[1], inputs))
        theirs.step()
        assert ours._manager.get_loss_scale() == theirs.loss_scale == ours.loss_scale
        assert ours.overflow == theirs.overflow == (step == 3)
        for mine, their in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine, their)
    assert not torch.equal(models[0].weight, VARIABLES[kind](small()).weight)


@kinds
@inner
def test_apply_gradients_steps_with_what_it_is_given_and_nothing_else(
    kind: str, make: Callable[[nn.Module], Any]
) -> None:
    model, clipped = VARIABLES[kind](small()), small()
    optimizer = LossScaleOptimizer(make(model), FixedLossScaleManager(64.0))
    pairs = optimizer.compute_gradients(
        loss_of(model, torch.ones(3, 4, dtype=torch.float32 if kind == "float32" else torch.half))
    )
    before = model.bias.detach().clone()
    (weight_grad, weight), _ = pairs
    optimizer.apply_gradients([(torch.full_like(weight_grad, 0.5), weight)])
    reference = make(clipped)
    clipped.weight.grad = torch.full((2, 4), 0.5)
    reference.step()
    assert torch.equal(model.bias, before)
    torch.testing.assert_close(model.weight.float(), clipped.weight, rtol=1e-3, atol=1e-3)
    assert torch.equal(weight, model.weight) or kind == "float16"


@kinds
@inner
def test_an_overflow_skips_the_step_lowers_the_scale_and_is_named(
    kind: str, make: Callable[[nn.Module], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, manager = VARIABLES[kind](small()), doubling()
    optimizer = LossScaleOptimizer(make(model), manager, model=model)
    before = model.weight.detach().clone()
    (_, weight), (_, bias) = optimizer.compute_gradients(
        model.weight.float().square().sum() + model.bias.float().sum()
    )
    optimizer.apply_gradients([(weight.grad, weight), (torch.full_like(bias, math.inf), bias)])
    assert optimizer.overflow
    assert manager.get_loss_scale() == 32.0
    assert torch.equal(model.weight, before)
    (row,) = optimizer.overflow_report
    assert (row.name, row.inf) == ("module.bias" if "computing" in kind else "bias", 2)
    printed = capsys.readouterr().out
    assert "Step 0 is skipped: gradients overflow at loss scale 64.0; the next is 32.0" in printed
    assert "bias [2]: 2 inf, 0 NaN" in printed


@kinds
def test_a_saved_run_goes_on_to_the_same_bits(kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.float16

    def begin() -> tuple[nn.Module, ExponentialUpdateLossScaleManager, LossScaleOptimizer]:
        model, manager = VARIABLES[kind](small()), doubling()
        return model, manager, LossScaleOptimizer(adam(model), manager, verbose=False)

    def steps(model: nn.Module, optimizer: LossScaleOptimizer, numbers: range) -> None:
        for step in numbers:
            inputs = torch.full((3, 4), math.inf if step == 1 else 1.0 + step, dtype=dtype)
            optimizer.minimize(loss_of(model, inputs))

    model, manager, optimizer = begin()
    steps(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    steps(model, optimizer, range(4, 8))
    file.seek(0)
    again, other, resumed = begin()
    states = torch.load(file, weights_only=True)
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    assert other.state_dict() == {"loss_scale": 32.0, "num_good_steps": 2, "num_bad_steps": 0}
    steps(again, resumed, range(4, 8))
    assert other.state_dict() == manager.state_dict()
    for mine, their in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, their)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    manager = doubling()
    optimizer = LossScaleOptimizer(adam(small()), manager)
    fixed = LossScaleOptimizer(adam(small()), FixedLossScaleManager(8.0)).state_dict()
    dynamic = FP16_Optimizer(adam(small()), dynamic_loss_scale=True, verbose=False).state_dict()
    wrong = {**optimizer.state_dict(), "loss_scaler": {**manager.state_dict(), "loss_scale": -1.0}}
    halved = {**optimizer.state_dict(), "loss_scaler": {**manager.state_dict(), "loss_scale": 32.0}}
    before = optimizer.state_dict()
    for state, sentence in (
        (fixed, "the state has ['loss_scale']; it must be a dict with the keys ['loss_scale', 'n"),
        (dynamic, "LossScaleOptimizer.load_state_dict: the state is that of a GradScaler or an"),
        (torch.amp.GradScaler("cpu").state_dict(), "the state is that of a GradScaler or an"),
        (wrong, "scale is -1.0; it must lie in"),
        ({**halved, "fp32_from_fp16": []}, "fp32_from_fp16 has 0 groups"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == str(before)
