"""Tasks for the fused step, and what exact formulas and float64 say of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from exact_lists import CPU, OFFSETS, Offsets, assert_nothing_before_was_written, moved
from op_cases import F16, F32, F64, Dtypes, ListCase, fill_positive, make_list
from step_driver import Adam, Group, Outcome, Row, Sgd, Step, Task
from tolerances import SUM_OF_SQUARES_TOLERANCES, assert_same_bits
from torch import Tensor

# What a norm loses: half of what its square does.
NORM_RTOL = SUM_OF_SQUARES_TOLERANCES[F32].rtol
HALF_MODEL: Sequence[Dtypes] = [(F32,), (F16,), (F16,)]  # fp32 masters of an fp16 model

# Groups that differ in every option of their rule.
ADAM_GROUPS = [
    Adam(),
    Adam(lr=0.03, beta1=0.8, beta2=0.95, eps=1e-2, weight_decay=0.3, adam_w_mode=False),
    Adam(lr=0.002, weight_decay=0.0, bias_correction=False, eps_inside_sqrt=True, maximize=True),
]
SGD_GROUPS = [
    Sgd(),
    Sgd(lr=0.03, momentum=0.5, dampening=0.0, weight_decay=0.3, nesterov=True),
    Sgd(lr=0.002, momentum=0.0, dampening=0.0, wd_after_momentum=True, maximize=True),
]
GROUPS: dict[str, Sequence[Group]] = {"adam": ADAM_GROUPS, "sgd": SGD_GROUPS}
each_rule = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)


def sample(
    sizes: Sequence[int],
    dtypes: Sequence[Dtypes] = HALF_MODEL,
    offsets: Offsets = OFFSETS["aligned"],
    groups: Sequence[Group] = ADAM_GROUPS,
    *,
    scale: float | Tensor = 8.0,
    check: bool = False,
) -> Task:
    """Return rows of these sizes, divided among groups of one rule, every third one not scaled.

    Each tensor ends where its memory ends. Adam's rows have taken 0, 1, 2, ... steps; of those of
    SGD some have momentum buffers that hold nothing yet, and some have no flag that says so.
    """
    case = ListCase("exact", [(size,) for size in sizes])
    of_state = [F64 if dtype == F64 else F32 for dtype in dtypes[0]]
    is_adam = isinstance(groups[0], Adam)
    kinds = [*dtypes, of_state, *([of_state] if is_adam else [])]
    params, grads, copies, *state = (
        _exact_list(case, kind, offsets, j) for j, kind in enumerate(kinds)
    )
    if is_adam:
        for tensor in state[1]:
            fill_positive(tensor)
    groups = [dataclasses.replace(group) for group in groups]
    rows = []
    for i in range(len(sizes)):
        group = groups[number := i * len(groups) // len(sizes)]
        steps_or_fresh = torch.tensor(float(i if is_adam else i % 7 == 1))
        tensors = [listed[i] for listed in state]
        numbers: list[Tensor | None] = [steps_or_fresh if is_adam or i % 5 else None]
        if not has_state(group):
            tensors, numbers = [], []
        rows.append(
            Row(
                *(params[i], grads[i], copies[i], tensors, numbers),
                group=number,
                scaled=i % 3 != 2,
            )
        )
    return Task(rows, groups, scale, check=check)


def _exact_list(case: ListCase, dtypes: Dtypes, offsets: Offsets, position: int) -> list[Any]:
    """Return tensors with a storage of their own and no memory behind it, or None for each."""
    if None in dtypes:
        return [None] * len(case.shapes)
    tensors = make_list(case, dtypes, CPU)
    return [moved(tensor, offsets(i, position)) for i, tensor in enumerate(tensors)]


def has_state(group: Group) -> bool:
    return not isinstance(group, Sgd) or group.momentum != 0.0


def written(row: Row) -> dict[str, Tensor]:
    """Return by name what a step writes of a row, but for its gradient."""
    named = {
        "param": row.param,
        "copy": row.copy,
        **{f"tensors[{i}]": tensor for i, tensor in enumerate(row.tensors)},
        **{f"numbers[{i}]": number for i, number in enumerate(row.numbers)},
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def copy_of(task: Task) -> Task:
    """Return the task with clones of all that a step writes."""

    def clone(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.clone()

    rows = [
        dataclasses.replace(
            row,
            param=row.param.clone(),
            copy=clone(row.copy),
            tensors=[tensor.clone() for tensor in row.tensors],
            numbers=[clone(number) for number in row.numbers],
            grad=clone(row.grad) if row.writes_grad else row.grad,
        )
        for row in task.rows
    ]
    return dataclasses.replace(task, rows=rows)


def step_exactly(task: Task, outcome: Outcome) -> None:
    """Take the step in torch, each operation rounded as the rules of csrc/math/ round it.

    Args:
        task: Rows and options; what a step writes is written, but for gradients.
        outcome: The factors that the fused step has decided on.
    """
    for row in task.rows:
        if row.grad is None:
            continue
        factors = outcome.groups[row.group]
        factor = factors.scaled_factor if row.scaled else factors.plain_factor
        arrays = [row.param, row.grad, *row.tensors]
        dtype = F64 if any(array.dtype == F64 for array in arrays) else F32
        param, grad, *state = (array.to(dtype) for array in arrays)
        options = task.groups[row.group]
        if isinstance(options, Adam):
            param, state = _adam(options, param, grad, state, row.numbers[0], factor)
        else:
            assert isinstance(options, Sgd)
            param, state = _sgd(options, param, grad, state, row.numbers, factor)
        row.param.copy_(param)
        if row.copy is not None:
            row.copy.copy_(param)
        for tensor, new in zip(row.tensors, state, strict=True):
            tensor.copy_(new)


def _adam(
    options: Adam, param: Tensor, grad: Tensor, state: list[Tensor], step: Tensor, factor: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the new parameter and moments; factors are found in double and rounded once."""
    exp_avg, exp_avg_sq = state
    step += 1
    lr, decay, eps = value_of(options.lr), options.weight_decay, options.eps
    corrected = options.bias_correction
    correction1 = 1.0 - math.pow(options.beta1, step.item()) if corrected else 1.0
    correction2 = 1.0 - math.pow(options.beta2, step.item()) if corrected else 1.0
    inside, outside = (eps * correction2, 0.0) if options.eps_inside_sqrt else (0.0, eps)
    keep, l2 = (1.0 - lr * decay, 0.0) if options.adam_w_mode else (1.0, decay)

    def f(number: float) -> Tensor:
        return torch.tensor(number, dtype=param.dtype)

    grad = grad * f(factor) + f(l2) * param
    exp_avg = exp_avg + f(1.0 - options.beta1) * (grad - exp_avg)
    exp_avg_sq = f(options.beta2) * exp_avg_sq + f(1.0 - options.beta2) * grad * grad
    denom = _sqrt(exp_avg_sq + f(inside)) * f(1.0 / math.sqrt(correction2)) + f(outside)
    return f(keep) * param - f(lr / correction1) * exp_avg / denom, [exp_avg, exp_avg_sq]


