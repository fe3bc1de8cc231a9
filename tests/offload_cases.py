"""A stand-in for a GPU beside the host: copies take place later than they are asked for.

CPU tensors are on the stand-in; what is in host memory is so by the names that the step gives it.
The streams are those of `torch.cuda` as far as `apex_mp.core.transfers` uses them. A copy waits in
its stream until something waits for it, or until chance lets it go on; until then its target holds
NaN, and its source is read only then. So a missing wait is a wrong number.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rule_cases import SHAPES
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from apex_mp.core import transfers
from apex_mp.engine import host_steps
from apex_mp.engine import offload as _offload
from apex_mp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)
from apex_mp.optimizers._fused import FusedOptimizer


class Stream:
    """A stream beside the current one."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._queue: collections.deque[tuple[Tensor, Callable[[], None]]] = collections.deque()
        self._done = 0  # copies that have taken place
        self._follows = False  # the work that the current stream was given
        gpu.streams.append(self)

    def wait_stream(self, current: Current) -> None:
        self._follows = True

    def add(self, func: Any, target: Tensor, source: Tensor) -> None:
        """Ask for a copy, or for a sum."""
        self._gpu.asked += 1
        ordered = self._follows
        with torch.no_grad():
            is_read = any(_overlap(target, read) for read, _ in self._queue)
            if func is torch.ops.aten.copy_.default and not is_read:
                _fill(target)

        def work() -> None:
            with torch.no_grad():
                if ordered:
                    func(target, source)
                else:  # The source may not be there yet, the target may still be read.
                    _fill(target)

        self._queue.append((source, work))
        self._gpu.let_go_on()

    def done(self) -> int:
        return self._done

    def asked(self) -> int:
        return self._done + len(self._queue)

    def run(self, until: int) -> None:
        """Let copies take place, in order."""
        while self._done < until and self._queue:
            self._queue.popleft()[1]()
            self._done += 1

    def leave(self) -> None:
        """The current stream goes on: what it is given from now on is not waited for."""
        self._follows = False


class Current:
    """The current stream, in which everything takes place at once."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu

    def wait_stream(self, stream: Stream) -> None:
        stream.run(stream.asked())
        for each in self._gpu.streams:
            each.leave()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    """A place in a stream."""

    def record(self, stream: Stream) -> None:
        self._stream, self._place = stream, stream.asked()

    def query(self) -> bool:
        return self._stream.done() >= self._place

    def synchronize(self) -> None:
        self._stream.run(self._place)


class _Asking(TorchDispatchMode):
    """A context in which copies and sums are asked for, not made."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            self._stream.add(func, *args[:2])
            return args[0]
        if func is torch.ops.aten._foreach_copy_.default:
            for target, source in zip(*args[:2], strict=True):
                self._stream.add(torch.ops.aten.copy_.default, target, source)
            return None
        return func(*args, **(kwargs or {}))


class LateGpu:
    """Stands for the module `torch.cuda`.

    Args:
        seed: Of chance, which lets copies go on early.

    Attributes:
        asked: The number of copies that were asked for.
        streams: Those beside the current one.
    """

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._current = Current(self)
        self.asked = 0
        self.streams: list[Stream] = []
        self.Event = Event

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        return Stream(self)

    def current_stream(self, device: torch.device) -> Current:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _Asking(stream):
            yield

    def let_go_on(self) -> None:
        """Let some copies take place that nothing waits for yet."""
        for stream in self._chance.sample(self.streams, len(self.streams)):
            if self._chance.random() < 0.3:
                stream.run(stream.asked() - self._chance.randrange(3))


def stand_in(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> LateGpu:
    """Put a stand-in in the place of the GPU, and return it."""
    gpu = LateGpu(seed)
    monkeypatch.setattr(transfers, "_cuda", gpu)
    monkeypatch.setattr(transfers, "_KIND", "cpu")
    monkeypatch.setattr(transfers, "pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    return gpu


def _overlap(one: Tensor, other: Tensor) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    return begin < other.data_ptr() + other.nbytes and other.data_ptr() < end


def _fill(target: Tensor) -> None:
    # Bytes of NaN in each floating dtype.
    target.fill_(float("nan") if target.is_floating_point() else 0xFF)


def offload_everywhere() -> None:
    """Have all fused optimizers of the process keep their state in host memory, in small buckets.

    Each is on a stand-in of its own kind: `--offload` of the tests.
    """
    transfers._cuda, transfers._KIND = LateGpu(), "cpu"
    transfers.pinned = lambda size: torch.zeros(size, dtype=torch.uint8)
    host_steps.BUCKET_ELEMENTS, host_steps.SMALL = 5_024, 300
    _offload._warn_of_one_thread = lambda optimizer: None  # Tests have one.
    init = FusedOptimizer.__init__

    @functools.wraps(init)
    def offloaded(self: Any, *args: Any) -> None:
        init(self, *args[:4], True)

    FusedOptimizer.__init__ = offloaded  # type: ignore[method-assign]


# Tests of what is otherwise with offload. They count passes over gradients, of which the GPU takes
# some; or write weights through .data in a step that compares none, which a CPU notices by samples;
# or are about DTensors, which are refused, or devices that are none, or the words of an error.
NOT_OFFLOADED = (
    "test_a_parameter_that_is_no_tensor_is_refused",  # by the plan of one device alone
    "test_checked_steps.py::test_a_step_after_a_check_reads_gradients_once_more",
    "test_grad_scaler_clip.py::test_a_fused_step_looks_at_gradients_once",
    "test_grad_scaler_norms.py::test_a_step_measures_what_no_pass_before_it_has_measured[Fused",
    "test_fused_sgd_in_wrappers.py::test_the_step_unscales_clips_and_copies_in_two_passes",
    "test_fp16_optimizer_clipping.py::test_clipping_costs_no_pass",
    "test_fp16_optimizer_masters.py::test_masters_gradients_cost_nothing_unlooked_at",
    "test_fp16_optimizer_in_torch.py::test_a_scheduler_on_the_inner_optimizer_leaves_the_fused",
    "test_split_masters.py::test_a_remainder_is_dropped_when_its_weight_is_written",
    "test_written_weights.py::test_training_goes_on_from_written_weights[",
    "test_written_weights.py::test_weights_that_are_swapped_in_and_back_stay_exact[split",
    "test_several_devices",
    "two devices",
    "test_shard",
    "refused_before_anything_is_changed[DTensor-",
    "test_step_dtensors.py",
    "test_fused_rules_call.py::test_a_call_that_does_not_fit_raises_a_sentence_and_chan",
    "test_step_loss_scale.py::test_a_step_updates_it_by_the_rule_of_the_host[unwaited",
    "test_offload",
)


# --- The same optimizer without and with it.

F16, BF16 = torch.float16, torch.bfloat16

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
