"""offload: what is refused, and steps that are broken off."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import run_until
from offload_cases import (
    F16,
    OPTIMIZERS,
    LateGpu,
    give_grads,
    pair,
    params_of,
    stand_in,
    train,
)
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core import transfers
from apex_mp.engine import host_steps
from apex_mp.optimizers import FusedAdam


@pytest.fixture(autouse=True)
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> LateGpu | None:
    """The stand-in; small buckets, so that there are several and large parameters are cut."""
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", 5_024)
    return stand_in(monkeypatch) if device.type == "cpu" else None


@pytest.mark.parametrize("value", ["cpu", None, 1])
def test_another_value_is_refused(value: Any, device: torch.device) -> None:
    with pytest.raises(TypeError, match=f"FusedAdam: offload is {value!r}; it must be True, Fal"):
        FusedAdam(params_of(device, F16), offload=value)


def test_parameters_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"params\[0\]\[0\] is on cpu, and offload is set; it"):
        FusedAdam([Parameter(torch.ones(3))], offload=True)


@pytest.mark.cpu_only
def test_a_model_that_went_to_the_cpu_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of(device, F16)
    optimizer = FusedAdam(params, offload=True)
    monkeypatch.undo()
    give_grads(params, 1)
    with pytest.raises(
        RuntimeError, match=r"params\[0\]\[0\] is on cpu, and offload is set; it must"
    ):
        optimizer.step()
    assert not optimizer.state


NEEDED = pytest.mark.parametrize(("offload", "needed"), [(True, 10_000), ("gradients", 12_048)])
PROCESSES = pytest.mark.parametrize("processes", [1, 8])


def make(offload: bool | str, device: torch.device) -> None:
    FusedAdam([Parameter(torch.ones(1_000, device=device).half())], offload=offload, **MASTERS)


MASTERS: dict[str, Any] = {"master_weights": True}


@NEEDED
@PROCESSES
def test_what_a_container_does_not_have_is_refused(
    processes: int,
    offload: bool | str,
    needed: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", f"{processes}")
    available = needed * processes
    monkeypatch.setattr(transfers, "bytes_up_to_limit", lambda: available)
    make(offload, device)
    available -= 1
    each = f" in each of {processes} processes" if processes > 1 else ""
    message = f" take {needed:,} bytes of host memory{each}, and {available:,} are available"
    with pytest.raises(MemoryError, match=message):
        make(offload, device)


@NEEDED
def test_an_estimate_that_is_less_warns(
    offload: bool | str, needed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "available_bytes", lambda: needed - 1)
    with pytest.warns(RuntimeWarning, match=f" take {needed:,} bytes of host memory, and "):
        make(offload, device)
    monkeypatch.setattr(transfers, "available_bytes", lambda: needed)
    make(offload, device)


@pytest.mark.parametrize(
    ("threads", "cores", "processes", "advised"),
    [(1, 16, "8", 2), (1, 16, "", 16), (1, 8, "8", None), (2, 16, "1", None)],
)
def test_one_thread_beside_idle_cores_warns(
    threads: int,
    cores: int,
    processes: str,
    advised: int | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make(True, device)
    said = [f"{each.message}" for each in seen]
    assert [f"Set OMP_NUM_THREADS={advised}, for" in each for each in said] == [True] * bool(
        advised
    )


SIZES_7B = [
    2 * size for _ in range(32) for size in [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
] + [2 * 32000 * 4096] * 2


@pytest.mark.parametrize("sizes", [SIZES_7B, [2 * 10**9, 3], [0, 1, 64, 65], []], ids=len)
def test_page_locked_memory_is_little_more_than_its_parts(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = []

    def pinned(size: int) -> Tensor:
        assert size & (size - 1) == 0  # Else torch's allocator takes the next power of two.
        blocks.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(transfers, "pinned", pinned)
    parts = transfers.pinned_together(sizes)
    assert [part.numel() for part in parts] == sizes
    assert sum(blocks) == transfers.pinned_bytes(sizes) <= 1.08 * sum(sizes) + 256


def test_parts_of_page_locked_memory_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_BLOCK", 1024)
    monkeypatch.setattr(transfers, "pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    sizes = [700, 3, 900, 5000, 64, 1, 300, 0, 128]
    parts = transfers.pinned_together(sizes)
    for number, part in enumerate(parts):
        part.fill_(number)
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        assert part.tolist() == [number] * size
        assert part.data_ptr() % 64 == parts[0].data_ptr() % 64 or not size


def test_the_free_memory_is_that_of_the_machine() -> None:
    available = transfers.available_bytes()
    assert available is None or 1 << 20 < available < 1 << 50


@pytest.mark.cpu_only
def test_memory_that_cannot_be_page_locked_is_said_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(transfers, "_has_warned", False)

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("pin_memory", False):
            raise RuntimeError("out of memory\nand more")
        return empty(*args, **kwargs)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(RuntimeWarning, match=r"^8 bytes .* \(out of memory\), so ordinary memory"):
        assert transfers.pinned(8).numel() == 8
    assert transfers.pinned(8).numel() == 8  # without a second warning


@pytest.mark.cpu_only
def test_a_captured_graph_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of(device, F16)
    optimizer = FusedAdam(params, offload=True)
    give_grads(params, 1)
    monkeypatch.setattr("apex_mp.core.readback.is_capturing_on", lambda device: True)
    with pytest.raises(RuntimeError, match="capturing a CUDA graph, and with offload the CPU"):
        optimizer.step()


@pytest.mark.cpu_only
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_forked_process_frees_no_page_locked_memory_and_no_stream(
    has_stepped: bool, device: torch.device
) -> None:
    params = params_of(device, F16)
    optimizer = OPTIMIZERS["Adam"](params, offload="gradients")
    sum((param.float() ** 2).sum() for param in params).backward()
    held = [weakref.ref(optimizer._host_grads)]
    if has_stepped:
        optimizer.step()
        held.append(weakref.ref(optimizer._engine.plan))
    pid = os.fork()
    if pid == 0:  # Copies to the device are in flight here.
        del optimizer, params
        gc.collect()
        os._exit(sum(each() is None for each in held))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    del optimizer, params
    gc.collect()
    assert all(each() is None for each in held)


# --- Steps that are broken off.


@pytest.mark.cpu_only
def test_after_an_error_weights_are_old_or_new_and_the_next_step_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain, params), (optimizer, others) = both = pair(OPTIMIZERS["Adam"], device, F16)
    for one, its in both:
        train(one, its, range(1, 3))
    before = [param.detach().clone() for param in others]
    finish = host_steps.Bucket.finish
    calls = []

    def break_off(bucket: Any, *args: Any) -> None:
        calls.append(bucket)
        if len(calls) == 4:
            raise OSError("a disk")
        finish(bucket, *args)

    monkeypatch.setattr(host_steps.Bucket, "finish", break_off)
    train(plain, params, range(3, 4))
    with pytest.raises(OSError, match="a disk"):
        train(optimizer, others, range(3, 4))
    # The GPU has waited for what was sent, so no later copy overwrites what is loaded now.
    pieces = [
        torch.cat([each.detach().reshape(-1) for each in tensors])
        for tensors in (before, params, others)
    ]
    old, new, now = pieces
    assert bool(((now == old) | (now == new)).all())
    assert not torch.equal(now, old)
    with pytest.raises(RuntimeError, match=r"ended with OSError after 3 of \d+ buckets of param"):
        optimizer.step()


@pytest.mark.cpu_only
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_a_ctrl_c_anywhere_a_step_is_whole_or_not_there(device: torch.device) -> None:
    def made() -> tuple[Any, list[Parameter], Callable[[], None]]:
        params = [Parameter(torch.ones(4, device=device)) for _ in range(2)]
        params.append(Parameter(torch.ones(8_000, device=device)))
        optimizer = FusedAdam(params, 1e-3, offload=True)

        def iteration() -> None:
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()

        iteration()
        return optimizer, params, iteration

    count = len(run_until(None, made()[2]))
    assert count > 500
    for at in range(0, count, 7):
        optimizer, params, iteration = made()
        place = run_until(at, iteration)[-1]
        iteration()
        values = {float(element) for param in params for element in param.detach()[[0, -1]]}
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert (len(values), len(steps)) == (1, 1), place
