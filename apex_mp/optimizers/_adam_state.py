"""What FusedAdam remembers of a parameter, and how it reads what other Adams remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import grads as _grads
from apex_mp import tensors
from apex_mp._state_checks import check_optimizer_state
from apex_mp.optimizers._kept import Kept

MOMENTS = ("exp_avg", "exp_avg_sq")
_LIKE_PARAM = (*MOMENTS, "master_param")


def completed(state: Mapping[str, Any], param: Tensor, *, with_master: bool) -> dict[str, Any]:
    """Return a state with what it lacks, and with nothing in another order than the parameter.

    Whatever is no tensor counts as lacking, but for a number of steps.
    """
    whole = dict(state)
    makers: dict[str, Callable[[], Tensor]] = {
        "step": lambda: _new_count(param, state.get("step")),
        "exp_avg": lambda: _new_moment(param),
        "exp_avg_sq": lambda: _new_moment(param),
    }
    if with_master:
        makers["master_param"] = lambda: param.detach().float()
    for key, make in makers.items():
        if not torch.is_tensor(whole.get(key)):
            whole[key] = make()
        elif key != "step":
            whole[key] = _grads.lie_as(whole[key], param)
    return whole


def _new_count(param: Tensor, steps: Any) -> Tensor:
    count = float(steps) if isinstance(steps, (int, float)) else 0.0
    return torch.full((), count, dtype=torch.float32, device=param.device)


def _new_moment(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=_dtype("exp_avg", param), requires_grad=False)


def check_amsgrad(group: Mapping[str, Any]) -> None:
    """Raise the old sentence if a parameter group asks for AMSGrad."""
    if group.get("amsgrad"):
        raise RuntimeError("FusedAdam does not support the AMSGrad variant.")


def adapt(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], options: Sequence[str]
) -> dict[str, Any]:
    """Return a saved state_dict as FusedAdam has it, for Optimizer.load_state_dict and `unpack`.

    Read are those of FusedAdam, of torch.optim.Adam and AdamW, and of the apex versions whose
    groups held the step count. Tensors are copies, so that two optimizers never share one.

    Args:
        saved: From `state_dict()`.
        groups: The parameter groups that it is for.
        options: Names of the options that a group here keeps if the saved one lacks them.

    Raises:
        RuntimeError: It was saved with amsgrad.
        TypeError, ValueError: A parameter's state is not that of Adam, or of another shape.
    """
    check_optimizer_state("FusedAdam", saved)
    saved_groups: list[dict[str, Any]] = [dict(group) for group in saved["param_groups"]]
    for saved_group in saved_groups:
        check_amsgrad(saved_group)
    sizes = [len(group["params"]) for group in groups]
    if [len(group["params"]) for group in saved_groups] != sizes:
        return dict(saved)  # torch says in which way they do not fit.
    states: dict[Any, Any] = dict(saved["state"])
    for group, saved_group in zip(groups, saved_groups, strict=True):
        step = saved_group.pop("step", None)
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            if states.get(index):
                states[index] = _adapt_state(index, states[index], param, step)
        for option in options:
            if option in group:  # an unpickled optimizer has a default more, of torch's
                saved_group.setdefault(option, group[option])
        if "decoupled_weight_decay" in saved_group:  # torch's name
            saved_group["adam_w_mode"] = saved_group.pop("decoupled_weight_decay")
    return {**saved, "state": states, "param_groups": saved_groups}


def _adapt_state(
    index: Any, state: Mapping[str, Any], param: Tensor, group_step: Any
) -> dict[str, Any]:
    adapted = dict(state)
    if group_step is not None:
        adapted.setdefault("step", group_step)
    missing = [key for key in ("step", *MOMENTS) if key not in adapted]
    if missing:
        raise ValueError(
            f"FusedAdam.load_state_dict: state[{index}] has {[*state]} and lacks {missing}; "
            "it must be the state of an Adam optimizer"
        )
    for key in _LIKE_PARAM:
        if key not in adapted:
            continue
        value = adapted[key]
        if not (torch.is_tensor(value) and value.is_floating_point()):
            kind = value.dtype if torch.is_tensor(value) else type(value).__name__
            raise TypeError(
                f"FusedAdam.load_state_dict: state[{index}]['{key}'] is of type {kind}; "
                "it must be a floating tensor"
            )
        reason = tensors.no_numbers(value)
        if reason is not None:
            raise TypeError(f"FusedAdam.load_state_dict: state[{index}]['{key}'] {reason}")
        if value.shape != param.shape:
            raise ValueError(
                f"FusedAdam.load_state_dict: state[{index}]['{key}'] has shape "
                f"{[*value.shape]}, its parameter {[*param.shape]}; they must match"
            )
        like_param = torch.empty_like(param, dtype=_dtype(key, param), requires_grad=False)
        adapted[key] = Kept(like_param.copy_(value))
    step = _count(index, adapted["step"])
    adapted["step"] = Kept(torch.tensor(step, dtype=torch.float32, device=param.device))
    return adapted


def _count(index: Any, step: Any) -> float:
    try:
        count = float(step)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements.
        count = math.nan
    if not 0.0 <= count < math.inf:
        raise ValueError(
            f"FusedAdam.load_state_dict: state[{index}]['step'] is {step!r}; "
            "it must be a number of steps"
        )
    return count


def _dtype(key: str, param: Tensor) -> torch.dtype:
    wide = param.dtype == torch.float64 and key in MOMENTS
    return torch.float64 if wide else torch.float32
