"""Copies between a GPU and the host on streams of their own, which overlap the work of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp.core.log import warn

# Targets and sources of copies.
Pairs: TypeAlias = Sequence[tuple[Tensor, Tensor]]

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
        self._current = current

    def to_host(self, pairs: Pairs, gathered: Pairs = ()) -> Any:
        """Copy each second tensor, on the GPU, to the first; return an event to wait for."""
        return self._copy(self._down, pairs, before=gathered)

    def to_device(self, pairs: Pairs, scattered: Pairs = ()) -> Any:
        """Copy each second tensor to the first, on the GPU; return an event to wait for."""
        return self._copy(self._up, pairs, after=scattered)

    def _copy(self, stream: Any, pairs: Pairs, before: Pairs = (), after: Pairs = ()) -> Any:
        with _cuda.stream(stream):
            _copy_together(before)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            _copy_together(after)
            return self._event(stream)

    def _event(self, stream: Any) -> Any:
        event = _cuda.Event()
        event.record(stream)
        return event

    def add_on_host(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Add each second tensor, on the GPU, to the first; return an event to wait for.

        The GPU computes the sums, so the host has nothing to wait for.
        """
        with _cuda.stream(self._down):
            for target, source in pairs:
                # Allocated and used on this stream alone, so it may be freed at once.
                total = torch.empty_like(source)
                total.copy_(target, non_blocking=True)
                total.add_(source)
                target.copy_(total, non_blocking=True)
            return self._event(self._down)

    def make_gpu_wait(self) -> None:
        """Make later work of the GPU's current stream wait for the copies to the GPU."""
        _cuda.current_stream(self._device).wait_stream(self._up)

    def make_gpu_wait_for(self, event: Any) -> None:
        """Make later work of the stream that `wait_for_gpu` saw last wait for an event."""
        self._current.wait_event(event)


def _copy_together(pairs: Pairs) -> None:
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_([*targets], [*sources])


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


def pinned_together(sizes: Sequence[int]) -> list[Tensor]:
    """Return page-locked memory of these sizes, bytes, in few blocks."""
    blocks, places = _placed(sizes)
    memory = [pinned(size) for size in blocks]
    rows = zip(sizes, places, strict=True)
    return [memory[number][begin : begin + size] for size, (number, begin) in rows]


def pinned_bytes(sizes: Sequence[int]) -> int:
    """Return how much memory `pinned_together` takes."""
    return sum(_placed(sizes)[0])


def _placed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the sizes of blocks, and for each piece its block and where it begins there.

    Blocks are powers of two, to which torch's allocator rounds them up.
    """
    blocks: list[int] = []
    used: list[int] = []
    places = []
    rest = sum(map(aligned, sizes))
    for size in map(aligned, sizes):
        fits = (n for n, block in enumerate(blocks) if used[n] + size <= block)
        number = next(fits, len(blocks))
        if number == len(blocks):
            of_rest = 1 << max(rest.bit_length() - 1, 0)
            blocks.append(max(1 << max(size - 1, 0).bit_length(), min(of_rest, _BLOCK)))
            used.append(0)
        places.append((number, used[number]))
        used[number] += size
        rest -= size
    return blocks, places


_BLOCK = 1 << 30  # bytes, unless one piece is larger


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up so that what lies behind them is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_ALIGNMENT = 64  # bytes: a cache line, and a vector of AVX-512


def available_bytes() -> int | None:
    """Return how many bytes of host memory are available now; None if it is unknown.

    An estimate: a virtual machine may be given more memory when it is needed.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvail")]
    except OSError:  # Not Linux.
        return None
    return min(found, default=None)


def bytes_up_to_limit() -> int | None:
    """Return how many bytes a container may still take; None if it has no limit."""
    return min(_free_in_group(), default=None)


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
