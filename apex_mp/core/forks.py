"""Forked processes, such as DataLoader workers: they can neither use nor free what is on a GPU.

CUDA does not work in a child of a process that has used it. Freeing a CUDA event or pinned memory
there ends the child: the destructor throws. So objects that hold them are never freed in a child,
neither by the garbage collector nor at its end.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import torch

_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def leak_in_children(holder: Any) -> None:
    """Leak an object in child processes: its destructor would call CUDA there."""
    _holders.add(holder)


def _leak() -> None:
    for holder in _holders:
        # Never released: the reference count cannot reach 0 in the child.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_leak)


def refuse_read(what: str, device: torch.device) -> None:
    """Raise if a number is on a GPU and this process is a child that cannot use it."""
    if device.type == "cuda" and torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            f"{what} is on {device}, and this process was forked from one that uses CUDA, so it "
            "cannot read it. Read it before the fork and pass the number, or start the process by "
            'spawn, as DataLoader(..., multiprocessing_context="spawn") does'
        )
