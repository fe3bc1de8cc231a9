"""step(grads=, output_params=, scale=, grad_norms=): the call that FP16_Optimizer made in 2019."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import BF16, F16, F32, F64, NAMES, Unchanged, give_grads, grad_for, train
from rule_cases import (
    SMALL,
    Subject,
    assert_stepped,
    each_subject,
    make_params,
    references_after_step,
)
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

SIZES = (1, 2, 1)  # of groups


def in_groups(items: list[Any]) -> list[list[Any]]:
    rest = iter(items)
    return [[next(rest) for _ in range(size)] for size in SIZES]


def grouped(subject: Subject, params: list[Parameter], **options: Any) -> Any:
    return subject.make([{"params": each} for each in in_groups(params)], **options)


# Of lists, and of the scale beside them.
FORMS: dict[str, tuple[Callable[[list[Any]], Any], Callable[[float, torch.device], Any]]] = {
    "generator": (iter, lambda scale, device: scale),
    "flat list": (list, lambda scale, device: int(scale)),
    "tuple": (tuple, lambda scale, device: torch.tensor(scale, device=device)),
    "list per group": (in_groups, lambda scale, device: torch.tensor(scale)),
    "tuple per group": (
        lambda items: tuple(tuple(one) for one in in_groups(items)),
        lambda scale, device: torch.tensor([scale], device=device),
    ),
    "generator of lists": (
        lambda items: iter(in_groups(items)),
        lambda scale, device: torch.tensor(scale, device=device, dtype=F16),
    ),
    "tuple of lists": (
        lambda items: tuple(in_groups(items)),
        lambda scale, device: torch.tensor(scale, device=device, dtype=F64),
    ),
}


@each_subject
@pytest.mark.parametrize(("form", "make_scale"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
def test_grads_and_output_params_may_be_given_in_every_old_form(
    dtype: torch.dtype, form: Any, make_scale: Any, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = grouped(subject, params, max_grad_norm=0.5)
    outputs = [Parameter(torch.zeros_like(p, dtype=dtype)) for p in params]
    give_grads(params, 99)  # not used
    own = [param.grad for param in params]
    for step in range(3):
        grads = [grad_for(param, step, index) for index, param in enumerate(params)]
        grads[1] = None
        expected = references_after_step(optimizer, subject, grads, 4.0)
        optimizer.step(
            grads=form(grads), output_params=form(outputs), scale=make_scale(4.0, device)
        )
        assert_stepped(optimizer, subject, expected)
        for index, (param, output) in enumerate(zip(params, outputs, strict=True)):
            wanted = torch.zeros_like(output) if index == 1 else param.detach().to(dtype)
            assert_same_bits(output.detach(), wanted)
            assert param.grad is own[index]
            assert_same_bits(param.grad, grad_for(param, 99, index))
            if index != 1:
                assert_same_bits(grads[index], grad_for(param, step, index))


# --- What does not fit is refused, and nothing is changed.


def ones(count: int, device: torch.device) -> list[Tensor]:
    return [torch.ones(4, device=device) for _ in range(count)]


def sparse_csr(device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "in beta state"
        return torch.ones(2, 2, device=device).to_sparse_csr()


def last_grad(grad: Tensor) -> dict[str, Any]:
    return {"grads": [*[torch.ones_like(grad.to_dense())] * 3, grad]}


def last_output(output: Tensor) -> dict[str, Any]:
    return {"output_params": [*ones(3, output.device), output]}


ADVICE = "<the advice>"
SPARSE = " does not support sparse gradients" + ADVICE + "$"
# Arguments of a step of two groups of two parameters of four numbers, and the message.
WRONG_CALLS: dict[str, tuple[Callable[[torch.device], dict[str, Any]], str]] = {
    "too few grads": (
        lambda d: {"grads": ones(3, d)},
        r"\.step: grads has lists of \[3\] tensors, the parameter groups have \[2, 2\]; they must",
    ),
    "no grads": (lambda d: {"grads": []}, r"\.step: grads has lists of \[0\] tensors"),
    "too many outputs": (
        lambda d: {"output_params": iter(ones(5, d))},
        r"\.step: output_params has lists of \[5\] tensors, the parameter groups have \[2, 2\]",
    ),
    "lists of the wrong length": (
        lambda d: {"grads": [ones(1, d), ones(3, d)]},
        r"\.step: grads has lists of \[1, 3\] tensors",
    ),
    "too few lists": (
        lambda d: {"grads": [ones(2, d)]},
        r"\.step: grads has lists of \[2\] tensors",
    ),
    "too few norms": (
        lambda d: {"grad_norms": [1.0]},
        r"\.step: grad_norms has 1 numbers; it must have one for each of the 2 parameter groups",
    ),
    "a scale of two elements": (
        lambda d: {"scale": torch.ones(2)},
        r": scale is a tensor of 2 elements; it must have 1",
    ),
    **{
        f"a scale of {scale}": (
            lambda d, scale=scale: {"scale": scale},
            rf"\.step: scale is {scale}; it must be more",
        )
        for scale in (0, 0.0, -2.0, math.nan)
    },
    "no tensor": (
        lambda d: {"grads": [ones(2, d), [torch.ones(4, device=d), "grad"]]},
        r"\.step: grads\[1\]\[1\] is a str; it must be a tensor or None",
    ),
    "a grad of another size in the first group": (
        lambda d: {"grads": [torch.ones(5, device=d), *ones(3, d)]},
        r": grads\[0\]\[0\] has 5 elements, params\[0\]\[0\] has 4; they must match",
    ),
    "a grad of another size": (
        lambda d: last_grad(torch.ones(5, device=d)),
        r": grads\[0\]\[0\] has 5 elements",
    ),
    "an integer grad": (
        lambda d: last_grad(torch.ones(4, device=d).long()),
        r": .*\[0\] is of dtype Long; it must be Half or BFloat16 or Float or Double",
    ),
    "a sparse grad": (lambda d: last_grad(torch.ones(4, device=d).to_sparse()), SPARSE),
    "a sparse CSR grad": (lambda d: last_grad(sparse_csr(d)), SPARSE),
    "an output of another size": (
        lambda d: last_output(torch.ones(5, device=d)),
        r": output_params\[1\]\[1\] has 5 elements, params\[1\]\[1\] has 4; they must",
    ),
    "an output with gaps": (
        lambda d: last_output(torch.ones(8, device=d)[::2]),
        r": output_params\[1\]\[1\] has sizes \[4\] and strides \[2\]",
    ),
}


@each_subject
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize(("make_call", "sentence"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_call_that_does_not_fit_raises_a_sentence_and_changes_nothing(
    make_call: Callable[[torch.device], dict[str, Any]],
    sentence: str,
    at_step: int,
    max_grad_norm: float,
    subject: Subject,
    device: torch.device,
) -> None:
    params = make_params(device, F32, [(4,)] * 4)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = subject.of_a_user.make(groups, max_grad_norm=max_grad_norm)
    train(optimizer, params, range(at_step))
    give_grads(params, at_step)
    call = make_call(device)
    sentence = f"^{subject.name}{sentence.replace(ADVICE, subject.for_sparse)}"
    outputs = list(call.get("output_params", []))
    if outputs:
        call["output_params"] = iter(outputs)
    with (
        Unchanged(optimizer, outputs),
        pytest.raises((RuntimeError, ValueError, TypeError), match=sentence),
    ):
        optimizer.step(**call)


@each_subject
def test_state_that_does_not_fit_is_named_before_any_group_is_stepped(
    subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = subject.of_a_user.in_two_groups(params)
    train(optimizer, params, range(1))
    name = subject.tensors[0]
    optimizer.state[params[3]][name] = torch.ones(2, device=device)
    sentence = rf"^{subject.name}: {name}\[1\]\[1\] has 2 elements, params\[1\]\[1\]"
    with Unchanged(optimizer), pytest.raises(RuntimeError, match=sentence):
        optimizer.step()
