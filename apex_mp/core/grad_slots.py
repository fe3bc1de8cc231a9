"""Where gradients come from: the parameters of an optimizer, read in one walk in C++."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import tensors
from apex_mp.core.step import Groups


class GradSlots:
    """The parameters of an optimizer's groups, each with a place for a gradient.

    Args:
        param_groups: The groups; later changes of their lists do not count.

    Attributes:
        params: The parameters, group by group.
    """

    def __init__(self, param_groups: Groups) -> None:
        lists = [group["params"] for group in param_groups]
        self.params: list[Tensor] = [*itertools.chain.from_iterable(lists)]
        self._ends = [*itertools.accumulate(map(len, lists))]

    def read(self) -> Grads:
        """Return the gradients that there are."""
        usual, unusual = _C.read_grads(self.params)
        plain = {device: (rows, grads) for device, rows, grads in usual}
        others: list[int] = []
        for row in unusual:
            grad = self.params[row].grad
            if grad is not None:
                _put(row, grad, plain, others)
        return Grads(self, plain, others)

    def counts(self, rows: Sequence[int]) -> list[int]:
        """Return how many of `rows`, which are sorted, lie in each group."""
        ends = [bisect.bisect_left(rows, end) for end in self._ends]
        return [end - begin for begin, end in itertools.pairwise([0, *ends])]


@dataclasses.dataclass(frozen=True)
class Grads:
    """The gradients of the parameters of `GradSlots`, as they were when these were read.

    Attributes:
        slots: The parameters.
        plain: By device, numbers of parameters, sorted, and their gradients, which the operators of
            this package read.
        others: Numbers of parameters whose gradient is sparse, a DTensor, or on a device without
            kernels: torch's operators read them.
    """

    slots: GradSlots
    plain: dict[torch.device, tuple[list[int], list[Tensor]]]
    others: list[int]

    def params(self) -> list[Tensor]:
        """Return the parameters with a plain gradient, device by device."""
        return [self.slots.params[row] for rows, _ in self.plain.values() for row in rows]

    def other_params(self) -> list[Tensor]:
        """Return those with another gradient."""
        return [self.slots.params[row] for row in self.others]


def _put(
    row: int,
    grad: Tensor,
    plain: dict[torch.device, tuple[list[int], list[Tensor]]],
    others: list[int],
) -> None:
    """Add a gradient that C++ has left to Python, at its place."""
    device = grad.device
    has_kernels = device.type == "cpu" or (device.type == "cuda" and _C.with_cuda)
    if not has_kernels or tensors.not_readable(grad) or not tensors.is_dense(grad):
        others.append(row)
        return
    rows, grads = plain.setdefault(device, ([], []))
    position = bisect.bisect(rows, row)
    rows.insert(position, row)
    grads.insert(position, grad)