def _sqrt(tensor: Tensor) -> Tensor:
    """Return the root, rounded correctly; torch's on a CPU is off by an ulp here and there."""
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(tensor.numpy()))


def _sgd(
    options: Sgd,
    param: Tensor,
    grad: Tensor,
    state: list[Tensor],
    fresh: list[Tensor | None],
    factor: float,
) -> tuple[Tensor, list[Tensor]]:
    """Return the new parameter and momentum buffer."""
    decay = options.weight_decay
    early, late = (0.0, decay) if options.wd_after_momentum else (decay, 0.0)

    def f(number: float) -> Tensor:
        return torch.tensor(number, dtype=param.dtype)

    update = grad * f(factor) + f(early) * param
    if state:
        is_fresh = fresh[0] is not None and fresh[0].item() != 0.0
        dampened = f(options.momentum) * state[0] + f(1.0 - options.dampening) * update
        state = [update if is_fresh else dampened]
        if fresh[0] is not None:
            fresh[0].zero_()
        update = update + f(options.momentum) * state[0] if options.nesterov else state[0]
    update = update + f(late) * param
    return param - f(value_of(options.lr)) * update, state


def assert_same_rows(task: Task, expected: Task) -> None:
    for ours, theirs in zip(task.rows, expected.rows, strict=True):
        for tensor, wanted in zip(written(ours).values(), written(theirs).values(), strict=True):
            assert_same_bits(tensor, wanted)


def assert_steps_exactly(step: Step, task: Task, **options: bool) -> Outcome:
    """Take a step and compare every bit that it wrote; return its outcome."""
    expected = copy_of(task)
    outcome = step.run(task, **options)
    assert outcome.found_inf == 0
    step_exactly(expected, outcome)
    assert_same_rows(task, expected)
    for row in task.rows:
        arrays = [row.param, row.copy, *row.tensors]
        assert_nothing_before_was_written([each for each in arrays if each is not None])
    return outcome


def norm_of(task: Task, scale: float, group: int | None = None) -> float:
    """Return the norm of the unscaled gradients of a group, or of all."""
    total = 0.0
    for row in task.rows:
        if row.grad is not None and group in (None, row.group):
            total += (row.grad.double() / (scale if row.scaled else 1)).square().sum().item()
    return math.sqrt(total)


def value_of(number: float | Tensor) -> float:
    return number.item() if isinstance(number, Tensor) else number


def assert_decided_rightly(task: Task, outcome: Outcome, *, measured: bool) -> None:
    """Compare norms and factors with those of float64."""
    scale = outcome.scale
    norms = [norm_of(task, scale, group) for group in range(len(task.groups))]
    norm_of_all = norm_of(task, scale)
    assert_near([outcome.norm], [norm_of_all if measured else math.nan])
    assert_near(
        [each.norm for each in outcome.groups], norms if measured else [math.nan] * len(norms)
    )
    for group, norm, decided in zip(task.groups, norms, outcome.groups, strict=True):
        clipped = norm_of_all if task.clip_by_global_norm else norm
        if group.norm is not None:
            clipped = value_of(group.norm) / scale
        clip = max(1.0, (clipped + 1e-6) / group.max_norm) if group.max_norm else 1.0
        sign = -1.0 if group.maximize else 1.0
        factors = [decided.scaled_factor, decided.plain_factor]
        assert_near(factors, [sign / (scale * clip), sign / clip])


def assert_near(numbers: Sequence[float], expected: Sequence[float]) -> None:
    for ours, theirs in zip(numbers, expected, strict=True):
        both_nan = math.isnan(ours) and math.isnan(theirs)
        assert both_nan or math.isclose(ours, theirs, rel_tol=NORM_RTOL), f"{ours} is not {theirs}"
