"""What FusedSGD remembers of a parameter, and how it reads what torch.optim.SGD remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import tensors
from apex_mp._state_checks import check_optimizer_state
from apex_mp.optimizers._kept import Kept

BUFFER = "momentum_buffer"


def new_buffer(param: Tensor) -> Tensor:
    """Return a momentum buffer that no gradient has come to yet."""
    return torch.zeros_like(param, dtype=_dtype(param), requires_grad=False)


def adapt(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], options: Sequence[str]
) -> dict[str, Any]:
    """Return a saved state_dict as FusedSGD has it, for Optimizer.load_state_dict and `unpack`.

    Read are those of FusedSGD, here and in apex, and of torch.optim.SGD. Tensors are copies, so
    that two optimizers never share one.

    Args:
        saved: From `state_dict()`.
        groups: The parameter groups that it is for.
        options: Names of the options that a group here keeps if the saved one lacks them.

    Raises:
        TypeError, ValueError: A parameter's state is not that of SGD, or of another shape; or it
            was saved with maximize.
    """
    check_optimizer_state("FusedSGD", saved)
    saved_groups: list[dict[str, Any]] = [dict(group) for group in saved["param_groups"]]
    for number, saved_group in enumerate(saved_groups):
        if saved_group.get("maximize"):
            raise ValueError(
                f"FusedSGD.load_state_dict: param_groups[{number}] has maximize=True, which "
                "FusedSGD does not have; negate the loss instead"
            )
    sizes = [len(group["params"]) for group in groups]
    if [len(group["params"]) for group in saved_groups] != sizes:
        return dict(saved)  # torch says in which way they do not fit.
    states: dict[Any, Any] = dict(saved["state"])
    for group, saved_group in zip(groups, saved_groups, strict=True):
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            if states.get(index):
                states[index] = _adapt_state(index, states[index], param)
        for option in options:
            if option in group:  # an unpickled optimizer has a default more, of torch's
                saved_group.setdefault(option, group[option])
    return {**saved, "state": states, "param_groups": saved_groups}


def _adapt_state(index: Any, state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    where = f"FusedSGD.load_state_dict: state[{index}]"
    if BUFFER not in state:
        raise ValueError(
            f"{where} has {[*state]} and lacks ['{BUFFER}']; it must be the state of an SGD "
            "optimizer"
        )
    buffer = state[BUFFER]
    if buffer is None:  # torch's, of a parameter that has had no gradient
        return {key: value for key, value in state.items() if key != BUFFER}
    if not (torch.is_tensor(buffer) and buffer.is_floating_point()):
        kind = buffer.dtype if torch.is_tensor(buffer) else type(buffer).__name__
        raise TypeError(f"{where}['{BUFFER}'] is of type {kind}; it must be a floating tensor")
    reason = tensors.no_numbers(buffer)
    if reason is not None:
        raise TypeError(f"{where}['{BUFFER}'] {reason}")
    if buffer.shape != param.shape:
        raise ValueError(
            f"{where}['{BUFFER}'] has shape {[*buffer.shape]}, its parameter {[*param.shape]}; "
            "they must match"
        )
    return {**state, BUFFER: Kept(new_buffer(param).copy_(buffer))}


def _dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32
