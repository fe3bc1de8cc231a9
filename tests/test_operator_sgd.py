"""sgd_ computes what the reference and torch.optim.SGD say, for every list and dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import reference
import torch
from op_cases import (
    A_FEW,
    ALL_SGD,
    DTYPES,
    F16,
    F32,
    F64,
    NAMES,
    OPERATOR,
    TILE,
    Arguments,
    Dtypes,
    ListCase,
    copy_of,
    number,
    tensors_of,
)
from test_operators import (
    assert_only_wrote,
    assert_same_trajectory,
    each_cpu_level,
    each_dtypes,
    each_list_and_dtype,
    gradients,
)
from tolerances import TOLERANCES, assert_near, assert_same_bits
from torch import Tensor

from apex_mp.core import ops

OPTIONS = ("momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum")
MODES = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "wd_after_momentum": after}
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.0), (0.9, 0.2))
    for nesterov in (False, True)
    for after in (False, True)
    if not (nesterov and (momentum == 0.0 or dampening))
]


def mode_name(mode: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in mode.items() if value) or "plain"


def take(call: Arguments) -> None:
    ops.sgd_(**call)


def math_dtype(call: Arguments, i: int) -> torch.dtype:
    lists = [call[name] for name in ("params", "grads", "momentum_buffers")]
    return reference.math_dtype(*(each[i] for each in lists if each is not None))


def assert_is_sgd_step(before: Arguments, after: Arguments) -> None:
    """Compare every tensor of a call with one step of the reference from the state before it."""
    options = {name: before[name] for name in OPTIONS}
    options |= {name: before[name].item() for name in ("lr", "inv_scale")}
    for i, param in enumerate(before["params"]):
        fresh = before["fresh"] is not None and before["fresh"][i].item() != 0.0
        has_buffer = before["momentum_buffers"] is not None and not fresh
        expected = reference.Sgd(param, before["momentum_buffers"][i] if has_buffer else None)
        expected.update(before["grads"][i], **options)
        assert_near(after["params"][i], expected.param, nearest(before, i, param.dtype))
        if after["momentum_buffers"] is not None:
            buffer = after["momentum_buffers"][i]
            assert_near(buffer, expected.buffer, nearest(before, i, buffer.dtype))
        if after["fresh"] is not None:
            assert after["fresh"][i].item() == 0.0
        if after["copies"] is not None:
            copy = after["copies"][i]
            if param.dtype in (copy.dtype, math_dtype(before, i)):
                assert_same_bits(copy, after["params"][i].to(copy.dtype))
            assert_near(copy, expected.param, nearest(before, i, copy.dtype))


def nearest(call: Arguments, i: int, dtype: torch.dtype) -> Any:
    """How near a result of this dtype can be: not nearer than the math."""
    return TOLERANCES[math_dtype(call, i) if dtype == F64 else dtype]


@each_list_and_dtype("sgd_")
def test_sgd_takes_one_step(case: ListCase, dtypes: list[Dtypes], device: torch.device) -> None:
    call = OPERATOR["sgd_"].sample(case, dtypes, device)
    before = copy_of(call)
    take(call)
    assert_is_sgd_step(before, call)
    assert_only_wrote("sgd_", case, before, call)


@each_cpu_level
@each_dtypes(ALL_SGD)
def test_sgd_takes_any_dtypes(dtypes: list[Dtypes], device: torch.device) -> None:
    call = OPERATOR["sgd_"].sample(ListCase("a list", [(TILE + 9,), (3,)]), dtypes, device)
    before = copy_of(call)
    take(call)
    assert_is_sgd_step(before, call)


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_sgd_has_every_mode(dtype: torch.dtype, mode: dict[str, Any], device: torch.device) -> None:
    buffer = dtype if mode["momentum"] else None
    call = OPERATOR["sgd_"].sample(A_FEW, [(dtype,), (dtype,), (buffer,), (F16,)], device) | mode
    before = copy_of(call)
    take(call)
    assert_is_sgd_step(before, call)


def test_sgd_takes_what_is_optional_or_none(device: torch.device) -> None:
    call = OPERATOR["sgd_"].sample(A_FEW, [(F32,), (F32,), (F32,), (None,)], device)
    call |= {"found_inf": None, "fresh": None}
    before = copy_of(call)
    take(call)
    assert_is_sgd_step(before, call)


def test_sgd_reads_nothing_from_a_fresh_buffer(device: torch.device) -> None:
    call = OPERATOR["sgd_"].sample(A_FEW, [(F32,), (F32,), (F32,), (None,)], device)
    call |= {"fresh": [number(1.0, device) for _ in call["params"]], "weight_decay": 0.0}
    for buffer in call["momentum_buffers"]:
        buffer.fill_(float("nan"))
    take(call)
    for buffer, grad in zip(call["momentum_buffers"], call["grads"], strict=True):
        assert torch.equal(buffer, grad * 0.5)


def test_sgd_takes_a_flat_copy_of_a_matrix(device: torch.device) -> None:
    matrix = ListCase("a matrix", [(3, 50)])
    call = OPERATOR["sgd_"].sample(matrix, [(F32,), (F16,), (F32,), (F16,)], device)
    call["copies"] = [torch.zeros(150, dtype=F16, device=device)]
    call["grads"] = [call["grads"][0].reshape(150)]
    take(call)
    assert_same_bits(call["copies"][0].view(3, 50), call["params"][0].half())


@pytest.mark.parametrize("found_inf", [1.0, 0.5, float("nan")])
@each_dtypes(DTYPES["sgd_"])
def test_sgd_changes_nothing_when_found_inf_is_set(
    dtypes: list[Dtypes], found_inf: float, device: torch.device
) -> None:
    call = OPERATOR["sgd_"].sample(A_FEW, dtypes, device)
    call["found_inf"].fill_(found_inf)
    call["grads"][0].fill_(float("nan"))
    before = copy_of(call)
    take(call)
    for name in before:
        for old, new in zip(tensors_of(before[name]), tensors_of(call[name]), strict=True):
            assert_same_bits(new, old)


@pytest.mark.parametrize("name", ["momentum_buffers", "fresh"])
def test_a_list_that_needs_momentum_is_refused_without(name: str, device: torch.device) -> None:
    call = OPERATOR["sgd_"].sample(A_FEW, [(F32,), (F32,), (F32,), (None,)], device)
    call[name] = None
    if name == "fresh":
        call = OPERATOR["sgd_"].sample(A_FEW, [(F32,), (F32,), (None,), (None,)], device)
        call["fresh"] = [number(1.0, device) for _ in call["params"]]
        sentence = "^sgd_: fresh was given without momentum_buffers"
    else:
        sentence = r"^sgd_: momentum is 0\.9, but there are no momentum_buffers; they must be given"
    before = copy_of(call)
    with pytest.raises(RuntimeError, match=sentence):
        take(call)
    for old, new in zip(before["params"], call["params"], strict=True):
        assert_same_bits(new, old)


# --- Many steps.


# Gradients are of sizes up to 10, and unlike Adam's steps those of SGD are as large: with this the
# weights stay of size 1 or so, for which tolerances are.
LR = 1e-3


def trajectory_call(start: list[Tensor], mode: dict[str, Any]) -> Arguments:
    device = start[0].device
    momentum = mode["momentum"]
    return {
        "params": [param.clone() for param in start],
        "momentum_buffers": [torch.zeros_like(param) for param in start] if momentum else None,
        "fresh": [number(1.0, device) for _ in start] if momentum else None,
        "copies": None,
        "lr": number(LR, device, F64),
        "inv_scale": number(1 / 1024, device),
        "found_inf": torch.zeros(1, device=device),
        "weight_decay": 0.1,
        **mode,
    }


# Where every factor is a power of two, products are exact: what torch fuses and we do not is then
# the same, and so is every bit (but for the sign of zero, which torch's comparison ignores).
EXACT = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    for momentum, dampening in ((0.0, 0.0), (0.5, 0.0), (0.5, 0.75))
    for decay in (0.0, 0.25)
    for nesterov in (False, True)
    if not (nesterov and (momentum == 0.0 or dampening))
]


@pytest.mark.parametrize("mode", EXACT, ids=mode_name)
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_sgd_equals_torch_to_the_bit_where_products_are_exact(
    dtype: torch.dtype, mode: dict[str, Any], device: torch.device
) -> None:
    theirs = [torch.randn(shape, dtype=dtype, device=device) for shape in ((7, 5), (600,))]
    call = trajectory_call(theirs, mode | {"wd_after_momentum": False})
    call["lr"] = number(2.0**-6, device)
    optimizer = torch.optim.SGD([param.requires_grad_() for param in theirs], lr=2.0**-6, **mode)
    for grads in itertools.islice(gradients(theirs), 50):
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        take(call | {"grads": [grad * 1024 for grad in grads]})
    for ours, param in zip(call["params"], theirs, strict=True):
        assert torch.equal(ours, param.detach())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    "mode", [mode for mode in MODES if not mode["wd_after_momentum"]], ids=mode_name
)
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_sgd_follows_torch_over_300_steps(
    dtype: torch.dtype, mode: dict[str, Any], weight_decay: float, device: torch.device
) -> None:
    theirs = [torch.randn(shape, dtype=dtype, device=device) for shape in ((7, 5), (600,))]
    call = trajectory_call(theirs, mode | {"weight_decay": weight_decay})
    options = {name: value for name, value in mode.items() if name != "wd_after_momentum"}
    params = [param.requires_grad_() for param in theirs]
    optimizer = torch.optim.SGD(params, lr=LR, weight_decay=weight_decay, **options)
    for grads in gradients(theirs):
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        take(call | {"grads": [grad * 1024 for grad in grads]})
    assert_same_trajectory(call["params"], theirs)


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_sgd_follows_the_reference_over_300_steps(
    dtype: torch.dtype, mode: dict[str, Any], device: torch.device
) -> None:
    start = [torch.randn(shape, dtype=dtype, device=device) for shape in ((7, 5), (600,))]
    call = trajectory_call(start, mode)
    expected = [reference.Sgd(param) for param in start]
    for grads in gradients(start):
        for each, grad in zip(expected, grads, strict=True):
            each.update(grad, lr=LR, inv_scale=1.0, weight_decay=0.1, **mode)
        take(call | {"grads": [grad * 1024 for grad in grads]})
    assert_same_trajectory(call["params"], [each.param for each in expected])
