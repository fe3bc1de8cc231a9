"""The arguments of the legacy call `step(grads=, output_params=, scale=, grad_norms=)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from apex_mp._step_request import Groups, Lists, StepRequest


def request(
    grads: Iterable[Any] | StepRequest | None,
    output_params: Iterable[Any] | None,
    grad_norms: Iterable[float | Tensor] | None,
    groups: Groups,
) -> StepRequest:
    """Return the arguments of the legacy call as a request; one that is a request is returned."""
    if isinstance(grads, StepRequest):
        return grads
    return StepRequest(
        grads=None if grads is None else _per_group("grads", grads, groups),
        copies=None
        if output_params is None
        else _per_group("output_params", output_params, groups),
        norms=None if grad_norms is None else _norm_per_group(grad_norms, groups),
    )


def _norm_per_group(
    grad_norms: Iterable[float | Tensor], groups: Groups
) -> list[float | Tensor | None]:
    norms: list[float | Tensor | None] = list(grad_norms)
    if len(norms) != len(groups):
        raise ValueError(
            f"FusedAdam.step: grad_norms has {len(norms)} numbers; it must have one for each of "
            f"the {len(groups)} parameter groups"
        )
    return norms


def _per_group(name: str, given: Iterable[Any], groups: Groups) -> Lists:
    """A list for each group, of the three forms that the legacy call has."""
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
            f"FusedAdam.step: {name} has lists of {[len(one) for one in lists]} tensors, "
            f"the parameter groups have {sizes}; they must match"
        )
    for i, one in enumerate(lists):
        for j, item in enumerate(one):
            if not (item is None or isinstance(item, Tensor)):
                raise TypeError(
                    f"FusedAdam.step: {name}[{i}][{j}] is a {type(item).__name__}; "
                    "it must be a tensor or None"
                )
    return lists
