"""offload="gradients": gradients leave during backward, and steps are those without it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import LateGpu, stand_in
from tolerances import assert_near, assert_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex_mp import amp
from apex_mp.core.grads.marks import is_mark
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FusedAdam
from apex_mp.optimizers._offload import buckets, gradients
from apex_mp.parallel import LARC

F16, F32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> LateGpu | None:
    """The stand-in; small buckets and pieces, so that there are several."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 500)
    monkeypatch.setattr(gradients, "_PIECE", 300)
    return stand_in(monkeypatch) if device.type == "cpu" else None


def new_model(device: torch.device, dtype: torch.dtype = F16) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 1)
    return nn.Sequential(*layers).to(device, dtype)


def adam(model: nn.Module, offload: Any, **options: Any) -> FusedAdam:
    return FusedAdam(model.parameters(), 1e-2, master_weights=True, offload=offload, **options)


def batch(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 30, generator=generator).to(next(model.parameters()))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(batch(model, seed)).float().pow(2).mean()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for param, wanted in zip(other.parameters(), one.parameters(), strict=True):
        assert_same_bits(param.detach(), wanted.detach())


Clear = Callable[[nn.Module, FusedAdam], None]
CLEARS: dict[str, Clear] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "not at all": lambda model, optimizer: None,
}


@pytest.mark.parametrize("clear", CLEARS.values(), ids=[*CLEARS])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_training_is_that_without_offload(
    clip: bool, backwards: int, clear: Clear, device: torch.device
) -> None:
    found = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = adam(model, offload)
        scaler = amp.GradScaler(device.type, init_scale=1024.0)
        norms = []
        for step in range(6):
            for part in range(backwards):
                loss = loss_of(model, 10 * step + part)
                if (step, part) == (3, 0):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            if clip:
                norms.append(scaler.clip_grad_norm_(optimizer, 0.3))
            scaler.step(optimizer)
            scaler.update()
            if clear is not CLEARS["not at all"] or step == 3:
                optimizer.zero_grad() if step == 3 else clear(model, optimizer)
        found.append((model, norms, scaler.get_scale()))
    (model, norms, scale), (other, others, other_scale) = found
    assert_equal(model, other)
    assert other_scale == scale == 512.0
    for norm, wanted in zip(others, norms, strict=True):
        assert_near(norm.cpu(), wanted.cpu())


def test_gradients_that_were_cleared_before_a_step_do_not_count(device: torch.device) -> None:
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = adam(model, offload)
        loss_of(model, 1).backward()
        model.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step()
        model.zero_grad()
        optimizer.step()  # without gradients
        models.append(model)
    assert_equal(*models)


def test_no_gradient_stays_on_the_gpu(device: torch.device) -> None:
    model = new_model(device)
    optimizer = adam(model, "gradients")
    loss_of(model, 1).backward()
    for param in model.parameters():
        assert param.grad is not None
        assert is_mark(param.grad) == (param.numel() > 1)
        assert param.grad.untyped_storage().nbytes() <= 4
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        model[0].weight.grad.mul_(2)
    optimizer.step()


def test_a_gradient_of_the_users_own_is_stepped(device: torch.device) -> None:
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = adam(model, offload)
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
        loss_of(model, 2).backward()  # added to it
        optimizer.step()
        models.append(model)
    assert_equal(*models)


def test_a_grad_that_was_replaced_after_it_was_taken_is_refused(device: torch.device) -> None:
    model = new_model(device)
    optimizer = adam(model, "gradients")
    loss_of(model, 1).backward()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match=r"params\[0\]\[0\]\.grad was replaced after its value"):
        optimizer.step()


def test_autograd_grad_leaves_what_was_accumulated(device: torch.device) -> None:
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = adam(model, offload)
        loss_of(model, 1).backward()
        torch.autograd.grad(loss_of(model, 2), [*model.parameters()])
        optimizer.step()
        models.append(model)
    assert_equal(*models)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_takes_gradients_too(copied: Callable[[Any], Any], device: torch.device) -> None:
    model = new_model(device)
    optimizer = adam(model, "gradients")
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    other, of_other = copied((model, optimizer))
    for one, its in ((model, optimizer), (other, of_other)):
        loss_of(one, 2).backward()
        assert is_mark(one[0].weight.grad)
        its.step()
    assert_equal(model, other)


def test_a_new_optimizer_takes_over(device: torch.device) -> None:
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = adam(model, offload)
        loss_of(model, 1).backward()
        optimizer = adam(model, offload)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step()
        models.append(model)
    assert_equal(*models)


def test_checkpointed_layers_and_groups_that_are_added(device: torch.device) -> None:
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = FusedAdam(model[0].parameters(), 1e-2, master_weights=True, offload=offload)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3})
        for step in range(3):
            data = batch(model, step).requires_grad_()
            hidden = checkpoint(model[:2], data, use_reentrant=False)
            model[2](hidden).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_equal(*models)


def test_a_compiled_model_trains(device: torch.device) -> None:
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = adam(model, offload)
        for step in range(3):
            loss_of(compiled, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_equal(*models)


# --- What reads .grad itself cannot work with it, and says so.


def unscaled(model: nn.Module, optimizer: FusedAdam, device: torch.device) -> None:
    scaler = amp.GradScaler(device.type)
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale_(optimizer)


def in_block(model: nn.Module, optimizer: FusedAdam, device: torch.device) -> None:
    handle = amp.init(device_type=device.type, verbose=False)
    try:
        with handle.scale_loss(loss_of(model, 1), optimizer) as loss:
            loss.backward()
    finally:
        handle._deactivate()


READERS: dict[str, Callable[[nn.Module, FusedAdam, torch.device], Any]] = {
    "unscale_": unscaled,
    "scale_loss": in_block,
    "FP16_Optimizer": lambda model, optimizer, device: FP16_Optimizer(optimizer),
    "LARC": lambda model, optimizer, device: LARC(optimizer),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_works_on_grad_is_refused(reader: str, device: torch.device) -> None:
    model = new_model(device)
    optimizer = adam(model, "gradients")
    with pytest.raises(ValueError, match=f'^{reader}: offload of this FusedAdam is "gradients", '):
        READERS[reader](model, optimizer, device)


def test_grad_scaler_of_torch_is_refused(device: torch.device) -> None:
    model = new_model(device, F32)
    optimizer = adam(model, "gradients")
    before = copy.deepcopy(model)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(loss_of(model, 1)).backward()
    with pytest.raises(RuntimeError, match=r"use apex_mp\.amp\.GradScaler|more than one element"):
        scaler.step(optimizer)
    assert_equal(before, model)


def test_two_optimizers_cannot_take_one_gradient(device: torch.device) -> None:
    model = new_model(device)
    optimizers = [adam(model, "gradients") for _ in range(2)]
    loss_of(model, 1).backward()
    optimizers[0].step()
    with pytest.raises(RuntimeError, match=r"params\[0\]\[0\]\.grad was taken to host"):
        optimizers[1].step()


def test_a_monitor_looks_at_what_is_there(device: torch.device) -> None:
    model = new_model(device)
    optimizer = adam(model, "gradients")
    scaler = amp.GradScaler(device.type, init_scale=2.0)
    monitor = Monitor(scaler, model=model, every=1)
    for step in range(2):
        scaler.scale(loss_of(model, step)).backward()
        norm = scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert float(norm) > 0.0
    assert [step.skipped for step in monitor.history.steps] == [False, False]
