"""A step of each fused optimizer is that of its float64 reference, however it is called."""

from __future__ import annotations

import copy
import functools
import itertools
import math
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
    copies_of,
    give_grads,
    grad_for,
    make_scaler,
    scaled_step,
    train,
)
from reference import l2_norm
from rule_cases import (
    MAKERS,
    SMALL,
    Subject,
    assert_same_as_torch,
    assert_stepped,
    each_mode,
    each_subject,
    each_twin,
    make_params,
    references_after_step,
    step_and_compare,
)
from scaled_steps import take_step
from several_devices_cases import side_of, spread
from tolerances import assert_near, assert_same_bits
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.engine import devices as engine_devices
from apex_mp.optimizers import FusedAdagrad, FusedLAMB, FusedNovoGrad, FusedSGD

# By step and parameter.
NO_GRAD = {(0, 1), (1, 1), (1, 0)}

each_dtype = pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)


# --- The formula.


@each_mode
@each_dtype
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
    assert len(optimizer.state) == (len(params) if options.get("momentum", 1) else 0)


KINDS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for loop": {"foreach": False},
    "fused": {"fused": True},
}


@each_twin
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_300_steps_equal_those_of_torch_in_float64_with_states_exchanged(
    dtype: torch.dtype,
    kind: dict[str, Any],
    subject: Subject,
    twin: Any,
    options: Any,
    theirs: Any,
    device: torch.device,
) -> None:
    params = make_params(device, dtype, SMALL)
    wide = copies_of(params, F64)
    late = 30  # The last parameter has its first gradient behind the exchange.
    if kind.get("fused"):
        late = 0  # torch's fused SGD wants the first gradients of all parameters at once.
    if twin is torch.optim.Adagrad:
        late = 0  # torch's Adagrad wants all states.
        kind = kind if device.type == "cpu" else {}  # Its fused one is for the CPU.
    how = {"missing": lambda step, index: (step + index) % 5 == 4 or (step < late and index == 3)}

    def make(both: dict[str, Any], ours: dict[str, Any], its: dict[str, Any]) -> tuple[Any, Any]:
        groups = ([{"params": each[:2]}, {"params": each[2:], **both}] for each in (params, wide))
        return subject.fused(next(groups), **ours), twin(next(groups), **its)

    optimizer, expected = make({"lr": 2.0**-6, "weight_decay": 0.0}, options, theirs | kind)
    for steps in (range(20), range(20, 300)):
        train(optimizer, params, steps, **how)
        train(expected, wide, steps, **how)
        assert_same_as_torch(optimizer, subject, expected)
        saved, of_torch = copy.deepcopy((optimizer.state_dict(), expected.state_dict()))
        if twin is torch.optim.Adagrad:
            add_steps(saved)
        optimizer, expected = make({}, {"lr": 1.0}, {"lr": 1.0})
        optimizer.load_state_dict(of_torch)
        expected.load_state_dict(saved)


def add_steps(saved: dict[str, Any]) -> None:
    """Add what FusedAdagrad does not have, and torch's optimizer needs."""
    for state in saved["state"].values():
        state["step"] = torch.tensor(20.0)
    for group in saved["param_groups"]:
        group["lr_decay"] = 0.0


# --- Gradients, copies and masters of other dtypes.


@pytest.mark.usefixtures("cpu_level")
@each_subject
@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32, F64], ids=NAMES.get)
@each_dtype
def test_gradients_may_be_of_another_dtype_and_a_copy_too(
    dtype: torch.dtype, grad_dtype: torch.dtype, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, dtype)
    optimizer = subject.make(params)
    copies = [torch.zeros_like(param, dtype=F16) for param in params]
    for step in range(2):
        grads = [grad_for(param, step, i, BF16).to(grad_dtype) for i, param in enumerate(params)]
        expected = references_after_step(optimizer, subject, grads, 4.0)
        optimizer.step(grads=grads, output_params=copies, scale=4.0)
        narrow = grad_dtype != F64  # Then its norm, which NovoGrad divides by, is one of float32.
        assert_stepped(optimizer, subject, expected, in_float32=narrow)
        for param, copied in zip(params, copies, strict=True):
            assert_near(copied, expected[param].param)


