"""What the device's table of the fused step holds, and when the host must write it anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_lists import CPU
from op_cases import CHUNK, F64, number
from step_cases import (
    assert_decided_rightly,
    assert_same_rows,
    assert_steps_exactly,
    copy_of,
    each_rule,
    sample,
    step_exactly,
)
from step_driver import Adam, Group, Row, Sgd, Step, Task

SIZES = [5, 600, 1, CHUNK + 5, 0, 40]
each_check = pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])

MOVES: dict[str, Callable[[Row], object]] = {
    "param": lambda row: setattr(row, "param", row.param.clone()),
    "first tensor of state": lambda row: row.tensors.__setitem__(0, row.tensors[0].clone()),
    "last tensor of state": lambda row: row.tensors.__setitem__(-1, row.tensors[-1].clone()),
    "copy": lambda row: setattr(row, "copy", row.copy.clone()),
    "no copy": lambda row: setattr(row, "copy", None),
    "number of state": lambda row: setattr(row, "numbers", [torch.ones(())]),
    "no number of state": lambda row: setattr(row, "numbers", []),
    "size": lambda row: setattr(row, "param", row.param[:-1]),
    "group": lambda row: setattr(row, "group", 2),
    "dtype of the gradient": lambda row: setattr(row, "grad", row.grad.float()),
    "scaled": lambda row: setattr(row, "scaled", not row.scaled),
    "writes_grad": lambda row: setattr(row, "writes_grad", not row.writes_grad),
    "copy_counts": lambda row: setattr(row, "copy_counts", not row.copy_counts),
    "position": lambda row: setattr(row, "position", 7),
}


@each_rule
@pytest.mark.parametrize("name", MOVES)
def test_a_table_does_not_fit_what_has_moved(name: str, groups: list[Group]) -> None:
    task = sample(SIZES, groups=groups)
    step = Step(task)
    assert step.fits(task)
    MOVES[name](task.rows[3])
    assert not step.fits(task)


def test_a_table_fits_whatever_becomes_of_gradients_and_options() -> None:
    task = sample(SIZES)
    step = Step(task)
    task.rows[0].grad = None
    task.rows[3].grad = task.rows[3].grad.clone()
    task.groups[1] = Adam(lr=7.0)
    assert step.fits(task)


def test_a_row_gets_its_first_gradient_late() -> None:
    task = sample(SIZES)
    grad, task.rows[3].grad = task.rows[3].grad.double(), None
    assert_steps_exactly(Step(task), task)
    assert Step(task).fits(task)
    step = Step(task)
    task.rows[3].grad = grad
    assert not step.fits(task)
    assert_steps_exactly(Step(task), task)


COMMON: dict[str, Any] = {"lr": 0.5, "max_norm": 0.5, "maximize": True, "norm": 100.0}
OPTIONS: dict[type[Group], dict[str, Any]] = {
    Adam: {
        **COMMON,
        **{"beta1": 0.5, "beta2": 0.5, "eps": 0.5, "weight_decay": 0.5},
        **{"adam_w_mode": False, "bias_correction": False, "eps_inside_sqrt": True},
    },
    Sgd: {
        **COMMON,
        **{"momentum": 0.5, "dampening": 0.5, "weight_decay": 0.5},
        **{"nesterov": True, "wd_after_momentum": True},
    },
}
EACH_OPTION = [
    pytest.param(rule, name, id=f"{rule.__name__.lower()}-{name}")
    for rule, options in OPTIONS.items()
    for name in options
]


@each_check
@pytest.mark.parametrize(("rule", "name"), EACH_OPTION)
def test_a_changed_option_counts_at_once(rule: type[Group], name: str, check: bool) -> None:
    task = sample(SIZES, groups=[rule(max_norm=0.1) for _ in range(3)], check=check)
    step = Step(task)
    step.run(task)
    assert step.knows_groups(task)
    setattr(task.groups[1], name, OPTIONS[rule][name])
    assert not step.knows_groups(task)
    outcome = assert_steps_exactly(step, task)
    assert_decided_rightly(task, outcome, measured=True)
    assert step.knows_groups(task)
    assert_steps_exactly(step, task)  # Now that it lies in memory.


@each_check
@pytest.mark.parametrize("rule", [Adam, Sgd], ids=["adam", "sgd"])
def test_a_tensor_lr_is_read_by_the_kernel(rule: type[Group], check: bool) -> None:
    lrs = [number(0.01, CPU), number(0.02, CPU, F64)]
    task = sample(SIZES, groups=[rule(lr=lr) for lr in lrs], check=check)
    step = Step(task)
    for factor in (1.0, 0.5, 3.0):
        for lr in lrs:
            lr.mul_(factor)
        assert step.knows_groups(task)
        assert_steps_exactly(step, task)


@each_check
@pytest.mark.parametrize("groups", [2, 40, 200, 700])
def test_many_groups_may_change_at_once(groups: int, check: bool) -> None:
    task = sample([3] * (groups + 5), groups=[Adam(max_norm=0.1)] * groups, check=check)
    step = Step(task)
    for lr in (0.5, 0.25):
        for i, group in enumerate(task.groups):
            group.lr, group.max_norm = lr + i / 1024, lr
        outcome = assert_steps_exactly(step, task)
        assert_decided_rightly(task, outcome, measured=True)


@each_check
@pytest.mark.parametrize("groups", [3, 700])
def test_a_replay_sees_groups_that_were_refreshed_and_no_others(groups: int, check: bool) -> None:
    task = sample([3] * (groups + 5), groups=[Adam()] * groups, check=check)
    step = Step(task)
    old = copy_of(task)
    old.groups = [dataclasses.replace(group) for group in task.groups]
    for group in task.groups:
        group.lr = 0.5
    step_exactly(old, step.run(task, captured=True))
    assert_same_rows(task, old)
    step.refresh_groups(task)
    assert step.knows_groups(task)
    assert_steps_exactly(step, task, captured=True)


def test_more_chunks_than_there_are_numbers_for_are_refused() -> None:
    row = sample([5]).rows[0]
    huge = torch.empty(1).as_strided((2**46,), (0,))
    with pytest.raises(RuntimeError, match="apex_mp: too many parameters for one step"):
        Step(Task([dataclasses.replace(row, param=huge)], [Adam()]))
