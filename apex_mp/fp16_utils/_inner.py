"""What FP16_Optimizer asks of the optimizer inside: groups, and one of two kinds of step."""

from __future__ import annotations

import inspect
from typing import Any


def inner_of(init_optimizer: Any, optimizer: Any, wrapper: type) -> Any:
    """Return the optimizer to wrap, given by one of two names.

    Raises:
        TypeError: It is not an optimizer, is a `wrapper` already, or was not given once.
    """
    if (init_optimizer is None) == (optimizer is None):
        raise TypeError("FP16_Optimizer: give the optimizer to wrap once, as init_optimizer=")
    inner = init_optimizer if init_optimizer is not None else optimizer
    if isinstance(inner, wrapper):
        raise TypeError("FP16_Optimizer: init_optimizer is an FP16_Optimizer; wrap the inner one")
    # Old code brings optimizers of its own that do not derive from torch's.
    if not (hasattr(inner, "param_groups") and callable(getattr(inner, "step", None))):
        raise TypeError(
            f"FP16_Optimizer: init_optimizer is a {type(inner).__name__}; it must be an optimizer"
        )
    return inner


def legacy_arguments(optimizer: Any) -> tuple[str, ...]:
    """Return the arguments of the legacy call that an optimizer's step takes, or none of them."""
    parameters = inspect.signature(optimizer.step).parameters
    if not {"grads", "output_params", "scale"} <= set(parameters):
        return ()
    return tuple(
        name for name in ("grads", "output_params", "scale", "grad_norms") if name in parameters
    )
