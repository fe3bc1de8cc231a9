"""The part of an optimizer on one device, and the plan that steps it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import extension
from apex_mp.core.step.scaled_step import Lists

Groups: TypeAlias = list[dict[str, Any]]
Places: TypeAlias = list[tuple[int, int]]
Norms: TypeAlias = list[float | Tensor | None]


def device_of(param: Tensor) -> torch.device:
    """Return the device whose plan steps a parameter."""
    return param.device


class Part:
    """The parameter groups and the lists of a request, with the parameters of one device only.

    Args:
        who: The optimizer's name, for messages.
        device: The device.
        plan: Steps the parameters.
        indices: For each group the indices of its parameters on the device.
        param_groups: All groups with all parameters.
        lists: `grads`, `grads_of` and `copies` of a ScaledStep.
    """

    def __init__(
        self,
        who: str,
        device: torch.device,
        plan: _C.StepPlan,
        indices: list[list[int]],
        param_groups: Groups,
        lists: Mapping[str, Lists | None],
    ) -> None:
        self._who = who
        self.device = device
        self.plan = plan
        self._indices = indices
        self.groups = [
            {**group, "params": _some(group["params"], here)}
            for group, here in zip(param_groups, indices, strict=True)
        ]
        self._lists: dict[str, Any] = {name: self._here(given) for name, given in lists.items()}

    def _here(self, lists: Lists | None) -> Lists | None:
        if lists is None:
            return None
        return [_some(one, here) for one, here in zip(lists, self._indices, strict=True)]

    def read(
        self,
        state: dict[Any, Any],
        masters: dict[Any, Any],
        make_state: Callable[[int, int], dict[str, Any]],
        scale: float | Tensor,
        unscale: Sequence[torch.dtype],
    ) -> None:
        """Make the plan read this part; errors name places in the whole groups."""

        def make(number: int, index: int) -> dict[str, Any]:
            return make_state(number, self._indices[number][index])

        try:
            self.plan.read(
                self.groups, state, masters, make, scale=scale, unscale=unscale, **self._lists
            )
        except (RuntimeError, TypeError) as error:
            error.args = (re.sub(r"\[(\d+)\]\[(\d+)\]", self._name, str(error)),)
            raise

    def _name(self, match: re.Match[str]) -> str:
        ((number, index),) = self._whole([(int(match[1]), int(match[2]))])
        return f"[{number}][{index}]"

    def _whole(self, places: Places) -> Places:
        return [(number, self._indices[number][index]) for number, index in places]

    def without_grad(self) -> Places:
        """Return places in the whole groups of parameters that were read and have no gradient."""
        return self._whole(self.plan.without_grad)

    def has_kernels(self) -> bool:
        """Return whether the plan can run; parameters without a gradient may be on any device.

        Raises:
            RuntimeError: It cannot, although there is a gradient.
        """
        if self.plan.can_run:
            return True
        for number, index in self.places_with_grad():
            raise RuntimeError(
                f"{self._who}: params[{number}][{index}] {extension.no_kernels(self.device)}"
            )
        return False

    def places_with_grad(self) -> Places:
        """Return places in the whole groups of parameters that were read and have a gradient."""
        return self._whole([place for _, place in self._with_grad()])

    def rows_with_grad(self) -> list[int]:
        """Return the positions, in the groups of this part, of parameters that have a gradient."""
        return [row for row, _ in self._with_grad()]

    def _with_grad(self) -> list[tuple[int, tuple[int, int]]]:
        without = set(self.plan.without_grad)
        places = [
            (number, index)
            for number, group in enumerate(self.groups)
            for index in range(len(group["params"]))
        ]
        return [(row, place) for row, place in enumerate(places) if place not in without]


def split(
    who: str,
    param_groups: Groups,
    lists: Mapping[str, Lists | None],
    plan_for: Callable[[torch.device], _C.StepPlan],
) -> list[Part]:
    """Return the parts in the order of their first parameters, but the CPU last.

    Args:
        who: The optimizer's name, for messages.
        param_groups: All groups with all parameters.
        lists: `grads`, `grads_of` and `copies` of a ScaledStep.
        plan_for: Returns a device's plan.

    Raises:
        ValueError: A list does not fit the groups.
    """
    for given in lists.values():
        _check_lengths(who, given, param_groups)
    indices: dict[torch.device, list[list[int]]] = {}
    for number, group in enumerate(param_groups):
        for index, param in enumerate(group["params"]):
            device = device_of(param)
            if device not in indices:
                indices[device] = [[] for _ in param_groups]
            indices[device][number].append(index)
    parts = [
        Part(who, device, plan_for(device), here, param_groups, lists)
        for device, here in indices.items()
    ]
    # The CPU comes last: its step keeps the host busy.
    return sorted(parts, key=lambda part: part.device.type == "cpu")


def _check_lengths(who: str, lists: Lists | None, param_groups: Groups) -> None:
    if lists is None:
        return
    sizes = [len(group["params"]) for group in param_groups]
    for number, size in enumerate(sizes):
        if not (
            number < len(lists) and isinstance(lists[number], list) and len(lists[number]) == size
        ):
            raise ValueError(
                f"{who}: what was given for group {number} is not a list with one item for "
                f"each of its {size} parameters"
            )


def _some(items: list[Any], indices: list[int]) -> list[Any]:
    return [items[index] for index in indices]
