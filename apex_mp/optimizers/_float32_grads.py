"""The float32 gradients with which `MasterWeights` steps, made of 16-bit ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from apex_mp.core.tensors import Lists, local_part
from apex_mp.grads import shards
from apex_mp.grads.found_inf import FoundInf, clip_divisor, inverse
from apex_mp.grads.grad_slots import Grads
from apex_mp.grads.measured import measure
from apex_mp.masters.store import needs_master
from apex_mp.step.scaled_step import GradCheck, HostOutcome, ScaledStep, StepResult

_NameOf: TypeAlias = Callable[[Tensor], str]


class Float32Grads:
    """Makes the gradients of steps.

    Args:
        keep: Keep their memory between steps.

    Attributes:
        kept: The gradient of each 16-bit parameter; None if memory is not kept.
    """

    def __init__(self, keep: bool) -> None:
        self.kept: dict[Tensor, Tensor] | None = {} if keep else None

    @torch.no_grad()
    def of(
        self, grads: Grads, step: ScaledStep, name_of: _NameOf
    ) -> tuple[FoundInf, dict[Tensor, Tensor]]:
        """Make unscaled float32 gradients of 16-bit ones; others are unscaled in place.

        Returns:
            What was found in the gradients, in all processes; and the new ones by parameter.
        """
        if step.grads is not None:
            return FoundInf(), _given(grads.slots.groups, step.grads)
        params = grads.slots.params
        factor = inverse(step.scale)
        if step.clip_to is not None and step.clip_norm is not None:
            factor = factor / clip_divisor(step.clip_norm, step.clip_to)
        is_scaled = step.check or isinstance(factor, Tensor) or factor != 1.0
        others = [(param, self._other(param, name_of)) for param in grads.other_params()]
        new = {param: grad for param, grad in others if needs_master(param)}
        found, count = FoundInf(), len(params) if step.check else None
        for here in grads.plain.values():
            # By number, or by id: parameters may share a gradient.
            pairs: dict[int, tuple[int, Tensor, Tensor]] = {}
            for row, grad in zip(here.rows, here.grads, strict=True):
                if needs_master(params[row]):
                    new[params[row]] = self._empty(params[row])
                    pairs[-1 - row] = row, grad, local_part(new[params[row]])
                elif is_scaled:
                    pairs.setdefault(id(grad), (row, grad, grad))
            src = [grad for _, grad, _ in pairs.values()]
            dst = [grad for _, _, grad in pairs.values()]
            rows = [row for row, _, _ in pairs.values()] if step.check else []
            found.unscale(src, dst, factor, rows, count)
        if is_scaled:
            found.unscale_others([grad for _, grad in others], factor)
        if step.check and grads.has_parts:
            shards.agree(params, [found], sums=True, scale=step.scale)
        return found, new

    def _other(self, param: Tensor, name_of: _NameOf) -> Tensor:
        """Return a gradient that torch's operators unscale, in float32 if it has 16 bits."""
        grad = param.grad
        assert grad is not None  # It was read.
        if not needs_master(param):
            return grad
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"MasterWeights: the gradient of {name_of(param)} is sparse ({grad.layout}), and "
                f"its parameter of dtype {param.dtype}; with a float32 master it must be dense "
                "(layers with sparse=False have dense gradients)"
            )
        return grad.float()

    def _empty(self, param: Tensor) -> Tensor:
        grad = param.grad
        assert grad is not None  # It was read.
        kept = None if self.kept is None else self.kept.get(param)
        if kept is None or kept.shape != grad.shape or kept.stride() != grad.stride():
            kept = torch.empty_like(grad, dtype=torch.float32)
            if self.kept is not None:
                self.kept[param] = kept
        return kept


@torch.no_grad()
def check_gradients(grads: Grads, step: ScaledStep, name_of: _NameOf) -> GradCheck:
    """Check and measure gradients for a step that is taken later."""
    if grads.others:
        raise RuntimeError(
            f"GradScaler.clip_grad_norm_: the gradient of {name_of(grads.other_params()[0])} is "
            "sparse, or on a device without kernels; call scaler.unscale_(optimizer) before"
        )
    measured = measure(grads, step.scale)
    device = next(iter(measured.found.flags), torch.device("cpu"))
    norm = measured.norm(device) * inverse(step.scale)
    return GradCheck(measured.found.on(device), norm, grads.dtypes())


def result_of(grads: Grads, found: FoundInf, step: ScaledStep) -> StepResult:
    """Return what becomes of a step; the host waits if gradients were checked."""
    skipped, norms = False, list[float]()
    if step.found_inf is not None:
        skipped = bool(step.found_inf)
        norms = [] if step.clip_norm is None else [float(step.clip_norm)]
    elif step.check:
        skipped, norms = bool(found), [found.norm]
    rows = grads.rows()
    places = (
        (number, index)
        for number, params in enumerate(grads.slots.groups)
        for index in range(len(params))
    )
    without = [place for row, place in enumerate(places) if row not in rows]
    dtypes = grads.dtypes()
    if grads.has_parts:  # Another process may have gradients, and all know what it has found.
        dtypes |= {param.dtype for param in grads.slots.params}
    return StepResult(HostOutcome(skipped, norms), without, dtypes)


def _given(groups: Sequence[Sequence[Tensor]], lists: Lists) -> dict[Tensor, Tensor]:
    """Return the gradients that a step was given of 16-bit parameters; store those of others."""
    new: dict[Tensor, Tensor] = {}
    for params, of_params in zip(groups, lists, strict=True):
        for param, grad in zip(params, of_params, strict=True):
            if needs_master(param) and grad is not None:
                new[param] = grad.float()
            elif not needs_master(param):
                param.grad = grad
    return new
