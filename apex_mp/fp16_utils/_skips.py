"""What a skipped step says: which parameters held inf or NaN."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from apex_mp.grads import NonFinite
from apex_mp.master_grads import MasterGrads

SKIPS_BEFORE_WARNING = 50
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
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
        for index, param in enumerate(group["params"]):
            grad = grads.grad_of(param)
            if grad is not None:
                yield _name_of(param, group, (number, index), grads, names), grad


def named_rows(
    rows: Sequence[int],
    without_grad: Collection[tuple[int, int]],
    param_groups: list[dict[str, Any]],
    grads: MasterGrads,
    names: Mapping[int, str],
) -> list[NonFinite]:
    """Return which parameters' gradients held inf or NaN, when only their rows are known.

    Args:
        rows: Numbers of theirs among the parameters that had a gradient in that step.
        without_grad: Group and index of those that had none.
        param_groups: As in `named_grads`, like the rest.
        grads: Likewise.
        names: Likewise.
    """
    had_none = {*without_grad}
    stepped = [
        (param, group, (number, index))
        for number, group in enumerate(param_groups)
        for index, param in enumerate(group["params"])
        if (number, index) not in had_none
    ]
    found = [stepped[row] for row in rows if row < len(stepped)]
    return [NonFinite(_name_of(*each, grads, names), tuple(each[0].shape)) for each in found]


def _name_of(
    param: Parameter,
    group: Mapping[str, Any],
    place: tuple[int, int],
    grads: MasterGrads,
    names: Mapping[int, str],
) -> str:
    name = names.get(id(grads.model_of.get(param, param)))
    if name is not None:
        return name
    number, index = place
    fallback = group.get("param_names")
    return fallback[index] if fallback else f"group {number}, parameter {index}"


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
        stacklevel=_frames_of_ours(),
    )


def _frames_of_ours() -> int:
    """The stacklevel at which a warning of the caller names the first line outside the package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
