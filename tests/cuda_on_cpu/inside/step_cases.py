"""Tasks for the fused step, and what the operators and float64 say of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from exact_lists import CPU, OFFSETS, Offsets, assert_nothing_before_was_written
from exact_lists import sample as sample_call
from op_cases import F16, F32, F64, OPERATOR, Dtypes, number
from step_driver import Group, Outcome, Row, Step, Task
from tolerances import SUM_OF_SQUARES_TOLERANCES, assert_same_bits
from torch import Tensor

# What a norm loses: half of what its square does.
NORM_RTOL = SUM_OF_SQUARES_TOLERANCES[F32].rtol
HALF_MODEL: Sequence[Dtypes] = [(F32,), (F16,), (F16,)]  # fp32 masters of an fp16 model
TENSORS = ("param", "exp_avg", "exp_avg_sq", "copy", "step")

# Groups that differ in every option of Adam.
GROUPS = [
    Group(),
    Group(lr=0.03, beta1=0.8, beta2=0.95, eps=1e-2, weight_decay=0.3, adam_w_mode=False),
    Group(lr=0.002, weight_decay=0.0, bias_correction=False, eps_inside_sqrt=True, maximize=True),
]


def sample(
    sizes: Sequence[int],
    dtypes: Sequence[Dtypes] = HALF_MODEL,
    offsets: Offsets = OFFSETS["aligned"],
    groups: Sequence[Group] = GROUPS,
    *,
    scale: float | Tensor = 8.0,
    check: bool = False,
) -> Task:
    """Return rows of these sizes, divided among groups, every third one not scaled.

    Each tensor ends where its memory ends, and the rows have taken 0, 1, 2, ... steps.
    """
    call = sample_call("adam_", sizes, dtypes, offsets)
    columns = [call[name] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")]
    columns.append(call["copies"] or [None] * len(sizes))
    rows = [
        Row(*tensors, step, group=i * len(groups) // len(sizes), scaled=i % 3 != 2)
        for i, (*tensors, step) in enumerate(zip(*columns, call["steps"], strict=True))
    ]
    groups = [dataclasses.replace(group) for group in groups]
    return Task(rows, groups, scale, check=check)


def copy_of(task: Task) -> Task:
    """Return the task with clones of all that a step writes."""
    rows = []
    for row in task.rows:
        names = (*TENSORS, "grad") if row.writes_grad else TENSORS
        tensors = {name: getattr(row, name) for name in names}
        clones = {name: each.clone() for name, each in tensors.items() if each is not None}
        rows.append(dataclasses.replace(row, **clones))
    return dataclasses.replace(task, rows=rows)


def step_by_operators(task: Task, outcome: Outcome) -> None:
    """Take the step with the operator adam_ and the factors that the fused step has decided on."""
    for group, (options, factors) in enumerate(zip(task.groups, outcome.groups, strict=True)):
        for scaled in (False, True):
            for with_copy in (False, True):
                rows = [
                    row
                    for row in task.rows
                    if row.grad is not None
                    and (row.group, row.scaled, row.copy is not None) == (group, scaled, with_copy)
                ]
                _adam(rows, options, factors.scaled_factor if scaled else factors.plain_factor)


def _adam(rows: list[Row], options: Group, factor: float) -> None:
    lists = {f"{name}s": [getattr(row, name) for row in rows] for name in TENSORS}
    if not rows or rows[0].copy is None:
        del lists["copys"]
    else:
        lists["copies"] = lists.pop("copys")
    names = ["beta1", "beta2", "eps", "weight_decay"]
    names += ["adam_w_mode", "bias_correction", "eps_inside_sqrt"]
    arguments = {
        "copies": None,
        **lists,
        "grads": [row.grad for row in rows],
        "lr": options.lr if isinstance(options.lr, Tensor) else number(options.lr, CPU, F64),
        "inv_scale": number(factor, CPU, F64),
        "found_inf": None,
        **{name: getattr(options, name) for name in names},
    }
    OPERATOR["adam_"](arguments)


def assert_same_rows(task: Task, expected: Task) -> None:
    for ours, theirs in zip(task.rows, expected.rows, strict=True):
        for name in TENSORS:
            if getattr(ours, name) is not None:
                assert_same_bits(getattr(ours, name), getattr(theirs, name))


def assert_steps_like_the_operators(step: Step, task: Task, **options: bool) -> Outcome:
    """Take a step and compare every bit that it wrote; return its outcome."""
    expected = copy_of(task)
    outcome = step.run(task, **options)
    assert outcome.found_inf == 0
    step_by_operators(expected, outcome)
    assert_same_rows(task, expected)
    for row in task.rows:
        arrays = [getattr(row, name) for name in TENSORS if name != "step"]
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
