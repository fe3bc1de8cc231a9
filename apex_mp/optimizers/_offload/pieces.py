"""What a step on the CPU steps, for parameters on a GPU; large parameters are cut to pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_mp.core.masters.store import MASTER
from apex_mp.optimizers._device_part import Groups, Places
from apex_mp.optimizers._state import master_dtype


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


class States(NamedTuple):
    """Where the states of parameters are.

    Attributes:
        groups: The parameter groups, without tensors on a GPU.
        state: The states of parameters.
        masters: Their masters.
        make: Completes both of a parameter, given its group and index, and returns the state.
    """

    groups: Groups
    state: Mapping[Tensor, dict[str, Any]]
    masters: Mapping[Tensor, Tensor]
    make: Callable[[int, int], dict[str, Any]]

    def of(self, param: Tensor) -> dict[str, Any] | None:
        """Return the state of a parameter, with its master; None: it has none."""
        state, master = self.state.get(param), self.masters.get(param)
        return state if state is None or master is None else {**state, MASTER: master}


class Parts:
    """The tensors of a step, cut as the parameters are; see `Items` for the lists.

    Args:
        items: What is stepped.
        sizes: By item the number of elements in a part; None: it is not cut.
        states: The states of parameters.
    """

    def __init__(self, items: Items, sizes: Sequence[int | None], states: States) -> None:
        self.items = items
        self.params = [*map(cut, items.params, sizes)]
        self.grads = [*map(cut, items.grads, sizes)]
        self.copies = [
            () if copy is None else cut(copy, size)
            for copy, size in zip(items.copies, sizes, strict=True)
        ]
        self._all, self._sizes = states, sizes
        self._states: list[Sequence[dict[str, Any]] | None] = []
        for number, param in enumerate(items.params):
            state = states.of(param)
            if state is not None:
                group = states.groups[items.places[number][0]]
                is_stale = MASTER in state and not master_dtype(param, group)
                if is_stale or not self._can_use(number, state):
                    state = self._made(number)
            self._states.append(None if state is None else self._cut_state(number, state))

    def existing_state(self, piece: Piece) -> dict[str, Any] | None:
        """Return the part of its parameter's state; None if there is none yet."""
        states = self._states[piece.number]
        return None if states is None else states[piece.part or 0]

    def new_state(self, piece: Piece) -> dict[str, Any]:
        """Return the same of a state that is completed."""
        number = piece.number
        states = self._states[number] = self._cut_state(number, self._made(number))
        return states[piece.part or 0]

    def _made(self, number: int) -> dict[str, Any]:
        self._all.make(*self.items.places[number])
        state = self._all.of(self.items.params[number])
        assert state is not None
        return state

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
