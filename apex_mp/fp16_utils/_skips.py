"""What a skipped step says: which parameters held inf or NaN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from apex_mp.grads import NonFinite
from apex_mp.master_grads import MasterGrads

SKIPS_BEFORE_WARNING = 50
_PARAMETERS_NAMED = 3


def named_grads(
    param_groups: list[dict[str, Any]], grads: MasterGrads, names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every present gradient with a name for its parameter.

    Args:
        param_groups: The optimizer's groups; their `param_names` are used where they exist.
        grads: Knows the gradients and the model parameters of masters.
        names: Names of the model's parameters by id(), which come first.
    """
    for number, group in enumerate(param_groups):
        fallback = group.get("param_names")
        for index, param in enumerate(group["params"]):
            grad = grads.grad_of(param)
            if grad is None:
                continue
            name = names.get(id(grads.model_of.get(param, param)))
            if name is None:
                name = fallback[index] if fallback else f"group {number}, parameter {index}"
            yield name, grad


def lines(report: Sequence[NonFinite]) -> list[str]:
    """Return a line for each of the worst parameters, and one for the number of the others."""
    shown = [f"  {found}" for found in report[:_PARAMETERS_NAMED]]
    others = len(report) - _PARAMETERS_NAMED
    return shown + ([f"  and {others} more parameters"] if others > 0 else [])


def warn_of_endless_skips(
    report: Sequence[NonFinite], scale: float, *, who: str = "FP16_Optimizer"
) -> None:
    """Warn that lowering the scale does not help."""
    worst = f" The worst: {report[0]}." if report else ""
    warnings.warn(
        f"{who} has skipped {SKIPS_BEFORE_WARNING} steps in a row; the loss scale is now "
        f"{scale}. Gradients hold inf or NaN at every scale tried.{worst}",
        RuntimeWarning,
        stacklevel=5,
    )
