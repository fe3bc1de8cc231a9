"""offload=True: every step is that of the same optimizer without it, to the bit.

Without a GPU the stand-in of offload_cases.py takes its place.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from offload_cases import (
    OPTIMIZERS,
    LateGpu,
    assert_equal,
    give_grads,
    pair,
    params_of,
    stand_in,
    train,
)
from tolerances import assert_near, assert_same_bits
from torch import nn

from apex_mp import AveragedMasters, amp, convert
from apex_mp.core import transfers
from apex_mp.engine import host_steps

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
each_dtype = pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)

each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=[*OPTIMIZERS])


@pytest.fixture(autouse=True)
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> LateGpu | None:
    """The stand-in; small buckets, so that there are several and large parameters are cut."""
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", 5_024)
    monkeypatch.setattr(host_steps, "SMALL", 300)
    return stand_in(monkeypatch) if device.type == "cpu" else None


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*that have no float32 masters")
        yield


# --- The numbers.


@pytest.mark.every_case
@each_dtype
@each_optimizer
def test_each_step_is_that_without_offload(
    make: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> None:
    both = pair(make, device, dtype)
    # Norms are summed in another order, which float32 shows on a GPU alone.
    has_norms = make in (OPTIMIZERS["LAMB"], OPTIMIZERS["NovoGrad"], OPTIMIZERS["Adam, clipped"])
    is_near = dtype == F64 or (has_norms and device.type == "cuda")
    same = assert_near if is_near else assert_same_bits
    for steps in (range(3), range(3, 6)):
        for optimizer, params in both:
            train(optimizer, params, steps)
        assert_equal(both, same)
    for state in both[1][0].state.values():
        assert all(value.is_cpu for value in state.values())


@pytest.mark.parametrize("seed", range(4))
def test_copies_may_take_place_at_any_time(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        stand_in(monkeypatch, seed)
    both = pair(OPTIMIZERS["Adam, split"], device, F16)
    for optimizer, params in both:
        train(optimizer, params, range(8))
    assert_equal(both)


WAITS = {
    "for the gradients": (host_steps.Bucket, "finish", "self._arrival.synchronize()"),
    "for weights to leave": (host_steps.Slot, "wait", "self.departure.synchronize()"),
    "of copies for the GPU": (transfers.Transfers, "wait_for_gpu", None),
    "of the GPU for copies": (transfers.Transfers, "make_gpu_wait", None),
}


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_a_wrong_number(
    wait: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, line = WAITS[wait]
    if line is None:
        monkeypatch.setattr(owner, name, lambda self: None)
    elif name == "wait":
        monkeypatch.setattr(owner, name, lambda self: setattr(self, "departure", None))
    else:
        monkeypatch.setattr("offload_cases.Event.synchronize", lambda self: None)
    both = pair(OPTIMIZERS["Adam"], device, F16)
    for optimizer, params in both:
        train(optimizer, params, range(3))
    with pytest.raises(AssertionError):
        assert_equal(both)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_small_tensors_travel_together(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[int] = []
    copy_ = transfers.Transfers._copy

    def counted(bus: Any, stream: Any, moves: Any, *args: Any, **kwargs: Any) -> Any:
        pairs.append(len(moves))
        return copy_(bus, stream, moves, *args, **kwargs)

    monkeypatch.setattr(transfers.Transfers, "_copy", counted)
    both = pair(OPTIMIZERS["Adam"], device, dtype, [(7,), (20, 30), (3, 5), (2, 2), (1,), (400,)])
    for optimizer, params in both:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert_equal(both)
    # Gradients and weights, then weights: each time two large tensors, and all small ones.
    assert pairs == [6, 3]


@pytest.mark.cpu_only
def test_only_a_few_buckets_are_in_page_locked_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(
        transfers, "pinned", lambda size: taken.append(size) or torch.zeros(size, dtype=torch.uint8)
    )
    params = params_of(device, F16, [(100_000,), (70, 30)])
    train(OPTIMIZERS["Adam"](params, offload=True), params, range(1, 4))
    # Gradients and weights, 2 bytes each, up to the next power of two.
    assert len(taken) == 3
    assert max(taken) <= 2 * 4 * 5_000


# --- Loss scales, clips, skips.


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_grad_scaler_of_torch_leaves_unscaled_gradients(
    dtype: torch.dtype, device: torch.device
) -> None:
    both = pair(OPTIMIZERS["Adam, clipped"], device, dtype)
    for optimizer, params in both:
        scaler = torch.amp.GradScaler(device.type, init_scale=128.0)
        scaler.scale(torch.ones((), device=device))
        give_grads(params, 1, 128.0)
        scaler.step(optimizer)
        scaler.update()
    assert_equal(both)
    for param, other in zip(both[0][1], both[1][1], strict=True):
        if param.grad is not None:
            assert_same_bits(other.grad, param.grad)


@pytest.mark.cpu_only
def test_nothing_is_copied_for_a_step_that_is_skipped(gpu: LateGpu, device: torch.device) -> None:
    params = params_of(device, F16)
    optimizer = OPTIMIZERS["Adam"](params, offload=True)
    scaler = amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    give_grads(params, 1)
    params[0].grad.fill_(float("nan"))
    scaler.step(optimizer)
    assert gpu.asked == 0


# --- Weights that others write, groups, checkpoints, copies.


@pytest.mark.parametrize("make", ["Adam", "Adam, split", "SGD", "Adam without masters"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_weights_count_that_are_written_in_any_step(
    dtype: torch.dtype, make: str, device: torch.device
) -> None:
    both = pair(OPTIMIZERS[make], device, dtype)
    for optimizer, params in both:
        for step in range(8):
            train(optimizer, params, range(step, step + 1))
            if step % 3 == 0:
                params[5].data.clamp_(-0.1, 0.1)
            if step == 5:
                with torch.no_grad():
                    params[4].mul_(0.5)
    assert_equal(both)


@pytest.mark.parametrize("make", ["Adam", "Adam, split", "SGD, dampened"])
@pytest.mark.parametrize("to", [False, True])
def test_a_file_is_read_with_and_without_offload(make: str, to: bool, device: torch.device) -> None:
    both = pair(OPTIMIZERS[make], device, F16)
    resumed = []
    for optimizer, params in both:
        train(optimizer, params, range(3))
        file = io.BytesIO()
        torch.save([optimizer.state_dict(), params], file)
        file.seek(0)
        state, weights = torch.load(file, weights_only=False)
        new = OPTIMIZERS[make](weights, offload=to)
        new.load_state_dict(state)
        train(new, weights, range(3, 6))
        train(optimizer, params, range(3, 6))
        resumed.append((new, weights))
    assert_equal(both)
    assert_equal(resumed)
    assert_equal([both[0], resumed[1]])


@pytest.mark.parametrize("make", ["Adam", "Adam, split"])
def test_masters_are_where_the_parameters_are(make: str, device: torch.device) -> None:
    both = pair(OPTIMIZERS[make], device, BF16)
    for optimizer, params in both:
        train(optimizer, params, range(3))
    for param, other in zip(both[0][1], both[1][1], strict=True):
        assert_same_bits(both[1][0].master(other), both[0][0].master(param))


def test_masters_are_averaged_and_written_to_files(device: torch.device) -> None:
    found = []
    for offload in (False, True):
        torch.manual_seed(1)
        model = nn.Linear(60, 70).to(device, F16)
        optimizer = OPTIMIZERS["Adam"](model.parameters(), offload=offload)
        averaged = AveragedMasters(model, optimizer)
        for step in range(1, 4):
            give_grads([*model.parameters()], step)
            optimizer.step()
            averaged.update_parameters(model)
        found.append([*averaged.module.parameters(), *convert.masters(model, optimizer).values()])
    for plain, offloaded in zip(*found, strict=True):
        assert_same_bits(offloaded.detach().cpu(), plain.detach().cpu())


def test_two_optimizers_take_turns(device: torch.device) -> None:
    models = []
    for offload in (False, True):
        params = params_of(device, F16)
        optimizers = [
            OPTIMIZERS["Adam"](some, offload=offload) for some in (params[:3], params[3:])
        ]
        for step in range(4):
            give_grads(params, step)
            for optimizer in optimizers:
                optimizer.step()
        models.append(params)
    for plain, offloaded in zip(*models, strict=True):
        assert_same_bits(offloaded.detach(), plain.detach())


def test_memory_orders_differ(device: torch.device) -> None:
    both = pair(OPTIMIZERS["Adam"], device, F16, [(80, 90), (2, 30, 40, 5), (3, 4)])
    for optimizer, params in both:
        params[0].data = params[0].data.t().contiguous().t()
        params[1].data = params[1].data.to(memory_format=torch.channels_last)
        train(optimizer, params, range(1, 4))
        params[0].data = params[0].data.contiguous()
        train(optimizer, params, range(4, 6))
    assert_equal(both)
