"""What a step on a GPU launches, waits for and allocates; and steps in real CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fp16_cases import F16, F32, INF, parameter, pull
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from apex_mp import amp
from apex_mp.core import readback
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.cuda_only

STEPS = 10
BLOCK = "the steps"
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches_and_waits(step: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Names of our kernels, and of all that the host waited for or copied from pageable memory."""
    small = torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        # A session of the profiler can lose its first kernels (pytorch #192021).
        for _ in range(1000):
            small.add_(1.0)
        torch.cuda.synchronize()
        with record_function(BLOCK):
            for _ in range(STEPS):
                step()
        torch.cuda.synchronize()
    events = list(profiler.events())
    block = next(event for event in events if event.name == BLOCK).time_range
    kernels = [event.name for event in events if "apex_mp" in event.name and "kernel" in event.name]
    waits = [
        event.name
        for event in events
        if ("Pageable" in event.name)
        or (event.name in WAITS and block.start <= event.time_range.start <= block.end)
    ]
    return kernels, waits


def fused(device: torch.device, count: int, max_grad_norm: float) -> FusedAdam:
    params = [parameter([1.0] * (1 + i % 7), F32, device) for i in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    groups = [{"params": params[: count // 3]}, {"params": params[count // 3 :], "lr": 0.02}]
    return FusedAdam(groups, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize(("count", "launches"), [(300, 2), (4_050, 2), (8_101, 4)])
def test_a_step_of_fused_adam_is_few_launches_and_no_wait(
    count: int, launches: int, max_grad_norm: float, device: torch.device
) -> None:
    optimizer = fused(device, count, max_grad_norm)
    optimizer.step()
    optimizer.step()
    kernels, waits = launches_and_waits(optimizer.step)
    assert len(kernels) == launches * STEPS, kernels[:20]
    assert waits == []


def mixed(device: torch.device, **options: Any) -> tuple[FP16_Optimizer, list[Any]]:
    params = [parameter([1.0, 2.0], F16, device), parameter([[3.0]], F32, device)]
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}, **options}
    return FP16_Optimizer(FusedAdam(params, max_grad_norm=1.0), verbose=False, **options), params


def train(optimizer: FP16_Optimizer, params: list[Any], factor: torch.Tensor | float) -> None:
    optimizer.zero_grad(set_to_none=True)
    optimizer.backward(sum((param.float() * factor).sum() for param in params))
    optimizer.step()


def test_a_training_step_of_fp16_optimizer_waits_for_nothing(device: torch.device) -> None:
    optimizer, params = mixed(device)
    train(optimizer, params, 1.0)
    train(optimizer, params, 1.0)
    kernels, waits = launches_and_waits(lambda: train(optimizer, params, 1.0))
    # Two of the step; one unscales the float32 parameter.
    assert len(kernels) == 3 * STEPS, kernels[:20]
    assert waits == []
    with nothing_waits():
        for _ in range(5):
            train(optimizer, params, 1.0)
    assert optimizer.cur_iter == 17


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["", "clipped"])
def test_steps_allocate_nothing_on_the_device(max_grad_norm: float, device: torch.device) -> None:
    def allocations() -> Any:
        return torch.cuda.memory_stats(device)["allocation.all.allocated"]

    optimizer = fused(device, 300, max_grad_norm)
    optimizer.step()
    before = allocations()
    for _ in range(STEPS):
        optimizer.step()
    assert allocations() == before


def test_overflows_are_reported_with_the_names_of_parameters(device: torch.device) -> None:
    optimizer, params = mixed(device)
    values = [1.0, INF, 1.0, 1.0, INF]
    for value in values:
        optimizer.zero_grad()
        optimizer.backward(pull((params[0], value), (params[1], 1.0)))
        optimizer.step()
    optimizer.zero_grad()
    assert optimizer.overflow
    assert optimizer.loss_scale == 256.0
    assert [str(one) for one in optimizer.overflow_report] == [
        "group 0, parameter 0 [2]: inf or NaN"
    ]


def test_replays_of_a_whole_iteration_are_iterations(device: torch.device) -> None:
    captured, params = mixed(device)
    plain, plain_params = mixed(device)
    factor = torch.ones((), device=device)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(captured, params, factor)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        train(plain, plain_params, 1.0)
    graph = torch.cuda.CUDAGraph()
    readback.wait()
    with torch.cuda.graph(graph):
        train(captured, params, factor)
    for value in (1.0, INF, 2.0, float("nan"), 0.5, 4.0):
        factor.fill_(value)
        graph.replay()
        train(plain, plain_params, value)
        assert captured.overflow == plain.overflow
        assert captured.loss_scale == plain.loss_scale
        for one, other in zip(params, plain_params, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("clip", "launches"), [(False, 3), (True, 4)])
def test_a_step_of_grad_scaler_is_few_launches_and_no_wait(
    clip: bool, launches: int, device: torch.device
) -> None:
    optimizer = fused(device, 300, 0.0)
    scaler = amp.GradScaler("cuda", init_scale=8.0)

    def step() -> None:
        scaler.scale(torch.ones((), device=device))
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    step()
    step()
    kernels, waits = launches_and_waits(step)
    assert len(kernels) == launches * STEPS, kernels[:20]
    assert waits == []
    with nothing_waits():
        step()


def linears(device: torch.device, layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device, F16)


def scaled(model: nn.Module) -> tuple[nn.Module, FusedAdam, amp.GradScaler]:
    optimizer = FusedAdam(model.parameters(), 1e-2, master_weights=True)
    return model, optimizer, amp.GradScaler("cuda", init_scale=1024.0, growth_interval=4)


def test_replays_of_an_iteration_with_grad_scaler_and_a_clip_are_iterations(
    device: torch.device,
) -> None:
    captured, plain = (scaled(linears(device, 4, 64)) for _ in range(2))
    data, factor = torch.randn(8, 64, device=device, dtype=F16), torch.ones((), device=device)

    def iterate(model: nn.Module, optimizer: FusedAdam, scaler: amp.GradScaler) -> None:
        optimizer.zero_grad()
        scaler.scale(model(data).float().pow(2).mean() * factor).backward()
        scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            iterate(*captured)
    torch.cuda.current_stream().wait_stream(stream)
    readback.wait()
    for _ in range(3):
        iterate(*plain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate(*captured)
    for value in (1.0, 3.0, INF, 0.1, 1.0, 1.0, 1.0, 1.0, float("nan"), 2.0):
        factor.fill_(value)
        graph.replay()
        iterate(*plain)
        for one, other in zip(captured[0].parameters(), plain[0].parameters(), strict=True):
            assert torch.equal(one, other), value
        assert captured[2].get_scale() == plain[2].get_scale()


def test_gradients_that_leave_during_backward_are_not_in_its_peak(device: torch.device) -> None:
    peaks = {}
    for offload in (True, "gradients"):
        model = linears(device, 24, 4096)
        optimizer = FusedAdam(model.parameters(), master_weights=True, offload=offload)
        data = torch.randn(1024, 4096, device=device, dtype=F16) * 1e-3
        for is_measured in (False, True):
            loss = model(data).float().mean()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            torch.cuda.synchronize()
            if is_measured:
                peaks[offload] = torch.cuda.max_memory_allocated() - before
            optimizer.zero_grad()
    weights = sum(param.nbytes for param in model.parameters())
    assert peaks["gradients"] < peaks[True] - 0.6 * weights, (peaks, weights)


def test_a_captured_backward_is_refused_where_gradients_leave(device: torch.device) -> None:
    model = linears(device, 2, 64)
    optimizer = FusedAdam(model.parameters(), master_weights=True, offload="gradients")
    data = torch.randn(8, 64, device=device, dtype=F16)

    def backward() -> None:
        model(data).float().mean().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match='a CUDA graph is captured, and offload is "gradients"'),
        torch.cuda.graph(graph),
    ):
        backward()
    optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    backward()
    optimizer.step()
    torch.cuda.synchronize()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 32 == 0:
            gc.collect()
        return torch.full((64,), float(index))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_are_forked_while_gradients_leave(device: torch.device) -> None:
    model = linears(device, 4, 64)
    optimizer = FusedAdam(model.parameters(), master_weights=True, offload="gradients")
    scaler = amp.GradScaler("cuda")
    for _ in range(2):
        batches = torch.utils.data.DataLoader(
            Numbers(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context="fork"
        )
        for batch in batches:
            data = batch.to(device, F16, non_blocking=True) / 64
            scaler.scale(model(data).float().pow(2).mean()).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert all(bool(param.isfinite().all()) for param in model.parameters())
