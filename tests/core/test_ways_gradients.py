"""Each way steps with the gradients of its losses: sums, parts, clips, edits. See ways.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import (
    F16,
    F32,
    INF,
    NAN,
    BackwardError,
    assert_same,
    pull,
    raise_in_backward,
)
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from way_runs import RULE, Run, exact
from ways import Twin, Way, give, grads_of, spoiled, train, ways_with

pytestmark = pytest.mark.usefixtures("amp_off", "other_device")


@ways_with()
def test_backward_calls_add_up(way: Way, device: torch.device) -> None:
    run = way.start(device)
    twin = Twin(run)
    for number in range(3):
        run.zero_grad()
        parts = [grads_of(run, 3 * number + part) for part in range(3)]
        parts[1][0] = None  # Not each loss is of all parameters.
        for part in parts:
            give(run, part)
        run.step()
        sums = [sum(g for g in each if g is not None) for each in zip(*parts, strict=True)]
        twin.step(*sums)
    twin.assert_is(run)


@ways_with()
def test_parameters_without_gradients_stay_as_they_are(way: Way, device: torch.device) -> None:
    run = way.start(device)
    twin = Twin(run)
    for number, used in enumerate((0, 2, 1, 1)):  # The first of b comes last.
        run.zero_grad()
        grads = [g if i == used else None for i, g in enumerate(grads_of(run, number))]
        give(run, grads)
        run.step()
        twin.step(*grads)
        twin.assert_is(run)


@ways_with()
def test_a_parameter_may_be_frozen_and_thawed(way: Way, device: torch.device) -> None:
    run = way.start(device)
    twin = Twin(run)
    for number, frozen in enumerate((True, False, False, True, False)):
        run.params[0].requires_grad_(not frozen)
        run.zero_grad()
        grads: list[Any] = grads_of(run, number)
        grads[0] = None if frozen else grads[0]
        give(run, grads)
        run.step()
        twin.step(*grads)
        twin.assert_is(run)


@ways_with()
def test_a_parameter_that_is_frozen_at_first_gets_its_master_later(
    way: Way, device: torch.device
) -> None:
    run = way.start(device, frozen=True)
    if way.store in ("own", "O2"):
        assert run.masters()[0] is run.params[0]
    run.params[0].requires_grad_(True)
    twin = Twin(run)
    train(run, twin, [None, INF, None])
    twin.assert_is(run)


@ways_with()
def test_an_exception_inside_backward_loses_nothing(way: Way, device: torch.device) -> None:
    run = way.start(device)
    twin = Twin(run)
    grads = grads_of(run, 0)
    give(run, grads)
    with pytest.raises(BackwardError):
        run.backward(raise_in_backward(pull(*zip(run.params, grads_of(run, 1), strict=True))))
    run.step()
    twin.step(*grads)
    twin.assert_is(run)


@ways_with("torch's interface")
def test_a_group_can_be_added_in_mid_training(way: Way, device: torch.device) -> None:
    run = way.start(device)
    twin = Twin(run)
    train(run, twin, [None, None])
    dtype = F32 if way.store in ("none", "O2") else F16
    later = [Parameter(exact(shape, 7).to(device, dtype)) for shape in ((5,), (1, 2))]
    for each, params in (
        (run, later),
        (twin, [Parameter(p.detach().float().clone()) for p in later]),
    ):
        each.optimizer.add_param_group({"params": params, "lr": 0.5})
        each.params += params
    train(run, twin, [None, INF, None], first=2)
    twin.assert_is(run)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last dimension first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "part of a larger one": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]].clone(
        memory_format=torch.preserve_format
    ),
    "no dimension": lambda t: t.reshape(-1)[0].clone(),
    "no element": lambda t: t[:0].clone(),
}


@ways_with()
@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=[*LAYOUTS])
def test_parameters_are_stepped_however_they_lie(
    lay: Callable[[Tensor], Tensor], way: Way, device: torch.device
) -> None:
    run = way.start(device, lay=lambda t: lay(t) if t.dim() > 1 else t)
    for param, master in zip(run.params, run.masters(), strict=True):
        assert param.shape == master.shape
    twin = Twin(run)
    train(run, twin, [None, None])
    twin.assert_is(run)


# Clips and edits


def assert_near(run: Run, twin: Twin) -> None:
    """A clip factor is rounded otherwise than torch's, three times."""
    for master, wanted in zip(run.masters(), twin.params, strict=True):
        torch.testing.assert_close(master.detach(), wanted.detach(), rtol=2e-6, atol=1e-7)


