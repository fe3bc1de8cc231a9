"""What a step on the CPU steps, for parameters on a GPU; large parameters are cut to pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_mp.optimizers._device_part import Groups, Places


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
        begin: The first element in memory order; None if all are here, in the parameter's shape.
        end: The first that is not here.
        is_last: Whether the parameter ends here.
    """

    number: int
    layout: Layout
    begin: int | None = None
    end: int = 0
    is_last: bool = True

    @property
    def size(self) -> int:
        return self.layout.shape.numel() if self.begin is None else self.end - self.begin

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor of the parameter's layout."""
        return tensor if self.begin is None else _flat(tensor)[self.begin : self.end]

    def on_host(self, memory: Tensor) -> Tensor:
        """Return a flat tensor in the shape of these elements."""
        if self.begin is not None:
            return memory
        return memory.as_strided(self.layout.shape, self.layout.stride)

    def of_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the parameter's state that belongs to these elements."""
        if self.begin is None:
            return whole
        return {name: self._of_value(value) for name, value in whole.items()}

    def _of_value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == self.layout.shape:
            return self.of(value)
        if value.numel() > 1:
            return value.new_empty(0)  # The plan says that it does not fit.
        # A count of steps: that of the parameter changes with its last piece.
        return value if self.is_last else value.clone()

    def can_use(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state is in host memory, and can be cut as the parameter is."""
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        # One without numbers is left to the plan, which says so.
        return all(tensor.is_cpu or tensor.is_meta for tensor in tensors) and (
            self.begin is None
            or all(
                tensor.stride() == self.layout.stride
                for tensor in tensors
                if tensor.shape == self.layout.shape
            )
        )


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
