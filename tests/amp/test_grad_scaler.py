"""apex_mp.amp.GradScaler: torch's to the bit where torch works, and float16 gradients beyond it."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    copies_of,
    give_grads,
    grad_for,
    make_params,
)
from grad_scaler_cases import OF_TORCH, OURS, give_scaled, new_scaler
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp import fp16_utils
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

# --- As torch's.


def test_a_checkpoint_goes_to_torch_and_back(device: torch.device) -> None:
    ours, theirs = new_scaler(device, init_scale=8.0), new_scaler(device, torch.amp.GradScaler)
    params = make_params(device)
    optimizer = FusedAdam(params)
    for step, bad in enumerate([None, math.inf, None]):
        give_scaled(ours, params, step, bad)
        ours.step(optimizer)
        ours.update()
    saved = ours.state_dict()
    assert saved.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(saved)
    assert theirs.state_dict() == saved
    assert theirs.state_dict()["_growth_tracker"] == 1
    again = GradScaler(device.type)
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == saved
    assert again.scale(torch.ones((), device=device)).item() == 4.0


def test_any_torch_optimizer_steps_masters_of_a_half_model(device: torch.device) -> None:
    # As scripts have it: fp32 masters are made by prep_param_lists.
    model = torch.nn.Linear(4, 3).to(device).half()
    model_params, masters = fp16_utils.prep_param_lists(model)
    expected = copies_of(masters)
    optimizer, plain = torch.optim.AdamW(masters), torch.optim.AdamW(expected)
    scaler = new_scaler(device)
    for step in range(5):
        give_scaled(scaler, model_params, step)
        fp16_utils.model_grads_to_master_grads(model_params, masters)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        fp16_utils.master_params_to_model_params(model_params, masters)
        scaler.update()
        give_grads(expected, step)
        plain.step()
    for param, master, wanted in zip(model_params, masters, expected, strict=True):
        assert_same_bits(master.detach(), wanted.detach())
        assert_same_bits(param.detach(), wanted.detach().half())


def test_a_gradient_that_two_parameters_share_is_unscaled_once(device: torch.device) -> None:
    params = [Parameter(torch.ones(3, device=device)) for _ in range(2)]
    params[0].grad = params[1].grad = torch.full((3,), 1024.0, device=device)
    new_scaler(device).unscale_(torch.optim.SGD(params))
    assert params[0].grad.tolist() == [1.0] * 3


MAKES = [*OURS.values(), *OF_TORCH.values()]


class Run:
    """A scaler and three optimizers, and what has been said of mistakes."""

    def __init__(self, cls: Any, makes: list[Any], options: dict[str, Any], where: Any) -> None:
        self.device: torch.device = where
        self.cls = cls
        self.scaler = cls(where.type, **options)
        self.lists = [make_params(where) for _ in makes]
        self.optimizers = [make(params) for make, params in zip(makes, self.lists, strict=True)]
        self.errors: list[tuple[str, str]] = []
        self.scaler.scale(torch.zeros((), device=where))

    def attempt(self, call: Callable[[], Any]) -> None:
        """Note the mistake; ours goes on where torch's sentence ends."""
        try:
            call()
        except (AssertionError, RuntimeError, ValueError) as error:
            self.errors.append((type(error).__name__, str(error).split(". ")[0].rstrip(".")))

    def backward(self, which: int, step: int, bad: float | None) -> None:
        for index, param in enumerate(self.lists[which]):
            grad = grad_for(param, step, index) * self.scaler.get_scale()
            param.grad = grad if param.grad is None else param.grad + grad
        if bad is not None:
            last: Any = self.lists[which][-1].grad
            last[(0,) * last.dim()] = bad

    def update(self, *new_scale: float) -> None:
        """End an iteration. Gradients that wait are touched, or ours would keep their scale."""
        self.attempt(lambda: self.scaler.update(*new_scale))
        for param in (param for params in self.lists for param in params):
            if param.grad is not None:
                param.grad = param.grad.clone()

    def resume(self, way: str) -> None:
        if way == "pickle":
            self.attempt(self._pickle)
        else:
            saved = self.scaler.state_dict()
            self.scaler = self.cls(self.device.type)
            self.scaler.load_state_dict(saved)
        self.scaler.scale(torch.zeros((), device=self.device))

    def _pickle(self) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))


def statement(rng: random.Random, number: int) -> Callable[[Run], None]:
    """Return one statement, to be run on both sides."""
    which = rng.randrange(3)
    what = rng.choices(
        ["backward", "step", "update", "unscale_", "clip", "edit", "zero", "set", "resume"],
        [8, 8, 6, 2, 2, 1, 3, 0.5, 0.7],
    )[0]
    bad = rng.choice([math.inf, math.nan, *[None] * 7])
    value = rng.choice([2.0, 1000.0])
    way = rng.choice(["pickle", "state_dict"])

    def params(run: Run) -> list[Parameter]:
        return run.lists[which]

    def clip(run: Run) -> None:
        torch.nn.utils.clip_grad_norm_(params(run), value)

    def edit(run: Run) -> None:
        for param in params(run):
            if param.grad is not None:
                param.grad.mul_(0.5)

    def step(run: Run) -> None:
        run.attempt(lambda: run.scaler.step(run.optimizers[which]))

    def unscale(run: Run) -> None:
        run.attempt(lambda: run.scaler.unscale_(run.optimizers[which]))

    return {
        "backward": lambda run: run.backward(which, number, bad),
        "step": step,
        "update": lambda run: run.update(),
        "unscale_": unscale,
        "clip": clip,
        "edit": edit,
        "zero": lambda run: run.optimizers[which].zero_grad(),
        "set": lambda run: run.update(value),
        "resume": lambda run: run.resume(way),
    }[what]


def compare(ours: Run, theirs: Run) -> None:
    assert ours.errors == theirs.errors
    assert ours.scaler.state_dict() == theirs.scaler.state_dict()
    for own, other in zip(ours.lists, theirs.lists, strict=True):
        for param, wanted in zip(own, other, strict=True):
            assert_same_bits(param.detach(), wanted.detach())
            assert (param.grad is None) == (wanted.grad is None)
            if param.grad is not None and wanted.grad is not None:
                assert_same_bits(param.grad, wanted.grad)


@pytest.mark.filterwarnings("ignore:.*gradients hold NaN, and no inf")
@pytest.mark.filterwarnings("ignore:GradScaler.step. scaler.scale:RuntimeWarning")
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_do_what_they_do_with_torch(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    makes = rng.sample(MAKES, 3)
    options = {
        "init_scale": rng.choice([2.0**10, 1000.0]),
        "growth_factor": rng.choice([2.0, 1.7]),
        "growth_interval": rng.choice([1, 3]),
    }
    runs = [Run(cls, makes, options, device) for cls in (GradScaler, torch.amp.GradScaler)]
    for run in runs:  # torch's fused optimizers leave a first state uninitialized if it is skipped
        for which, optimizer in enumerate(run.optimizers):
            run.backward(which, 0, None)
            run.scaler.step(optimizer)
        run.scaler.update()
    for number in range(60):
        execute = statement(rng, number)
        for run in runs:
            execute(run)
        compare(*runs)
