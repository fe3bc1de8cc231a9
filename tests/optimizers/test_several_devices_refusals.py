"""What a step on several devices refuses; that nothing has changed then, and is kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import Unchanged, give_grads
from plan_cases import Run, fresh_grad, parameter
from scaled_steps import take_step
from several_devices_cases import side_of, spread
from torch.nn import Parameter

from apex_mp.engine import devices as engine_devices
from apex_mp.optimizers import FusedAdam

each_warmth = pytest.mark.parametrize("steps_before", [0, 2], ids=["first step", "warm"])


@pytest.fixture(autouse=True)
def two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_devices, "device_of", side_of)


def make_run(steps: int = 0) -> Run:
    """A run of two groups on both devices."""
    params = [parameter(size) for size in (4, 3, 5, 2)]
    run = Run(spread(FusedAdam([{"params": params[:3]}, {"params": params[3:]}], lr=0.1)))
    run.train(steps)
    give_grads(run.params, 9)
    return run


def sparse_grad(run: Run) -> None:
    run.params[2].grad = torch.ones(5).to_sparse()


def wrong_lr(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"] = torch.ones(2)


def wrong_found_inf(run: Run) -> None:
    run.optimizer.found_inf = torch.zeros(2)


def wrong_eps(run: Run) -> None:
    run.optimizer.param_groups[1]["eps"] = -1.0


SPOILERS: dict[Callable[[Run], None], str] = {
    sparse_grad: "sparse",
    wrong_lr: "lr is a tensor of 2 elements; it must have 1",
    wrong_found_inf: "found_inf is a tensor of 2 elements; it must have 1",
    wrong_eps: "eps is -1",
}


@each_warmth
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_what_one_device_refuses_changes_nothing_on_any(
    spoil: Callable[[Run], None], max_grad_norm: float, steps_before: int
) -> None:
    run = make_run(steps_before)
    for group in run.optimizer.param_groups:
        group["max_grad_norm"] = max_grad_norm
    good = [dict(group) for group in run.optimizer.param_groups]
    with Unchanged(run.optimizer):
        spoil(run)
        with pytest.raises((RuntimeError, ValueError), match=SPOILERS[spoil]):
            run.optimizer.step()
        for group, old in zip(run.optimizer.param_groups, good, strict=True):
            group.update(old)
    assert len(run.optimizer.state) == (4 if steps_before else 0)
    vars(run.optimizer).pop("found_inf", None)
    give_grads(run.params, 9)
    run.optimizer.step()
    assert len(run.optimizer.state) == 4


@pytest.mark.parametrize("name", ["grads", "grads_of", "copies"])
@pytest.mark.parametrize(
    "lists", [[[None]], [[None] * 3], [None, None], [[None] * 3, [None] * 2], [[None] * 4, [None]]]
)
def test_lists_that_do_not_fit_the_groups_are_refused(lists: Any, name: str) -> None:
    run = make_run()
    wish = r"given for group \d is not a list with one item for each of its \d parameters"
    with pytest.raises(ValueError, match=wish):
        take_step(run.optimizer, **{name: lists})
    assert not run.optimizer.state


@each_warmth
def test_a_gradient_where_there_are_no_kernels_is_refused_by_name(steps_before: int) -> None:
    run = make_run(steps_before)
    kept = run.listed[:]
    with Unchanged(run.optimizer):
        run.listed[1] = Parameter(torch.ones(3, device="meta"))
        run.listed[1].grad = torch.ones(3, device="meta")
        wish = "which this build of apex_mp has no kernels; it must be on the CPU or on a CUDA"
        with pytest.raises(RuntimeError, match=rf"params\[0\]\[1\] is on meta(:0)?, for {wish}"):
            run.optimizer.step()
        run.listed[:] = kept


def test_without_kernels_for_cuda_the_command_that_builds_them_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_devices, "device_of", lambda param: torch.device("cuda", 1))
    param = Parameter(torch.ones(3, device="meta"), requires_grad=False)
    optimizer = FusedAdam([param])
    param.requires_grad_().grad = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match=r"params\[0\]\[0\] is on cuda:1, .*\n.*FORCE_CUDA=1 "):
        optimizer.step()


# --- Nothing is kept alive.


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("refresh", [False, True], ids=["step", "refresh"])
def test_between_steps_nothing_is_kept_alive(refresh: bool, max_grad_norm: float) -> None:
    run = make_run()
    run.make_grad = lambda p, step, i: torch.stack([fresh_grad(p, step, i)] * 2, -1)[..., 0]
    for group in run.optimizer.param_groups:
        group["max_grad_norm"] = max_grad_norm
    optimizer = run.optimizer
    for step in range(3):
        for index, param in enumerate(run.params):
            param.grad = run.make_grad(param, step, index)
        optimizer.step()
    if refresh:
        optimizer.refresh_hyperparameters()
    kept = [weakref.ref(param) for param in run.params]
    kept += [weakref.ref(param.grad) for param in run.params if param.grad is not None]
    kept += [weakref.ref(t) for state in optimizer.state.values() for t in state.values()]
    optimizer.zero_grad()
    optimizer.state.clear()
    del param
    for group in optimizer.param_groups:
        group["params"].clear()
    del group
    assert alive(kept) == 0
