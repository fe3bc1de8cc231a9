"""Check and load the inner optimizer's part of a checkpoint, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from apex_mp.core.state_checks import check_optimizer_state

# State of torch's optimizers that has the parameter's shape. torch does not check shapes when it
# loads; the next step would fail, or broadcast.
_LIKE_PARAM = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
    "sum",
)


def check(who: str, saved: Any, optimizer: Any) -> None:
    """Raise an error if a state_dict is not one for an optimizer of these groups.

    An optimizer with hooks that may change the state checks it itself.
    """
    if has_load_hooks(optimizer):
        return
    check_optimizer_state(who, saved)
    ours, theirs = optimizer.param_groups, saved["param_groups"]
    if len(theirs) != len(ours):
        raise ValueError(
            f"{who}.load_state_dict: the saved optimizer has {len(theirs)} parameter groups, this "
            f"one has {len(ours)}; they must match"
        )
    for number, (group, saved_group) in enumerate(zip(ours, theirs, strict=True)):
        if len(saved_group["params"]) != len(group["params"]):
            raise ValueError(
                f"{who}.load_state_dict: group {number} of the saved optimizer has "
                f"{len(saved_group['params'])} parameters, that of this one has "
                f"{len(group['params'])}; they must match"
            )
        misfit = _misfit(optimizer, saved["state"], saved_group, group)
        if misfit is not None and has_known_state(optimizer):
            index, key, shape, wanted = misfit
            raise ValueError(
                f"{who}.load_state_dict: {key} of parameter {index} in group {number} has shape "
                f"{shape}, its parameter {wanted}; they must match"
            )


def has_load_hooks(optimizer: Any) -> bool:
    """Return whether hooks of an optimizer may change the state that it loads."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def has_known_state(optimizer: Any) -> bool:
    """Return whether we know which state of an optimizer has the parameter's shape."""
    return type(optimizer).__module__.startswith(("torch.optim.", "apex_mp.optimizers."))


def fits(
    optimizer: Any, states: Mapping[Any, Any], saved_group: Mapping[str, Any], group: Any
) -> bool:
    """Return whether the shapes in the states of a group are those of its parameters."""
    return _misfit(optimizer, states, saved_group, group) is None


def _like_param(optimizer: Any) -> tuple[str, ...]:
    """Return names of the state that has the parameter's shape; fused optimizers define them."""
    rule = getattr(optimizer, "_rule", None)
    return _LIKE_PARAM if rule is None else (*rule.layout.tensors, "master_param")


def _misfit(
    optimizer: Any,
    states: Mapping[Any, Any],
    saved_group: Mapping[str, Any],
    group: Mapping[str, Any],
) -> tuple[int, str, list[int], list[int]] | None:
    """Return the first state of a wrong shape: parameter index, key, shape and wanted shape."""
    names = _like_param(optimizer)
    pairs = zip(saved_group["params"], group["params"], strict=True)
    for index, (saved, param) in enumerate(pairs):
        state = states.get(saved) or {}
        for key in names:
            value = state.get(key)
            if torch.is_tensor(value) and value.shape != param.shape:
                return index, key, [*value.shape], [*param.shape]
    return None


def load(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load a state_dict into an optimizer; if that raises, restore its own state."""
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict(saved)
    except BaseException:
        # torch sets both before it checks the steps.
        optimizer.state, optimizer.param_groups = before
        raise
