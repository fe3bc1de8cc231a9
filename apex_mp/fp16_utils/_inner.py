"""What FP16_Optimizer asks of the optimizer inside, and of what else it is given."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


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


def check_static_scale(scale: Any) -> None:
    """Refuse a word, which amp takes as a scale.

    Raises:
        TypeError: It is one.
    """
    if isinstance(scale, str):
        raise TypeError(
            f"FP16_Optimizer: static_loss_scale is {scale!r}; it must be a number; a scale that "
            "adjusts itself is had by dynamic_loss_scale=True"
        )


def check_loss(loss: Any) -> None:
    """Refuse what has no backward.

    Raises:
        TypeError: It is no floating tensor.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"FP16_Optimizer.backward: loss is a {kind}; it must be a floating tensor")
