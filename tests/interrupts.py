"""A Ctrl-C at a chosen place of the package."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

import apex_mp
from apex_mp.core import readback

_PACKAGE = os.path.dirname(apex_mp.__file__)


class Interrupt:
    """A trace function that raises KeyboardInterrupt at one line, call or return of the package.

    Args:
        at: Which one [None: none].

    Attributes:
        places: Those that were reached.
    """

    def __init__(self, at: int | None = None) -> None:
        self.places: list[str] = []
        self._at = at

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        self._count(frame, event)
        return self._local

    def _local(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event != "exception":
            self._count(frame, event)
        return self._local

    def _count(self, frame: types.FrameType, event: str) -> None:
        file = os.path.relpath(frame.f_code.co_filename, _PACKAGE)
        self.places.append(f"{file}:{frame.f_lineno} {frame.f_code.co_qualname} {event}")
        if len(self.places) - 1 == self._at:
            sys.settrace(None)
            raise KeyboardInterrupt


def run_until(at: int | None, iteration: Callable[[], None]) -> list[str]:
    """Run an iteration, interrupted or not; return the places that were reached."""
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt)
    try:
        iteration()
    except KeyboardInterrupt:
        # A trace function also raises where no signal is handled: between a lock and its block.
        readback._lock, readback._in_callback = threading.RLock(), False
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # __exit__ of torch.no_grad may have been interrupted.
    return interrupt.places
