"""offload=True: every step is that of the same optimizer without it, to the bit.

Without a GPU the stand-in of offload_cases.py takes its place.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupts import run_until
from offload_cases import LateGpu, Stream, stand_in
from rule_cases import SHAPES
from tolerances import assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp import amp
from apex_mp.core import transfers
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)
from apex_mp.optimizers._offload import bucket as _bucket
from apex_mp.optimizers._offload import buckets as _buckets

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
each_dtype = pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)

adam = functools.partial(FusedAdam, lr=0.01, weight_decay=0.1)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam without masters": adam,
    "Adam": functools.partial(adam, master_weights=True),
    "Adam, split": functools.partial(adam, master_weights="split", maximize=True),
    "Adam, narrow": functools.partial(
        adam, master_weights="split", moment_dtype=BF16, stochastic_rounding=True
    ),
    "Adam, clipped": functools.partial(adam, master_weights=True, max_grad_norm=1.0),
    "AdamW": functools.partial(FusedAdamW, lr=0.01, master_weights=True),
    "SGD": functools.partial(FusedSGD, lr=0.01, master_weights=True),
    "SGD, dampened": functools.partial(
        FusedSGD, lr=0.01, momentum=0.9, dampening=0.5, master_weights=True
    ),
    "Adagrad": functools.partial(FusedAdagrad, lr=0.01, master_weights=True),
    "LAMB": functools.partial(FusedLAMB, lr=0.01, master_weights=True),
    "NovoGrad": functools.partial(FusedNovoGrad, lr=0.01, master_weights=True),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=[*OPTIMIZERS])


@pytest.fixture(autouse=True)
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> LateGpu | None:
    """The stand-in; small buckets, so that there are several and large parameters are cut."""
    monkeypatch.setattr(_buckets, "BUCKET_ELEMENTS", 5_000)
    return stand_in(monkeypatch) if device.type == "cpu" else None


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*that have no float32 masters")
        yield


def params_of(
    device: torch.device, dtype: torch.dtype, shapes: Any = SHAPES, *, seed: int = 1
) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes
    ]


def give_grads(params: list[Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(params):
        grad = factor * torch.randn(param.shape, generator=generator)
        param.grad = None if (index + step) % 5 == 0 else grad.to(param)


def train(optimizer: Any, params: list[Parameter], steps: range) -> None:
    for step in steps:
        give_grads(params, step)
        optimizer.step()


def pair(make: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[Any, list[Parameter]]]:
    """Return the same optimizer and parameters without and with offload."""
    both = []
    for offload in (False, True):
        params = params_of(*args, **kwargs)
        both.append((make(params, offload=offload), params))
    return both


def assert_equal(both: list[tuple[Any, list[Parameter]]], same: Any = assert_same_bits) -> None:
    (plain, params), (offloaded, others) = both
    for param, other in zip(params, others, strict=True):
        same(other.detach(), param.detach())
    saved, of_other = plain.state_dict(), offloaded.state_dict()
    assert of_other["param_groups"] == saved["param_groups"]
    assert [*of_other["state"]] == [*saved["state"]]
    for number, state in saved["state"].items():
        assert [*of_other["state"][number]] == [*state]
        for name, value in state.items():
            same(of_other["state"][number][name].cpu(), value.cpu())


# --- The numbers.


@pytest.mark.every_case
@each_dtype
@each_optimizer
def test_each_step_is_that_without_offload(
    make: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> None:
    both = pair(make, device, dtype)
    # Norms in float64 are summed in another order, which float32 does not show.
    same = assert_near if dtype == F64 else assert_same_bits
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
    "for the gradients": (_bucket.Bucket, "finish", "self._arrival.synchronize()"),
    "for weights to leave": (_bucket.Slot, "wait", "self.departure.synchronize()"),
    "of copies for the GPU": (transfers.Transfers, "follow", None),
    "of the GPU for copies": (transfers.Transfers, "lead", None),
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


def scaled_loop(optimizer: Any, params: list[Parameter], scaler: Any, clip: bool) -> list[Tensor]:
    norms = []
    for step in range(6):
        scaler.scale(torch.ones((), device=params[0].device))
        give_grads(params, step, scaler.get_scale())
        if step == 2:
            params[3].grad = torch.full_like(params[3], float("inf"))
        if clip:
            norms.append(scaler.clip_grad_norm_(optimizer, 0.5))
        scaler.step(optimizer)
        scaler.update()
    return norms


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("make", ["Adam", "SGD, dampened", "LAMB"])
def test_grad_scaler_skips_and_clips(make: str, clip: bool, device: torch.device) -> None:
    both = pair(OPTIMIZERS[make], device, F16)
    scalers = [amp.GradScaler(device.type, init_scale=128.0) for _ in both]
    norms = [scaled_loop(*one, scaler, clip) for one, scaler in zip(both, scalers, strict=True)]
    assert_equal(both)
    for plain, offloaded in zip(*norms, strict=True):
        assert_near(offloaded, plain)
    assert [scaler.get_scale() for scaler in scalers] == [64.0, 64.0]


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


def test_fp16_optimizer_has_it_inside(device: torch.device) -> None:
    both = []
    for offload in (False, True):
        params = params_of(device, F16)
        inner = FusedAdam(params, lr=0.01, offload=offload)
        optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
        for _ in range(3):
            optimizer.backward(sum((param.float() ** 2).sum() for param in params))
            optimizer.clip_master_grads(0.5)
            optimizer.step()
            optimizer.zero_grad()
        both.append((inner, params))
    assert_equal(both)


@pytest.mark.cpu_only
def test_nothing_is_copied_for_a_step_that_is_skipped(gpu: LateGpu, device: torch.device) -> None:
    params = params_of(device, F16)
    optimizer = OPTIMIZERS["Adam"](params, offload=True)
    scaler = amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    give_grads(params, 1)
    params[0].grad.fill_(float("nan"))
    scaler.step(optimizer)
    assert (gpu.asked, len(optimizer.state)) == (0, 0)


# --- Weights that others write, groups, checkpoints, copies.


def test_training_goes_on_from_written_weights(device: torch.device) -> None:
    both = pair(OPTIMIZERS["Adam"], device, F16)
    for optimizer, params in both:
        train(optimizer, params, range(4))
        with torch.no_grad():
            params[5].mul_(0.5)
        with pytest.warns(RuntimeWarning, match="changed outside of step"):
            train(optimizer, params, range(4, 5))
    assert_equal(both)


def test_a_parameter_without_a_master_is_read_anew_in_each_step(device: torch.device) -> None:
    both = pair(adam, device, F32)
    for optimizer, params in both:
        for step in range(6):
            train(optimizer, params, range(step, step + 1))
            params[5].data.clamp_(-0.1, 0.1)
    assert_equal(both)


def test_a_group_is_added_and_options_change(device: torch.device) -> None:
    both = pair(OPTIMIZERS["Adam"], device, F16)
    for optimizer, params in both:
        train(optimizer, params, range(2))
        more = params_of(device, F16, [(9, 600)], seed=2)
        optimizer.add_param_group({"params": more, "lr": torch.tensor(0.1, device=device)})
        params += more
        train(optimizer, params, range(2, 4))
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        train(optimizer, params, range(4, 6))
        optimizer.param_groups[1]["lr"] = 0.1  # Else the options hold tensors.
        optimizer.param_groups[1]["lr"] = float(optimizer.param_groups[1]["lr"])
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on(copied: Callable[[Any], Any], device: torch.device) -> None:
    params = params_of(device, F16)
    optimizer = OPTIMIZERS["Adam"](params, offload=True)
    train(optimizer, params, range(3))
    other, others = copied((optimizer, params))
    train(optimizer, params, range(3, 5))
    train(other, others, range(3, 5))
    assert other.offload
    assert_equal([(optimizer, params), (other, others)])


@pytest.mark.parametrize("make", ["Adam", "Adam, split"])
def test_masters_are_where_the_parameters_are(make: str, device: torch.device) -> None:
    both = pair(OPTIMIZERS[make], device, BF16)
    for optimizer, params in both:
        train(optimizer, params, range(3))
    for param, other in zip(both[0][1], both[1][1], strict=True):
        assert_same_bits(both[1][0].master(other), both[0][0].master(param))


def test_memory_orders_differ(device: torch.device) -> None:
    both = pair(OPTIMIZERS["Adam"], device, F16, [(80, 90), (2, 30, 40, 5), (3, 4)])
    for optimizer, params in both:
        params[0].data = params[0].data.t().contiguous().t()
        params[1].data = params[1].data.to(memory_format=torch.channels_last)
        train(optimizer, params, range(1, 4))
        params[0].data = params[0].data.contiguous()
        train(optimizer, params, range(4, 6))
    assert_equal(both)


# --- What cannot be.


@pytest.mark.parametrize("value", ["cpu", None, 1])
def test_another_value_is_refused(value: Any, device: torch.device) -> None:
    with pytest.raises(TypeError, match=f"FusedAdam: offload is {value!r}; it must be True or Fal"):
        FusedAdam(params_of(device, F16), offload=value)


def test_parameters_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"params\[0\]\[0\] is on cpu, and offload is True; it"):
        FusedAdam([Parameter(torch.ones(3))], offload=True)


@pytest.mark.cpu_only
def test_a_model_that_went_to_the_cpu_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of(device, F16)
    optimizer = FusedAdam(params, offload=True)
    monkeypatch.undo()
    give_grads(params, 1)
    with pytest.raises(RuntimeError, match="a parameter is on cpu, and the optimizer was made w"):
        optimizer.step()
    assert not optimizer.state


def test_too_little_host_memory_is_said_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "available_bytes", lambda: 11_999)
    with pytest.raises(
        MemoryError, match="of group 0 take 12,000 bytes of host memory, and 11,999"
    ):
        FusedAdam([Parameter(torch.ones(1_000, device=device).half())], master_weights=True,
                  offload=True)  # fmt: skip
    monkeypatch.setattr(transfers, "available_bytes", lambda: 12_000)
    FusedAdam([Parameter(torch.ones(1_000, device=device).half())], master_weights=True,
              offload=True)  # fmt: skip


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
    monkeypatch.setattr("apex_mp.optimizers._offload.plan.is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="capturing a CUDA graph, and with offload=True the CPU"):
        optimizer.step()


# --- Steps that are broken off.


@pytest.mark.cpu_only
def test_after_an_error_weights_are_old_or_new_and_the_next_step_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain, params), (optimizer, others) = both = pair(OPTIMIZERS["Adam"], device, F16)
    for one, its in both:
        train(one, its, range(1, 3))
    before = [param.detach().clone() for param in others]
    finish = _bucket.Bucket.finish
    calls = []

    def break_off(bucket: Any, *args: Any) -> None:
        calls.append(bucket)
        if len(calls) == 4:
            raise OSError("a disk")
        finish(bucket, *args)

    monkeypatch.setattr(_bucket.Bucket, "finish", break_off)
    train(plain, params, range(3, 4))
    with pytest.raises(OSError, match="a disk"):
        train(optimizer, others, range(3, 4))
    for stream in [s for bus in optimizer._plan._buckets._buses.values() for s in (bus._up,)]:
        assert isinstance(stream, Stream)
        stream.run(stream.asked())
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
    for at in range(count):
        optimizer, params, iteration = made()
        place = run_until(at, iteration)[-1]
        iteration()
        values = {float(element) for param in params for element in param.detach()[[0, -1]]}
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert (len(values), len(steps)) == (1, 1), place
