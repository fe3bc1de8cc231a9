"""The state of torch.autocast in each thread while casts are on.

Each thread has a state of its own, which no other thread can change. So only the main thread has
autocast on from `init()` to `_deactivate()`. Every other thread switches it on while it calls a
module or a function with a rule, and restores it when the call returns.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class _Before(NamedTuple):
    """The state of autocast before it was switched on in a thread."""

    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    nesting: int  # how many regions of torch.autocast were open
    regions: int  # how many of them were in _Thread.regions


class _Thread(threading.local):
    """The state of one thread.

    Attributes:
        before: The state before autocast was switched on in this thread; None if it was not.
        is_in_module: Whether a module is being called.
        keeps_casts: Whether casts of parameters are kept now.
        off: How many nested `with` blocks have switched casts off.
        regions: The user's regions of torch.autocast that were entered since `init()`.
        optimizer_steps: How many nested steps of optimizers are running.
        enabled_before_step: Whether autocast was on before the first of them.
    """

    def __init__(self) -> None:
        self.before: _Before | None = None
        self.is_in_module = False
        self.keeps_casts = False
        self.off = 0
        self.regions: list[Any] = []
        self.optimizer_steps = 0
        self.enabled_before_step = False


class Switch:
    """Switches autocast on and off in the calling thread.

    Args:
        device_type: "cpu" or "cuda".
        dtype: The low precision.

    Attributes:
        active: False once casts have ended in all threads.
        thread: The state of the current thread.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.active = True
        self.thread = _Thread()
        self.dtype = dtype
        self._was_opened_in_main = False

    def open(self) -> None:
        """Switch autocast on until `close`, if this is the main thread."""
        self._was_opened_in_main = _is_main_thread()
        if self._was_opened_in_main:
            self._switch_on()

    def close(self) -> None:
        """Switch autocast off in this thread, and in the main thread before its next line."""
        self.active = False
        self._switch_off()
        if self._was_opened_in_main and not _is_main_thread():
            _call_in_main_thread(self._switch_off)

    def is_on(self) -> bool:
        """Return whether functions called now have their arguments cast."""
        return self.active and torch.is_autocast_enabled(self.device_type)

    def is_due(self) -> bool:
        """Return whether a call in this thread switches autocast on: casts are due, but off."""
        thread = self.thread
        if not self.active or thread.off or thread.optimizer_steps:
            return False
        if torch._C._current_graph_task_id() != -1:
            return False
        self._forget_a_region_that_ended()
        others = sum(region.device != self.device_type for region in thread.regions)
        return thread.before is None and _nesting() == others

    @contextlib.contextmanager
    def on_for_a_call(self) -> Iterator[None]:
        """Switch autocast on for a `with` block, where it `is_due`."""
        self._switch_on()
        try:
            yield
        finally:
            self._switch_off()

    @contextlib.contextmanager
    def casts_off(self) -> Iterator[None]:
        """Switch casts off in this thread for a `with` block."""
        thread = self.thread
        before = torch.is_autocast_enabled(self.device_type)
        torch.set_autocast_enabled(self.device_type, False)
        thread.off += 1
        try:
            yield
        finally:
            thread.off -= 1
            if self.active:
                torch.set_autocast_enabled(self.device_type, before)

    @contextlib.contextmanager
    def casts_on(self) -> Iterator[None]:
        """Switch casts on for a `with` block inside one in which they are off."""
        device_type, before_init = self.device_type, self.thread.before
        before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, self.dtype)
        try:
            yield
        finally:
            if self.thread.before is before_init:
                torch.set_autocast_enabled(device_type, before[0])
                torch.set_autocast_dtype(device_type, before[1])

    def _switch_on(self) -> None:
        thread, device_type = self.thread, self.device_type
        thread.before = _Before(
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
            _nesting(),
            len(thread.regions),
        )
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, self.dtype)
        # torch's cache of casts does not detect edits of a weight; ours does.
        torch.set_autocast_cache_enabled(False)

    def _switch_off(self) -> None:
        thread, device_type = self.thread, self.device_type
        self._forget_a_region_that_ended()
        if thread.before is None:
            return
        before, thread.before = thread.before, None
        # The user's open regions keep their state; when one ends, it restores the one before it.
        regions = thread.regions[before.regions :]
        ours = [region for region in regions if region.device == device_type]
        if ours:
            ours[0].prev, ours[0].prev_fastdtype = before.enabled, before.dtype
        else:
            torch.set_autocast_enabled(device_type, before.enabled)
            torch.set_autocast_dtype(device_type, before.dtype)
        if regions:
            regions[0].prev_cache_enabled = before.cache_enabled
        else:
            torch.set_autocast_cache_enabled(before.cache_enabled)

    def _forget_a_region_that_ended(self) -> None:
        """Drop `before` if the user's region around it has ended, which restored its own state."""
        before = self.thread.before
        if before is not None and _nesting() < before.nesting:
            self.thread.before = None


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


_for_main_thread: collections.deque[Callable[[], None]] = collections.deque()


def _run_in_main_thread(_: Any) -> int:
    while _for_main_thread:
        _for_main_thread.popleft()()
    return 0


_C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_in_main_thread)


def _call_in_main_thread(function: Callable[[], None]) -> None:
    """Have the main thread call `function` before its next line of Python."""
    _for_main_thread.append(function)
    if ctypes.pythonapi.Py_AddPendingCall(_C_FUNCTION, None) != 0:
        raise RuntimeError("amp: the main thread has too many pending calls to switch casts off")
