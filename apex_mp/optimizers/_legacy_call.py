"""The arguments of the legacy call `step(grads=, output_params=, scale=, grad_norms=)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

Lists: TypeAlias = list[list[Tensor | None]]
Groups: TypeAlias = Sequence[dict[str, Any]]


def grads_per_group(grads: Iterable[Any] | None, groups: Groups) -> Lists:
    """Return the gradients to step with: those given, else each parameter's own."""
    if grads is None:
        return [[param.grad for param in group["params"]] for group in groups]
    return _per_group("grads", grads, groups)


def outputs_per_group(output_params: Iterable[Any] | None, groups: Groups) -> Lists:
    """Return where each new parameter is also written; None where that is nowhere."""
    if output_params is None:
        return [[None] * len(group["params"]) for group in groups]
    return _per_group("output_params", output_params, groups)


def norm_per_group(
    grad_norms: Iterable[float | Tensor] | None, groups: Groups
) -> Sequence[float | Tensor | None]:
    """Return the gradient norm of each group, or None for each if none are given."""
    if grad_norms is None:
        return [None] * len(groups)
    norms = list(grad_norms)
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
