"""What messages call the parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp.core.tensors import place_name
from apex_mp.grads.nonfinite import NonFinite
from apex_mp.masters.master_grads import MasterGrads

# A parameter, its group, and the numbers of the group and of the parameter in it.
_Place: TypeAlias = tuple[Parameter, Mapping[str, Any], tuple[int, int]]


class ParamNames:
    """Names for messages of the parameters of an optimizer.

    Args:
        grads: The gradients and masters; None: parameters have no masters.
        model: The module whose names are used first, then `param_names` of the groups, then group
            and index [None].
    """

    def __init__(self, grads: MasterGrads | None, model: torch.nn.Module | None) -> None:
        self._grads = grads
        named = () if model is None else model.named_parameters()
        self._of_model = {id(param): name for name, param in named}

    def of_model(self, param: Any) -> str:
        """Return the name of a parameter in the model; empty if it has none."""
        return self._of_model.get(id(param), "")

    def of(self, master: Parameter, param_groups: list[dict[str, Any]]) -> str:
        """Return the name of a master that is in a group."""
        places = self._places(param_groups)
        return next((self._name(*each) for each in places if each[0] is master), "parameter")

    def params(self, param_groups: list[dict[str, Any]]) -> Iterator[tuple[str, Parameter]]:
        """Yield every parameter in the groups with its name."""
        for each in self._places(param_groups):
            yield self._name(*each), each[0]

    def grads(self, param_groups: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        """Yield every gradient that there is, with the name of its parameter."""
        for name, param in self.params(param_groups):
            grad = param.grad if self._grads is None else self._grads.grad_of(param)
            if grad is not None:
                yield name, grad

    def rows(
        self,
        rows: Sequence[int],
        without_grad: Collection[tuple[int, int]],
        param_groups: list[dict[str, Any]],
    ) -> list[NonFinite]:
        """Return which gradients held inf or NaN in a step, given their rows."""
        had_none = {*without_grad}
        stepped = [each for each in self._places(param_groups) if each[2] not in had_none]
        found = [stepped[row] for row in rows if row < len(stepped)]
        return [NonFinite(self._name(*each), tuple(each[0].shape)) for each in found]

    def _places(self, param_groups: list[dict[str, Any]]) -> Iterator[_Place]:
        for number, group in enumerate(param_groups):
            for index, param in enumerate(group["params"]):
                yield param, group, (number, index)

    def _name(self, param: Parameter, group: Mapping[str, Any], place: tuple[int, int]) -> str:
        own = param if self._grads is None else self._grads.masters.model_of.get(param, param)
        name = self._of_model.get(id(own))
        if name is not None:
            return name
        return place_name(group, *place)