@pytest.mark.every_case
@ways_with()
def test_a_clip_returns_the_norm_of_unscaled_gradients_and_counts(
    way: Way, device: torch.device
) -> None:
    check_clips(way, device, lambda run, max_norm: run.clip(max_norm))


@ways_with("torch's clip")
def test_unscaled_gradients_can_be_clipped_by_torch(way: Way, device: torch.device) -> None:
    check_clips(way, device, lambda run, max_norm: clip_grad_norm_(run.unscaled(), max_norm))


def check_clips(way: Way, device: torch.device, clip: Callable[[Run, float], Any]) -> None:
    run = way.start(device)
    twin = Twin(run)
    for number, max_norm in enumerate((0.5, 1e9, 0.0, 0.5)):
        run.zero_grad()
        grads = grads_of(run, number)
        give(run, grads)
        for param, grad in zip(twin.params, grads, strict=True):
            param.grad = grad.clone()
        wanted = clip_grad_norm_(twin.params, max_norm)
        norm = torch.as_tensor(clip(run, max_norm))
        torch.testing.assert_close(norm, wanted, rtol=5e-7, atol=0.0)
        run.step()
        twin.optimizer.step()
        assert not run.skipped
        assert_near(run, twin)


@ways_with("torch's interface")
def test_a_group_may_be_added_after_a_clip(way: Way, device: torch.device) -> None:
    """The step of an optimizer that clips once read one norm too many, from memory of others."""
    run = way.start(device)
    twin = Twin(run)
    grads = grads_of(run, 0)
    give(run, grads)
    run.clip(1e9)
    for each in (run, twin):
        each.optimizer.add_param_group({"params": [Parameter(torch.ones(2, device=device))]})
    run.step()
    twin.step(*grads)
    for master, wanted in zip(run.masters(), twin.params, strict=False):
        assert_same_bits(master.detach(), wanted.detach())


@ways_with()
@pytest.mark.parametrize("value", [INF, NAN])
def test_a_clip_of_an_overflow_skips_the_step(value: float, way: Way, device: torch.device) -> None:
    run = way.start(device)
    train(run, None, [None])
    before = run.numbers()
    run.zero_grad()
    give(run, spoiled(grads_of(run, 1), value))
    norm = run.clip(1.0)
    assert norm == -1 or not torch.as_tensor(norm).isfinite()
    run.step()
    assert run.skipped
    assert run.scale == RULE.scale / 2
    assert_same(run.numbers(), before)


def halve(params: list[Any]) -> None:
    for param in params:
        param.grad.mul_(0.5)


def replace_by_half(params: list[Any]) -> None:
    for param in params:
        param.grad = param.grad * 0.5


def add_by_data(params: list[Any]) -> None:
    for param in params:
        param.grad.data.add_(1.0)


def drop_one(params: list[Any]) -> None:
    params[1].grad = None


def drop_all(params: list[Any]) -> None:
    for param in params:
        param.grad = None


@ways_with()
@pytest.mark.parametrize("edit", [halve, replace_by_half, add_by_data, drop_one, drop_all])
def test_edits_of_unscaled_gradients_count(
    edit: Callable[[list[Any]], None], way: Way, device: torch.device
) -> None:
    run = way.start(device)
    twin = Twin(run)
    train(run, twin, [None])
    grads = grads_of(run, 1)
    run.zero_grad()
    give(run, grads)
    for each, grad in zip(run.unscaled(), grads, strict=True):
        assert torch.equal(each.grad.float(), grad)
    edit(run.unscaled())
    run.step()
    for param, grad in zip(twin.params, grads, strict=True):
        param.grad = grad
    edit(twin.params)
    twin.optimizer.step()
    twin.assert_is(run)


# What changes between steps


def change_the_lr(run: Run, twin: Twin) -> None:
    for each in (run, twin):
        each.optimizer.param_groups[0]["lr"] = 0.5


def reverse_the_group(run: Run, twin: Twin) -> None:
    for each in (run, twin):
        each.optimizer.param_groups[0]["params"].reverse()
        each.params.reverse()


def move_the_data(run: Run, twin: Twin) -> None:
    for param in [*run.params, *run.masters()]:
        param.data = param.data.clone()


def swap_the_tensors(run: Run, twin: Twin) -> None:
    for param in run.params:
        torch.utils.swap_tensors(param, Parameter(param.detach().clone()))


def load_its_own_state(run: Run, twin: Twin) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def clear_the_state(run: Run, twin: Twin) -> None:
    for each in (run, twin):
        each.optimizer.state.clear()


def reorder_the_state(run: Run, twin: Twin) -> None:
    for param in [*run.optimizer.state][::2]:
        run.optimizer.state[param] = run.optimizer.state.pop(param)


