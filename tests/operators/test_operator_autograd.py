"""Operators and the rest of torch: version counters, inference mode, opcheck, torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from op_cases import (
    A_FEW,
    BF16,
    F16,
    F32,
    LISTS,
    OPERATOR,
    OPERATORS,
    Arguments,
    Dtypes,
    ListCase,
    Operator,
    copy_of,
    tensors_of,
)
from tolerances import SUM_OF_SQUARES_TOLERANCES, assert_near, assert_same_bits
from torch import Tensor
from torch.library import opcheck

SMALL = ListCase("small", [(5,), (), (0,), (2, 300)])
NONE = ListCase("none", [])
VIEWS = ListCase("views of one buffer", [(5,), (600,), (1,)], "views")

each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)


def sample(
    operator: Operator,
    device: torch.device,
    case: ListCase = SMALL,
    dtypes: Sequence[Dtypes] = ((F32, F16), (F16, BF16), (BF16,), (F16,)),
) -> Arguments:
    """Return a call in which every tensor that can be written is."""
    call = operator.sample(case, dtypes, device)
    if operator.name == "check_" and call["grads"]:
        call["grads"][0].fill_(float("inf"))
    return call


# --- Version counters: how autograd notices that a tensor it saved has changed.


@each_operator
def test_each_written_tensor_and_no_other_gets_a_new_version(
    operator: Operator, device: torch.device
) -> None:
    call = sample(operator, device)
    before = {name: [t._version for t in tensors_of(each)] for name, each in call.items()}
    operator(call)
    for name, versions in before.items():
        for tensor, version in zip(tensors_of(call[name]), versions, strict=True):
            assert (tensor._version > version) == (name in operator.written), name


FLOATS_WRITTEN = [
    (operator, name)
    for operator in OPERATORS
    for name in operator.written
    if name not in ("good_steps", "overflows", "counts")  # Integers, which no graph goes through.
]


@pytest.mark.parametrize(("operator", "name"), FLOATS_WRITTEN)
def test_backward_through_what_an_operator_has_written_raises(
    operator: Operator, name: str, device: torch.device
) -> None:
    call = sample(operator, device, A_FEW)
    weight = tensors_of(call[name])[-1].requires_grad_()
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        operator(call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def assert_same_call(actual: Arguments, expected: Arguments) -> None:
    for name in expected:
        pairs = zip(tensors_of(actual[name]), tensors_of(expected[name]), strict=True)
        for ours, theirs in pairs:
            assert_same_bits(ours, theirs)


# --- opcheck: torch's own test of schema, autograd registration, fake tensors and AOT dispatch.


@pytest.mark.parametrize("case", [SMALL, NONE, LISTS[-1]], ids=str)
@each_operator
def test_opcheck_passes(operator: Operator, case: ListCase, device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opcheck(operator.overload, (), sample(operator, device, case))


# --- torch.compile, without graph breaks.


@pytest.mark.slow
@pytest.mark.parametrize("case", [SMALL, VIEWS], ids=str)
def test_the_default_backend_compiles_all_operators_into_one_graph(
    case: ListCase, device: torch.device
) -> None:
    calls = [sample(operator, device, case) for operator in OPERATORS]
    expected = [copy_of(call) for call in calls]
    overloads = [operator.overload for operator in OPERATORS]

    def step(calls: list[Arguments]) -> None:
        for overload, call in zip(overloads, calls, strict=True):
            overload(**call)

    with torch.no_grad():
        step(expected)
        torch.compile(step, fullgraph=True)(calls)
    torch._dynamo.reset()
    for ours, wanted in zip(calls, expected, strict=True):
        for name in wanted:
            for one, other in zip(tensors_of(ours[name]), tensors_of(wanted[name]), strict=True):
                # Traced operators work on copies. On CUDA sums follow the alignment in their order.
                assert_near(one, other, SUM_OF_SQUARES_TOLERANCES[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_made_in_a_compiled_function_are_written_where_they_lie(
    backend: str, device: torch.device
) -> None:
    found_inf, factor = torch.zeros(1, device=device), torch.full((), 2.0, device=device)

    def double_some(part: Tensor) -> Tensor:
        some = [part[3:7], part[8:14].view(2, 3).t()]
        OPERATOR["unscale_"].overload(some, some, factor, found_inf)
        return part.sum()

    buffer = torch.arange(40.0, device=device)
    expected = buffer.clone()
    expected[13:17] *= 2
    expected[18:24] *= 2
    total = torch.compile(double_some, fullgraph=True, backend=backend)(buffer[10:30])
    torch._dynamo.reset()
    assert_same_bits(buffer, expected)
    assert total == expected[10:30].sum()


def test_a_compiled_training_step_may_hold_the_operators(device: torch.device) -> None:
    unscale = sample(OPERATOR["unscale_"], device, A_FEW, [(F32,), (F32,)])
    check = sample(OPERATOR["check_"], device, A_FEW, [(F32,)])

    def step(unscale: Arguments, check: Arguments, scaled: list[Tensor]) -> Tensor:
        grads = [grad / 1024 for grad in scaled]
        OPERATOR["check_"].overload(**(check | {"grads": grads}))
        OPERATOR["unscale_"].overload(**(unscale | {"src": grads}))
        return unscale["dst"][1].sum()

    scaled = [grad * 1024 for grad in unscale["src"]]
    other, other_check = copy_of(unscale), copy_of(check)
    with torch.no_grad():
        expected = step(unscale, check, scaled)
        actual = torch.compile(step, fullgraph=True, backend="aot_eager")(
            other, other_check, scaled
        )
    torch._dynamo.reset()
    assert_near(actual, expected)
    assert_same_call(other, unscale)
    assert_same_call(other_check, check)
