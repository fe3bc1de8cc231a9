"""Checks of hyperparameters, each with an error of one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_type(who: str, name: str, value: Any) -> None:
    """Raise a TypeError unless a hyperparameter is a number or a tensor; any value passes."""
    if not hasattr(value, "__float__"):
        is_text = isinstance(value, str) and any(character.isdigit() for character in value)
        hint = " (YAML reads 1e-3 as text; write 1.0e-3)" if is_text else ""
        raise TypeError(f"{who}: {name} is {value!r}; it must be a number{hint}")


def check_number(who: str, name: str, value: Any, *, at_least: float = -math.inf) -> None:
    """Check one hyperparameter."""
    check_type(who, name, value)
    if not value >= at_least:
        wish = "a number" if at_least == -math.inf else f"{at_least:g} or more"
        raise ValueError(f"{who}: {name} is {value}; it must be {wish}")


def check_lr(who: str, lr: Any) -> None:
    """Check a learning rate, which may be a tensor."""
    if not isinstance(lr, Tensor):
        check_number(who, "lr", lr, at_least=0.0)
    elif lr.numel() != 1:  # Reading one on a GPU would make the host wait.
        raise ValueError(f"{who}: lr is a tensor of {lr.numel()} elements; it must have 1")


def check_masters(who: str, value: Any) -> None:
    """Raise a ValueError for a string that names no kind of masters."""
    if isinstance(value, str) and value not in ("split", "float32"):
        raise ValueError(
            f"{who}: master_weights is {value!r}; it must be True, False, 'split' or 'float32'"
        )


def check_betas(who: str, betas: Any) -> None:
    """Check the two decay factors of moments."""
    if not isinstance(betas, (tuple, list)):
        raise TypeError(f"{who}: betas is {betas!r}; it must be two numbers in [0, 1)")
    for beta in betas:
        check_number(who, "one of betas", beta)
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{who}: betas is {betas}; it must be two numbers in [0, 1)")


def check_group(who: str, group: Mapping[str, Any]) -> None:
    """Check the options that optimizers have in common."""
    if group.get("amsgrad"):
        raise RuntimeError(f"{who} does not support the AMSGrad variant.")
    check_lr(who, group["lr"])
    for name in ("momentum", "eps", "weight_decay", "max_grad_norm"):
        if name in group:
            check_number(who, name, group[name], at_least=0.0)
    moments = group.get("moment_dtype", torch.float32)
    if moments not in (torch.float32, torch.bfloat16, torch.int8):
        raise ValueError(
            f"{who}: moment_dtype is {moments!r}; it must be torch.float32, torch.bfloat16 or "
            "torch.int8"
        )
    if group.get("stochastic_rounding") and moments == torch.float32:
        raise ValueError(
            f"{who}: stochastic_rounding is True; it must be False unless moment_dtype is "
            "torch.bfloat16 or torch.int8"
        )
    masters = group.get("master_weights", False)
    check_masters(who, masters)
    if "betas" in group:
        check_betas(who, group["betas"])
