"""offload="gradients": gradients leave during backward, and steps are those without it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from offload_cases import LateGpu, stand_in
from tolerances import assert_near, assert_same_bits
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from apex_mp import amp
from apex_mp.core import readback
from apex_mp.engine import host_grads, host_steps
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.grads.in_host_memory import is_mark
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FusedAdam
from apex_mp.parallel import LARC

F16, F32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> LateGpu | None:
    """The stand-in; small buckets and pieces, so that there are several."""
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", 512)
    monkeypatch.setattr(host_grads, "_PIECE", 300)
    monkeypatch.setattr(host_steps, "SMALL", 100)
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


@pytest.mark.cpu_only
def test_a_step_copies_weights_alone(gpu: LateGpu) -> None:
    """Gradients are in host memory already, and need no memory of a bucket either."""
    asked, sizes = [], []
    for offload in (True, "gradients"):
        model = new_model(torch.device("cpu"))
        optimizer = adam(model, offload)
        loss_of(model, 1).backward()
        before = gpu.asked
        optimizer.step()
        asked.append(gpu.asked - before)
        plan: Any = optimizer._engine.plan
        sizes.append(sum(bucket._grads.size for bucket in plan._host._buckets))
    assert asked[1] < asked[0]
    assert sizes[1] == 0 < sizes[0]


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


ACTIONS: dict[str, Callable[[nn.Module, FusedAdam, int], Any]] = {
    "backward": lambda model, optimizer, number: loss_of(model, number).backward(),
    "step": lambda model, optimizer, number: optimizer.step(),
    "clear": lambda model, optimizer, number: optimizer.zero_grad(),
    "zero": lambda model, optimizer, number: optimizer.zero_grad(set_to_none=False),
    "zero model": lambda model, optimizer, number: model.zero_grad(set_to_none=False),
    "zero one": lambda model, optimizer, number: [
        p.grad.zero_() for p in model[0].parameters() if p.grad is not None
    ],
    "clear one": lambda model, optimizer, number: setattr(model[2].weight, "grad", None),
    "cast": lambda model, optimizer, number: loss_of(
        model.to([F16, torch.bfloat16][number % 2]), number
    ).backward(),
}


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_calls_is_that_without_offload(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        stand_in(monkeypatch, seed)
    actions = random.Random(seed).choices([*ACTIONS], [8, 4, 1, 1, 1, 1, 1, 1], k=25)
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = adam(model, offload)
        for number, action in enumerate([*actions, "step"]):
            ACTIONS[action](model, optimizer, number)
        models.append(model)
    assert_equal(*models)


def test_no_gradient_stays_on_the_gpu(device: torch.device) -> None:
    model = new_model(device)
    optimizer = adam(model, "gradients")
    loss_of(model, 1).backward()
    for param in model.parameters():
        assert param.grad is not None
        assert is_mark(param.grad)
        assert param.grad.data_ptr() == 0
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


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda grad: grad.mul_(2),
    "fill_": lambda grad: grad.fill_(1),
    "masked_fill_": lambda grad: grad.masked_fill_(grad.isnan(), 0.0),
    "foreach": lambda grad: torch._foreach_mul_([grad], 2.0),
    "a number": lambda grad: grad.add_(1),
    "a row": lambda grad: grad.__setitem__(0, 0.0),
    "a view": lambda grad: grad.view(-1).zero_(),
    "data": lambda grad: grad.data.clamp_(-1, 1),
    "read by": lambda grad: torch.zeros(40, 30, dtype=F16, device=grad.device).add_(grad),
    "norms": lambda grad: torch._foreach_mul_([grad.new_ones(2), grad], grad.norm()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=[*WRITES])
def test_a_write_to_a_placeholder_names_its_parameter(
    write: Callable[[Tensor], Any], device: torch.device
) -> None:
    model = new_model(device)
    optimizer = FusedAdam(model.named_parameters(), offload="gradients")
    loss_of(model, 1).backward()
    grad = model[0].weight.grad
    assert grad.isnan().all()
    with pytest.raises(
        RuntimeError, match=r"FusedAdam: 0\.weight\.grad is in host memory, since offl"
    ):
        write(grad)
    grad.zero_()
    assert grad.norm() == 0.0
    optimizer.step()


def test_few_gradients_are_alive_while_the_host_is_ahead(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("first_checks measures the peak")
    late = stand_in(monkeypatch)
    late.let_go_on = lambda: None  # type: ignore[method-assign]
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(32)]).to(device, F16)
    storages = []
    peak = 0

    def count(param: Tensor) -> None:
        nonlocal peak
        storages.append(StorageWeakRef(param.grad.untyped_storage()))
        peak = max(peak, sum(not storage.expired() for storage in storages))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    optimizer = adam(model, "gradients")
    model(torch.ones(4, 64, dtype=F16, device=device)).float().sum().backward()
    # The GPU has waited for the copies of all others.
    alive = sum(not storage.expired() for storage in storages)
    assert late.asked - sum(stream.done() for stream in late.streams) == alive
    optimizer.step()
    assert 1 <= peak <= 0.15 * 32


def test_two_threads_run_backward(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        stand_in(monkeypatch)
    found = []
    for offload in (False, "gradients"):
        models = [new_model(device) for _ in range(2)]
        optimizer = adam(nn.ModuleList(models), offload)

        def train(model: nn.Module) -> None:
            for step in range(4):
                loss_of(model, step).backward()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(train, models))
        optimizer.step()
        found.append(nn.ModuleList(models))
    assert_equal(*found)


@pytest.mark.cpu_only
def test_a_captured_backward_is_refused_and_training_goes_on(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    for offload in (False, "gradients"):
        model = new_model(device)
        optimizer = adam(model, offload)
        if offload:
            with monkeypatch.context() as patch:
                patch.setattr(readback, "is_capturing", lambda: True)
                with pytest.raises(RuntimeError, match=r"params\[0\]\[\d\]: a CUDA graph is capt"):
                    loss_of(model, 1).backward()
            optimizer.zero_grad()
        for step in (2, 3):
            loss_of(model, step).backward()
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


@pytest.mark.slow
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
    with pytest.raises(RuntimeError, match=r"use apex_mp\.amp\.GradScaler|in host memory"):
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
