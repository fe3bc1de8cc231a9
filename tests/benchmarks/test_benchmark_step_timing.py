"""How benchmarks.step takes times: rounds, batches, memory's speed, and the clock of a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks import step_cases, step_timing
from benchmarks.step_arena import Running
from benchmarks.step_device import Cpu, Cuda, Stub

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


def test_the_reference_of_a_cpu_reads_and_writes_every_byte_that_it_claims(monkeypatch):
    multiplied = []
    monkeypatch.setattr(torch.Tensor, "mul_", lambda tensor, factor: multiplied.append(tensor))
    reference = step_timing.Reference(Cpu(), 1)
    reference.once()
    (tensor,) = multiplied
    assert reference.bytes == 2 * 2**20 == 2 * tensor.nbytes


def recorded() -> tuple[list[str], Running]:
    calls: list[str] = []
    return calls, Running(lambda: calls.append("prepare"), lambda: calls.append("step"))


class Ticking(Stub):
    """A device whose clock advances by a second at each mark, and which says what it is asked."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.now = calls, 0.0

    def mark(self) -> float:
        self.calls.append("mark")
        self.now += 1.0
        return self.now

    def wait(self) -> None:
        self.calls.append("wait")


def test_a_batch_waits_before_and_after_its_steps_and_times_nothing_between_them():
    calls, case = recorded()
    took, host = step_timing.batch(case, 3, Ticking(calls))
    step = ["mark", "step", "mark"]
    assert calls == ["wait", *step, "prepare", *step, "prepare", *step, "wait"]
    assert took == [1.0, 1.0, 1.0]
    assert len(host) == 3
    assert all(0.0 < each < 1.0 for each in host)


def test_the_clock_of_a_gpu_is_events_on_the_current_stream(monkeypatch):
    made = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.timed, self.recorded = enable_timing, 0
            made.append(self)

        def record(self) -> None:
            self.recorded += 1

        def elapsed_time(self, end: Event) -> float:
            assert (self, end) == (made[0], made[1])
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = Cuda()
    assert device.seconds(device.mark(), device.mark()) == 0.0025
    assert [(event.timed, event.recorded) for event in made] == [(True, 1), (True, 1)]


def test_what_is_replayed_is_a_graph_of_one_step_with_its_gradients_in_place(monkeypatch):
    calls, case = recorded()

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def capture(graph):
        assert isinstance(graph, Graph)
        calls.append("capture")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    replayed = step_cases.replayed(case, SimpleNamespace(is_cuda=True))
    assert calls == ["prepare", "step"] * 2 + ["prepare", "capture", "step", "end"]
    replayed.prepare()
    replayed.step()
    assert calls[8:] == ["replay"]
