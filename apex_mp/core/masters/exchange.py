"""16-bit parameters that hold their float32 masters while an optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.masters.masters import write


class Exchange:
    """Parameters whose data and gradient are float32 ones for a while.

    The objects stay the same, so an optimizer finds its state, and whatever else it keeps of its
    parameters.

    Args:
        masters: By parameter, a tensor like it in float32; the step writes it.
        grads: By parameter, its gradient in float32, or None.
    """

    def __init__(self, masters: Mapping[Tensor, Tensor], grads: Mapping[Tensor, Tensor]) -> None:
        self._masters, self._grads = masters, grads
        self._weights: dict[Tensor, tuple[Tensor, Tensor | None]] = {}

    def enter(self) -> None:
        """Put masters and float32 gradients in place."""
        for param, master in self._masters.items():
            self._weights[param] = param.detach(), param.grad
            _put(param, master, self._grads.get(param))

    def leave(self) -> None:
        """Put weights and their gradients back, as they were."""
        for param, (weight, grad) in self._weights.items():
            _put(param, weight, grad)
        self._weights.clear()

    def copy_to_weights(self) -> None:
        """Round the masters to the weights, after `leave`."""
        parts = tensors.local_part
        write([(parts(param), parts(master)) for param, master in self._masters.items()])


@contextlib.contextmanager
def exchanged(
    masters: Mapping[Tensor, Tensor], grads: Mapping[Tensor, Tensor]
) -> Iterator[Exchange]:
    """A context in which parameters hold masters; see `Exchange`. Weights are not written."""
    exchange = Exchange(masters, grads)
    try:
        exchange.enter()
        yield exchange
    finally:
        exchange.leave()


def _put(param: Any, data: Any, grad: Tensor | None) -> None:
    param.grad = None  # One of another dtype would be refused.
    param.data = data
    if tensors.local_part(param) is not param:
        # A DTensor's data is that of a Python attribute.
        param._local_tensor, param._spec = data._local_tensor, data._spec
    param.grad = grad
