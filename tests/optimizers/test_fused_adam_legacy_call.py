"""step(grads=, output_params=, scale=, grad_norms=): the call that FP16_Optimizer made in 2019."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    Unchanged,
    assert_same_state,
    assert_same_trajectory,
    copies_of,
    give_grads,
    grad_for,
    make_params,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdam

SIZES = (2, 3, 1)
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def in_groups(items: list[Any]) -> list[list[Any]]:
    rest = iter(items)
    return [[next(rest) for _ in range(size)] for size in SIZES]


def grouped(params: list[Parameter], **options: Any) -> FusedAdam:
    groups = [{"params": one} for one in in_groups(params)]
    return FusedAdam(groups, **{**OPTIONS, **options})


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "generator": iter,
    "flat list": list,
    "tuple": tuple,
    "list per group": in_groups,
    "tuple per group": lambda items: tuple(tuple(one) for one in in_groups(items)),
    "generator of lists": lambda items: iter(in_groups(items)),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@each_form
def test_grads_may_be_given_in_every_old_form(
    form: Callable[[list[Any]], Any], device: torch.device
) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer, expected = grouped(params), grouped(expected_params)
    for step in range(3):
        give_grads(expected_params, step)
        optimizer.step(grads=form([p.grad for p in expected_params]))
        expected.step()
    assert_same_state(optimizer, expected)


@each_form
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
def test_output_params_receive_exactly_the_rounded_parameter(
    dtype: torch.dtype, form: Callable[[list[Any]], Any], device: torch.device
) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    outputs = [Parameter(torch.zeros_like(p, dtype=dtype)) for p in params]
    optimizer, expected = grouped(params), grouped(expected_params)
    for step in range(3):
        give_grads(params, step)
        give_grads(expected_params, step)
        optimizer.step(output_params=form(outputs))
        expected.step()
        for param, output in zip(params, outputs, strict=True):
            assert_same_bits(output.detach(), param.detach().to(dtype))
    assert_same_state(optimizer, expected)


def test_given_grads_replace_those_of_the_parameters_and_stay_as_they_are(
    device: torch.device,
) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    give_grads(params, 99)  # not used
    own = [p.grad.clone() for p in params]
    give_grads(expected_params, 0)
    given = [p.grad.clone() for p in expected_params]
    optimizer, expected = grouped(params), grouped(expected_params)
    optimizer.step(grads=given, scale=4.0)
    for param in expected_params:
        param.grad /= 4
    expected.step()
    assert_same_state(optimizer, expected)
    for index, param in enumerate(params):
        assert_same_bits(param.grad, own[index])
        assert_same_bits(given[index], grad_for(param, 0, index))


@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32, F64], ids=NAMES.get)
def test_gradients_of_any_dtype_step_float32_masters(
    grad_dtype: torch.dtype, device: torch.device
) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer, expected = FusedAdam(params, **OPTIONS), FusedAdam(expected_params, **OPTIONS)
    for step in range(5):
        give_grads(expected_params, step, values=BF16)
        optimizer.step(grads=[p.grad.to(grad_dtype) for p in expected_params])
        expected.step()
    for param, wanted in zip(params, expected_params, strict=True):
        # Math is float64 with float64 gradients, so not the same bits.
        assert_near(param.detach(), wanted.detach(), TRAJECTORY_TOLERANCES[F32])
        assert param.dtype == optimizer.state[param]["exp_avg"].dtype == F32


# --- scale


SCALES: dict[str, Callable[[float, torch.device], Any]] = {
    "float": lambda scale, device: scale,
    "int": lambda scale, device: int(scale),
    "tensor": lambda scale, device: torch.tensor(scale, device=device),
    "tensor on the CPU": lambda scale, device: torch.tensor(scale),
    "tensor of one element": lambda scale, device: torch.tensor([scale], device=device),
    "float16 tensor": lambda scale, device: torch.tensor(scale, device=device, dtype=F16),
    "float64 tensor": lambda scale, device: torch.tensor(scale, device=device, dtype=F64),
}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("make_scale", SCALES.values(), ids=SCALES)
def test_gradients_are_divided_by_the_scale(
    make_scale: Callable[[float, torch.device], Any], max_grad_norm: float, device: torch.device
) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer = grouped(params, max_grad_norm=max_grad_norm)
    expected = grouped(expected_params, max_grad_norm=max_grad_norm)
    for step in range(3):
        give_grads(params, step, factor=1024.0)
        give_grads(expected_params, step)
        optimizer.step(scale=make_scale(1024.0, device))
        expected.step()
    for param, wanted in zip(params, expected_params, strict=True):
        assert_near(param.detach(), wanted.detach())
        assert_near(optimizer.state[param]["exp_avg"], expected.state[wanted]["exp_avg"])


@pytest.mark.parametrize("scale", [0, 0.0, -2.0, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(scale: float, device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    give_grads(params, 0)
    with (
        Unchanged(optimizer),
        pytest.raises(ValueError, match=f"scale is {scale}; it must be more"),
    ):
        optimizer.step(scale=scale)


# --- max_grad_norm and grad_norms


def old_clip(norm: float, scale: float, max_grad_norm: float) -> float:
    return max(1.0, (norm / scale + 1e-6) / max_grad_norm)


SCALE, MAX_NORM = 256.0, 1.5

NORMS: dict[str, Callable[[float, torch.device], Any]] = {
    "float": lambda norm, device: norm,
    "tensor": lambda norm, device: torch.tensor(norm, device=device),
    "float16 tensor": lambda norm, device: torch.tensor(norm, dtype=F16, device=device),
    "float64 tensor of one element": lambda norm, device: torch.tensor(
        [norm], dtype=F64, device=device
    ),
}


def group_norms(params: list[Parameter]) -> list[float]:
    return [
        math.sqrt(sum(float(p.grad.double().square().sum()) for p in group if p.grad is not None))
        for group in in_groups(params)
    ]


@pytest.mark.parametrize("has_outputs", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["computed", "given"])
def test_each_group_is_clipped_by_its_own_norm_given_or_not(
    given: bool, has_outputs: bool, device: torch.device
) -> None:
    limit = 2.0
    params = make_params(device)
    expected_params = copies_of(params, F64)
    optimizer = grouped(params, max_grad_norm=limit, eps=1.0)
    expected = grouped(expected_params, eps=1.0)
    # Some parameters with an output and some without are two calls, and still one norm.
    outputs = [torch.zeros_like(p, dtype=F16) if i % 2 else None for i, p in enumerate(params)]
    clips = set()
    for step in range(4):
        # As in the second step: a gradient that is None takes no part.
        give_grads(params, step, factor=SCALE, missing=lambda step, index: step == index == 1)
        give_grads(expected_params, step, missing=lambda step, index: step == index == 1)
        norms = group_norms(params)
        for group, norm in zip(in_groups(expected_params), norms, strict=True):
            clip = old_clip(norm, SCALE, limit)
            clips.add(clip)
            for param in group:
                if param.grad is not None:
                    param.grad /= clip
        optimizer.step(
            scale=SCALE,
            grad_norms=norms if given else None,
            output_params=outputs if has_outputs else None,
        )
        expected.step()
    assert 1.0 in clips  # some groups are clipped and some are not
    assert max(clips) > 4.0
    assert_same_trajectory(optimizer, params, expected, expected_params, TRAJECTORY_TOLERANCES[F32])


# --- What does not fit is refused, and nothing is changed


def ones(count: int, device: torch.device) -> list[Tensor]:
    return [torch.ones(4, device=device) for _ in range(count)]


def sparse_csr(device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "in beta state"
        return torch.ones(2, 2, device=device).to_sparse_csr()


WRONG: dict[str, tuple[Callable[[torch.device], dict[str, Any]], str]] = {
    "too few grads": (
        lambda d: {"grads": ones(3, d)},
        r"grads has lists of \[3\] tensors, the parameter groups have \[2, 2\]; they must match",
    ),
    "no grads": (lambda d: {"grads": []}, r"grads has lists of \[0\] tensors"),
    "too many outputs": (
        lambda d: {"output_params": iter(ones(5, d))},
        r"output_params has lists of \[5\] tensors, the parameter groups have \[2, 2\]",
    ),
    "lists of the wrong length": (
        lambda d: {"grads": [ones(1, d), ones(3, d)]},
        r"grads has lists of \[1, 3\] tensors",
    ),
    "too few lists": (lambda d: {"grads": [ones(2, d)]}, r"grads has lists of \[2\] tensors"),
    "too few norms": (
        lambda d: {"grad_norms": [1.0]},
        "grad_norms has 1 numbers; it must have one for each of the 2 parameter groups",
    ),
    "a scale of two elements": (
        lambda d: {"scale": torch.ones(2)},
        "scale is a tensor of 2 elements; it must have 1",
    ),
    "no tensor": (
        lambda d: {"grads": [ones(2, d), [torch.ones(4, device=d), "grad"]]},
        r"grads\[1\]\[1\] is a str; it must be a tensor or None",
    ),
    "a grad of another size in the first group": (
        lambda d: {"grads": [torch.ones(5, device=d), *ones(3, d)]},
        r"FusedAdam: grads\[0\]\[0\] has 5 elements, params\[0\]\[0\] has 4; they must match",
    ),
    "a grad of another size in the second group": (
        lambda d: {"grads": [*ones(3, d), torch.ones(5, device=d)]},
        r"FusedAdam: grads\[1\]\[1\] has 5 elements, params\[1\]\[1\] has 4; they must match",
    ),
    "an integer grad in the second group": (
        lambda d: {"grads": [*ones(3, d), torch.ones(4, device=d).long()]},
        r"\[1\] is of dtype Long; it must be Half or BFloat16 or Float or Double",
    ),
    "a sparse grad in the second group": (
        lambda d: {"grads": [*ones(3, d), torch.ones(4, device=d).to_sparse()]},
        "FusedAdam does not support sparse gradients, please consider SparseAdam instead",
    ),
    "a sparse CSR grad in the second group": (
        lambda d: {"grads": [*[torch.ones(2, 2, device=d)] * 3, sparse_csr(d)]},
        "FusedAdam does not support sparse gradients, please consider SparseAdam instead",
    ),
    "an output of another size in the second group": (
        lambda d: {"output_params": [None, None, None, torch.ones(5, device=d)]},
        r"FusedAdam: output_params\[1\]\[1\] has 5 elements, params\[1\]\[1\] has 4; they must",
    ),
    "an output with gaps in the second group": (
        lambda d: {"output_params": [*ones(3, d), torch.ones(8, device=d)[::2]]},
        r"FusedAdam: output_params\[1\]\[1\] has sizes \[4\] and strides \[2\]",
    ),
}


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize(("make_call", "message"), WRONG.values(), ids=WRONG)
def test_a_call_that_does_not_fit_raises_a_sentence_and_changes_nothing(
    make_call: Callable[[torch.device], dict[str, Any]],
    message: str,
    at_step: int,
    max_grad_norm: float,
    device: torch.device,
) -> None:
    params = make_params(device, F32, [(4,)] * 4)
    optimizer = FusedAdam(
        [{"params": params[:2]}, {"params": params[2:]}], lr=0.1, max_grad_norm=max_grad_norm
    )
    for step in range(at_step):
        give_grads(params, step)
        optimizer.step()
    give_grads(params, at_step)
    call = make_call(device)
    outputs = list(call.get("output_params", []))
    if outputs:
        call["output_params"] = iter(outputs)
    with (
        Unchanged(optimizer, [output for output in outputs if output is not None]),
        pytest.raises((RuntimeError, ValueError, TypeError), match=message),
    ):
        optimizer.step(**call)
