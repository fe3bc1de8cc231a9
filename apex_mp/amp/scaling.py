"""One `with scale_loss(...)` block: a scaled loss in, unscaled gradients and a verdict out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import grads as _grads
from apex_mp.amp.casting import is_low
from apex_mp.amp.scaler import LossScaler
from apex_mp.amp.step_guard import Skips, guard_of
from apex_mp.fp16_utils import FP16_Optimizer

_LOG = logging.getLogger("apex_mp.amp")
_PARAMETERS_NAMED = 3
_warned_of_low_precision = False


@dataclasses.dataclass(slots=True)
class Route:
    """How a gradient gets to the optimizer.

    Attributes:
        source: The parameter that backward gives a gradient to.
        target: The parameter that the optimizer steps: the source itself, or its master.
        before: The unscaled gradient that the target had before the block.
        seen: The gradient that the source had: a master's was made from it.
    """

    source: Tensor
    target: Tensor
    before: Tensor | None = None
    seen: Tensor | None = None

    @property
    def has_master(self) -> bool:
        return self.source is not self.target


@dataclasses.dataclass(frozen=True)
class Overflow:
    """What there is to say about gradients that hold inf or NaN.

    Attributes:
        report: Which gradients hold how many.
        scale_before: The loss scale that they had.
        scale_after: The next one.
    """

    report: list[_grads.NonFinite]
    scale_before: float
    scale_after: float

    def lines(self) -> list[str]:
        """Return a line for each of the worst parameters, and one for the number of the others."""
        lines = [f"  {found}" for found in self.report[:_PARAMETERS_NAMED]]
        others = len(self.report) - _PARAMETERS_NAMED
        return lines + ([f"  and {others} more parameters"] if others > 0 else [])


@contextlib.contextmanager
def scaled_backward(
    loss: Tensor,
    optimizers: Sequence[Any],
    scaler: LossScaler,
    *,
    skips: Sequence[Skips] | None = None,
    names: Callable[[], Mapping[int, str]] = dict,
    announce: Callable[[Overflow], None] | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
    expect_float32: bool = True,
) -> Iterator[Tensor]:
    """Yield `loss` times the scale; when the block ends, unscale the gradients it has added.

    Gradients that were there before are unscaled: they are set aside and added again, so that each
    loss has its own scale. Parameters that the loss does not touch keep theirs. If the block
    raises, all gradients are as they were before it, unless they were left scaled.

    Args:
        loss: Of any shape and floating dtype; it may be NaN or inf: only gradients decide.
        optimizers: Those whose parameters get gradients; an overflow skips the next step of each.
        scaler: The scale of this loss; updated.
        skips: What to tell of an overflow, one for each optimizer [guards before their steps].
        names: Returns names of parameters by id(), for messages.
        announce: Is told of an overflow [a warning in the log].
        delay_unscale: Leave the gradients scaled: more losses with this scaler are to come.
        delay_overflow_check: Leave the verdict to the next block with this scaler.
        expect_float32: Warn, once, of gradients in low precision that no master is for.

    Raises:
        TypeError: The loss is not a tensor of a floating dtype.
        RuntimeError: An optimizer scales by itself.
    """
    _check(loss, optimizers)
    skips = [guard_of(optimizer) for optimizer in optimizers] if skips is None else skips
    scale = scaler.loss_scale()
    routes = [route for optimizer in optimizers for route in _routes(optimizer)]
    scaled_by = next((each.scaled_by for each in skips if each.scaled_by is not None), None)
    _set_aside(routes, scaled_by, scale)
    try:
        yield (loss if loss.dtype == torch.float64 else loss.float()) * scale
    except BaseException:
        if scaled_by is None:
            _put_back(routes)
        raise
    for each in skips:
        each.scaled_by = scale if delay_unscale else None
    if delay_unscale:
        return
    if expect_float32:
        _warn_of_low_precision(routes)
    _unscale(routes, scaler)
    if delay_overflow_check or not scaler.update_scale():
        return
    report = _grads.locate_nonfinite(_named_grads(optimizers, names()))
    (announce or _warn)(Overflow(report, scale, scaler.loss_scale()))
    for each in skips:
        each.overflowed(report, can_back_off=lambda: scaler.loss_scale() < scale)


def _check(loss: Any, optimizers: Sequence[Any]) -> None:
    if not torch.is_tensor(loss) or not loss.is_floating_point():
        kind = loss.dtype if torch.is_tensor(loss) else type(loss).__name__
        raise TypeError(f"scale_loss: loss is a {kind}; it must be a floating tensor")
    for optimizer in optimizers:
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                "scale_loss was given an FP16_Optimizer, which scales the loss itself; call "
                "optimizer.backward(loss), or give scale_loss the optimizer inside"
            )
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"scale_loss: optimizer is a {type(optimizer).__name__}; it must be an optimizer"
            )


def _routes(optimizer: Any) -> list[Route]:
    models: Mapping[Tensor, Tensor] = getattr(optimizer, "_amp_model_of", {})
    return [
        Route(models.get(param, param), param)
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def _set_aside(routes: list[Route], scaled_by: float | None, scale: float) -> None:
    """Take away the gradients that are there and unscaled; let scaled ones have our scale."""
    scaled = [route.source.grad for route in routes if route.source.grad is not None]
    if scaled_by is not None and scaled_by != scale and scaled:
        torch._foreach_mul_(scaled, scale / scaled_by)
    for route in routes:
        if route.has_master:
            # Whoever clears the gradients of the model clears those of its masters.
            if route.source.grad is None:
                route.target.grad = None
            route.before, route.target.grad = route.target.grad, None
        if scaled_by is None:
            route.seen, route.source.grad = route.source.grad, None
            if not route.has_master:
                route.before = route.seen


def _put_back(routes: list[Route]) -> None:
    for route in routes:
        route.source.grad = route.seen
        route.target.grad = route.before


@torch.no_grad()
def _unscale(routes: list[Route], scaler: LossScaler) -> None:
    """Give every target its unscaled gradient, with the one that it had before."""
    fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
    added: tuple[list[Tensor], list[Tensor]] = ([], [])
    sparse: list[tuple[Route, Tensor]] = []
    for route in routes:
        grad, before = route.source.grad, route.before
        if grad is None:
            route.source.grad, route.target.grad = route.seen, before
            continue
        if grad.layout is not torch.strided or (before is not None and before.is_sparse):
            sparse.append((route, _coalesced(grad)))
        elif before is not None:
            added[0].append(_grads.lie_as(grad, before))
            added[1].append(before)
            route.target.grad = before
        elif route.has_master:
            route.target.grad = torch.empty_like(grad, dtype=route.target.dtype)
            fresh[0].append(grad)
            fresh[1].append(route.target.grad)
        else:
            fresh[0].append(grad)
            fresh[1].append(grad)
    for _, grad in sparse:
        values = grad._values() if grad.is_sparse else grad
        fresh[0].append(values)
        fresh[1].append(values)
    if fresh[0]:
        scaler.unscale(*fresh)
    if added[0]:
        scaler.unscale_with_stashed(*added)
    for route, grad in sparse:
        route.target.grad = grad if route.before is None else route.before + grad


def _coalesced(grad: Tensor) -> Tensor:
    return grad.coalesce() if grad.is_sparse else grad


def _warn_of_low_precision(routes: list[Route]) -> None:
    global _warned_of_low_precision
    grads = [route.source.grad for route in routes if not route.has_master]
    if not _warned_of_low_precision and any(g is not None and is_low(g.dtype) for g in grads):
        _warned_of_low_precision = True
        _LOG.warning(
            "Incoming grads are not fp32 (not master grads). Downscaling non-fp32 grads may "
            "indicate an error. When using Amp, you don't need to call .half() on your model."
        )


def _named_grads(
    optimizers: Sequence[Any], names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        models = getattr(optimizer, "_amp_model_of", {})
        for number, group in enumerate(optimizer.param_groups):
            own_names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    name = names.get(id(models.get(param, param)))
                    if name is None and own_names:
                        name = own_names[index]
                    yield name or f"group {number}, parameter {index}", _coalesced(param.grad)


def _warn(overflow: Overflow) -> None:
    before, after = overflow.scale_before, overflow.scale_after
    change = f"goes from {before} to {after}" if after < before else f"stays {before}"
    first = f"Gradient overflow, skipping update; the loss scale {change}"
    _LOG.warning("%s", "\n".join([first, *overflow.lines()]))
