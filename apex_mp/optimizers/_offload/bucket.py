"""A bucket of parameters on its way through a step on the CPU, and its memory there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import transfers
from apex_mp.optimizers._device_part import Groups, Norms
from apex_mp.optimizers._offload.pieces import Items, Piece
from apex_mp.optimizers._state import MASTER, master_dtype


class Slot:
    """Page-locked memory that several buckets use in turn; it grows to the largest."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.departure: Any = None  # an event: the weights that lie here have left

    def take(self, sizes: Sequence[tuple[int, Any]]) -> Iterator[Tensor]:
        """Yield flat tensors of these numbers of elements and dtypes, one behind the other."""
        needed = sum(transfers.aligned(size * dtype.itemsize) for size, dtype in sizes)
        if self._memory is None or self._memory.numel() < needed:
            self.wait()
            # torch's allocator takes a power of two anyway.
            self._memory = transfers.pinned(1 << max(needed - 1, 0).bit_length())
        begin = 0
        for size, dtype in sizes:
            yield self._memory[begin : begin + size * dtype.itemsize].view(dtype)
            begin += transfers.aligned(size * dtype.itemsize)

    def wait(self) -> None:
        """Wait until the weights that were here last have left."""
        if self.departure is not None:
            self.departure.synchronize()
            self.departure = None


class Bucket:
    """Pieces that go through a step together, and their host memory.

    Args:
        plan: Steps them.
        pieces: The pieces, on one device.
        groups: The number of groups.
        slot: Where in host memory.
        bus: Copies to and from the device.

    Attributes:
        is_done: Whether the step was taken and the weights are on their way.
    """

    def __init__(
        self,
        plan: _C.StepPlan,
        pieces: list[Piece],
        groups: int,
        slot: Slot,
        bus: transfers.Transfers,
    ) -> None:
        self.plan = plan
        self.bus = bus
        self._slot = slot
        self._pieces = pieces
        layouts = [piece.layout for piece in pieces]
        # A gradient that is here already needs no other memory.
        dtypes = [None if layout.grad_on_host else layout.grad_dtype for layout in layouts]
        dtypes += [layout.dtype for layout in layouts] + [layout.copy_dtype for layout in layouts]
        sizes = [p.size for p in pieces] * 3
        needed = [pair for pair in zip(sizes, dtypes, strict=True) if pair[1] is not None]
        memory = slot.take(needed)
        views = [
            None if dtype is None else piece.on_host(next(memory))
            for piece, dtype in zip(pieces * 3, dtypes, strict=True)
        ]
        count = len(pieces)
        self._grads: list[Any] = views[:count]
        self._weights: list[Any] = views[count : 2 * count]
        self._copies: list[Any] = views[2 * count :]
        # As the plan reads them, by groups.
        self._pieces_of = _by_group(groups, pieces, pieces)
        self._params_of = _by_group(groups, pieces, self._weights)
        self._copies_of = _by_group(groups, pieces, self._copies)
        self._holders = [*map(_holder, pieces, self._grads, self._weights)]
        self._positions = [piece.layout.position for here in self._pieces_of for piece in here]
        self.clear()

    def clear(self) -> None:
        """Drop what was read."""
        self.plan.clear()
        self._items: Items | None = None
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._needs_weight: list[bool] = []
        self._arrival: Any = None
        self.is_done = False

    def read(
        self,
        items: Items,
        groups: Groups,
        states: Mapping[Tensor, dict[str, Any]],
        make_state: Callable[[int, int], dict[str, Any]],
        scale: float,
    ) -> None:
        """Make the plan read the pieces; their values are copied later, by `start`."""
        self._items = items
        for piece, weight in zip(self._pieces, self._weights, strict=True):
            param = items.params[piece.number]
            whole = states.get(param)
            is_stale = MASTER in (whole or ()) and not master_dtype(
                param, groups[piece.layout.group]
            )
            if whole is not None and (is_stale or not piece.can_use(whole)):
                whole = make_state(*items.places[piece.number])
            if whole is not None:
                self._states[weight] = piece.of_state(whole)

        def make(number: int, index: int) -> dict[str, Any]:
            piece: Piece = self._pieces_of[number][index]
            return piece.of_state(make_state(*items.places[piece.number]))

        holders = [
            _holder(piece, piece.of(items.grads[piece.number]), weight) if grad is None else holder
            for piece, grad, weight, holder in zip(
                self._pieces, self._grads, self._weights, self._holders, strict=True
            )
        ]
        has_copies = any(copy is not None for copy in self._copies)
        try:
            self.plan.read(
                [
                    {**group, "params": here}
                    for group, here in zip(groups, self._params_of, strict=True)
                ],
                self._states,
                make,
                grads=None,
                grads_of=_by_group(len(groups), self._pieces, holders),
                copies=self._copies_of if has_copies else None,
                scale=scale,
                positions=self._positions,
            )
        except (RuntimeError, TypeError, ValueError) as error:
            error.args = (re.sub(r"\[(\d+)\]\[(\d+)\]", self._name, str(error)),)
            raise
        self._needs_weight = [
            master_dtype(items.params[piece.number], groups[piece.layout.group]) != torch.float32
            for piece in self._pieces
        ]

    def _name(self, match: re.Match[str]) -> str:
        """Return the place in the whole groups of a place in this bucket."""
        assert self._items is not None
        piece: Piece = self._pieces_of[int(match[1])][int(match[2])]
        number, index = self._items.places[piece.number]
        return f"[{number}][{index}]"

    def start(self) -> None:
        """Ask for the gradients, and for weights without a whole master."""
        if self._arrival is not None or self.is_done:
            return
        assert self._items is not None
        self._slot.wait()
        pairs = []
        rows = zip(self._pieces, self._grads, self._weights, self._needs_weight, strict=True)
        for piece, grad, weight, needs_weight in rows:
            if grad is not None:
                pairs.append((grad, piece.of(self._items.grads[piece.number])))
            if needs_weight:
                pairs.append((weight, piece.of(self._items.params[piece.number])))
        self._arrival = self.bus.to_host(pairs)

    def finish(self, norms: Norms, clip: Mapping[str, Any]) -> None:
        """Take the step, once the gradients are there, and send the weights back."""
        if self.is_done:
            return
        assert self._items is not None
        if not self.plan.has_run:  # It has if a Ctrl-C came between the step and the copies.
            self._arrival.synchronize()
            self.plan.run(
                norms=norms,
                found_inf=None,
                check=False,
                clip_by_global_norm=False,
                loss_scale=None,
                wait=False,
                **clip,
            )
        pairs = []
        for piece, weight, copy in zip(self._pieces, self._weights, self._copies, strict=True):
            pairs.append((piece.of(self._items.params[piece.number]), weight))
            to = self._items.copies[piece.number]
            if copy is not None and to is not None:
                pairs.append((piece.of(to), copy))
        self._slot.departure = self.bus.to_device(pairs)
        self.is_done = True


def _by_group(groups: int, pieces: list[Piece], values: Sequence[Any]) -> list[list[Any]]:
    lists: list[list[Any]] = [[] for _ in range(groups)]
    for piece, value in zip(pieces, values, strict=True):
        lists[piece.layout.group].append(value)
    return lists


def _holder(piece: Piece, grad: Any, weight: Any) -> Tensor | None:
    """Return the tensor whose `.grad` is a scaled gradient; one that is not is the weight's."""
    if grad is None:
        return None
    holder = grad.detach() if piece.layout.scaled else weight
    holder.grad = grad
    return holder if piece.layout.scaled else None