NARROW = {"moment_dtype": BF16}
ROUNDINGS: list[dict[str, Any]] = [{}, NARROW, NARROW | {"stochastic_rounding": True}]


@pytest.mark.cpu_only  # On CUDA the order of a norm's sum, and so its last bits, go by the dtype.
@each_subject
@pytest.mark.parametrize("moments", ROUNDINGS, ids=["float32", "nearest", "stochastic"])
@pytest.mark.parametrize("output", [F16, BF16], ids=NAMES.get)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=NAMES.get)
@pytest.mark.usefixtures("cpu_level")
def test_half_gradients_and_outputs_are_those_of_floats_rounded_once(
    dtype: torch.dtype,
    output: torch.dtype,
    subject: Subject,
    moments: dict[str, Any],
    device: torch.device,
) -> None:
    if len(moments) > 1 and subject.fused in (FusedSGD, FusedAdagrad):
        pytest.skip("it counts no steps, from which random bits are made")
    params = make_params(device, F32)
    theirs = copies_of(params)
    outputs = [torch.zeros_like(param, dtype=output) for param in params]
    optimizer, expected = subject.make(params), subject.make(theirs)
    for each in (optimizer, expected):
        each.param_groups[0].update(moments)
    for step in range(2):
        grads = [grad_for(param, step, i).to(dtype) for i, param in enumerate(params)]
        optimizer.step(grads=[grads], output_params=[outputs])
        expected.step(grads=[[grad.float() for grad in grads]])
    for param, wanted, copied in zip(params, theirs, outputs, strict=True):
        assert_same_bits(param.detach(), wanted.detach())
        assert_same_bits(copied, wanted.detach().to(output))


WITH_MASTERS = MAKERS | {"SGD without momentum": functools.partial(FusedSGD, lr=0.1)}
_each_maker = pytest.mark.parametrize("make", WITH_MASTERS.values(), ids=[*WITH_MASTERS])
_both_forms = pytest.mark.parametrize("masters", ["float32", True])


def each_with_masters(test: Any) -> Any:
    return _each_maker(_both_forms(test))


@each_with_masters
@pytest.mark.parametrize("dtype", [F16, BF16], ids=NAMES.get)
def test_masters_train_as_float32_parameters_through_skipped_steps_and_a_checkpoint(
    dtype: torch.dtype, make: Any, masters: Any, device: torch.device
) -> None:
    params = make_params(device, dtype)
    wide_params = copies_of(params, F32)
    optimizer, wide = make(params, master_weights=masters), make(wide_params)
    scaler = amp.GradScaler(device.type, init_scale=1.0)
    # NovoGrad divides by norms, which CUDA adds up in another order for gradients of float32.
    assert_same = assert_near if isinstance(optimizer, FusedNovoGrad) else assert_same_bits
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(params, master_weights=masters)
            optimizer.load_state_dict(saved)
        for bad in (True, False) if step in (0, 2, 4) else ():
            give_grads(params, step, values=dtype, factor=scaler.get_scale())
            if bad:
                params[0].grad.fill_(INF)  # type: ignore[union-attr]
            scaler.scale(torch.ones((), device=device))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.step_was_skipped(optimizer) == bad
            for param, expected in zip(params, wide_params, strict=True) if bad else ():
                assert_same(optimizer.master(param), expected.detach())
        if step not in (0, 2, 4):
            train(optimizer, params, [step], values=dtype)
        train(wide, wide_params, [step], values=dtype)
        for param, expected in zip(params, wide_params, strict=True):
            master = optimizer.master(param)
            assert_same(master, expected.detach())
            if masters == "float32" or dtype == F16:
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
            assert_same_bits(optimizer.master(param), expected.detach())


# --- Groups, options, layouts and devices.


