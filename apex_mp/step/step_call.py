"""What a call of `step` asks for: legacy arguments, or attributes that a loss scaler has set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.tensors import Groups, Lists
from apex_mp.step.scaled_step import ScaledStep


def scaled_step(
    who: str,
    optimizer: Any,
    grads: Iterable[Any] | None,
    output_params: Iterable[Any] | None,
    scale: float | Tensor,
    grad_norms: Iterable[float | Tensor] | None,
) -> ScaledStep:
    """Return the step that the arguments ask for, and GradScaler's attributes of the optimizer."""
    if not isinstance(scale, Tensor) and not scale > 0.0:
        raise ValueError(f"{who}.step: scale is {scale}; it must be more than 0")
    step: ScaledStep | None = getattr(optimizer, "scaled_step", None)
    # torch's GradScaler sets both around the call; grad_scale is None after unscale_.
    found_inf = getattr(optimizer, "found_inf", None)
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if grads is not None and (step is not None or found_inf is not None):
        raise ValueError(
            f"{who}.step: grads was given inside GradScaler or another loss scaler, which looks "
            "for inf and NaN in each parameter's .grad only; leave grads out"
        )
    if step is not None:
        return step
    if found_inf is not None and getattr(optimizer, "offload", False) == "gradients":
        raise RuntimeError(
            f'{who}: torch\'s GradScaler looks for inf in .grad, and with offload="gradients" '
            "gradients are in host memory; use apex_mp.amp.GradScaler"
        )
    if grad_scale is not None:
        scale = grad_scale if scale == 1.0 else scale * grad_scale
    groups: Groups = optimizer.param_groups
    return ScaledStep(
        grads=None if grads is None else _per_group(who, "grads", grads, groups),
        copies=None
        if output_params is None
        else _per_group(who, "output_params", output_params, groups),
        scale=scale,
        norms=None if grad_norms is None else _norm_per_group(who, grad_norms, groups),
        found_inf=found_inf,
        unscale=() if grad_scale is None else unscaled_dtypes(optimizer),
        warns=True,
    )


def unscaled_dtypes(optimizer: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes of gradients that a step inside GradScaler unscales in place."""
    return _UNSCALED[optimizer.unscale_grads]


# By the option `unscale_grads`. Unscaled, small gradients would underflow in float16.
_WIDE = (torch.float32, torch.bfloat16, torch.float64)
_UNSCALED = {None: _WIDE, True: (*_WIDE, torch.float16), False: ()}


def check_unscale_grads(who: str, value: Any) -> None:
    """Raise a TypeError unless `unscale_grads` is True, False or None."""
    if not (value is None or isinstance(value, bool)):
        raise TypeError(f"{who}: unscale_grads is {value!r}; it must be True, False or None")


def _norm_per_group(
    who: str, grad_norms: Iterable[float | Tensor], groups: Groups
) -> list[float | Tensor | None]:
    norms: list[float | Tensor | None] = list(grad_norms)
    if len(norms) != len(groups):
        raise ValueError(
            f"{who}.step: grad_norms has {len(norms)} numbers; it must have one for each of "
            f"the {len(groups)} parameter groups"
        )
    return norms


def _per_group(who: str, name: str, given: Iterable[Any], groups: Groups) -> Lists:
    """Return a list for each group, from any of the three forms of the legacy call."""
    items = list(given)
    sizes = [len(group["params"]) for group in groups]
    nested = bool(items) and all(isinstance(item, (list, tuple)) for item in items)
    if nested:
        lists = [list(item) for item in items]
    elif len(items) == sum(sizes):
        rest = iter(items)
        lists = [[next(rest) for _ in range(size)] for size in sizes]
    else:
        lists = [items]
    if [len(one) for one in lists] != sizes:
        raise ValueError(
            f"{who}.step: {name} has lists of {[len(one) for one in lists]} tensors, "
            f"the parameter groups have {sizes}; they must match"
        )
    for i, one in enumerate(lists):
        for j, item in enumerate(one):
            if not (item is None or isinstance(item, Tensor)):
                raise TypeError(
                    f"{who}.step: {name}[{i}][{j}] is a {type(item).__name__}; "
                    "it must be a tensor or None"
                )
    return lists
