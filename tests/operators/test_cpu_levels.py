"""One result on every processor: the same bits at each CPU level and with any number of threads."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch
from op_cases import (
    BF16,
    F16,
    F32,
    LISTS,
    NAMES,
    OPERATORS,
    Arguments,
    Dtypes,
    ListCase,
    Operator,
    copy_of,
    name_of,
)
from op_cases import tensors_of as tensors_in
from step_list_cases import RULES, STEP_DTYPES, Rule, sample
from step_list_cases import assert_same_call as assert_same_step
from step_list_cases import copy_of as copy_of_step
from tolerances import assert_same_bits
from torch import Tensor

from apex_mp import _C
from apex_mp.multi_tensor_apply._steps import step_lists

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")
WITH_LISTS = [operator for operator in OPERATORS if operator.lists]
ROWS = [(operator, dtypes) for operator in WITH_LISTS for dtypes in operator.dtypes]
each_row = pytest.mark.parametrize(
    ("operator", "dtypes"), ROWS, ids=[f"{operator}-{name_of(dtypes)}" for operator, dtypes in ROWS]
)

# Enough chunks for two threads, in another number of chunks for each tensor.
LONG = ListCase("long", [(50_000,), (3,), (16_384,), (100_001,), (40,)])

# The dtypes that have a way of their own through registers: numbers before the first aligned copy,
# whole registers, and numbers behind the last one.
each_grad = pytest.mark.parametrize("grad", [F16, BF16, F32], ids=NAMES.get)
each_copy = pytest.mark.parametrize("copy", [None, F16, BF16, F32], ids=NAMES.get)
SIZES = [*range(1, 36), 63, 64, 65, 511, 512, 513, 1100]


def plant_inf_and_nan(call: Arguments) -> None:
    """Put one at the end of each tensor of the first list, so that the results hold them too."""
    tensors = [each for each in next(iter(call.values())) if each.numel() > 1]
    for tensor, bad in zip(tensors, itertools.cycle(map(float, ("inf", "-inf", "nan")))):
        tensor[(-1,) * tensor.dim()] = bad


def results(operator: Operator, call: Arguments) -> list[torch.Tensor]:
    operator(call)
    return [tensor for name in operator.written for tensor in tensors_in(call[name])]


def assert_same_results(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_bits(ours, theirs)


def test_a_level_that_is_not_there_is_refused_and_the_others_are_named() -> None:
    before, levels = _C.cpu_level(), ", ".join(_C.cpu_levels())
    with pytest.raises(ValueError, match=rf"^CPU level 'none' .* must be one of: {levels}$"):
        _C.set_cpu_level("none")
    assert _C.cpu_level() == before


@each_row
def test_every_cpu_level_gives_the_same_bits(
    operator: Operator, dtypes: list[Dtypes], cpu_level: str
) -> None:
    for case, with_inf in itertools.product(LISTS, (False, True)):
        call = operator.sample(case, dtypes, CPU)
        if with_inf:
            plant_inf_and_nan(call)
        again = copy_of(call)
        _C.set_cpu_level(cpu_level)
        actual = results(operator, call)
        _C.set_cpu_level("baseline")
        assert_same_results(actual, results(operator, again))


@each_row
def test_one_thread_and_two_give_the_same_bits(
    operator: Operator, dtypes: list[Dtypes], restore_threads: None
) -> None:
    call = operator.sample(LONG, dtypes, CPU)
    again = copy_of(call)
    torch.set_num_threads(1)
    expected = results(operator, again)
    torch.set_num_threads(2)
    assert_same_results(results(operator, call), expected)


class Step:
    """One Adam step on tensors that are cut from flat memory, from where a test wants them."""

    def __init__(self, size: int, grad: torch.dtype, copy: torch.dtype | None) -> None:
        self.param, self.exp_avg = torch.randn(2, size)
        self.exp_avg_sq = torch.rand(size)
        self.grad = (10 * torch.randn(size)).to(grad)
        self.copy = None if copy is None else torch.zeros(size, dtype=copy)

    def take(self, sizes: list[int], starts: tuple[int, ...], lr: float = 0.01) -> None:
        """Update every tensor of `sizes`; `starts` are those of param, moments, grad and copy."""

        def cut(flat: Tensor, start: int) -> list[Tensor]:
            pieces = []
            for size in sizes:
                pieces.append(flat[start : start + size])
                start += -(-size // 64) * 64 + 64  # The next one begins as aligned as this one.
            return pieces

        flat = (self.param, self.grad, self.exp_avg, self.exp_avg_sq)
        lists = [cut(tensor, start) for tensor, start in zip(flat, starts[:4], strict=True)]
        copies = None if self.copy is None else cut(self.copy, starts[4])
        step_lists(
            "adam",
            "a_function",
            *lists[:2],
            tensors={"exp_avg": lists[2], "exp_avg_sq": lists[3]},
            numbers={"step": torch.full((len(sizes),), 3.0).unbind()},
            options={
                **{"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": lr},
                **{"adam_w_mode": True, "bias_correction": True, "eps_inside_sqrt": False},
            },
            copies=copies,
            scale=4.0,
        )

    def at_baseline(self, *arguments: Any) -> Step:
        """Return what the step would have made of a copy of all tensors at the baseline."""
        again, level = deepcopy(self), _C.cpu_level()
        _C.set_cpu_level("baseline")
        again.take(*arguments)
        _C.set_cpu_level(level)
        return again

    def assert_same(self, other: Step) -> None:
        """Compare the whole memory, so that what was written beside a tensor is seen too."""
        for name, tensor in vars(self).items():
            if tensor is not None:
                assert_same_bits(tensor, vars(other)[name])


@each_copy
@each_grad
def test_a_step_gives_the_same_bits_from_wherever_its_tensors_start(
    grad: torch.dtype, copy: torch.dtype | None, cpu_level: str
) -> None:
    for offset in range(17):  # The widest register holds 16 halves.
        step = Step(15_000, grad, copy)
        starts = (offset % 3, offset % 5, offset % 7, offset % 2, offset)
        expected = step.at_baseline(SIZES, starts)
        step.take(SIZES, starts)
        step.assert_same(expected)


@each_copy
@each_grad
def test_a_step_gives_the_same_bits_for_any_bits(
    grad: torch.dtype, copy: torch.dtype | None, cpu_level: str
) -> None:
    size = 2**16 + 7
    step = Step(size, grad, copy)
    bits = torch.randint(-(2**31), 2**31, (5, size)).to(torch.int32)
    step.param, step.exp_avg, step.exp_avg_sq = bits[:3].clone().view(F32)
    # -0.0, subnormals and infinities are rare among random bits.
    for tensor in (step.param, step.exp_avg, step.exp_avg_sq):
        tensor[::7] = -0.0
        tensor[1::7] = 1e-41
        tensor[2::7] = float("inf")
        tensor[3::7] = torch.randn(tensor[3::7].shape)
    step.grad = bits[4].view(grad)[:size].clone()
    expected = step.at_baseline([size], (0,) * 5)
    step.take([size], (0,) * 5)
    step.assert_same(expected)


@pytest.mark.parametrize("dtypes", STEP_DTYPES, ids=name_of)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_step_of_every_rule_gives_the_same_bits(
    rule: Rule, dtypes: Any, cpu_level: str, restore_threads: None
) -> None:
    uneven = ListCase("a list", [(1500,), (17,), (2, 300)], "uneven offset")
    for case, threads in ((uneven, 1), (LONG, 2)):
        call = sample(rule, case, dtypes, CPU)
        expected = copy_of_step(call)
        torch.set_num_threads(threads)
        _C.set_cpu_level(cpu_level)
        step_lists(**call)
        torch.set_num_threads(1)
        _C.set_cpu_level("baseline")
        step_lists(**expected)
        assert_same_step(call, expected)


@pytest.mark.parametrize("half", [F16, BF16], ids=NAMES.get)
def test_the_copy_of_a_step_is_rounded_as_torch_rounds(half: torch.dtype, cpu_level: str) -> None:
    # With lr 0 a finite parameter stays as it is, so that the copy rounds what the test wants.
    size = 2**20
    step = Step(size, F16, half)
    bits = torch.randint(-(2**31), 2**31, (size,)).to(torch.int32)
    numbers = torch.randn(size) * torch.randint(-27, 18, (size,)).float().exp2()
    exact = torch.arange(-(2**15), 2**15).to(torch.int16).view(half).float()
    ties = (exact.view(torch.int32) + (1 << (12 if half is F16 else 15))).view(F32)
    step.param = torch.cat([bits.view(F32), numbers, exact, ties])[-size:].contiguous()
    step.param[:1000] = bits[:1000].view(F32)
    step.param[1000:2000] = (bits[:1000] | 0x7F800001).view(F32)  # NaN, of either sign
    before = step.param.clone()
    step.take([size], (0,) * 5, 0.0)
    finite = before.isfinite()
    assert_same_bits(step.param[finite], before[finite])
    assert step.copy is not None
    assert_same_bits(step.copy, step.param.to(half))
    if half is BF16:
        assert (step.copy[step.param.isnan()].view(torch.int16) == 0x7FC0).all()
