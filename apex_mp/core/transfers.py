"""Copies between a GPU and the host on streams of their own, which overlap the work of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.log import warn

_cuda: Any = torch.cuda
_KIND = "cuda"  # the type of device from which is copied
_has_warned = False


class Transfers:
    """Copies of lists of tensors, one stream for each direction.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = _cuda.Stream(device), _cuda.Stream(device)

    def wait_for_gpu(self) -> None:
        """Make later copies wait for the work that the GPU's current stream has now."""
        current = _cuda.current_stream(self._device)
        self._down.wait_stream(current)
        self._up.wait_stream(current)

    def to_host(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copy each second tensor, on the GPU, to the first; return an event to wait for."""
        return self._copy(self._down, pairs)

    def to_device(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copy each second tensor to the first, on the GPU; return an event to wait for."""
        return self._copy(self._up, pairs)

    def _copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        with _cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = _cuda.Event()
            event.record(stream)
        return event

    def make_gpu_wait(self) -> None:
        """Make later work of the GPU's current stream wait for the copies to the GPU."""
        _cuda.current_stream(self._device).wait_stream(self._up)


def is_offloadable(device: torch.device) -> bool:
    """Return whether a device is a GPU."""
    return device.type == _KIND


def pinned(size: int) -> Tensor:
    """Return bytes of host memory that a GPU reads by itself: page-locked.

    If there are none left, they are ordinary ones, and a warning says so once.
    """
    global _has_warned
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        if not _has_warned:
            _has_warned = True
            (reason, *_) = str(error).splitlines()
            warn(
                f"{size:,} bytes of host memory could not be page-locked ({reason}), so ordinary "
                "memory is used, to and from which a GPU copies more slowly",
                "no-page-locked-memory",
            )
        return torch.empty(size, dtype=torch.uint8)


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up so that what lies behind them is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_ALIGNMENT = 64  # bytes: a cache line, and a vector of AVX-512


def available_bytes() -> int | None:
    """Return how many bytes of host memory this process may still take; None if it is unknown."""
    found = [*_free_in_group()]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvail")]
    except OSError:  # Not Linux.
        pass
    return min(found, default=None)


def _free_in_group() -> Iterator[int]:
    """Yield the free bytes of the control group at the root: in a container, its own."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, taken = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # There is none, or its limit is "max".
        return
    # Files that were read are dropped when memory is needed.
    files = sum(int(line.split()[1]) for line in lines if line.startswith(_FILES))
    yield limit - taken + files


_FILES = ("inactive_file ", "active_file ")
