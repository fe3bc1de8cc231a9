"""Checks of load_state_dict's argument, each with an error of one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# One of these keys is in the state of every optimizer, FP16_Optimizer's included.
_OF_OPTIMIZERS = {"param_groups", "optimizer_state_dict"}


def as_dict(who: str, state_dict: Any) -> dict[Any, Any]:
    """Return a state_dict as a dict, its values as they are."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{who}.load_state_dict: state_dict is a {type(state_dict).__name__}"
            f"{file_advice(state_dict)}; it must be what state_dict() returned"
        )
    return dict(state_dict)


def file_advice(given: Any) -> str:
    """Return the end of a sentence about a file's name given instead of its content."""
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        return f", {str(given)!r}, which apex_mp.load_checkpoint opens"
    return ""


def part_advice(saved: Mapping[Any, Any]) -> str:
    """Return the end of a sentence about a whole checkpoint given instead of one part of it."""
    for key, value in saved.items():
        if isinstance(value, Mapping) and _OF_OPTIMIZERS & value.keys():
            return f"; give the part that is an optimizer's, checkpoint[{key!r}]"
    return ""


def check_optimizer_state(who: str, saved: Any) -> None:
    """Refuse what an optimizer's `state_dict()` cannot have returned."""
    if not isinstance(saved, Mapping):
        kind = type(saved).__name__
        raise TypeError(
            f"{who}.load_state_dict: the optimizer's state is a {kind}; it must be a dict"
        )
    missing = [key for key in ("state", "param_groups") if key not in saved]
    if missing:
        advice = part_advice(saved) or "; it must be what an optimizer's state_dict() returned"
        raise ValueError(
            f"{who}.load_state_dict: keys {missing} are missing from the optimizer's state, which "
            f"has {[*saved]}{advice}"
        )
    states, groups = saved["state"], saved["param_groups"]
    if not isinstance(states, Mapping):
        raise TypeError(f"{who}.load_state_dict: state is {states!r:.60}; it must be a dict")
    if not isinstance(groups, (list, tuple)):
        raise TypeError(f"{who}.load_state_dict: param_groups is {groups!r:.60}; it must be a list")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise TypeError(
                f"{who}.load_state_dict: param_groups[{number}] is {group!r:.60}; it must be a "
                "dict with a list of params"
            )
        for key in group["params"]:
            if not isinstance(states.get(key, {}), Mapping):
                raise TypeError(
                    f"{who}.load_state_dict: state[{key!r}] is {states[key]!r:.60}; it must be a "
                    "dict"
                )
