"""The fused optimizers in loops: schedulers, hooks, torch's GradScaler, autograd, torch.compile."""

from __future__ import annotations

import functools
import math
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
    Optimizer,
    Unchanged,
    give_grads,
    make_scaler,
    scaled_step,
)
from rule_cases import (
    MAKERS,
    SMALL,
    SUBJECTS,
    Subject,
    assert_stepped,
    each_subject,
    make_params,
    references_after_step,
    step_and_compare,
)
from tolerances import assert_same_bits
from torch.nn import Parameter
from torch.optim import lr_scheduler

from apex_mp import fp16_utils
from apex_mp.optimizers import FusedAdam, FusedMixedPrecisionLamb

# --- Schedulers, zero_grad.

SCHEDULERS: dict[str, Callable[[Optimizer, bool], Any]] = {
    "StepLR": lambda o, _: lr_scheduler.StepLR(o, 7, 0.5),
    "OneCycleLR": lambda o, cycles: lr_scheduler.OneCycleLR(o, 0.125, 30, cycle_momentum=cycles),
    "LambdaLR": lambda o, _: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "CosineAnnealingLR": lambda o, _: lr_scheduler.CosineAnnealingLR(o, 20),
    "warmup, then decay": lambda o, _: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.ExponentialLR(o, 0.9)], [10]
    ),
}


