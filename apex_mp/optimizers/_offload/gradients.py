"""`offload="gradients"`: gradients leave the GPU during backward."""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import forks, transfers
from apex_mp.core.grads.checks import match_strides
from apex_mp.core.grads.marks import is_mark, mark_like
from apex_mp.core.tensors import is_wrapper

# Elements that are accumulated at a time, and how many of these pieces are under way.
_PIECE = 1 << 22
_PIECES = 3


@dataclasses.dataclass(eq=False)
class _Kept:
    """The gradient of a parameter in host memory.

    Attributes:
        host: The gradient; None before the first backward.
        mark: The parameter's `.grad` while they are here.
        is_new: Whether backward has stored a gradient since the last call of `HostGrads.of`.
        node: The parameter's AccumulateGrad node, kept alive because it holds a hook.
    """

    node: Any
    host: Tensor | None = None
    mark: Tensor | None = None
    is_new: bool = False


class HostGrads:
    """Takes the gradients of parameters to host memory when backward has accumulated them.

    A parameter's `.grad` is then a mark, by which it is known that the gradient was not cleared.
    Gradients of one element stay.

    Args:
        who: The optimizer's name, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._kept: dict[Tensor, _Kept] = {}
        self._buses: dict[torch.device, transfers.Transfers] = {}
        self._last: dict[torch.device, Any] = {}  # the event of the last copy
        # Gradients whose copies may not have taken place, so that their memory is not used anew.
        self._leaving: collections.deque[tuple[Any, Tensor]] = collections.deque()
        self._free: list[Tensor] = []
        # Events, parts of gradients, and what is added to them then.
        self._arriving: collections.deque[tuple[Any, Tensor, Tensor]] = collections.deque()
        forks.leak_in_children(self)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Take the gradients of these parameters from now on."""
        itself = weakref.ref(self)
        for param in params:
            if not param.requires_grad or param in self._kept:
                continue
            node = torch.autograd.graph.get_gradient_edge(param).node
            self._kept[param] = _Kept(node)
            node.register_prehook(functools.partial(_before, itself, weakref.ref(param)))
            take: Any = functools.partial(_after, itself)
            param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def before(self, param: Tensor) -> None:
        """Called before backward adds to `.grad`, to which it would add the mark."""
        kept = self._kept[param]
        if param.grad is not kept.mark:  # Cleared, replaced, or the mark of another optimizer.
            kept.mark = None
        if is_mark(param.grad):
            param.grad = None

    @torch.no_grad()
    def after(self, param: Tensor) -> None:
        """Called after backward has added to `.grad`: take it."""
        kept, grad = self._kept[param], param.grad
        if grad is None or grad.layout != torch.strided or is_wrapper(grad):
            return
        if is_mark(grad) or grad.numel() <= 1 or not transfers.is_offloadable(param.device):
            return
        grad = match_strides(grad.detach(), param)
        bus = self._bus(param.device)
        bus.wait_for_gpu()
        if kept.mark is not None and kept.host is not None:
            self._add(bus, kept.host, grad)
        else:
            if kept.host is None or not _alike(kept.host, grad):
                kept.host = _pinned_like(grad)
            self._last[param.device] = bus.to_host([(kept.host, grad)])
        self._leaving.append((self._last[param.device], grad))
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        kept.mark, kept.is_new = mark_like(param), True
        param.grad = kept.mark

    def _bus(self, device: torch.device) -> transfers.Transfers:
        if device not in self._buses:
            self._buses[device] = transfers.Transfers(device)
        return self._buses[device]

    def _add(self, bus: transfers.Transfers, host: Tensor, grad: Tensor) -> None:
        """Add a gradient to one that is here, when it has come."""
        targets, sources = torch.split(_flat(host), _PIECE), torch.split(_flat(grad), _PIECE)
        for target, source in zip(targets, sources, strict=True):
            if len(self._arriving) == _PIECES:
                self._add_oldest()
            memory = self._free.pop() if self._free else transfers.pinned(8 * _PIECE)
            part = memory[: source.numel() * source.element_size()].view(source.dtype)
            event = self._last[grad.device] = bus.to_host([(part, source)])
            self._arriving.append((event, target, part))

    def _add_oldest(self) -> None:
        event, target, part = self._arriving[0]
        event.synchronize()
        self._arriving.popleft()
        target.add_(part)
        self._free.append(torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until all gradients that were taken are here."""
        while self._arriving:
            self._add_oldest()
        for event in self._last.values():
            event.synchronize()
        self._leaving.clear()

    def of(self, place: tuple[int, int], param: Tensor) -> Tensor | None:
        """Return the gradient that is here for a parameter, after `finish`; None: there is none.

        Args:
            place: Group and index of what it steps, for messages.
            param: The parameter.

        Raises:
            RuntimeError: Another optimizer has taken it, or `.grad` was replaced after it was
                taken.
        """
        grad, kept = param.grad, self._kept.get(param)
        is_new = kept is not None and kept.is_new
        if kept is not None:
            kept.is_new = False
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
        if kept is None or kept.mark is not grad:
            raise RuntimeError(
                f"{where}.grad was taken to host memory by another optimizer whose offload is "
                '"gradients", too; one optimizer alone can step a parameter'
            )
        return kept.host


def _before(owner: weakref.ref[HostGrads], param: weakref.ref[Tensor], _: Any) -> None:
    grads, itself = owner(), param()
    if grads is not None and itself is not None:
        grads.before(itself)


def _after(owner: weakref.ref[HostGrads], param: Tensor) -> None:
    grads = owner()
    if grads is not None:
        grads.after(param)


def _pinned_like(grad: Tensor) -> Tensor:
    size = grad.numel() * grad.element_size()
    memory = transfers.pinned(max(size, 1))[:size].view(grad.dtype)
    return memory.as_strided(grad.shape, grad.stride())


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