@each_subject
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=NAMES.get)
def test_each_group_is_clipped_by_the_norm_that_counts(
    dtype: torch.dtype, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, dtype)
    groups = [
        {"params": params[:3], "max_grad_norm": 0.5},
        {"params": params[3:5]},
        {"params": params[5:], "max_grad_norm": 2.0, "lr": 0.25},
    ]
    optimizer = subject.make(groups)
    # Some with an output and some without are two calls, and still one norm.
    outputs = [torch.zeros_like(p, dtype=F16) if i % 2 else None for i, p in enumerate(params)]
    for step, way in enumerate(("measured", "given", "checked")):
        give_grads(params, step, factor=256.0, missing=lambda step, index: step == index == 1)
        grads = [param.grad for param in params]
        expected = references_after_step(optimizer, subject, grads, 256.0)
        lists = (grads[:3], grads[3:5], grads[5:])
        norms = [l2_norm([grad for grad in each if grad is not None]) for each in lists]
        if way == "checked":
            result = take_step(optimizer, check=True, scale=256.0)
            assert result.outcome.norms == pytest.approx([norm / 256.0 for norm in norms])
        else:
            forms = [norms[0], *(torch.tensor([n], dtype=F64, device=device) for n in norms[1:])]
            given = {"grad_norms": forms} if way == "given" else {"output_params": outputs}
            optimizer.step(scale=256.0, **given)
        assert_stepped(optimizer, subject, expected)


def test_clipping_divides_as_torch_does_where_norms_are_tiny(device: torch.device) -> None:
    weight = Parameter(torch.zeros(1, device=device))
    weight.grad = torch.full((1,), 1e-3, device=device)
    FusedSGD([weight], 1.0, max_grad_norm=1e-4).step()
    expected = torch.full((1,), -1e-3, device=device, requires_grad=True)
    expected.grad = torch.full((1,), 1e-3, device=device)
    torch.nn.utils.clip_grad_norm_([expected], 1e-4)
    torch.testing.assert_close(-weight.detach(), expected.grad, rtol=1e-6, atol=0.0)


LRS = {
    "0-dim": lambda: torch.tensor(0.5),
    "1-element": lambda: torch.tensor([0.5]),
    "float64": lambda: torch.tensor(0.5, dtype=F64),
    "bfloat16": lambda: torch.tensor(0.5, dtype=BF16),
}


@each_subject
@pytest.mark.parametrize("on_device", [False, True], ids=["on the CPU", "beside the parameters"])
@pytest.mark.parametrize("make_lr", LRS.values(), ids=LRS)
def test_options_that_change_count_at_once_and_lr_may_be_a_tensor(
    make_lr: Any, on_device: bool, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = subject.make(params[:2], lr=make_lr().to(device if on_device else "cpu"))
    optimizer.add_param_group({"params": params[2:], "weight_decay": 0.5})
    changes: list[dict[str, Any]] = [{}, {"weight_decay": 0.25}, *subject.modes[:4], {}, {}]
    changes += [{"eps": 0.25}] if "eps" in subject.options else []
    for step, change in enumerate(changes):
        # In place, as schedulers do; they go below 0, and past their end to NaN.
        value = math.nan if step == len(changes) - 1 else 0.5 ** (1 + step) - 2.0**-6
        for group in optimizer.param_groups:
            group["lr"].fill_(value)
        optimizer.param_groups[1].update(change)
        give_grads(params, step)
        step_and_compare(optimizer, subject)


LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "gaps": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
}
EACH_GRAD_LAYOUT = [*itertools.product(("contiguous", "channels_last", "transposed"), LAYOUTS)]


@each_subject
@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "fp16 with masters"])
@pytest.mark.parametrize(("param_layout", "grad_layout"), EACH_GRAD_LAYOUT)
def test_parameters_in_any_order_of_memory_are_stepped_as_they_lie(
    param_layout: str, grad_layout: str, masters: bool, subject: Subject, device: torch.device
) -> None:
    (param,) = make_params(device, F16 if masters else F32, [(2, 3, 4, 5)])
    param = Parameter(LAYOUTS[param_layout](param.detach()))
    strides = param.stride()
    optimizer = subject.make([param])
    for group in optimizer.param_groups if masters else ():
        group["master_weights"] = True
    for step in range(3):
        give_grads([param], step)
        # In place, because `.grad =` of another layout is what autograd itself may do.
        param.grad = LAYOUTS[grad_layout](param.grad)
        step_and_compare(optimizer, subject)
    assert param.stride() == strides
    assert (param in optimizer._own_masters.kept) == masters


