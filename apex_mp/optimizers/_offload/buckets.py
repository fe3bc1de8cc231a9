"""The buckets in which parameters on a GPU go through a step on the CPU.

Gradients are copied to the host, the CPU steps, and new weights are copied back; the copies of one
bucket overlap the step of another. Masters and moments are not page-locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from apex_mp import _C
from apex_mp.core import transfers
from apex_mp.optimizers._device_part import Norms
from apex_mp.optimizers._offload.bucket import Bucket, Slot
from apex_mp.optimizers._offload.pieces import Items, Layout, Parts, Piece, States

# Elements of a bucket, and how many buckets are under way: one that comes, one that is stepped, one
# that goes.
BUCKET_ELEMENTS = 1 << 22
SLOTS = 3
_MANY_THREADS = 8


class Buckets:
    """The buckets of a step; from step to step it keeps plans, host memory and streams.

    Args:
        who: The optimizer's name, for messages.
        new_plan: Makes a plan for parameters on the CPU.
        steps_parts: Whether parts of tensors can be stepped, so that large ones are cut.
    """

    def __init__(self, who: str, new_plan: Callable[[], _C.StepPlan], steps_parts: bool) -> None:
        self._who = who
        self._new_plan = new_plan
        self._steps_parts = steps_parts
        self._slots = [Slot() for _ in range(SLOTS)]
        self._buses: dict[torch.device, transfers.Transfers] = {}
        # Elements of a bucket, groups and parameters for which `_buckets` were made.
        self._made_for: tuple[int, int, list[Layout]] = (0, 0, [])
        self._buckets: list[Bucket] = []
        self._read: list[Bucket] = []
        self._failure: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the step that was read last was taken, or a part of it."""
        return any(bucket.plan.has_run for bucket in self._read)

    def read(
        self,
        items: Items,
        states: States,
        scale: float,
    ) -> None:
        """Read and check a step before anything is changed.

        Args:
            items: What is stepped.
            states: The states of parameters.
            scale: The divisor of scaled gradients.

        Raises:
            RuntimeError: An earlier step was broken off.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)
        self.clear()
        self._read = []
        groups = states.groups
        layouts = [Layout.of(items, number, groups) for number in range(len(items.params))]
        made_for = self._elements, len(groups), layouts
        if made_for != self._made_for:
            self._buckets = self._made(layouts, len(groups))
            self._made_for = made_for
        sizes = [self._part_of(layout) for layout in layouts]
        parts = Parts(items, sizes, states)
        for bucket in self._buckets:
            bucket.read(parts, groups, scale)
            self._read.append(bucket)

    def _made(self, layouts: list[Layout], groups: int) -> list[Bucket]:
        buckets = []
        for number, pieces in enumerate(self._filled(layouts)):
            device = pieces[0].layout.device
            if device not in self._buses:
                self._buses[device] = transfers.Transfers(device)
            slot, bus = self._slots[number % SLOTS], self._buses[device]
            buckets.append(Bucket(self._new_plan(), pieces, groups, slot, bus))
        return buckets

    def _filled(self, layouts: list[Layout]) -> Iterator[list[Piece]]:
        """Yield the pieces of each bucket, on one device."""
        bucket: list[Piece] = []
        left = self._elements
        for number, layout in enumerate(layouts):
            for piece in self._pieces(number, layout):
                is_there = bucket and bucket[0].layout.device == layout.device
                if bucket and (piece.size > left or not is_there):
                    yield bucket
                    bucket, left = [], self._elements
                bucket.append(piece)
                left -= piece.size
        if bucket:
            yield bucket

    def _pieces(self, number: int, layout: Layout) -> Iterator[Piece]:
        size, part = layout.shape.numel(), self._part_of(layout)
        if part is None:
            yield Piece(number, layout, size)
            return
        for index, begin in enumerate(range(0, size, part)):
            yield Piece(number, layout, min(part, size - begin), index)

    def _part_of(self, layout: Layout) -> int | None:
        """Return to how many elements a parameter is cut; None: it is not."""
        # Random bits depend on the number of the element in its parameter.
        can_cut = self._steps_parts and not layout.is_random
        return self._elements if can_cut and layout.shape.numel() > self._elements else None

    @property
    def _elements(self) -> int:
        """Elements of a bucket; with many threads it takes as long with more of them."""
        return BUCKET_ELEMENTS * (4 if torch.get_num_threads() >= _MANY_THREADS else 1)

    def step(self, norms: Norms, clip: Mapping[str, Any]) -> None:
        """Take the step that was read.

        Args:
            norms: As of `_C.StepPlan.run`, numbers.
            clip: Its `clip_to` and `clip_norm`, likewise.
        """
        try:
            try:
                self._go_through(norms, clip)
            except KeyboardInterrupt:
                self._go_through(norms, clip)  # The rest: a step is taken whole.
                raise
        except BaseException as error:
            done = sum(bucket.is_done for bucket in self._read)
            if self.has_begun and done < len(self._read):
                self._failure = (
                    f"{self._who}: the step before this one ended with {type(error).__name__} "
                    f"after {done} of {len(self._read)} buckets of parameters; the weights of the "
                    "others are as before it. Load a checkpoint into the model and a new optimizer"
                )
            raise

    def _go_through(self, norms: Norms, clip: Mapping[str, Any]) -> None:
        """Take the step in each bucket where it is not taken yet."""
        buses = {bucket.bus for bucket in self._read}
        for bus in buses:
            bus.wait_for_gpu()
        try:
            for number, bucket in enumerate(self._read):
                for ahead in self._read[number : number + SLOTS - 1]:
                    ahead.start()
                bucket.finish(norms, clip)
        finally:  # Else a late copy could overwrite a checkpoint that is loaded after an error.
            for bus in buses:
                bus.make_gpu_wait()

    def clear(self) -> None:
        """Drop what was read."""
        for bucket in self._buckets:
            bucket.clear()
