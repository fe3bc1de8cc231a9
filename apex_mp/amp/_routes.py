"""Gradients on their way to optimizers: set aside before backward, unscaled and added up after."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from apex_mp.core import grads as _grads
from apex_mp.core import tensors
from apex_mp.core.found_inf import FoundInf, inverse
from apex_mp.core.tensors import is_wrapper


@dataclasses.dataclass(frozen=True)
class Unscaling:
    """The scale of a loss, and what is found while its gradients are divided by it.

    Attributes:
        scale: What the loss was multiplied by; 0-dim on a device that the host does not wait for.
        found_inf: Of the scaled gradients.
        found_in_sum: Of unscaled ones, whose inf and NaN are not the fault of the scale.
    """

    scale: float | Tensor
    found_inf: FoundInf = dataclasses.field(default_factory=FoundInf)
    found_in_sum: FoundInf = dataclasses.field(default_factory=FoundInf)


@dataclasses.dataclass(slots=True)
class Route:
    """How a gradient gets to the optimizer.

    Attributes:
        source: The parameter that backward gives a gradient to.
        target: The parameter that the optimizer steps: the source itself, or its master.
        place: Its parameter group and its index in it.
        scaled_by: The scale of the gradient that is there, if it was left scaled, else None.
        before: The unscaled gradient that the target had before the block.
        seen: The gradient that the source had: a master's was made from it.
        copy: What it held, if it is a view, whose memory backward may write.
    """

    source: Tensor
    target: Tensor
    place: tuple[int, int]
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
        Route(models.get(param, param), param, (number, index), scaled_by)
        for number, group in enumerate(optimizer.param_groups)
        for index, param in enumerate(group["params"])
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
                if route.seen is not None and _is_strided_view(route.seen):
                    # DistributedDataParallel may write this memory anew: a view of its bucket.
                    route.copy = route.seen.clone()


def check_before(routes: Iterable[Route], unscaling: Unscaling) -> None:
    """Look for inf and NaN in what was set aside."""
    before = [dense_values(route.before) for route in routes if route.before is not None]
    if before:
        unscaling.found_in_sum.check([_real(_writable(grad)) for grad in before])


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
            route.source.grad = _writable(route.source.grad)
            route.source.grad.mul_(scale / (route.scaled_by or 1.0))


def _clear_with_model(route: Route) -> None:
    # A user who clears the gradients of the model wants those of the masters cleared too.
    if route.source.grad is None:
        route.target.grad = None


@torch.no_grad()
def unscale(routes: Iterable[Route], unscaling: Unscaling) -> None:
    """Give every target its unscaled gradient, with the one that it had before.

    Args:
        routes: As `set_aside` left them, with the gradients of backward.
        unscaling: The scale; what is found is added to it.

    Raises:
        RuntimeError: A gradient holds no numbers, or numbers that cannot be scaled.
    """
    fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
    added: tuple[list[Tensor], list[Tensor]] = ([], [])
    new: list[tuple[Route, Tensor]] = []  # gradients that are not added up in place
    for route in routes:
        _make_writable(route)
        grad, before, target = route.source.grad, route.before, route.target
        if route.copy is not None and grad is not None and _share_memory(grad, before):
            before = route.copy
        if grad is None:
            route.source.grad, target.grad = route.seen, before
        elif is_wrapper(grad):
            new.append((route, grad))
        elif grad.is_sparse or (before is not None and before.is_sparse):
            grad = _coalesced(grad).to(target.dtype)
            _append(fresh, dense_values(grad), dense_values(grad))
            new.append((route, grad))
        elif before is not None:
            _append(added, _grads.lie_as(grad, before), before)
            target.grad = before
        elif route.has_master:
            target.grad = torch.empty_like(grad, dtype=target.dtype)
            _append(fresh, grad, target.grad)
        else:
            _append(fresh, grad, grad)
    found_inf, inv_scale = unscaling.found_inf, inverse(unscaling.scale)
    found_inf.unscale(*fresh, inv_scale)
    found_inf.add_unscaled(*added, inv_scale)
    found_inf.unscale_wrappers([grad for _, grad in new if is_wrapper(grad)], inv_scale)
    for route, grad in new:
        route.target.grad = _sum(grad, route.before)
    # An unscaled gradient may be too large for float16 where the scaled one was not.
    both = (*fresh[1], *added[1])
    unscaling.found_in_sum.check([grad for grad in both if grad.dtype is torch.float16])


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


def _writable(grad: Tensor) -> Tensor:
    """Return the gradient, or a copy if its strides or negation forbid writing to it."""
    return tensors.writable(grad) if grad.layout is torch.strided else grad


def _make_writable(route: Route) -> None:
    """Give a route gradients that can be written to.

    Raises:
        RuntimeError: The gradient of backward has no numbers in memory, or cannot be scaled.
    """
    if route.before is not None:
        route.before = _writable(route.before)
    grad = route.source.grad
    if grad is None or grad.is_sparse or tensors.is_usual(grad):
        return
    resolved = _writable(grad)
    if route.has_master or not is_wrapper(grad) or isinstance(grad, FakeTensor):
        reason = tensors.no_numbers(resolved)
        if reason is None and not grad.is_complex():
            reason = tensors.not_floating(resolved)
        if reason is not None:
            number, index = route.place
            raise RuntimeError(f"scale_loss: grads[{number}][{index}] {reason}")
    if resolved is not grad:
        route.source.grad = resolved


def _is_strided_view(grad: Tensor) -> bool:
    return not grad.is_sparse and not is_wrapper(grad) and grad._is_view()


def _coalesced(grad: Tensor) -> Tensor:
    return grad.coalesce() if grad.is_sparse else grad


def dense_values(grad: Tensor) -> Tensor:
    """Return a gradient, or the values of a sparse one."""
    return _coalesced(grad)._values() if grad.is_sparse else grad


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
                grad = dense_values(param.grad)
                grad = grad.to_local() if hasattr(grad, "to_local") else grad  # of a DTensor
                if not is_wrapper(grad):  # The inf and NaN of others cannot be counted.
                    yield name or f"group {number}, parameter {index}", grad