@each_subject
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_schedule_is_that_of_torch_and_each_step_goes_by_it(
    make_scheduler: Any, tensor_lr: bool, subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    lr: Any = torch.tensor(0.0625, dtype=F64) if tensor_lr else 0.0625
    optimizer = subject.make(params, lr=lr)
    cycled = [name for name in ("betas", "momentum") if name in subject.options]
    twin = torch.optim.SGD if "momentum" in cycled else torch.optim.Adam
    expected = twin(
        [Parameter(torch.ones(1))], lr=0.0625, **{name: subject.options[name] for name in cycled}
    )
    schedulers = [make_scheduler(each, bool(cycled)) for each in (optimizer, expected)]
    seen = set()
    for step in range(30):
        (group,), (wanted,) = optimizer.param_groups, expected.param_groups
        assert float(group["lr"]) == pytest.approx(float(wanted["lr"]), rel=1e-5)
        assert [group[name] for name in cycled] == [wanted[name] for name in cycled]
        seen.add((float(group["lr"]), *(group[name] for name in cycled)))
        give_grads(params, step)
        step_and_compare(optimizer, subject)
        expected.step()
        if step < 29:
            for scheduler in schedulers:
                scheduler.step()
    assert len(seen) > 4  # the schedule did something


@each_subject
def test_zero_grad_sets_gradients_to_none_unless_asked_to_zero_them(
    subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = subject.make(params)
    give_grads(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert [float(p.grad.abs().sum()) for p in params] == [0.0] * len(params)
    optimizer.zero_grad()
    assert [p.grad for p in params] == [None] * len(params)


# --- Autograd, torch.compile.


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=[*MAKERS])
def test_backward_through_weights_that_the_step_has_written_raises(
    make: Any, masters: bool, device: torch.device
) -> None:
    param = Parameter(torch.ones(3, device=device).half())
    optimizer = make([param], master_weights=masters)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.cpu_only  # On CUDA the host does not know that the step is skipped.
@each_subject
def test_a_skipped_step_does_not_invalidate_a_graph(subject: Subject, device: torch.device) -> None:
    # Nothing was written, so backward through the old weights is right.
    param = Parameter(torch.ones(3, device=device))
    optimizer, scaler = subject.make([param]), make_scaler(device)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    param.grad.fill_(math.inf)
    scaler.step(optimizer)
    param.grad = None
    loss.backward()
    assert param.grad.tolist() == [2.0] * 3


@each_subject
def test_a_compiled_function_that_steps_is_not_compiled_anew_when_lr_changes(
    subject: Subject, device: torch.device
) -> None:
    torch._dynamo.reset()
    compilations = []

    def backend(module: Any, inputs: Any) -> Any:
        compilations.append(module)
        return module.forward

    params = make_params(device, shapes=SMALL)
    optimizer = subject.make(params)
    step = torch.compile(lambda: optimizer.step(), backend=backend)
    for number in range(4):
        optimizer.param_groups[0]["lr"] *= 0.5
        give_grads(params, number)
        expected = references_after_step(optimizer, subject, [param.grad for param in params])
        step()
        assert_stepped(optimizer, subject, expected)
    assert not compilations


# --- torch's GradScaler; for its skips see test_ways_skips.py.


@each_subject
def test_a_plain_step_after_a_skipped_one_is_taken(subject: Subject, device: torch.device) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer, scaler = subject.make(params), make_scaler(device)
    scaled_step(scaler, optimizer, params, 0, bad=math.inf)
    give_grads(params, 1)
    step_and_compare(optimizer, subject)


@each_subject
def test_grads_of_ones_own_are_refused_because_nobody_has_checked_them(
    subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = subject.make(params)
    give_grads(params, 0)
    bad = [torch.full_like(p, math.inf) for p in params]
    with Unchanged(optimizer), pytest.raises(ValueError, match="grads was given inside GradScaler"):
        make_scaler(device).step(optimizer, grads=bad)


@each_subject
def test_the_legacy_scale_multiplies_that_of_grad_scaler(
    subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    outputs = [torch.zeros_like(p, dtype=F16) for p in params]
    optimizer, scaler = subject.make(params), make_scaler(device)
    give_grads(params, 0, factor=1024.0 * 8.0)
    grads = [param.grad.clone() for param in params]
    expected = references_after_step(optimizer, subject, grads, 1024.0 * 8.0)
    scaler.step(optimizer, scale=8.0, output_params=outputs)
    assert_stepped(optimizer, subject, expected)
    for output, param in zip(outputs, params, strict=True):
        assert_same_bits(output, param.detach().half())


@each_subject
def test_after_an_error_in_grad_scaler_the_next_step_is_right(
    subject: Subject, device: torch.device
) -> None:
    """torch removes `grad_scale` only after a step without one, and multiplies the next by it."""
    params = make_params(device, shapes=SMALL)
    optimizer, scaler = subject.make(params), make_scaler(device)
    optimizer.param_groups[0]["weight_decay"] = -1.0
    with pytest.raises(ValueError, match="weight_decay is -1"):
        scaled_step(scaler, optimizer, params, 0)
    scaler.update()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    give_grads(params, 1, factor=scaler.get_scale())
    grads = [param.grad.clone() for param in params]
    expected = references_after_step(optimizer, subject, grads, scaler.get_scale())
    scaler.step(optimizer)
    assert_stepped(optimizer, subject, expected)


def test_a_function_in_the_place_of_a_step_must_call_it() -> None:
    param = Parameter(torch.ones(3, dtype=F16))
    optimizer = fp16_utils.FP16_Optimizer(FusedAdam([param]), verbose=False)
    step, calls = optimizer.optimizer.step, []

    @functools.wraps(step)
    def counting(*args: Any, **options: Any) -> None:
        calls.append(step(*args, **options))

    optimizer.optimizer.step = counting
    optimizer.backward((param.float() * 2).sum())
    optimizer.step()
    assert calls == [None]
    assert not optimizer.overflow
    optimizer.optimizer.step = functools.wraps(step)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"FusedAdam.step was replaced by a function "):
        optimizer.step()


# --- FusedMixedPrecisionLamb: masters, and numbers on the device.


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=NAMES.get)
@pytest.mark.parametrize("way", ["scaler", "argument"])
def test_groups_count_the_steps_that_are_not_skipped(
    way: str, dtype: torch.dtype, device: torch.device
) -> None:
    params, subject = make_params(device, dtype, SMALL), SUBJECTS["MixedPrecisionLamb"]
    reduced = None if dtype == F32 else dtype
    optimizer = subject.make(params, step=7, reduced_precision_dtype=reduced)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(torch.zeros((), device=device))
    (group,) = optimizer.param_groups
    for number, is_bad in enumerate((True, False, False, True, False)):
        give_grads(params, number, factor=scaler.get_scale(), values=BF16)
        if is_bad:
            params[1].grad.view(-1)[7] = math.inf
        grads = [param.grad for param in params]
        expected = references_after_step(optimizer, subject, grads, scaler.get_scale())
        taken = group["step"].item() + (not is_bad)
        before = [*map(optimizer.master, params)]
        if way == "argument":
            optimizer.step(grad_scaler=scaler)
            scaler.update(scaler.get_scale() / (2 if is_bad else 1))
        else:
            scaler.step(optimizer)
            scaler.update()
        if not is_bad:
            assert_stepped(optimizer, subject, expected)
        for param, old in zip(params, before, strict=True):
            assert not is_bad or torch.equal(optimizer.master(param), old)
        assert len(optimizer._own_masters.kept) == (len(params) if reduced else 0)
        assert (group["step"].tolist(), group["step"].dtype) == ([taken], torch.int32)
        assert group["lr"].device == group["step"].device == params[0].device
        group["lr"].mul_(0.5)  # as a schedule on the device
    assert group["step"].item() == 10


def test_masters_can_be_asked_for_later_and_other_dtypes_are_refused(device: torch.device) -> None:
    params = make_params(device, BF16, SMALL)
    optimizer = FusedMixedPrecisionLamb(params)
    assert optimizer.param_groups_full_precision == [{"params": [None] * len(params)}]
    optimizer.reduced_precision_dtype = BF16
    masters = optimizer.param_groups_full_precision[0]["params"]
    assert [master.dtype for master in masters] == [F32] * len(params)
    with pytest.raises(ValueError, match=r"reduced_precision_dtype is torch\.float64; it must be"):
        FusedMixedPrecisionLamb(params, reduced_precision_dtype=F64)
    give_grads(params, 1)
    other = FusedMixedPrecisionLamb(params)
    with pytest.warns(RuntimeWarning, match=r"FusedMixedPrecisionLamb\(\.\.\., reduced_precision_"):
        other.step()
