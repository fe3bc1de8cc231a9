"""Checks of the arguments of apex_mp.convert, each with an error of one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp.core.checkpoints.state_checks import file_advice


def check_state(function: str, state_dict: Any) -> None:
    """Check that `state_dict` is one of a model, not a file's name, a model or a whole checkpoint.

    Raises:
        TypeError: It is no mapping by names.
        ValueError: It holds no tensor, but a mapping that does.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        raise TypeError(
            f"{function}: state_dict is a {type(state_dict).__name__}{_advice(state_dict)}; it "
            "must be what a model's state_dict() returns"
        )
    if any(torch.is_tensor(value) for value in state_dict.values()):
        return
    inner = [
        key
        for key, value in state_dict.items()
        if isinstance(value, Mapping) and any(map(torch.is_tensor, value.values()))
    ]
    if inner:
        raise ValueError(
            f"{function}: state_dict is a whole checkpoint, of {[*state_dict]}; give the part that "
            f"is the model's, such as checkpoint[{inner[0]!r}]"
        )


def _advice(state_dict: Any) -> str:
    return ", not a dict by names" if isinstance(state_dict, Mapping) else file_advice(state_dict)


def check_model(function: str, model: Any) -> None:
    """Check that `model` is a module.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{function}: model is a {type(model).__name__}; it must be a torch.nn.Module"
        )


def check_optimizer(function: str, optimizer: Any) -> None:
    """Check that `optimizer` is an optimizer.

    Raises:
        TypeError: It is not.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise TypeError(
            f"{function}: optimizer is a {type(optimizer).__name__}; it must be an optimizer or a "
            "list of them"
        )


def check_keys(state: Mapping[str, Any], model: nn.Module) -> None:
    """Check that the keys are those of the model.

    Raises:
        ValueError: Keys are missing or unknown.
    """
    wanted = model.state_dict()
    missing = [
        key for key in wanted if key not in state and not key.endswith("num_batches_tracked")
    ]
    unexpected = [key for key in state if key not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"convert: the state_dict lacks {missing} and has {unexpected}, which the model has "
            "not; they must fit"
        )


def check_value(name: str, value: Any, tensor: Tensor) -> None:
    """Check that a value fits into the model's tensor.

    Raises:
        ValueError: It is no tensor, of another shape, or too large for float16.
    """
    if not torch.is_tensor(value):
        raise ValueError(
            f"convert: {name} is a {type(value).__name__}; it must be a tensor, as in the model"
        )
    if value.shape != tensor.shape:
        raise ValueError(
            f"convert: {name} has shape {[*value.shape]}, the model's has {[*tensor.shape]}; they "
            "must match"
        )
    if tensor.dtype == torch.float16 and value.is_floating_point():
        lost = torch.isinf(value.to(tensor.dtype)) & ~torch.isinf(value)
        if bool(lost.any()):
            largest = value[lost].abs().max().item()
            raise ValueError(f"convert: {name} holds {largest:g}, which float16 cannot hold")
