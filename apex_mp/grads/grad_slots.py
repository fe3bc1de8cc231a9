"""Where gradients come from: the parameters of an optimizer, read in one walk in C++."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import tensors
from apex_mp.core.tensors import Groups, Lists


class GradSlots:
    """The parameters of an optimizer's groups, and where backward leaves their gradients.

    Args:
        param_groups: The groups; later changes of their lists do not count.
        model_of: The parameter that backward writes to, of each that has a master [none has].

    Attributes:
        groups: The parameters that are stepped, a list for each group.
        models: As `groups`: the parameter of the model, or None if there is no master of it.
        params: The parameters that are stepped, group by group.
        sources: For each the one that backward writes to: itself, or that of the model.
        with_master: Numbers of the slots whose stepped parameter is a master.
    """

    def __init__(self, param_groups: Groups, model_of: Mapping[Any, Tensor] | None = None) -> None:
        self.groups: list[list[Tensor]] = [[*group["params"]] for group in param_groups]
        self.params = [*itertools.chain.from_iterable(self.groups)]
        self.models: Lists = [[None] * len(params) for params in self.groups]
        self.sources, self.with_master = self.params, list[int]()
        if model_of:
            self.models = [[*map(model_of.get, params)] for params in self.groups]
            models = [*itertools.chain.from_iterable(self.models)]
            pairs = zip(models, self.params, strict=True)
            self.sources = [param if model is None else model for model, param in pairs]
            self.with_master = [row for row, model in enumerate(models) if model is not None]

    def fits(self, param_groups: Groups) -> bool:
        """Whether the groups still hold the same parameters."""
        return len(param_groups) == len(self.groups) and all(
            _C.same_items(group["params"], params)
            for group, params in zip(param_groups, self.groups, strict=True)
        )

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameter that backward writes to and the one that is stepped, of each slot."""
        return zip(self.sources, self.params, strict=True)

    def read(self) -> Grads:
        """Return the gradients that exist now."""
        plain, unusual, has_parts = _C.read_grads(self.sources)
        others: list[int] = []
        for row in unusual:
            grad = self.sources[row].grad
            if grad is not None:
                _put(row, grad, plain, others)
        return Grads(self, plain, others, has_parts)


@dataclasses.dataclass(frozen=True)
class Grads:
    """The gradients of the parameters of `GradSlots`, as they were when these were read.

    Attributes:
        slots: The parameters.
        plain: By device, gradients that the operators of this package read, and the numbers of
            their parameters, sorted. A DTensor's is the part that this process holds.
        others: Numbers of parameters whose gradient is sparse, or sharded another way than the
            parameter, or on a device without kernels. torch's operators read these.
        has_parts: Whether a parameter is a DTensor, with or without a gradient.
    """

    slots: GradSlots
    plain: dict[torch.device, _C.DeviceGrads]
    others: list[int]
    has_parts: bool

    def rows(self) -> set[int]:
        """Return the numbers of all parameters with a gradient."""
        return set(self.others).union(*(here.rows for here in self.plain.values()))

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the gradients, or of their parameters in `others`."""
        plain = (dtype for here in self.plain.values() for dtype in here.dtypes)
        return {*plain, *(param.dtype for param in self.other_params())}

    def other_params(self) -> list[Tensor]:
        """Return the parameters whose gradients are in `others`."""
        return [self.slots.sources[row] for row in self.others]


def _put(
    row: int, grad: Tensor, plain: dict[torch.device, _C.DeviceGrads], others: list[int]
) -> None:
    """Insert a gradient that C++ does not read, in order of rows."""
    device = grad.device
    readable = tensors.has_kernels(device) and tensors.not_readable(grad) is None
    if not (readable and tensors.is_dense(grad)):
        others.append(row)
        return
    plain.setdefault(device, _C.DeviceGrads(device)).insert(row, grad)
