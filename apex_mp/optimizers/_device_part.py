"""What of an optimizer lies on one device, and the plan that steps it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C, _extension
from apex_mp import grads as _grads
from apex_mp._step_request import Lists

Groups: TypeAlias = list[dict[str, Any]]
Places: TypeAlias = list[tuple[int, int]]
Norms: TypeAlias = list[float | Tensor | None]


def device_of(param: Tensor) -> torch.device:
    """The device whose plan steps a parameter."""
    return param.device


class Part:
    """The parameter groups, and lists given for them, without what belongs to other devices.

    Args:
        who: The optimizer's name, for messages.
        device: Where the parameters are.
        plan: Steps them.
        indices: For each group which of its parameters are there.
        param_groups: All groups with all parameters.
        lists: `grads`, `grads_of` and `copies` of a StepRequest.
    """

    def __init__(
        self,
        who: str,
        device: torch.device,
        plan: _C.AdamPlan,
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
        self._lists = {name: self._here(given) for name, given in lists.items()}

    def _here(self, lists: Lists | None) -> Lists | None:
        if lists is None:
            return None
        return [_some(one, here) for one, here in zip(lists, self._indices, strict=True)]

    def read(
        self,
        state: dict[Any, Any],
        scale: float | Tensor,
        norms: Norms | None,
        unscale: Sequence[torch.dtype] = (),
    ) -> Places:
        """Have the plan read its part; return places in the whole groups, and raise with those."""
        try:
            needs = self.plan.read(
                self.groups, state, scale=scale, norms=norms, unscale=unscale, **self._lists
            )
        except (RuntimeError, TypeError) as error:
            error.args = (re.sub(r"\[(\d+)\]\[(\d+)\]", self._name, str(error)),)
            raise
        return self._whole(needs)

    def _name(self, match: re.Match[str]) -> str:
        ((number, index),) = self._whole([(int(match[1]), int(match[2]))])
        return f"[{number}][{index}]"

    def _whole(self, places: Places) -> Places:
        return [(number, self._indices[number][index]) for number, index in places]

    def without_grad(self) -> Places:
        """Places in the whole groups of parameters that were read and have no gradient."""
        return self._whole(self.plan.without_grad)

    def has_kernels(self) -> bool:
        """Whether the plan can run; parameters without a gradient may be anywhere.

        Raises:
            RuntimeError: It cannot, and there is a gradient.
        """
        if self.plan.can_run:
            return True
        for number, index in self._places_with_grad():
            raise RuntimeError(self._no_kernels(*self._whole([(number, index)])[0]))
        return False

    def _no_kernels(self, number: int, index: int) -> str:
        wish = "it must be on the CPU or on a CUDA device"
        if self.device.type == "cuda":
            wish = _extension.build_hint("FORCE_CUDA=1 ")
        return (
            f"{self._who}: params[{number}][{index}] is on {self.device}, for which this build of "
            f"apex_mp has no kernels; {wish}"
        )

    def gradients(self) -> Iterator[tuple[Tensor, int, bool]]:
        """The gradients, the group of each, and whether the loss scale has scaled it."""
        for number, index in self._places_with_grad():
            param = self.groups[number]["params"][index]
            grad, scaled = self._gradient_of(param, number, index)
            yield _grads.lie_as(grad, param), number, scaled

    def _gradient_of(self, param: Tensor, number: int, index: int) -> tuple[Any, bool]:
        grads, grads_of = self._lists["grads"], self._lists["grads_of"]
        if grads is not None:
            return grads[number][index], True
        if grads_of is None:
            return param.grad, True
        source = grads_of[number][index]
        return (param.grad, False) if source is None else (source.grad, True)

    def _places_with_grad(self) -> Iterator[tuple[int, int]]:
        """Places in the groups of this part."""
        without = set(self.plan.without_grad)
        for number, group in enumerate(self.groups):
            for index in range(len(group["params"])):
                if (number, index) not in without:
                    yield number, index


def split(
    who: str,
    param_groups: Groups,
    lists: Mapping[str, Lists | None],
    plan_for: Callable[[torch.device], _C.AdamPlan],
) -> list[Part]:
    """Return the parts in the order of their first parameters, but the CPU last.

    Args:
        who: The optimizer's name, for messages.
        param_groups: All groups with all parameters.
        lists: `grads`, `grads_of` and `copies` of a StepRequest.
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
    # The CPU keeps the host busy: others begin before it.
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
