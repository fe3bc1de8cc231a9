"""`step_lists` takes the step of every rule, for every list and dtype of the tables."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from op_cases import (
    A_FEW,
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    LISTS,
    MANY_LISTS,
    NAMES,
    TILE,
    ListCase,
    assert_guards_intact,
    name_of,
    number,
)
from step_list_cases import (
    ADAM,
    LR,
    NOVOGRAD,
    RULES,
    SGD,
    STEP_DTYPES,
    Rule,
    assert_same_call,
    assert_steps,
    copy_of,
    lists_of,
    sample,
)
from tolerances import assert_same_bits

from apex_mp.core.step_lists import step_lists

HALF_MODEL = STEP_DTYPES[2]
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)


@each_rule
@pytest.mark.parametrize("case", [*LISTS[1:], *MANY_LISTS], ids=str)
def test_every_list_is_stepped_and_nothing_around_it(
    rule: Rule, case: ListCase, device: torch.device
) -> None:
    call = sample(rule, case, HALF_MODEL, device)
    assert_steps(rule, call)
    if case.layout != "views":
        for name in call["tensors"].keys() | {"params", "grads", "copies"}:
            assert_guards_intact(lists_of(call)[name])


@each_rule
@pytest.mark.parametrize("dtypes", STEP_DTYPES, ids=name_of)
def test_every_rule_takes_the_usual_dtypes(
    rule: Rule, dtypes: Any, device: torch.device, cpu_level: str
) -> None:
    assert_steps(rule, sample(rule, A_FEW, dtypes, device))


@pytest.mark.parametrize("param", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("grad", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("copy", [None, *FLOATS], ids=NAMES.get)
@pytest.mark.parametrize("rule", [ADAM, SGD], ids=str)
def test_adam_and_sgd_take_any_dtypes(
    rule: Rule, copy: Any, grad: Any, param: Any, device: torch.device, cpu_level: str
) -> None:
    dtypes = [(param,), (grad,), (copy,)]
    assert_steps(rule, sample(rule, ListCase("a list", [(TILE + 9,)]), dtypes, device))


MODES = [
    *(
        (ADAM, {"adam_w_mode": decoupled, "bias_correction": corrected, "eps_inside_sqrt": inside})
        for decoupled, corrected, inside in itertools.product((True, False), repeat=3)
    ),
    *(
        (SGD, {"dampening": 0.0, "nesterov": nesterov, "wd_after_momentum": late})
        for nesterov, late in itertools.product((True, False), repeat=2)
    ),
]


@pytest.mark.parametrize(("rule", "mode"), MODES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_adam_and_sgd_have_every_mode(
    rule: Rule, mode: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    call = sample(rule, A_FEW, ((dtype,), (dtype,), (F16,)), device)
    call["options"] |= mode
    assert_steps(rule, call)


@each_rule
@pytest.mark.parametrize("found_inf", [1.0, 0.5, float("nan")])
def test_nothing_changes_when_found_inf_is_set(
    rule: Rule, found_inf: float, device: torch.device
) -> None:
    for state_dtypes in (None, (F16,)):
        call = sample(rule, A_FEW, HALF_MODEL, device, state_dtypes)
        call["found_inf"].fill_(found_inf)
        call["grads"][0].fill_(float("nan"))
        before = copy_of(call)
        step_lists(**call)
        assert_same_call(call, before)


@each_rule
def test_numbers_may_be_tensors_and_found_inf_none(rule: Rule, device: torch.device) -> None:
    call = sample(rule, A_FEW, HALF_MODEL, device)
    expected = copy_of(call)
    step_lists(**expected)
    scale = torch.tensor(call["scale"], device=device)
    options = call["options"] | {"lr": number(LR, device, F64)}
    step_lists(**(call | {"options": options, "scale": scale, "found_inf": None}))
    assert_same_call(call, expected)


@each_rule
@pytest.mark.parametrize("state", [F16, BF16, F64])
def test_state_of_another_dtype_is_stepped_in_the_math_and_rounded(
    rule: Rule, state: torch.dtype, device: torch.device
) -> None:
    call = sample(rule, A_FEW, HALF_MODEL, device, (state,))
    wide = copy_of(call)
    wide["tensors"] = {
        name: [each.float() for each in listed] for name, listed in call["tensors"].items()
    }
    step_lists(**wide)
    step_lists(**call)
    for name, listed in wide.pop("tensors").items():
        for ours, theirs in zip(call["tensors"][name], listed, strict=True):
            assert_same_bits(ours, theirs.to(state))
    assert_same_call(call | {"tensors": {}}, wide | {"tensors": {}})


def test_each_parameter_has_a_step_count_of_its_own(device: torch.device) -> None:
    call = sample(ADAM, A_FEW, HALF_MODEL, device)
    counts = torch.tensor([0.0, 7.0, 3.0, 100.0, 1.0], device=device)
    call["numbers"] = {"step": [*counts.unbind()]}
    for _ in range(2):
        step_lists(**call)
    assert counts.tolist() == [2.0, 9.0, 5.0, 102.0, 3.0]


def test_a_parameter_that_requires_grad_is_stepped_and_its_version_changes(
    device: torch.device,
) -> None:
    call = sample(SGD, A_FEW, HALF_MODEL, device)
    param = call["params"][1].requires_grad_()
    loss = (param * param).sum()
    step_lists(**call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_function_may_call_it(device: torch.device) -> None:
    call = sample(ADAM, A_FEW, HALF_MODEL, device)
    expected = copy_of(call)
    step_lists(**expected)
    torch.compile(lambda: step_lists(**call), backend="eager")()
    torch._dynamo.reset()
    assert_same_call(call, expected)


# --- Refusals: a sentence, and nothing is written.


def transposed(call: dict[str, Any], name: str) -> None:
    lists_of(call)[name][1] = lists_of(call)[name][1].t().contiguous().t()


def on_meta(call: dict[str, Any], name: str) -> None:
    lists_of(call)[name][1] = lists_of(call)[name][1].to("meta")


def shorter(call: dict[str, Any], name: str) -> None:
    lists_of(call)[name][1] = lists_of(call)[name][1].flatten()[1:]


def option(call: dict[str, Any], name: str) -> None:
    call["options"][name] = -0.5


def missing(call: dict[str, Any], name: str) -> None:
    del call["options"][name]


def twice(call: dict[str, Any], name: str) -> None:
    call[name][1] = call[name][3]


FAULTS = [
    (shorter, "grads", RuntimeError, r"grads\[1\] has 599 elements, params\[1\] has 600"),
    (shorter, "exp_avg", RuntimeError, r"exp_avg\[1\] has 599 elements, params\[1\] has 600"),
    (shorter, "copies", RuntimeError, r"output_params\[1\] has 599 elements, params\[1\] has 600"),
    (on_meta, "grads", RuntimeError, r"grads\[1\] is on meta, params\[1\] on "),
    (on_meta, "params", RuntimeError, r"params\[1\] is on meta, params\[0\] on "),
    (transposed, "exp_avg", RuntimeError, r"the state of params\[1\] lies in memory in another"),
    (option, "weight_decay", ValueError, "weight_decay is -0.5; it must be 0 or more"),
    (missing, "eps", KeyError, "eps"),
    (twice, "params", ValueError, "a parameter stands twice"),
]


@pytest.mark.parametrize(
    ("spoil", "name", "error", "message"), FAULTS, ids=[f"{f[0].__name__} {f[1]}" for f in FAULTS]
)
def test_a_fault_is_named_and_nothing_is_written(
    spoil: Any, name: str, error: type[Exception], message: str, device: torch.device
) -> None:
    call = sample(NOVOGRAD, A_FEW, HALF_MODEL, device)
    spoil(call, name)
    before = copy_of(call)
    with pytest.raises(error, match=message) as raised:
        step_lists(**call)
    if error is not KeyError:
        assert str(raised.value).startswith("a_function: ")
    for old, new in zip(lists_of(before).values(), lists_of(call).values(), strict=True):
        for one, other in zip(old, new, strict=True):
            if one.device.type != "meta":
                assert_same_bits(other, one)


def test_a_device_without_kernels_is_named() -> None:
    call = sample(SGD, ListCase("one", [(3,)]), ((F32,), (F32,), (None,)), torch.device("meta"))
    with pytest.raises(RuntimeError, match=r"^a_function: params\[0\] is on meta, for which this"):
        step_lists(**(call | {"found_inf": None}))
