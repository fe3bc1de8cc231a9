"""What a step on the CPU steps, for parameters on a GPU; large parameters are cut to pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_mp.optimizers._device_part import Groups, Places
from apex_mp.optimizers._state import MASTER, master_dtype


@dataclasses.dataclass(eq=False)
class Items:
    """What a step steps; all lists have one item for each parameter with a gradient, in order.

    Attributes:
        places: Group and index.
        positions: The number of the parameter in the optimizer.
        params: The parameters.
        grads: Their gradients, in the parameters' memory order, on the GPU or here.
        on_host: Whether the gradient is in host memory.
        scaled: Whether the gradient is scaled by the loss scale.
        copies: Where the new parameter is also written; None: nowhere.
    """

    places: Places
    positions: list[int]
    params: list[Tensor]
    grads: list[Tensor]
    on_host: list[bool]
    scaled: list[bool]
    copies: list[Tensor | None]


class Layout(NamedTuple):
    """What host memory for a parameter depends on."""

    group: int
    position: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad_dtype: torch.dtype
    grad_on_host: bool
    scaled: bool
    copy_dtype: torch.dtype | None
    is_random: bool

    @classmethod
    def of(cls, items: Items, number: int, groups: Groups) -> Layout:
        param, copy = items.params[number], items.copies[number]
        group = items.places[number][0]
        return cls(
            group,
            items.positions[number],
            param.shape,
            param.stride(),
            param.dtype,
            param.device,
            items.grads[number].dtype,
            items.on_host[number],
            items.scaled[number],
            None if copy is None else copy.dtype,
            bool(groups[group].get("stochastic_rounding")),
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """A parameter, or a part of a large one.

    Attributes:
        number: Of the parameter among the items.
        layout: The parameter's layout.
        size: The number of elements.
        part: Of the parameter, the first is 0; None if all elements are here, in their shape.
    """

    number: int
    layout: Layout
    size: int
    part: int | None = None

    def of(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return these elements of tensors of all items that `cut` has cut."""
        return parts[self.number][self.part or 0]

    def on_host(self, memory: Tensor) -> Tensor:
        """Return a flat tensor in the shape of these elements."""
        if self.part is not None:
            return memory
        return memory.as_strided(self.layout.shape, self.layout.stride)


def cut(tensor: Tensor, size: int | None) -> Sequence[Tensor]:
    """Return a tensor's elements in memory order, as many at a time; None: the tensor itself."""
    if size is None:
        return (tensor,)
    parts: Sequence[Tensor] = torch.split(tensor.detach().as_strided((tensor.numel(),), (1,)), size)
    return parts


class Parts:
    """The tensors of a step, cut as the parameters are; see `Items` for the lists.

    Args:
        items: What is stepped.
        sizes: By item the number of elements in a part; None: it is not cut.
        groups: The parameter groups.
        states: The states of parameters.
        make_state: Completes the state of a parameter, given its group and index.
    """

    def __init__(
        self,
        items: Items,
        sizes: Sequence[int | None],
        groups: Groups,
        states: Mapping[Tensor, dict[str, Any]],
        make_state: Callable[[int, int], dict[str, Any]],
    ) -> None:
        self.items = items
        self.params = [*map(cut, items.params, sizes)]
        self.grads = [*map(cut, items.grads, sizes)]
        self.copies = [
            () if copy is None else cut(copy, size)
            for copy, size in zip(items.copies, sizes, strict=True)
        ]
        self._make_state, self._sizes = make_state, sizes
        self._states: list[Sequence[dict[str, Any]] | None] = []
        for number, param in enumerate(items.params):
            state = states.get(param)
            if state is not None:
                is_stale = MASTER in state and not master_dtype(
                    param, groups[items.places[number][0]]
                )
                if is_stale or not self._can_use(number, state):
                    state = make_state(*items.places[number])
            self._states.append(None if state is None else self._cut_state(number, state))

    def existing_state(self, piece: Piece) -> dict[str, Any] | None:
        """Return the part of its parameter's state; None if there is none yet."""
        states = self._states[piece.number]
        return None if states is None else states[piece.part or 0]

    def new_state(self, piece: Piece) -> dict[str, Any]:
        """Return the same of a state that is completed."""
        number = piece.number
        state = self._make_state(*self.items.places[number])
        states = self._states[number] = self._cut_state(number, state)
        return states[piece.part or 0]

    def _cut_state(self, number: int, state: dict[str, Any]) -> Sequence[dict[str, Any]]:
        size, param = self._sizes[number], self.items.params[number]
        if size is None:
            return (state,)
        last = len(self.params[number]) - 1
        parts: list[dict[str, Any]] = [{} for _ in range(last + 1)]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                values = cut(value, size)
            elif isinstance(value, Tensor) and value.numel() > 1:
                values = [value.new_empty(0)] * len(parts)  # The plan says that it does not fit.
            elif isinstance(value, Tensor):
                # A count of steps: that of the parameter changes with its last part.
                values = [*value.detach().expand(last, *value.shape).clone(), value]
            else:
                values = [value] * len(parts)
            for part, each in zip(parts, values, strict=True):
                part[name] = each
        return parts

    def _can_use(self, number: int, state: Mapping[str, Any]) -> bool:
        """Return whether a state is in host memory, and can be cut as the parameter is."""
        param, is_cut = self.items.params[number], self._sizes[number] is not None
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        # One without numbers is left to the plan, which says so.
        return all(tensor.is_cpu or tensor.is_meta for tensor in tensors) and not (
            is_cut
            and any(
                tensor.stride() != param.stride()
                for tensor in tensors
                if tensor.shape == param.shape
            )
        )