@pytest.mark.cpu_only
@each_subject
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_parameters_on_several_devices_are_stepped_as_on_one(
    max_grad_norm: float, subject: Subject, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(engine_devices, "device_of", side_of)
    params = make_params(device)
    groups = [{"params": params[:3], "lr": 0.5}, {"params": params[3:]}]
    optimizer = spread(subject.make(groups, max_grad_norm=max_grad_norm))
    for step in range(3):
        give_grads(params, step, missing=lambda step, index: step == index == 1)
        step_and_compare(optimizer, subject)
    scaler = make_scaler(device)
    with Unchanged(optimizer):
        scaled_step(scaler, optimizer, params, 3, bad=math.inf)


# --- What is special to one of them.


def test_weight_decay_after_momentum_decays_the_weights_alone(device: torch.device) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = FusedSGD(params, 0.5, momentum=0.5, weight_decay=0.25, wd_after_momentum=True)
    expected = [p.detach().clone() for p in params]
    give_grads(params, 0)
    optimizer.step()
    for param, before in zip(params, expected, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], param.grad)
        assert_near(param.detach(), before - 0.5 * (param.grad + 0.25 * before))


def test_the_first_gradient_of_sgd_is_not_dampened(device: torch.device) -> None:
    late, early = make_params(device, shapes=[(3,), (3,)])
    optimizer = FusedSGD([late, early], 1.0, momentum=0.5, dampening=0.75)
    for step in range(2):
        give_grads([late, early], step, missing=lambda step, index: step == index == 0)
        buffer = copy.deepcopy(optimizer.state[early].get("momentum_buffer"))
        optimizer.step()
    assert torch.equal(optimizer.state[late]["momentum_buffer"], late.grad)
    assert torch.equal(optimizer.state[early]["momentum_buffer"], 0.5 * buffer + 0.25 * early.grad)


@pytest.mark.parametrize(
    ("norm_type", "init_zero", "norms"),
    [
        (2, False, [5.0, math.sqrt(0.5 * 25.0 + 0.5 * 100.0)]),
        (2, True, [math.sqrt(0.5 * 25.0), math.sqrt(0.5 * 12.5 + 0.5 * 100.0)]),
        (0, False, [4.0, 0.5 * 4.0 + 0.5 * 8.0]),
        (0, True, [2.0, 0.5 * 2.0 + 0.5 * 8.0]),
    ],
)
def test_norms_are_averaged_from_the_first_gradient_or_from_zero(
    norm_type: int, init_zero: bool, norms: list[float], device: torch.device
) -> None:
    weight = Parameter(torch.full((2,), 2.0, device=device))
    options = {"betas": (0.9, 0.5), "norm_type": norm_type, "init_zero": init_zero}
    optimizer = FusedNovoGrad([weight], **options)
    for factor, norm in zip((1.0, 2.0), norms, strict=True):
        weight.grad = torch.tensor([3.0, -4.0], device=device) * factor
        optimizer.step()
        assert optimizer.state[weight]["exp_avg_sq"].item() == pytest.approx(norm, rel=1e-6)


def test_each_tensor_has_its_own_ratio(device: torch.device) -> None:
    """Each of many sizes, of one chunk and of several, moves by lr times its norm."""
    sizes = (1, 63, 20_000, 5)
    params = [Parameter(torch.linspace(0.5, 1.0 + n % 7, n, device=device)) for n in sizes]
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, 10.0 ** (index - 2))
    before = [param.detach().clone() for param in params]
    FusedLAMB(params, 0.25, weight_decay=0.0, use_nvlamb=True, eps=0.0).step()
    for param, old in zip(params, before, strict=True):
        moved = torch.linalg.vector_norm((param.detach() - old).double())
        wanted = 0.25 * torch.linalg.vector_norm(old.double())
        assert moved.item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("pairs", [1, 2501])  # On CUDA a thread then takes two vectors, or one.
def test_parameters_whose_squares_are_beyond_float32_have_a_norm(
    pairs: int, device: torch.device
) -> None:
    param = Parameter(torch.tensor((3e30, 4e30) * pairs, device=device))
    param.grad = torch.tensor([2.0, -1.0], device=device).repeat(pairs)
    FusedLAMB([param], 0.5, weight_decay=0.0, use_nvlamb=True, eps=0.0).step()
    step = 0.5 * 5e30 / math.sqrt(2.0)
    assert param.tolist() == pytest.approx([3e30 - step, 4e30 + step] * pairs, rel=1e-5)
