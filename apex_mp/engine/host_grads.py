"""`offload="gradients"`: gradients leave the GPU during backward.

All that is done with them is a row of copies on one stream of the GPU: a gradient to host memory,
or its sum with what is there. So the host waits only in `HostGrads.finish`, and a gradient that is
cleared needs nothing: the next one is written over it, later on the same stream.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import forks, readback, transfers
from apex_mp.core.tensors import is_wrapper, match_strides
from apex_mp.grads.in_host_memory import Held, is_mark, mark_like

# Elements that are added at a time.
_PIECE = 1 << 22
# The part of all gradients' bytes whose copies may be under way, beside the newest gradient.
_UNDER_WAY = 1 / 16


@dataclasses.dataclass(eq=False, kw_only=True)
class _Held(Held):
    """The gradient of a parameter.

    Attributes:
        param: The parameter.
        owner: Takes the gradient to host memory.
        memory: Where it lies; None before the first backward.
        number: Of the gradient: backward has stored as many where `.grad` was None.
        is_new: Whether backward has stored or added one since the last call of `HostGrads.of`.
    """

    param: weakref.ref[Tensor]
    owner: weakref.ref[HostGrads]
    memory: Tensor | None = None
    number: int = 0
    is_new: bool = False

    def add(self, mark: Any, grad: Tensor) -> None:
        owner, param = self.owner(), self.param()
        if owner is None or param is None or mark.number != self.number:
            raise RuntimeError(
                f"{self.name}.grad stands for a gradient in host memory that is gone, and backward "
                "adds to it; clear .grad when an optimizer is replaced, and do not put one back"
            )
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{self.name}.grad is in host memory, and backward adds a sparse gradient to it; "
                "offload must be True or False"
            )
        owner.send(self, match_strides(grad.detach(), param))


class HostGrads:
    """Takes the gradients of parameters to host memory when backward has accumulated them.

    A parameter's `.grad` is then a mark, to which backward adds: see `mark_like`.

    Args:
        who: The optimizer's name, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._held: dict[Tensor, _Held] = {}
        self._buses: dict[torch.device, transfers.Transfers] = {}
        self._last: dict[torch.device, Any] = {}  # the event of the last copy
        # Gradients whose memory may not be used anew, and the events of their copies.
        self._leaving: collections.deque[tuple[Any, Tensor]] = collections.deque()
        self._leaving_bytes, self._limit = 0, 0.0
        self._lock = threading.Lock()  # Autograd has a thread for each GPU.
        forks.leak_in_children(self)

    def watch(self, number: int, group: Mapping[str, Any]) -> None:
        """Take the gradients of a parameter group from now on."""
        itself = weakref.ref(self)
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            if not param.requires_grad or param in self._held:
                continue
            name = names[index] if names else f"params[{number}][{index}]"
            self._held[param] = _Held(
                f"{self._who}: {name}", param=weakref.ref(param), owner=itself
            )
            self._limit += _UNDER_WAY * param.nbytes
            take: Any = functools.partial(_take, itself)
            param.register_post_accumulate_grad_hook(take)

    @torch.no_grad()
    def take(self, param: Tensor) -> None:
        """Take a gradient that backward has stored in `.grad`."""
        grad = param.grad
        if grad is None or is_mark(grad) or grad.layout != torch.strided or is_wrapper(grad):
            return
        if not transfers.is_offloadable(param.device):
            return
        held = self._held[param]
        held.number += 1
        held.is_zero = True  # What is there does not count.
        self.send(held, match_strides(grad.detach(), param))
        param.grad = mark_like(param, held, held.number)

    def send(self, held: _Held, grad: Tensor) -> None:
        """Copy a gradient to host memory, or add it to what is there."""
        if readback.is_capturing():
            raise RuntimeError(
                f'{held.name}: a CUDA graph is captured, and offload is "gradients", which takes '
                "gradients to host memory during backward; a graph cannot hold that. Capture "
                "forward and backward with offload=True"
            )
        with self._lock:
            device, memory = grad.device, self._memory_for(held, grad)
            bus = self._bus(device)
            bus.wait_for_gpu()
            if held.is_zero:
                event = bus.to_host([(memory, grad)])
            else:
                targets, sources = (torch.split(_flat(each), _PIECE) for each in (memory, grad))
                event = bus.add_on_host(zip(targets, sources, strict=True))
            held.is_zero, held.is_new, self._last[device] = False, True, event
            self._keep(event, grad)

    def _memory_for(self, held: _Held, grad: Tensor) -> Tensor:
        """Return host memory for a gradient; the first call allocates that of all parameters."""
        if held.memory is None:
            params = [param for param, each in self._held.items() if each.memory is None]
            parts = transfers.pinned_together([param.nbytes for param in params])
            for param, part in zip(params, parts, strict=True):
                self._held[param].memory = _shaped(part, param)
        memory = held.memory
        assert memory is not None
        if memory.dtype != grad.dtype or memory.stride() != grad.stride():  # The model was changed.
            self._wait()
            memory = _shaped(transfers.pinned(grad.nbytes), grad).copy_(memory)
            held.memory = memory
        return memory

    def _bus(self, device: torch.device) -> transfers.Transfers:
        if device not in self._buses:
            self._wait()  # For copies of parameters that were on another device before.
            self._buses[device] = transfers.Transfers(device)
        return self._buses[device]

    def _keep(self, event: Any, grad: Tensor) -> None:
        """Keep a gradient until its copy has taken place, and few of them.

        The GPU waits, so that its memory can be used anew; the host, which may be ahead by a whole
        backward, does not.
        """
        while self._leaving:
            first, oldest = self._leaving[0]
            if not first.query():
                if self._leaving_bytes <= self._limit:
                    break
                self._buses[oldest.device].make_gpu_wait_for(first)
            self._leaving.popleft()
            self._leaving_bytes -= oldest.nbytes
        self._leaving.append((event, grad))
        self._leaving_bytes += grad.nbytes

    def _wait(self) -> None:
        for event in self._last.values():
            event.synchronize()
        self._leaving.clear()
        self._leaving_bytes = 0

    def finish(self) -> None:
        """Wait until all gradients that were taken are here."""
        with self._lock:
            self._wait()

    @torch.no_grad()
    def of(self, place: tuple[int, int], param: Tensor) -> Tensor | None:
        """Return the gradient that is here for a parameter, after `finish`; None: there is none."""
        grad: Any = param.grad
        held = self._held.get(param)
        is_new = held is not None and held.is_new
        if held is not None:
            held.is_new = False
        if grad is None:
            return None
        where = f"{self._who}: params[{place[0]}][{place[1]}]"
        if not is_mark(grad):
            if not is_new:
                return None
            raise RuntimeError(
                f"{where}.grad was replaced after its values went to host memory, as "
                'DistributedDataParallel does, and offload is "gradients"; it must be True'
            )
        if held is None or grad.held is not held or grad.number != held.number:
            raise RuntimeError(
                f"{where}.grad was taken to host memory by another optimizer whose offload is "
                '"gradients", too; one optimizer alone can step a parameter'
            )
        memory = held.memory
        assert memory is not None
        if held.is_zero:
            memory.zero_()
            held.is_zero = False
        return memory.to(grad.dtype)  # The model was cast.


def _take(owner: weakref.ref[HostGrads], param: Tensor) -> None:
    grads = owner()
    if grads is not None:
        grads.take(param)


def _shaped(memory: Tensor, like: Tensor) -> Tensor:
    return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
