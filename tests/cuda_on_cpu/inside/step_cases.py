"""Tasks for the fused step, and what the operators and float64 say of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
from exact_lists import CPU, OFFSETS, Offsets, assert_nothing_before_was_written
from exact_lists import sample as sample_call
from op_cases import F16, F32, F64, OPERATOR, Dtypes, number
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


@dataclasses.dataclass(frozen=True)
class Rule:
    """The operator that takes the same step, and its lists for the state."""

    operator: str
    tensors: tuple[str, ...]
    numbers: str


RULES: dict[type[Group], Rule] = {
    Adam: Rule("adam_", ("exp_avgs", "exp_avg_sqs"), "steps"),
    Sgd: Rule("sgd_", ("momentum_buffers",), "fresh"),
}


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
    rule = RULES[type(groups[0])]
    param, grad, copy = dtypes
    if rule.operator == "sgd_":
        dtypes = (param, grad, [F64 if dtype == F64 else F32 for dtype in param], copy)
    call = sample_call(rule.operator, sizes, dtypes, offsets)
    groups = [dataclasses.replace(group) for group in groups]
    rows = []
    for i in range(len(sizes)):
        group = i * len(groups) // len(sizes)
        copies = call["copies"]
        rows.append(
            Row(
                call["params"][i],
                call["grads"][i],
                None if copies is None else copies[i],
                [call[name][i] for name in rule.tensors],
                [call[rule.numbers][i]],
                group=group,
                scaled=i % 3 != 2,
            )
        )
        if isinstance(groups[group], Sgd) and i % 5 == 0:
            rows[-1].numbers = [None]
        if not has_state(groups[group]):
            rows[-1].tensors, rows[-1].numbers = [], []
    return Task(rows, groups, scale, check=check)


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


def step_by_operators(task: Task, outcome: Outcome) -> None:
    """Take the step with the rule's operator and the factors that the fused step has decided on."""
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in task.rows:
        if row.grad is not None:
            facts = (row.copy is not None, *(number is not None for number in row.numbers))
            alike.setdefault((row.group, row.scaled, *facts), []).append(row)
    for rows in alike.values():
        factors = outcome.groups[rows[0].group]
        factor = factors.scaled_factor if rows[0].scaled else factors.plain_factor
        _operate(rows, task.groups[rows[0].group], factor)


def _operate(rows: list[Row], options: Group, factor: float) -> None:
    rule = RULES[type(options)]
    first = rows[0]
    lists = {
        name: [row.tensors[i] for row in rows] if first.tensors else None
        for i, name in enumerate(rule.tensors)
    }
    has_number = bool(first.numbers) and first.numbers[0] is not None
    OPERATOR[rule.operator](
        {
            "params": [row.param for row in rows],
            "grads": [row.grad for row in rows],
            **lists,
            rule.numbers: [row.numbers[0] for row in rows] if has_number else None,
            "copies": None if first.copy is None else [row.copy for row in rows],
            "lr": options.lr if isinstance(options.lr, Tensor) else number(options.lr, CPU, F64),
            "inv_scale": number(factor, CPU, F64),
            "found_inf": None,
            **{name: getattr(options, name) for name in options.OPTIONS},
        }
    )


def assert_same_rows(task: Task, expected: Task) -> None:
    for ours, theirs in zip(task.rows, expected.rows, strict=True):
        for tensor, wanted in zip(written(ours).values(), written(theirs).values(), strict=True):
            assert_same_bits(tensor, wanted)


def assert_steps_like_the_operators(step: Step, task: Task, **options: bool) -> Outcome:
    """Take a step and compare every bit that it wrote; return its outcome."""
    expected = copy_of(task)
    outcome = step.run(task, **options)
    assert outcome.found_inf == 0
    step_by_operators(expected, outcome)
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
