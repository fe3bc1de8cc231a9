"""Where benchmarks.step runs, and its clock there: the CPU, a GPU, or a stub that stands for a GPU.

All else is shared, so that `--device stub` runs on the CPU what a GPU will run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from apex_mp.core import readback
from benchmarks.step_arena import Running

# Blocks of a trace, each followed by the case's name: the step on the host, and until the device
# has done it.
STEP, WHOLE = "benchmarks.step host: ", "benchmarks.step device: "
TRACED = 3  # steps
# Kernels before them: a session of the profiler can lose its first ones (pytorch #192021).
HEAD = 1000


class Cpu:
    """The CPU, whose clock is the host's.

    Attributes:
        kind: Whose cases and workloads run.
        tensors: Where the tensors are.
        rounds: Of which medians are taken, if the caller does not say.
        steps: How many follow each other in a batch; a single one finds the caches cold.
        reference_is: By what memory's speed is measured.
        is_real: False for the stub.
    """

    kind = tensors = "cpu"
    rounds, steps = 9, 1
    reference_is = "in place"
    is_real = True

    def mark(self) -> Any:
        """Return now, in the device's order of work."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks; `wait` comes first."""
        return float(end - begin)

    def wait(self) -> None:
        """Wait until the device has done its work."""

    def reference(self, mebibytes: int) -> tuple[int, Callable[[], object]]:
        """Return what memory's speed is measured by, and the bytes that it moves."""
        tensor = torch.ones(mebibytes << 18, device=self.tensors)
        return 2 * tensor.nbytes, lambda: tensor.mul_(1.0)


class Cuda(Cpu):
    """A GPU, whose clock is CUDA events."""

    kind = tensors = "cuda"
    rounds, steps = 5, 10
    reference_is = "copied"
    activities: tuple[ProfilerActivity, ...] = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize()

    def reference(self, mebibytes: int) -> tuple[int, Callable[[], object]]:
        """Copy from the device to the device."""
        source = torch.ones(mebibytes << 18, device=self.tensors)
        target = torch.empty_like(source)
        return 2 * source.nbytes, lambda: target.copy_(source)

    def trace(self, running: dict[str, Running], deadline: float) -> list[Any]:
        """Return the profiler's events of some steps of each case; none begins after `deadline`.

        In one session: each loses more kernels than the one before.
        """
        head = torch.zeros(1, device=self.tensors)
        with profile(activities=self.activities, acc_events=True) as profiler:
            for _ in range(HEAD):
                head.add_(1.0)
            for name, case in running.items():
                for _ in range(TRACED if time.monotonic() < deadline else 0):
                    case.prepare()
                    self.wait()
                    with record_function(WHOLE + name):
                        with record_function(STEP + name):
                            case.step()
                        self.wait()
        return list(profiler.events())


class Stub(Cuda):
    """The CPU in the place of a GPU: to see that everything runs. Its figures mean nothing."""

    tensors = "cpu"
    is_real = False
    activities = (ProfilerActivity.CPU,)

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def wait(self) -> None:
        pass

    def trace(self, running: dict[str, Running], deadline: float) -> list[Any]:
        """Add a launch and a kernel for each operator of torch."""
        events = super().trace(running, deadline)
        return [*events, *(stub for event in events for stub in _stubs(event))]


def _stubs(event: Any) -> Iterable[Any]:
    if "::" in event.name:
        launch, kernel = _StubEvent(event), _StubEvent(event)
        launch.name, launch.device_type = "cudaLaunchKernel", DeviceType.CPU
        kernel.name, kernel.device_type = f"void {event.name}<stub>()", DeviceType.CUDA
        yield from (launch, kernel)


class _StubEvent:
    """What step_profile reads of an event."""

    name: str
    device_type: DeviceType

    def __init__(self, event: Any) -> None:
        self.time_range = event.time_range


DEVICES: dict[str, type[Cpu]] = {"cpu": Cpu, "cuda": Cuda, "stub": Stub}


def captured(step: Callable[[], object], at: Tensor) -> Callable[[], object]:
    """Return what replays a step from a CUDA graph; on a CPU, which has none, the step itself.

    The step was taken before, outside of the graph, and finds its gradients in place.

    Args:
        step: What to capture.
        at: A parameter.
    """
    if not at.is_cuda:
        return step
    readback.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return functools.partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, step: Callable[[], object]) -> None:
    """Replay a graph; `step` is kept because the graph writes to its optimizer's memory."""
    graph.replay()


def seconds(work: Callable[[], object], device: str) -> float:
    """Return how long something takes, until the device has done it."""
    clock = DEVICES[device]()
    clock.wait()
    begin = time.perf_counter()
    work()
    clock.wait()
    return time.perf_counter() - begin
