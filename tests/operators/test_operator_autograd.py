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


def test_an_optional_list_and_an_optional_tensor_may_be_absent(device: torch.device) -> None:
    for name, absent in (
        ("unscale_", ("sum_sq",)),
        ("l2_norm_", ("norms",)),
    ):
        call = sample(OPERATOR[name], device) | dict.fromkeys(absent)
        written = [call[each] for each in OPERATOR[name].written if call[each] is not None]
        before = [t._version for each in written for t in tensors_of(each)]
        OPERATOR[name](call)
        after = [t._version for each in written for t in tensors_of(each)]
        assert all(new > old for new, old in zip(after, before, strict=True))


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


@each_operator
def test_backward_through_what_an_operator_only_reads_goes_on(
    operator: Operator, device: torch.device
) -> None:
    call = sample(operator, device, A_FEW)
    read = [t for name in call.keys() - set(operator.written) for t in tensors_of(call[name])]
    assert read
    losses = [(tensor.requires_grad_() ** 2).sum() for tensor in read]
    with torch.no_grad():
        operator(call)
    for loss in losses:
        loss.backward()


def test_a_refused_call_leaves_graphs_intact(device: torch.device) -> None:
    call = sample(OPERATOR["axpby_"], device, A_FEW)
    loss = (call["out"][1].requires_grad_() ** 2).sum()
    with torch.no_grad(), pytest.raises(RuntimeError, match="tested is 2"):
        OPERATOR["axpby_"](call | {"tested": 2})
    loss.backward()


def test_a_view_shares_the_new_version_of_its_base(device: torch.device) -> None:
    call = sample(OPERATOR["unscale_"], device)
    base = torch.ones(10, device=device)
    call["dst"][0] = base[2:7]
    OPERATOR["unscale_"](call)
    assert base._version == 1


@each_operator
def test_inference_mode_changes_no_result(operator: Operator, device: torch.device) -> None:
    expected = sample(operator, device)
    call = copy_of(expected)
    operator(expected)
    with torch.inference_mode():
        operator(call)
        of_inference = copy_of(sample(operator, device))  # Inference tensors have no version.
        operator(of_inference)
    assert_same_call(call, expected)


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


def test_opcheck_passes_in_place_and_without_what_is_optional(device: torch.device) -> None:
    unscale = sample(OPERATOR["unscale_"], device)
    axpby = sample(OPERATOR["axpby_"], device)
    norm = sample(OPERATOR["l2_norm_"], device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opcheck(OPERATOR["unscale_"].overload, (), unscale | {"dst": unscale["src"]})
        opcheck(OPERATOR["unscale_"].overload, (), unscale | {"sum_sq": None})
        opcheck(OPERATOR["axpby_"].overload, (), axpby | {"out": axpby["y"]})
        opcheck(OPERATOR["l2_norm_"].overload, (), norm | {"norms": None})


# --- torch.compile, without graph breaks.


@each_operator
def test_compiles_into_one_graph_with_equal_results(
    operator: Operator, device: torch.device
) -> None:
    expected = sample(operator, device)
    call = copy_of(expected)
    operator(expected)
    compiled = torch.compile(operator.overload, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(**call)
    torch._dynamo.reset()
    assert_same_call(call, expected)


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


def test_clones_of_slices_and_their_parts_are_written_where_they_lie(device: torch.device) -> None:
    factor = torch.full((), 2.0, device=device)

    def double_some(buffer: Tensor) -> tuple[Tensor, Tensor]:
        clone, found_inf = buffer[10:30].clone(), buffer[39:].clone()
        some = [clone[3:7]]
        OPERATOR["unscale_"].overload(some, some, factor, found_inf)
        return clone + 1, found_inf + 1

    buffer = torch.arange(40.0, device=device)
    buffer[14] = torch.inf
    expected = double_some(buffer)
    results = torch.compile(double_some, fullgraph=True)(buffer)
    torch._dynamo.reset()
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted)


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
