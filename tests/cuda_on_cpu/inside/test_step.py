"""The fused step does to every number what its formula says, to the bit, whatever the rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from exact_lists import (
    CHUNKS,
    OFFSETS,
    Offsets,
    around,
    assert_nothing_before_was_written,
    count_chunks,
    with_chunks_of,
)
from on_cuda_kernels import ORDERS, all_blocks, choose
from op_cases import (
    CHUNK,
    F16,
    F32,
    F64,
    FLOATS,
    MIXED,
    NAMES,
    SMALLEST_CHUNK,
    Dtypes,
    name_of,
)
from step_cases import (
    HALF_MODEL,
    SGD_GROUPS,
    assert_decided_rightly,
    assert_same_rows,
    assert_steps_exactly,
    copy_of,
    each_rule,
    sample,
)
from step_driver import Adam, Group, Sgd, Step
from step_list_cases import STEP_DTYPES
from tolerances import assert_same_bits

SIZES = [*range(18), 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1, 0, 2 * CHUNK + 1, 7]
A_FEW = [5, 600, 1, CHUNK + 5, 0, 40, 9]
WRITTEN_DTYPES: list[list[Dtypes]] = [[(F32,), (F32,), (None,)], [MIXED, MIXED[::-1], (F16,)]]


@each_rule
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("dtypes", STEP_DTYPES, ids=name_of)
def test_a_step_is_exact(dtypes: list[Dtypes], offsets: Offsets, groups: list[Group]) -> None:
    task = sample(SIZES, dtypes, offsets, groups, check=True)
    for group in task.groups:
        group.max_norm = 0.5
    outcome = assert_steps_exactly(Step(task), task)
    assert_decided_rightly(task, outcome, measured=True)


@each_rule
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_step_has_chunks_of_each_size(chunk: int, groups: list[Group]) -> None:
    sizes = around(chunk)
    task = sample(sizes, HALF_MODEL, OFFSETS["each list off by another"], groups, check=True)
    first = copy_of(task)
    step = Step(first)
    choose()
    step.run(first)
    assert all_blocks() == 2 * count_chunks(sizes, chunk)  # Both passes.
    outcome = assert_steps_exactly(Step(task), task, norms=True)
    assert_decided_rightly(task, outcome, measured=True)


def test_a_copy_in_float64_has_all_numbers_of_a_chunk() -> None:
    task = sample(with_chunks_of(CHUNK, [CHUNK]), [(F32,), (F32,), (F64,)])
    assert_steps_exactly(Step(task), task)


def test_a_step_of_a_million_parameters_has_three_blocks_for_each_multiprocessor() -> None:
    task = sample([600_000, 400_000], [(F32,), (F16,), (None,)], check=True)
    step = Step(task)
    choose(blocks_at_ends=1)
    step.run(task)  # No block is the last one, so that all blocks of pass 2 end at once.
    assert all_blocks() >= 2 * 3 * 132


@each_rule
@pytest.mark.parametrize("param", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("grad", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("copy", [None, *FLOATS], ids=NAMES.get)
def test_a_step_takes_any_dtypes(copy: Any, grad: Any, param: Any, groups: list[Group]) -> None:
    task = sample([3, 40, 17], [(param,), (grad,), (copy,)], groups=groups)
    assert_steps_exactly(Step(task), task)


@each_rule
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("dtypes", WRITTEN_DTYPES, ids=map(name_of, WRITTEN_DTYPES))
def test_gradients_are_left_unscaled(
    dtypes: list[Dtypes], offsets: Offsets, groups: list[Group]
) -> None:
    task = sample(SIZES, dtypes, offsets, groups, scale=1000.0, check=True)
    for group in task.groups:
        group.max_norm = 0.5  # The step multiplies by other factors.
    for i, row in enumerate(task.rows):
        row.writes_grad = i % 3 == 1
    before = [row.grad.clone() for row in task.rows]
    assert_steps_exactly(Step(task), task)
    for row, grad in zip(task.rows, before, strict=True):
        wanted = reference.unscaled(grad, 1 / 1000, grad) if row.writes_grad else grad
        assert_same_bits(row.grad, wanted)
    assert_nothing_before_was_written([row.grad for row in task.rows])


@each_rule
@pytest.mark.parametrize("dtypes", [HALF_MODEL, [(F32,), (F32,), (F64,)]], ids=name_of)
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_every_pair_of_offsets_is_stepped(
    check: bool, dtypes: list[Dtypes], groups: list[Group]
) -> None:
    pairs = [(one, other) for one in range(9) for other in range(9)]
    task = sample([40] * len(pairs), dtypes, lambda i, j: pairs[i][j % 2], groups, check=check)
    assert_steps_exactly(Step(task), task)


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_sums_are_those_of_check_to_the_bit(check: bool) -> None:
    # One chunk with a gradient: the sum of its row is that of a block.
    for size in (1, 9, 600, CHUNK):
        for dtype in MIXED:
            sizes, dtypes = with_chunks_of(CHUNK, [size]), [(F32,), (dtype,), (None,)]
            task = sample(sizes, dtypes, lambda i, j: 3, [Adam()], scale=1.0, check=check)
            grad = task.rows[0].grad
            for row in task.rows[1:]:
                row.grad = None
            sum_sq = torch.zeros(1, dtype=F64)
            torch.ops.apex_mp.check_([grad], [0], torch.zeros(1), sum_sq)
            assert Step(task).run(task, norms=True).norm == math.sqrt(sum_sq.item())


@each_rule
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_no_order_of_threads_or_blocks_changes_a_bit(check: bool, groups: list[Group]) -> None:
    first = sample([CHUNK] * 9 + A_FEW, groups=groups, check=check)
    first.groups[1].max_norm = 0.1
    outcomes = {}
    for order in ORDERS:
        choose(order=order)
        task = copy_of(first)
        outcomes[order] = task, Step(task).run(task)
    forward, outcome = outcomes["forward"]
    for task, other in outcomes.values():
        assert other == outcome
        assert_same_rows(task, forward)


@each_rule
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_steps_follow_each_other(check: bool, groups: list[Group]) -> None:
    task = sample(A_FEW, groups=groups, check=check)
    step = Step(task)
    for _ in range(4):
        for row in task.rows:
            row.grad = torch.randn(row.param.shape).to(F16)  # Elsewhere: the old one is free.
        assert_steps_exactly(step, task)


@each_rule
def test_a_row_without_a_gradient_is_left_alone(groups: list[Group]) -> None:
    task = sample(A_FEW, groups=groups, check=True)
    task.groups[0].max_norm = 1.0
    step = Step(task)
    for row in task.rows:
        row.grad.fill_(1000.0)
    step.run(task)
    for absent in ([0, 3], [1, 2, 4, 5, 6], range(7), []):
        grads = [torch.randn(row.param.shape).to(F16) for row in task.rows]
        for i, row in enumerate(task.rows):
            row.grad = None if i in absent else grads[i]
        assert step.fits(task)
        outcome = assert_steps_exactly(step, task)
        assert_decided_rightly(task, outcome, measured=True)


@each_rule
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("count", [450, 1100, 5000])
def test_more_rows_than_one_launch_takes_are_stepped(
    count: int, check: bool, groups: list[Group]
) -> None:
    task = sample([3, 1, 0, 2] * (count // 4), groups=groups, check=check)
    task.groups[2].max_norm = 0.5
    step = Step(task)
    task.groups[1].lr = 0.5
    outcome = assert_steps_exactly(step, task)
    assert_decided_rightly(task, outcome, measured=True)


def test_a_group_of_more_chunks_than_a_warp_takes_is_summed() -> None:
    groups = [Adam(max_norm=0.1), Adam(max_norm=0.2), Adam(max_norm=0.3)]
    task = sample([1] * (1024 + 1025 + 5), groups=groups, check=True)
    for i, row in enumerate(task.rows):
        row.group = 0 if i < 1024 else 1 if i < 1024 + 1025 else 2
    outcome = assert_steps_exactly(Step(task), task)
    assert_decided_rightly(task, outcome, measured=True)


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_rows_that_are_full_of_chunks_are_stepped(check: bool) -> None:
    # The narrow grid takes 64 chunks a launch: the third row is cut in two.
    sizes = [40 * SMALLEST_CHUNK, 5, 30 * SMALLEST_CHUNK, 0, 20 * SMALLEST_CHUNK - 1]
    task = sample(sizes, [(F16,), (F16,), (None,)], check=check)
    outcome = assert_steps_exactly(Step(task), task, norms=True)
    assert_decided_rightly(task, outcome, measured=True)


MODES = {
    "momentum": Sgd(),
    "no momentum": Sgd(momentum=0.0),
    "no dampening": Sgd(dampening=0.0),
    "nesterov": Sgd(dampening=0.0, nesterov=True),
    "decay after momentum": Sgd(wd_after_momentum=True),
    "decay alone": Sgd(momentum=0.0, wd_after_momentum=True),
}


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_sgd_has_every_mode(mode: Sgd, check: bool) -> None:
    task = sample(A_FEW, groups=[mode, SGD_GROUPS[0]], check=check)
    step = Step(task)
    for _ in range(3):
        assert_steps_exactly(step, task)


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_the_first_gradient_of_a_buffer_is_not_dampened(captured: bool) -> None:
    """Blocks share a row; the one that clears the flag may be the first or the last."""
    for order in ORDERS:
        choose(order=order)
        task = sample([3 * CHUNK + 5, 0, 7], groups=[Sgd(weight_decay=0.0)], scale=1.0)
        grads = [row.grad.float() for row in task.rows]
        for row in task.rows:
            row.tensors[0].fill_(math.nan)  # Nothing is read from it.
            row.numbers[0] = torch.ones(())
        step = Step(task)
        task.found_inf = torch.ones(1)
        step.run(task, captured=captured)
        assert [row.numbers[0].item() for row in task.rows] == [1.0] * 3
        assert all(row.tensors[0].isnan().all() for row in task.rows)
        task.found_inf.zero_()
        step.run(task, captured=captured)
        assert [row.numbers[0].item() for row in task.rows] == [0.0] * 3
        for row, grad in zip(task.rows, grads, strict=True):
            assert_same_bits(row.tensors[0], grad)
        assert_steps_exactly(step, task, captured=captured)  # From now on it is.
