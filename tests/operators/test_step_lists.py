"""`step_lists` takes the step of every rule, for every list and dtype of the tables."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from op_cases import (
    A_FEW,
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
)
from step_list_cases import (
    ADAM,
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

from apex_mp.multi_tensor_apply._steps import step_lists

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
