"""A bucket of parameters on its way through a step on the CPU, and its memory there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import transfers
from apex_mp.core.masters.store import MASTER
from apex_mp.optimizers._device_part import Groups, Norms
from apex_mp.optimizers._offload.pieces import Parts, Piece

Moves: TypeAlias = list[tuple[Tensor, Tensor]]

# Elements of a tensor to which it travels with others, in one copy: a copy costs the host as much
# time as the bus takes for so many.
_SMALL = 1 << 16


class Slot:
    """Memory that several buckets use in turn; it grows to the largest."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._on_gpus: dict[torch.device, Tensor] = {}
        self.departure: Any = None  # an event: the weights that lie here have left

    def take(self, size: int) -> Tensor:
        """Return page-locked bytes."""
        if self._memory is None or self._memory.numel() < size:
            self.wait()
            # torch's allocator takes a power of two anyway.
            self._memory = transfers.pinned(1 << max(size - 1, 0).bit_length())
        return self._memory[:size]

    def take_on_gpu(self, device: torch.device, size: int) -> Tensor:
        """Return bytes on a GPU."""
        if device not in self._on_gpus or self._on_gpus[device].numel() < size:
            self.wait()
            self._on_gpus[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._on_gpus[device][:size]

    def wait(self) -> None:
        """Wait until the weights that were here last have left."""
        if self.departure is not None:
            self.departure.synchronize()
            self.departure = None


class Memory:
    """Tensors of one kind in host memory, one for each piece of a bucket; small ones come first.

    Args:
        pieces: The pieces.
        dtypes: Their dtypes; None: there is no tensor.

    Attributes:
        size: In bytes.
        here: The tensors.
    """

    def __init__(self, pieces: list[Piece], dtypes: Sequence[torch.dtype | None]) -> None:
        self._pieces, self._dtypes = pieces, dtypes
        numbers = [number for number, dtype in enumerate(dtypes) if dtype is not None]
        self._order = sorted(numbers, key=lambda number: pieces[number].size > _SMALL)
        small = [number for number in numbers if pieces[number].size <= _SMALL]
        self._small = {*small} if len(small) > 1 else set()
        ends = [*itertools.accumulate(map(self._bytes, self._order), initial=0)]
        self._begins = dict(zip(self._order, ends, strict=False))
        self.size, self.small_size = ends[-1], ends[len(self._small)]

    def _bytes(self, number: int) -> int:
        dtype = self._dtypes[number]
        assert dtype is not None
        return transfers.aligned(self._pieces[number].size * dtype.itemsize)

    def lay(self, memory: Tensor, on_gpu: Tensor) -> None:
        """Lay the tensors in memory of `size` on the host, and of `small_size` on the GPU."""
        self.here = [self._view(memory, number) for number in range(len(self._pieces))]
        self._block, self._on_gpu = memory[: self.small_size], on_gpu
        self._there = {number: self._view(on_gpu, number) for number in self._small}

    def _view(self, memory: Tensor, number: int) -> Any:
        piece, dtype = self._pieces[number], self._dtypes[number]
        if dtype is None:
            return None
        begin = self._begins[number]
        flat = memory[begin : begin + piece.size * dtype.itemsize].view(dtype)
        return piece.on_host(flat)

    def moves(self, tensors: Iterable[tuple[int, Tensor]]) -> tuple[Moves, Moves]:
        """Return pairs, first the tensor here, that travel between these tensors and those given.

        Args:
            tensors: Numbers of pieces, and their tensors on the GPU.

        Returns:
            Of host and GPU; and of the GPU alone, which small tensors go through.
        """
        through, moves = [], []
        for number, tensor in tensors:
            if number in self._small:
                through.append((self._there[number], tensor))
            else:
                moves.append((self.here[number], tensor))
        if through:
            moves.append((self._block, self._on_gpu))
        return moves, through


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
        self._has_host_grads = any(layout.grad_on_host for layout in layouts)
        # A gradient that is here already needs no other memory.
        grads = Memory(pieces, [None if one.grad_on_host else one.grad_dtype for one in layouts])
        weights = Memory(pieces, [layout.dtype for layout in layouts])
        copies = Memory(pieces, [layout.copy_dtype for layout in layouts])
        every = [grads, weights, copies]
        memory = torch.split(slot.take(sum(e.size for e in every)), [e.size for e in every])
        sizes = [each.small_size for each in every]
        on_gpu = torch.split(slot.take_on_gpu(layouts[0].device, sum(sizes)), sizes)
        for each, here, there in zip(every, memory, on_gpu, strict=True):
            each.lay(here, there)
        self._grads, self._weights, self._copies = every
        # As the plan reads them, by groups.
        self._pieces_of = _by_group(groups, pieces, pieces)
        self._params_of = _by_group(groups, pieces, weights.here)
        self._copies_of = _by_group(groups, pieces, copies.here) if copies.size else None
        holders = [*map(_holder, pieces, grads.here, weights.here)]
        self._holders_of = _by_group(groups, pieces, holders)
        self._positions = [piece.layout.position for here in self._pieces_of for piece in here]
        self.clear()

    def clear(self) -> None:
        """Drop what was read."""
        self.plan.clear()
        self._parts: Parts | None = None
        self._arrival: Any = None
        self.is_done = False

    def read(self, parts: Parts, groups: Groups, scale: float) -> None:
        """Make the plan read the pieces; their values are copied later, by `start`."""
        self._parts = parts
        states, masters = {}, {}
        for piece, weight in zip(self._pieces, self._weights.here, strict=True):
            state = parts.existing_state(piece)
            if state is not None:
                states[weight] = state
                masters.update({weight: state[MASTER]} if MASTER in state else {})

        def make(number: int, index: int) -> dict[str, Any]:
            state = parts.new_state(self._pieces_of[number][index])
            masters.update(
                {self._params_of[number][index]: state[MASTER]} if MASTER in state else {}
            )
            return state

        holders = self._holders_of
        if self._has_host_grads:
            rows = zip(self._pieces, self._grads.here, self._weights.here, strict=True)
            some = [
                _holder(piece, piece.of(parts.grads) if grad is None else grad, weight)
                for piece, grad, weight in rows
            ]
            holders = _by_group(len(groups), self._pieces, some)
        try:
            self.plan.read(
                [
                    {**group, "params": here}
                    for group, here in zip(groups, self._params_of, strict=True)
                ],
                states,
                masters,
                make,
                grads=None,
                grads_of=holders,
                copies=self._copies_of,
                scale=scale,
                positions=self._positions,
            )
        except (RuntimeError, TypeError, ValueError) as error:
            error.args = (re.sub(r"\[(\d+)\]\[(\d+)\]", self._name, str(error)),)
            raise

    def _name(self, match: re.Match[str]) -> str:
        """Return the place in the whole groups of a place in this bucket."""
        assert self._parts is not None
        piece: Piece = self._pieces_of[int(match[1])][int(match[2])]
        number, index = self._parts.items.places[piece.number]
        return f"[{number}][{index}]"

    def start(self) -> None:
        """Ask for gradients and weights."""
        if self._arrival is not None or self.is_done:
            return
        parts = self._parts
        assert parts is not None
        self._slot.wait()
        grads = [
            (number, piece.of(parts.grads))
            for number, piece in enumerate(self._pieces)
            if self._grads.here[number] is not None
        ]
        weights = [(number, piece.of(parts.params)) for number, piece in enumerate(self._pieces)]
        moves, through = self._grads.moves(grads)
        more = self._weights.moves(weights)
        self._arrival = self.bus.to_host(moves + more[0], through + more[1])

    def finish(self, norms: Norms, clip: Mapping[str, Any]) -> None:
        """Take the step, once the gradients are there, and send the weights back."""
        if self.is_done:
            return
        parts = self._parts
        assert parts is not None
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
        weights = [(number, piece.of(parts.params)) for number, piece in enumerate(self._pieces)]
        moves, through = self._weights.moves(weights)
        if self._copies_of is not None:
            copies = [
                (number, piece.of(parts.copies))
                for number, piece in enumerate(self._pieces)
                if self._copies.here[number] is not None
            ]
            more = self._copies.moves(copies)
            moves, through = moves + more[0], through + more[1]
        self._slot.departure = self.bus.to_device(_turned(moves), _turned(through))
        self.is_done = True


def _turned(pairs: Moves) -> Moves:
    return [(there, here) for here, there in pairs]


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
