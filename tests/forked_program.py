"""What test_forks starts: a process with readbacks that forks in each state, and its children.

    python forked_program.py cpu|cuda ended

Where there is no GPU, stand-ins take the place of events and pinned memory. Each writes a line with
the process that has freed it to the file `ended`. On a GPU freeing a real one ends a child.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from apex_mp.core import readback
from apex_mp.optimizers import FusedAdam

MAIN, MAIN_THREAD = os.getpid(), threading.get_ident()


class StandIn:
    """An event or pinned memory, of which a test knows which process has freed it."""

    has_arrived = False

    def __init__(self, *_: Any, **options: Any) -> None:
        pass

    def __del__(self, write: Any = os.write, pid: Any = os.getpid) -> None:
        write(ENDED, f"{pid()}\n".encode())

    def copy_(self, *_: Any, **options: Any) -> None:
        if DURING_COPY:
            DURING_COPY.pop()()

    def clone(self) -> torch.Tensor:
        return torch.zeros(())

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return StandIn.has_arrived

    def synchronize(self) -> None:
        pass


DURING_COPY: list[Callable[[], None]] = []
OPTIMIZERS: list[Any] = []
KEPT: list[Any] = []


def submit(callback: Callable[[Any], None] = lambda arrived: None) -> None:
    if DEVICE == "cuda":
        values = torch.ones((), device="cuda")
        if DURING_COPY:
            DURING_COPY.pop()()
        readback.submit_tensor(values, callback)
        return
    values: Any = types.SimpleNamespace(device=torch.device("cuda"), shape=(), dtype=torch.float32)
    real_empty = torch.empty
    torch.empty = StandIn
    try:
        readback.submit_tensor(values, callback)
    finally:
        torch.empty = real_empty


def fork() -> None:
    """Fork; the child frees what it can, trains on the CPU, and ends as a script ends."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, state
        return
    readback.poll()
    plans = [weakref.ref(optimizer._engine.plan) for optimizer in OPTIMIZERS]
    OPTIMIZERS.clear()
    KEPT.clear()
    gc.collect()
    assert None not in [plan() for plan in plans], state
    assert not readback._pending
    arrived = []
    readback.submit_tensor(torch.ones(2), arrived.append)
    readback.wait()
    assert len(arrived) == 1, state
    if threading.get_ident() == MAIN_THREAD and state != "in a capture":
        raise SystemExit
    # A child without its main thread cannot finalize Python, and none can end a capture.
    os._exit(0)


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def fork_in_callback(start: Callable[[Callable[[], None]], None]) -> None:
    submit(lambda arrived: start(fork))
    submit()
    readback.wait()


def fork_during_submit() -> None:
    DURING_COPY.append(fork)
    submit()


def fork_with_a_plan() -> None:
    param = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    OPTIMIZERS.append(FusedAdam([param]))
    streams = [torch.cuda.Stream() for _ in range(2)] if DEVICE == "cuda" else [None]
    for stream in streams:
        with torch.cuda.stream(stream):
            param.grad = torch.ones_like(param)
            OPTIMIZERS[0].step()
    fork()
    OPTIMIZERS.clear()


def fork_while_waiting() -> None:
    """As a signal handler that forks while the host waits for a device."""
    submit()
    first = readback._pending[0]
    first.wait = lambda: (delattr(first, "wait"), fork())
    readback.wait()


def fork_in_a_capture() -> None:
    submit()
    if DEVICE == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            fork()
        return
    torch.cuda.is_initialized = lambda: os.getpid() == MAIN
    torch.cuda.is_current_stream_capturing = lambda: True
    fork()
    readback.wait()
    assert len(readback._pending) == 1  # Nothing is read back in the capture.
    torch.cuda.is_current_stream_capturing = lambda: False


def fork_with_a_result() -> None:
    submit(KEPT.append)
    readback.wait()
    fork()


STATES: dict[str, Callable[[], None]] = {
    "nothing pending": fork,
    "one pending": lambda: (submit(), fork()),
    "many pending": lambda: ([submit() for _ in range(100)], fork()),
    "in a callback": lambda: fork_in_callback(lambda call: call()),
    "in a callback, by another thread": lambda: fork_in_callback(in_thread),
    "in submit": fork_during_submit,
    "while waiting": fork_while_waiting,
    "in a capture": fork_in_a_capture,
    "with a result that a callback has kept": fork_with_a_result,
    "with a plan that has stepped on two streams": fork_with_a_plan,
}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        readback.poll()
        return torch.tensor(float(index))


def load(method: str, persistent: bool) -> None:
    loader = DataLoader(
        Rows(), num_workers=1, multiprocessing_context=method, persistent_workers=persistent
    )
    for _ in range(2):
        submit()
        assert sum(map(float, loader)) == 6.0


def main() -> None:
    global state
    if DEVICE == "cpu":
        torch.cuda.Event = StandIn
        torch.cuda.current_stream = lambda device: None
    for state in STATES:
        STATES[state]()
        readback.wait()
    for method in ("fork", "forkserver", "spawn"):
        for persistent in (False, True):
            state = f"{method}, persistent: {persistent}"
            load(method, persistent)
            readback.wait()


state = ""
DEVICE, path = sys.argv[1:]
ENDED = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
if __name__ == "__main__":
    main()
    print(MAIN)
