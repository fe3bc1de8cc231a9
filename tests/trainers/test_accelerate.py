"""Hugging Face accelerate with apex_mp.accelerate.attach_scaler."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import StepLR

from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam, FusedSGD

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("accelerate_state")]
MAX_NORM = 0.6  # Of a run's norms some are smaller, some larger.


def prepared(optimizer: Any, trained: nn.Module, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, **options)
    attach_scaler(accelerator, GradScaler("cpu"))
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    return accelerator, *accelerator.prepare(trained, optimizer, scheduler)


def test_a_half_model_learns_as_in_fp32() -> None:
    half = tasks.model().half()
    optimizer = FusedAdam(half.parameters(), tasks.LR, master_weights=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    attach_scaler(accelerator, GradScaler("cpu"))
    half, optimizer = accelerator.prepare(half, optimizer)
    losses = []
    for batch in tasks.batches():
        with accelerator.accumulate(half):
            loss = tasks.loss_of(half, batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(half.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
    tasks.assert_same_course(losses, tasks.fp32_losses(accumulation=2))


@pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedSGD, torch.optim.AdamW])
def test_autocast_and_clipping_end_with_the_weights_of_a_torch_loop(optimizer_class: Any) -> None:
    trained = tasks.model()
    optimizer = optimizer_class(trained.parameters(), tasks.LR)
    accelerator, trained, optimizer, _ = prepared(optimizer, trained)
    norms = []
    for batch in tasks.batches():
        with torch.autocast("cpu", torch.float16):
            loss = tasks.loss_of(trained, batch)
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(trained.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    expected = tasks.torch_amp_weights(optimizer_class, MAX_NORM)
    assert min(norms) < MAX_NORM < max(norms)
    torch.testing.assert_close([*trained.parameters()], expected, rtol=0, atol=0)


def test_clipping_does_not_lose_fp16_gradients_that_are_too_small_unscaled() -> None:
    tiny = 2.0**-26  # 2**-25 and less rounds to 0 in float16.
    half = nn.Linear(4, 1, bias=False).half()
    nn.init.zeros_(half.weight)
    optimizer = FusedAdam(half.parameters(), betas=(0.0, 0.0), master_weights=True)
    accelerator, half, optimizer, _ = prepared(optimizer, half)
    accelerator.backward(half(torch.ones(1, 4, dtype=torch.float16)).sum().float() * tiny)
    norm = accelerator.clip_grad_norm_(half.parameters(), tiny)
    assert norm.item() == 2 * tiny
    optimizer.step()
    clipped = optimizer.state[half.weight]["exp_avg"]
    # torch.nn.utils.clip_grad_norm_, too, adds 1e-6 to the norm.
    expected = torch.full_like(clipped, tiny * tiny / (2 * tiny + 1e-6))
    torch.testing.assert_close(clipped, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("optimizer_class", "half"),
    [(FusedAdam, True), (FusedAdam, False), (FusedSGD, False), (torch.optim.AdamW, False)],
)
@pytest.mark.parametrize("clip", [False, True])
def test_an_overflow_is_a_skipped_step_and_the_scheduler_stands_still(
    optimizer_class: Any, half: bool, clip: bool
) -> None:
    trained = tasks.model().half() if half else tasks.model()
    options = {"master_weights": True} if half else {}
    accelerator, trained, optimizer, scheduler = prepared(
        optimizer_class(trained.parameters(), tasks.LR, **options), trained
    )
    rates, skipped, moved = [], [], []
    assert not accelerator.optimizer_step_was_skipped
    for batch, factor in zip(tasks.batches(4), (1.0, math.inf, math.nan, 1.0), strict=True):
        before = [param.detach().clone() for param in trained.parameters()]
        accelerator.backward(tasks.loss_of(trained, batch) * factor)
        if clip:
            accelerator.clip_grad_norm_(trained.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0] / tasks.LR)
        moved.append(not all(map(torch.equal, before, trained.parameters())))
    assert skipped == [False, True, True, False]
    assert rates == [0.5, 0.5, 0.5, 0.25]
    assert moved == [True, False, False, True]
    assert accelerator.scaler.get_scale() == 2.0**14


def test_gradients_that_accumulate_are_one_step() -> None:
    trained = tasks.model()
    accelerator, trained, optimizer, scheduler = prepared(
        FusedAdam(trained.parameters()), trained, gradient_accumulation_steps=2
    )
    rates, skipped = [], []
    for batch, factor in zip(tasks.batches(6), (1, 1, math.inf, 1, 1, 1), strict=True):
        with accelerator.accumulate(trained):
            accelerator.backward(tasks.loss_of(trained, batch) * factor)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, False, False, True, True, False]
    assert rates == [1e-3, 5e-4, 5e-4, 5e-4, 5e-4, 2.5e-4]


def test_the_scale_is_saved_and_loaded_with_the_rest(tmp_path: Path) -> None:
    trained = tasks.model()
    accelerator, trained, optimizer, _ = prepared(FusedAdam(trained.parameters()), trained)
    for factor in (1.0, math.inf, 1.0):
        accelerator.backward(tasks.loss_of(trained, tasks.batches(1)[0]) * factor)
        optimizer.step()
        optimizer.zero_grad()
    saved = accelerator.scaler.state_dict()
    assert (saved["scale"], saved["_growth_tracker"]) == (2.0**15, 1)
    accelerator.save_state(str(tmp_path))
    other, *_ = prepared(FusedAdam(trained.parameters()), trained)
    other.load_state(str(tmp_path))
    assert other.scaler.state_dict() == saved


def two_optimizers() -> tuple[Any, ...]:
    """One for each layer; the inner ones take the whole gradient as their step."""
    trained = tasks.model()
    layers = [[*layer.parameters()] for layer in trained if isinstance(layer, nn.Linear)]
    accelerator = Accelerator(cpu=True)
    attach_scaler(accelerator, GradScaler("cpu", 16.0))
    optimizers = accelerator.prepare(*(torch.optim.SGD(each, lr=1.0) for each in layers))
    return accelerator, trained, layers, optimizers


@pytest.mark.parametrize("steps_before", [0, 2], ids=["a new process", "after steps"])
def test_the_state_of_a_sharded_checkpoint_leaves_the_scale_alone(steps_before: int) -> None:
    """What accelerate calls for FSDP2 makes new state by a step with gradients of 0."""

    def run(steps: int) -> tuple[Any, Any, Any]:
        half = tasks.model().half()
        optimizer = FusedAdam(half.parameters(), tasks.LR, master_weights=True)
        accelerator, scaler = Accelerator(cpu=True), GradScaler("cpu", growth_interval=2)
        attach_scaler(accelerator, scaler)
        half, optimizer = accelerator.prepare(half, optimizer)
        for batch in tasks.batches()[:steps]:
            accelerator.backward(tasks.loss_of(half, batch))
            optimizer.step()
            optimizer.zero_grad()
        return half, optimizer, scaler

    half, optimizer, scaler = run(3)
    state, scale = get_optimizer_state_dict(half, optimizer), scaler.state_dict()
    weights = half.state_dict()
    half, optimizer, scaler = run(steps_before)
    half.load_state_dict(weights)
    scaler.load_state_dict(scale)
    set_optimizer_state_dict(half, optimizer, state)
    assert scaler.state_dict() == scale
    loaded = get_optimizer_state_dict(half, optimizer)["state"]
    for name, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(loaded[name][key], value), (name, key)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_two_optimizers_that_clip_and_step_in_turn_take_the_steps_of_fp32(clip: str) -> None:
    accelerator, trained, layers, optimizers = two_optimizers()
    before = [param.detach().clone() for param in trained.parameters()]
    for params, optimizer in zip(layers, optimizers, strict=True):
        accelerator.backward(tasks.loss_of(trained, tasks.batches(1)[0]))
        getattr(accelerator, clip)(params, 100.0)
        optimizer.step()
        trained.zero_grad()
    steps = [old - new for old, new in zip(before, trained.parameters(), strict=True)]
    reference = tasks.model()
    for place in (slice(0, 2), slice(2, 4)):
        params = [*reference.parameters()]
        grads = torch.autograd.grad(tasks.loss_of(reference, tasks.batches(1)[0]), params)
        torch.testing.assert_close(steps[place], [*grads[place]], rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for param, grad in zip(params[place], grads[place], strict=True):
                param -= grad


# What is refused


def test_an_optimizer_that_scales_by_itself_is_refused() -> None:
    half = tasks.model().half()
    accelerator = Accelerator(cpu=True)
    attach_scaler(accelerator, GradScaler("cpu"))
    optimizer = FP16_Optimizer(FusedAdam(half.parameters()), verbose=False)
    with pytest.raises(TypeError, match="FP16_Optimizer scales losses by itself"):
        accelerator.prepare(half, optimizer)


def test_a_scaler_comes_before_prepare() -> None:
    trained = tasks.model()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(FusedAdam(trained.parameters()))
    with pytest.raises(RuntimeError, match="call attach_scaler before it"):
        attach_scaler(accelerator, GradScaler("cpu"))


def test_fp16_that_accelerate_would_ignore_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(ValueError, match='ignores mixed_precision="fp16" on cpu'):
        attach_scaler(accelerator, GradScaler("cpu"))
