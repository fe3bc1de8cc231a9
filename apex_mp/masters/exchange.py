"""16-bit parameters that hold their float32 masters while an optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from apex_mp import _C
from apex_mp.core import tensors
from apex_mp.masters.masters import write


class Exchange:
    """Parameters whose data and gradient are float32 ones for a while.

    The objects stay the same, so an optimizer finds its state, and whatever else it keeps of its
    parameters; and so does the node of the graph that accumulates a gradient, with its hooks.

    Args:
        masters: By parameter, a tensor like it in float32; the step writes it, or puts another
            one into the parameter, which then replaces it here.
        grads: By parameter, its gradient in float32, or None.
    """

    def __init__(self, masters: dict[Tensor, Tensor], grads: Mapping[Tensor, Tensor]) -> None:
        self._masters, self._grads = masters, grads
        self._weights: dict[Tensor, tuple[Tensor, Tensor | None]] = {}

    def enter(self) -> None:
        """Put masters and float32 gradients in place."""
        assert self._grads.keys() <= self._masters.keys()  # Nothing is stepped in 16 bits.
        for param, master in self._masters.items():
            self._weights[param] = param.detach(), param.grad
            _put(param, master, self._grads.get(param))

    def leave(self) -> None:
        """Put weights and their gradients back, as they were; a cleared gradient stays so.

        After an interrupt it can be called again.
        """
        for param in [*self._weights]:
            weight, grad = self._weights[param]
            if param.dtype != weight.dtype:
                if param in self._grads and param.grad is None:
                    self._weights[param] = weight, (grad := None)
                self._masters[param] = param.detach()
            _put(param, weight, grad)
            del self._weights[param]

    @contextlib.contextmanager
    def ending(self) -> Iterator[Exchange]:
        """A context at whose end parameters have their weights, whatever was raised."""
        try:
            yield self
        finally:
            try:
                self.leave()
            except BaseException:  # An interrupt; a second one would have to hit this line.
                self.leave()
                raise

    def copy_to_weights(self) -> None:
        """Round the masters to the weights, after `leave`."""
        pairs = [*self._masters.items()]
        if any(type(param) not in tensors.PLAIN_TYPES for param in self._masters):
            parts = tensors.local_part
            pairs = [(parts(param), parts(master)) for param, master in pairs]
        write(pairs)


@contextlib.contextmanager
def exchanged(masters: dict[Tensor, Tensor], grads: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """A context in which parameters hold masters; see `Exchange`. Weights are not written."""
    with Exchange(masters, grads).ending() as exchange:
        exchange.enter()
        yield


def _put(param: Any, data: Any, grad: Tensor | None) -> None:
    _C.put_data(param, data)
    if type(param) not in tensors.PLAIN_TYPES and tensors.local_part(param) is not param:
        # A DTensor's data is that of a Python attribute.
        param._local_tensor, param._spec = data._local_tensor, data._spec
    param.grad = grad
