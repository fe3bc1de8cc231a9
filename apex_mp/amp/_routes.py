"""Gradients on their way to optimizers: set aside before backward, unscaled and added up after."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp import grads as _grads
from apex_mp.amp._unscalers import Unscaler


@dataclasses.dataclass(slots=True)
class Route:
    """How a gradient gets to the optimizer.

    Attributes:
        source: The parameter that backward gives a gradient to.
        target: The parameter that the optimizer steps: the source itself, or its master.
        scaled_by: The scale of the gradient that is there, if it was left scaled, else None.
        before: The unscaled gradient that the target had before the block.
        seen: The gradient that the source had: a master's was made from it.
        copy: What it held, if it is a view, whose memory backward may write.
    """

    source: Tensor
    target: Tensor
    scaled_by: float | None = None
    before: Tensor | None = None
    seen: Tensor | None = None
    copy: Tensor | None = None

    @property
    def has_master(self) -> bool:
        return self.source is not self.target

    @property
    def is_scaled(self) -> bool:
        return self.scaled_by is not None


def routes_of(optimizer: Any, scaled_by: float | None = None) -> list[Route]:
    """Return a route for each parameter of an optimizer.

    Args:
        optimizer: Any object with param_groups.
        scaled_by: The scale of its gradients, if they were left scaled [None].
    """
    models: Mapping[Tensor, Tensor] = getattr(optimizer, "_amp_model_of", {})
    return [
        Route(models.get(param, param), param, scaled_by)
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def set_aside(routes: Iterable[Route]) -> None:
    """Take away the unscaled gradients that are there; those that were left scaled stay."""
    for route in routes:
        if route.has_master:
            _clear_with_model(route)
            route.before, route.target.grad = route.target.grad, None
        if not route.is_scaled:
            route.seen, route.source.grad = route.source.grad, None
            if not route.has_master:
                route.before = route.seen
                if route.seen is not None and not route.seen.is_sparse and route.seen._is_view():
                    # DistributedDataParallel may write this memory anew: a view of its bucket.
                    route.copy = route.seen.clone()


def check_before(routes: Iterable[Route], unscaler: Unscaler) -> None:
    """Look for inf and NaN in what was set aside."""
    before = [_values(_coalesced(route.before)) for route in routes if route.before is not None]
    if before:
        unscaler.check([_real(grad) for grad in before])


def put_back(routes: Iterable[Route]) -> None:
    """Restore what `set_aside` took, and forget what has come since."""
    for route in routes:
        if not route.is_scaled:
            route.source.grad = route.seen
            if route.copy is not None and route.seen is not None:
                with torch.no_grad():
                    route.seen.copy_(route.copy)
        if not route.is_scaled or route.has_master:
            route.target.grad = route.before


def clear(routes: Iterable[Route]) -> None:
    """Forget what `set_aside` took."""
    for route in routes:
        if not route.is_scaled or route.has_master:
            route.before = route.seen = None


@torch.no_grad()
def scale_by(routes: Iterable[Route], scale: float) -> None:
    """Scale the gradients that are there, so that backward adds scaled ones to them.

    Those of masters stay: backward starts anew in the parameter of the model.
    """
    for route in routes:
        if route.has_master:
            _clear_with_model(route)
        if route.source.grad is None or route.scaled_by == scale:
            continue
        if route.has_master and not route.is_scaled:
            route.source.grad = torch.zeros_like(route.source.grad)
        else:
            route.source.grad.mul_(scale / (route.scaled_by or 1.0))


def _clear_with_model(route: Route) -> None:
    # Whoever clears the gradients of the model clears those of its masters.
    if route.source.grad is None:
        route.target.grad = None


@torch.no_grad()
def unscale(routes: Iterable[Route], unscaler: Unscaler) -> None:
    """Give every target its unscaled gradient, with the one that it had before.

    Args:
        routes: As `set_aside` left them, with the gradients of backward.
        unscaler: By which scale, and who is told of inf and NaN.
    """
    fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
    added: tuple[list[Tensor], list[Tensor]] = ([], [])
    sparse: list[tuple[Route, Tensor]] = []
    for route in routes:
        grad, before, target = route.source.grad, route.before, route.target
        if route.copy is not None and grad is not None and _share_memory(grad, before):
            before = route.copy
        if grad is None:
            route.source.grad, target.grad = route.seen, before
        elif grad.is_sparse or (before is not None and before.is_sparse):
            grad = _coalesced(grad).to(target.dtype)
            _append(fresh, _values(grad), _values(grad))
            sparse.append((route, grad))
        elif before is not None:
            _append(added, _grads.lie_as(grad, before), before)
            target.grad = before
        elif route.has_master:
            target.grad = torch.empty_like(grad, dtype=target.dtype)
            _append(fresh, grad, target.grad)
        else:
            _append(fresh, grad, grad)
    if fresh[0]:
        unscaler.unscale(*fresh)
    if added[0]:
        unscaler.add_unscaled(*added)
    for route, grad in sparse:
        route.target.grad = _sum(grad, route.before)
    # An unscaled gradient may be too large for float16 where the scaled one was not.
    half = [grad for pair in (fresh, added) for grad in pair[1] if grad.dtype is torch.float16]
    if half:
        unscaler.check(half)


def _share_memory(grad: Tensor, before: Tensor | None) -> bool:
    if before is None or grad.is_sparse:
        return False
    return grad.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


def _append(lists: tuple[list[Tensor], list[Tensor]], source: Tensor, target: Tensor) -> None:
    lists[0].append(_real(source))
    lists[1].append(_real(target))


def _real(grad: Tensor) -> Tensor:
    # The operators know of real numbers.
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _coalesced(grad: Tensor) -> Tensor:
    return grad.coalesce() if grad.is_sparse else grad


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


def _sum(grad: Tensor, before: Tensor | None) -> Tensor:
    if before is None:
        return grad
    return grad + before if before.is_sparse else before + grad  # torch wants the dense one first


def named_grads(
    optimizers: Iterable[Any], names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of optimizers, each with a name for its parameter.

    Args:
        optimizers: Any objects with param_groups.
        names: Names of parameters, of the model's where there are masters, by id().
    """
    for optimizer in optimizers:
        models = getattr(optimizer, "_amp_model_of", {})
        for number, group in enumerate(optimizer.param_groups):
            own_names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = names.get(id(models.get(param, param)))
                if name is None and own_names:
                    name = own_names[index]
                yield name or f"group {number}, parameter {index}", _values(_coalesced(param.grad))
