"""Checks of what an FP16_Optimizer is given: the optimizer inside, and the loss."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from apex_mp.core.masters.masters import LOW_PRECISION
from apex_mp.core.masters.steps_of_masters import check_lists


def inner_of(init_optimizer: Any, optimizer: Any, wrapper: type) -> Any:
    """Return the optimizer to wrap, given by one of two names.

    Raises:
        TypeError: It is not an optimizer, is a `wrapper` already, was not given once, or steps
            parameters that are not in the lists of its `param_groups`.
    """
    if (init_optimizer is None) == (optimizer is None):
        raise TypeError("FP16_Optimizer: give the optimizer to wrap once, as init_optimizer=")
    inner = init_optimizer if init_optimizer is not None else optimizer
    if isinstance(inner, wrapper):
        raise TypeError("FP16_Optimizer: init_optimizer is an FP16_Optimizer; wrap the inner one")
    # Old code has optimizers of its own that do not derive from torch's.
    if not (hasattr(inner, "param_groups") and callable(getattr(inner, "step", None))):
        raise TypeError(
            f"FP16_Optimizer: init_optimizer is a {type(inner).__name__}; it must be an optimizer"
        )
    check_lists("FP16_Optimizer", inner, LOW_PRECISION)
    return inner


def legacy_arguments(optimizer: Any) -> tuple[str, ...]:
    """Return which arguments of apex's legacy call the optimizer's step takes; may be none."""
    parameters = inspect.signature(optimizer.step).parameters
    if not {"grads", "output_params", "scale"} <= set(parameters):
        return ()
    return tuple(
        name for name in ("grads", "output_params", "scale", "grad_norms") if name in parameters
    )


def check_loss(loss: Any) -> None:
    """Refuse a loss that has no backward.

    Raises:
        TypeError: It is no floating tensor.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"FP16_Optimizer.backward: loss is a {kind}; it must be a floating tensor")
