"""A bucket of parameters on its way through a step on the CPU, and its memory there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import transfers
from apex_mp.optimizers._device_part import Groups, Norms
from apex_mp.optimizers._offload.pieces import Items, Piece
from apex_mp.optimizers._state import MASTER


class Slot:
    """Page-locked memory of a bucket, as large as any has needed."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.departure: Any = None  # an event: the weights that lie here have left

    def take(self, sizes: Sequence[tuple[int, torch.dtype]]) -> Iterator[Tensor]:
        """Yield flat tensors with these numbers of elements, one behind the other."""
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
        sizes = [(p.size, p.like.grad) for p in pieces] + [(p.size, p.like.dtype) for p in pieces]
        sizes += [(p.size, p.like.copy) for p in pieces if p.like.copy is not None]
        memory = [*slot.take(sizes)]
        count = len(pieces)
        views = [p.on_host(each) for p, each in zip(pieces * 2, memory[: 2 * count], strict=True)]
        self._grads, self._weights = views[:count], views[count:]
        rest = iter(memory[2 * count :])
        self._copies = [None if p.like.copy is None else p.on_host(next(rest)) for p in pieces]
        # As the plan reads them, by groups.
        self._pieces_of = _by_group(groups, pieces, pieces)
        self._params_of = _by_group(groups, pieces, self._weights)
        self._copies_of = _by_group(groups, pieces, self._copies)
        holders = [
            _with_grad(grad if piece.like.scaled else weight, grad)
            for piece, grad, weight in zip(pieces, self._grads, self._weights, strict=True)
        ]
        scaled = [h if p.like.scaled else None for h, p in zip(holders, pieces, strict=True)]
        self._grads_of = _by_group(groups, pieces, scaled)
        self._positions = [piece.like.position for here in self._pieces_of for piece in here]
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
        """Make the plan read the pieces, as if their numbers were there."""
        self._items = items
        for piece, weight in zip(self._pieces, self._weights, strict=True):
            whole = states.get(items.params[piece.number])
            if not piece.can_cut(whole):
                whole = make_state(*items.places[piece.number])
            if whole is not None:
                self._states[weight] = piece.of_state(whole)

        def make(number: int, index: int) -> dict[str, Any]:
            piece: Piece = self._pieces_of[number][index]
            return piece.of_state(make_state(*items.places[piece.number]))

        has_copies = any(copy is not None for copy in self._copies)
        self.plan.read(
            [
                {**group, "params": here}
                for group, here in zip(groups, self._params_of, strict=True)
            ],
            self._states,
            make,
            grads=None,
            grads_of=self._grads_of,
            copies=self._copies_of if has_copies else None,
            scale=scale,
            positions=self._positions,
        )
        self._needs_weight = [
            getattr(states.get(items.params[p.number], {}).get(MASTER), "dtype", None)
            != torch.float32
            for p in self._pieces
        ]

    def start(self) -> None:
        """Ask for the gradients, and for weights without a whole master."""
        if self._arrival is not None or self.is_done:
            return
        assert self._items is not None
        self._slot.wait()
        pairs = []
        rows = zip(self._pieces, self._grads, self._weights, self._needs_weight, strict=True)
        for piece, grad, weight, needs_weight in rows:
            pairs.append((grad, piece.of(self._items.grads[piece.number])))
            if needs_weight:
                pairs.append((weight, piece.of(self._items.params[piece.number])))
        self._arrival = self.bus.to_host(pairs)

    def finish(self, norms: Norms, clip: Mapping[str, Any]) -> None:
        """Take the step, once the gradients are there, and send the weights back."""
        if self.is_done:
            return
        assert self._items is not None
        if not self.plan.has_run:
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
        lists[piece.like.group].append(value)
    return lists


def _with_grad(holder: Tensor, grad: Tensor) -> Tensor:
    holder.grad = grad.view_as(grad)
    return holder
