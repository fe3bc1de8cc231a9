"""Optimizers that are a rule of the engine do what their references do, however they are called."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from typing import Any

import pytest
import torch
from fp16_cases import INF
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    Unchanged,
    assert_same_state,
    copies_of,
    give_grads,
    grad_for,
    make_scaler,
    scaled_step,
    train,
)
from rule_cases import (
    SMALL,
    SUBJECTS,
    Subject,
    assert_stepped,
    each_subject,
    make_params,
    mode_name,
    references_after_step,
)
from several_devices_cases import side_of, spread
from tolerances import assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.engine import devices as engine_devices
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedNovoGrad, FusedSGD

# By step and parameter.
NO_GRAD = {(0, 1), (1, 1), (1, 0)}

each_mode = pytest.mark.parametrize(
    ("subject", "mode"),
    [
        pytest.param(subject, mode, id=f"{name}-{mode_name(mode)}")
        for name, subject in SUBJECTS.items()
        for mode in subject.modes
    ],
)


def step_and_compare(optimizer: Any, subject: Subject) -> None:
    """Take a step with each parameter's `.grad`, and compare it with the reference."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    expected = references_after_step(optimizer, subject.reference, grads)
    optimizer.step()
    assert_stepped(optimizer, expected)


# --- The formula.


@each_mode
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
@pytest.mark.usefixtures("cpu_level")
def test_each_step_is_that_of_the_reference(
    dtype: torch.dtype, subject: Subject, mode: dict[str, Any], device: torch.device
) -> None:
    params = make_params(device, dtype)
    options = subject.options | mode
    optimizer = subject.fused(params, **options)
    assert {name: optimizer.param_groups[0][name] for name in options} == options
    for step in range(3):
        # The second has no gradient before the last step, the first none in the second.
        give_grads(params, step, missing=lambda step, index: (step, index) in NO_GRAD)
        step_and_compare(optimizer, subject)
    assert len(optimizer.state) == len(params)


@pytest.mark.usefixtures("cpu_level")
@each_subject
@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32, F64], ids=NAMES.get)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
def test_gradients_may_be_of_another_dtype_and_a_copy_too(
    dtype: torch.dtype, grad_dtype: torch.dtype, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, dtype)
    optimizer = subject.fused(params, **subject.options)
    copies = [torch.zeros_like(param, dtype=F16) for param in params]
    for step in range(2):
        grads = [grad_for(param, step, i, BF16).to(grad_dtype) for i, param in enumerate(params)]
        expected = references_after_step(optimizer, subject.reference, grads, 4.0)
        optimizer.step(grads=grads, output_params=copies, scale=4.0)
        narrow = grad_dtype != F64  # Then its norm, which NovoGrad divides by, is one of float32.
        assert_stepped(optimizer, expected, in_float32=narrow)
        for param, copied in zip(params, copies, strict=True):
            assert_near(copied, expected[param].param)


# --- float32 masters of parameters in low precision.

WITH_MASTERS = {
    **{name: functools.partial(each.fused, **each.options) for name, each in SUBJECTS.items()},
    "SGD": functools.partial(FusedSGD, lr=0.1, weight_decay=0.1),
    "SGD, momentum": functools.partial(FusedSGD, lr=0.1, momentum=0.9, dampening=0.5),
}


def assert_same_master(optimizer: Any, master: Tensor, expected: Tensor) -> None:
    # NovoGrad divides by norms, which CUDA adds up in another order for gradients of float32.
    assert_same = assert_near if isinstance(optimizer, FusedNovoGrad) else assert_same_bits
    assert_same(master, expected.detach())


_each = pytest.mark.parametrize("make", WITH_MASTERS.values(), ids=[*WITH_MASTERS])
_both_ways = pytest.mark.parametrize("masters", ["float32", True])


def each_with_masters(test: Any) -> Any:
    return _each(_both_ways(test))


@each_with_masters
@pytest.mark.parametrize("dtype", [F16, BF16], ids=NAMES.get)
def test_masters_train_as_float32_parameters_and_a_checkpoint_has_them(
    dtype: torch.dtype, make: Any, masters: Any, device: torch.device
) -> None:
    params = make_params(device, dtype)
    wide_params = copies_of(params, F32)
    optimizer, wide = make(params, master_weights=masters), make(wide_params)
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(params, master_weights=masters)
            optimizer.load_state_dict(saved)
        give_grads(params, step, values=dtype)
        give_grads(wide_params, step, values=dtype)
        optimizer.step()
        wide.step()
        for param, expected in zip(params, wide_params, strict=True):
            master = optimizer.master(param)
            assert_same_master(optimizer, master, expected)
            if masters == "float32":
                assert_same_bits(param.detach(), master.to(dtype))


