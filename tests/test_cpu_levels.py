"""One result on every processor: the same bits at each CPU level and with any number of threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_cases import LISTS, OPERATORS, Arguments, Dtypes, ListCase, Operator, copy_of, name_of
from op_cases import tensors_of as tensors_in
from tolerances import assert_same_bits

from apex_mp import _C

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")
WITH_LISTS = [operator for operator in OPERATORS if operator.lists]
ROWS = [(operator, dtypes) for operator in WITH_LISTS for dtypes in operator.dtypes]
each_row = pytest.mark.parametrize(
    ("operator", "dtypes"), ROWS, ids=[f"{operator}-{name_of(dtypes)}" for operator, dtypes in ROWS]
)

# Enough chunks for two threads, in another number of chunks for each tensor.
LONG = ListCase("long", [(50_000,), (3,), (16_384,), (100_001,), (40,)])


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


def test_the_best_level_comes_first_and_the_baseline_is_always_there() -> None:
    levels = _C.cpu_levels()
    assert levels == [name for name in ("avx512", "avx2", "baseline") if name in levels]
    assert levels[-1] == "baseline"


def test_a_level_that_is_set_is_in_use(cpu_level: str) -> None:
    assert _C.cpu_level() == cpu_level


def test_an_unknown_level_is_refused_and_changes_nothing() -> None:
    before = _C.cpu_level()
    choices = ", ".join(_C.cpu_levels())
    sentence = rf"'sse9' \(APEX_MP_CPU_LEVEL\) is not to be had here; it must be one of: {choices}"
    with pytest.raises(ValueError, match=sentence):
        _C.set_cpu_level("sse9")
    assert _C.cpu_level() == before