def patch_the_step(run: Run, twin: Twin) -> None:
    step = run.inner.step
    run.inner.step = lambda *args, **kwargs: step(*args, **kwargs)


CHANGES: tuple[Callable[[Run, Twin], None], ...] = (
    *(change_the_lr, reverse_the_group, move_the_data, swap_the_tensors, load_its_own_state),
    *(clear_the_state, reorder_the_state, patch_the_step),
)


@ways_with("torch's interface")
@pytest.mark.parametrize("change", CHANGES)
def test_steps_after_a_change_are_those_of_float32(
    sides: int, change: Callable[[Run, Twin], None], way: Way, device: torch.device
) -> None:
    run = way.start(device, sides=sides)
    twin = Twin(run)
    train(run, twin, [None, INF, None])
    run.zero_grad()
    change(run, twin)
    train(run, twin, [None, None, INF, None], first=3)
    twin.assert_is(run, is_near=sides == 2 and "clipped" in way.inner)


@pytest.mark.filterwarnings("ignore:amp. the float32 master:RuntimeWarning")
@ways_with()
def test_weights_that_were_written_are_stepped(way: Way, device: torch.device) -> None:
    """Where masters win, they are written."""
    run = way.start(device)
    twin = Twin(run)
    train(run, twin, [None, None])
    run.zero_grad()
    with torch.no_grad():
        for param in run.masters() if way.store in ("own", "O2") else run.params:
            param.mul_(0.5)
        for param, master in zip(twin.params, run.masters(), strict=True):
            param.copy_(master)
    train(run, twin, [None, INF, None], first=2)
    twin.assert_is(run)


# Schedulers, hooks, closures

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
}


@ways_with("torch's interface")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("on", ["optimizer", "inner"])
@pytest.mark.parametrize("first", [None, INF], ids=["step", "skipped step"])
def test_schedulers_set_the_learning_rate_without_a_warning(
    first: Any, on: str, name: str, way: Way, device: torch.device
) -> None:
    run = way.start(device)
    twin = Twin(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = SCHEDULERS[name](getattr(run, on))
        expected = SCHEDULERS[name](twin.optimizer)
        for number, value in enumerate((first, None, None, INF, None)):
            train(run, twin, [value], first=number)
            if value is None or way.has("schedulers after skipped steps"):
                scheduler.step()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # The twin has not stepped.
                    expected.step()
            assert scheduler.get_last_lr() == expected.get_last_lr()
    twin.assert_is(run)


HOOKS: dict[str, Callable[[Run, Any], list[Any]]] = {
    "on the optimizer": lambda run, hook: [
        run.optimizer.register_step_pre_hook(hook("pre")),
        run.optimizer.register_step_post_hook(hook("post")),
    ],
    "on the inner": lambda run, hook: [
        run.inner.register_step_pre_hook(hook("pre")),
        run.inner.register_step_post_hook(hook("post")),
    ],
    "on all": lambda run, hook: [
        register_optimizer_step_pre_hook(hook("pre")),
        register_optimizer_step_post_hook(hook("post")),
    ],
}


@ways_with("torch's interface")
@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize("value", [None, INF])
def test_hooks_run_once_for_each_real_step(
    value: Any, where: str, way: Way, device: torch.device
) -> None:
    run = way.start(device)
    calls: list[str] = []

    def hook(name: str) -> Any:
        def call(optimizer: Any, *_: Any) -> None:
            assert optimizer in (run.optimizer, run.inner, getattr(run.inner, "optim", None))
            calls.append(name)

        return call

    handles = HOOKS[where](run, hook)
    try:
        train(run, None, [value])
        if value is None:
            assert calls == ["pre", "post"]
        elif way.has("no hooks in skipped steps"):
            assert calls == []
    finally:
        for handle in handles:
            handle.remove()
    calls.clear()
    train(run, None, [None], first=1)
    assert calls == []


@ways_with("closures", "torch's interface")
def test_a_closure_is_called_and_its_gradients_are_stepped(way: Way, device: torch.device) -> None:
    run = way.start(device)
    twin = Twin(run)
    losses: list[float] = []

    def closure() -> Tensor:
        run.zero_grad()
        loss = pull(*zip(run.params, grads_of(run, len(losses)), strict=True))
        run.backward(loss)
        losses.append(loss.item())
        return loss.detach()

    for number in range(3):
        result = run.step(closure)
        assert float(result) == losses[-1]
        assert len(losses) == number + 1
        twin.step(*grads_of(run, number))
    twin.assert_is(run)