@each_with_masters
@pytest.mark.usefixtures("cpu_level")
def test_masters_take_float64_gradients_as_float32_parameters_do(
    make: Any, masters: Any, device: torch.device
) -> None:
    params = make_params(device, BF16)  # Of float16, split ones below 2**-16 are not exact.
    wide_params = copies_of(params, F32)
    optimizer, wide = make(params, master_weights=masters), make(wide_params)
    for step in range(3):
        grads = [grad_for(param, step, i, F64) / 3.0 for i, param in enumerate(params)]
        optimizer.step(grads=grads)
        wide.step(grads=grads)
        for param, expected in zip(params, wide_params, strict=True):
            assert_same_master(optimizer, optimizer.master(param), expected)


@each_with_masters
def test_a_skipped_step_leaves_parameters_and_masters(
    make: Any, masters: Any, device: torch.device
) -> None:
    params = make_params(device, F16)
    optimizer = make(params, master_weights=masters)
    scaler = amp.GradScaler(device.type)
    for bad in (True, False, True):
        before = copy.deepcopy(params), [*map(optimizer.master, params)]
        scaler.scale(torch.ones((), device=device))
        give_grads(params, 0)
        if bad:
            params[0].grad.fill_(INF)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped(optimizer) == bad
        for param, value, old_master in zip(params, *before, strict=True):
            master = optimizer.master(param)
            if bad:
                assert_same_bits(param.detach(), value.detach())
                assert_same_bits(master, old_master)
            assert_same_bits(param.detach(), master.to(F16))


@each_subject
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=NAMES.get)
def test_each_group_is_clipped_by_the_norm_that_counts(
    dtype: torch.dtype, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, dtype)
    groups = [
        {"params": params[:3], "max_grad_norm": 0.5},
        {"params": params[3:5]},
        {"params": params[5:], "max_grad_norm": 2.0, "lr": 0.3},
    ]
    optimizer = subject.fused(groups, **subject.options)
    for step in range(3):
        give_grads(params, step)
        step_and_compare(optimizer, subject)


@each_subject
def test_parameters_in_any_order_of_memory_are_stepped_as_they_lie(
    subject: Subject, device: torch.device
) -> None:
    weight = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=torch.channels_last)
    params = [Parameter(weight), Parameter(torch.randn(4, 6, device=device).t())]
    optimizer = subject.fused(params, **subject.options)
    for step in range(3):
        give_grads(params, step)
        params[0].grad = params[0].grad.contiguous()
        step_and_compare(optimizer, subject)


_NARROW = {"moment_dtype": BF16}
_ROUNDINGS: list[dict[str, Any]] = [{}, _NARROW, _NARROW | {"stochastic_rounding": True}]


@pytest.mark.cpu_only  # On CUDA the order of a norm's sum, and so its last bits, go by the dtype.
@pytest.mark.parametrize(
    ("fused", "options", "moments"),
    [
        (fused, options, moments)
        for fused, options in (
            (FusedAdam, {"lr": 0.1}),
            (FusedSGD, {"lr": 0.1, "momentum": 0.9}),
            *((subject.fused, subject.options) for subject in SUBJECTS.values()),
        )
        for moments in _ROUNDINGS
        if len(moments) < 2 or fused not in (FusedSGD, FusedAdagrad)  # They count no steps.
    ],
)
@pytest.mark.parametrize("output", [F16, BF16], ids=NAMES.get)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=NAMES.get)
@pytest.mark.usefixtures("cpu_level")
def test_half_gradients_and_outputs_are_those_of_floats_rounded_once(
    dtype: torch.dtype,
    output: torch.dtype,
    fused: Any,
    options: Any,
    moments: dict[str, Any],
    device: torch.device,
) -> None:
    params = make_params(device, F32)
    theirs = copies_of(params)
    outputs = [torch.zeros_like(param, dtype=output) for param in params]
    optimizer, expected = fused(params, **options), fused(theirs, **options)
    for each in (optimizer, expected):
        each.param_groups[0].update(moments)
    for step in range(2):
        grads = [grad_for(param, step, i).to(dtype) for i, param in enumerate(params)]
        optimizer.step(grads=[grads], output_params=[outputs])
        expected.step(grads=[[grad.float() for grad in grads]])
    for param, wanted, copied in zip(params, theirs, outputs, strict=True):
        assert_same_bits(param.detach(), wanted.detach())
        assert_same_bits(copied, wanted.detach().to(output))


# --- Copies.


@each_subject
@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
def test_another_optimizer_goes_on_to_the_bit(
    dtype: torch.dtype, way: str, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, dtype, SMALL)
    optimizer = subject.fused(params, **subject.options, unscale_grads=False)
    train(optimizer, params, range(3), missing=lambda step, index: index == 2)
    if way == "deepcopy":
        others, other = copy.deepcopy((params, optimizer))
    elif way == "pickle":
        others, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        others = copies_of(params)
        other = subject.fused(others, unscale_grads=False)
        saved = optimizer.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        other.load_state_dict(saved)
    assert_same_state(optimizer, other)
    assert other.unscale_grads is False
    for each, its in ((optimizer, params), (other, others)):
        train(each, its, range(3, 6))
    assert_same_state(optimizer, other)


@each_subject
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "max_grad_norm"])
def test_an_option_out_of_range_is_refused(name: str, subject: Subject) -> None:
    who = subject.fused.__name__
    params = [Parameter(torch.ones(3))]
    for value in (-1.0, math.nan):
        with pytest.raises(ValueError, match=rf"^{who}: {name} is {value}; it must be 0 or more"):
            subject.fused(params, **{name: value})
    with pytest.raises(TypeError, match=rf"^{who}: {name} is '1e-3'; it must be a number"):
        subject.fused(params, **{name: "1e-3"})
    optimizer = subject.fused(params)
    train(optimizer, params, range(1))
    if name != "lr":  # Schedules go past their end.
        optimizer.param_groups[0][name] = -1.0
        with Unchanged(optimizer), pytest.raises(ValueError, match=f"^{who}: {name} is -1"):
            optimizer.step()


@each_subject
def test_options_that_change_count_at_once_and_lr_may_be_a_tensor(
    subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    lr = torch.tensor(0.5, device=device)
    optimizer = subject.fused(params[:2], **(subject.options | {"lr": lr}))
    optimizer.add_param_group({"params": params[2:], "weight_decay": 0.5})
    changes: list[dict[str, Any]] = [{}, {"eps": 0.25}, {"weight_decay": 0.3}, *subject.modes[:2]]
    for step, change in enumerate(changes):
        lr.fill_(0.5 / (1 + step))
        optimizer.param_groups[1].update(change)
        give_grads(params, step)
        step_and_compare(optimizer, subject)


@pytest.mark.cpu_only
@each_subject
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_parameters_on_several_devices_are_stepped_as_on_one(
    max_grad_norm: float, subject: Subject, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(engine_devices, "device_of", side_of)
    params = make_params(device)
    groups = [{"params": params[:3], "lr": 0.5}, {"params": params[3:]}]
    optimizer = spread(
        subject.fused(groups, **(subject.options | {"max_grad_norm": max_grad_norm}))
    )
    for step in range(3):
        give_grads(params, step, missing=lambda step, index: step == index == 1)
        step_and_compare(optimizer, subject)
    scaler = make_scaler(device)
    with Unchanged(optimizer):
        scaled_step(scaler, optimizer, params, 3, bad=math.inf)


@each_subject
def test_the_state_of_another_optimizer_is_refused(subject: Subject) -> None:
    params = [Parameter(torch.ones(3))]
    optimizer, other = subject.fused(params), torch.optim.SGD(params, 0.1, momentum=0.9)
    train(other, params, range(1))
    who = rf"^{subject.fused.__name__}\.load_state_dict: state\[0\]"
    with Unchanged(optimizer), pytest.raises(ValueError, match=who + " has .*lacks .*state of a"):
        optimizer.load_state_dict(other.state_dict())
    train(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    name = subject.fused._rule.layout.tensors[0]
    saved["state"][0][name] = torch.ones(2)
    with Unchanged(optimizer), pytest.raises(ValueError, match=who + rf"\['{name}'\] has shape"):
        optimizer.load_state_dict(saved)


@each_subject
def test_what_does_not_fit_is_named_before_any_group_is_stepped(
    subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = subject.fused([{"params": params[:2]}, {"params": params[2:]}], **subject.options)
    train(optimizer, params, range(1))
    who, name = subject.fused.__name__, subject.fused._rule.layout.tensors[0]
    good = optimizer.state[params[3]][name]
    optimizer.state[params[3]][name] = torch.ones(2, device=device)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match=rf"{name}\[1\]\[1\] has 2 elements, params\[1\]\[1\]"):
        optimizer.step()
    optimizer.state[params[3]][name] = good
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param.detach(), old)
    params[3].grad = params[3].grad.to_sparse()
    with pytest.raises(RuntimeError, match=rf"^{who} does not support sparse gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"\.step: grads has lists of \[1\]"):
        optimizer.step(grads=[before[0]])
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param.detach(), old)
