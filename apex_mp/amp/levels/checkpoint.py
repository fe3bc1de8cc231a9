"""amp.state_dict and amp.load_state_dict: the loss scales of `amp.initialize` in a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from apex_mp.amp._amp_state import _amp_state, maybe_print
from apex_mp.core.checkpoints.state_checks import as_dict
from apex_mp.loss_scale import is_of_grad_scaler


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of all loss scales, plain values by "loss_scaler0" and so on.

    Args:
        destination: A dict to put them into [None: a new one].
    """
    result = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        result[f"loss_scaler{number}"] = scaler.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load the state of loss scales; if their number differs, of as many as both have.

    Args:
        state_dict: What `state_dict` returned, here or in 2019, or the state of a
            torch.amp.GradScaler, which had one scale for all losses.

    Raises:
        RuntimeError: There is a key of another kind; nothing is changed.
        TypeError, ValueError, KeyError: The state of a scale is not valid; nothing is changed.
    """
    state_dict = as_dict("amp", state_dict)
    scalers = _amp_state.loss_scalers
    if is_of_grad_scaler(state_dict):
        state_dict = {f"loss_scaler{number}": state_dict for number in range(len(scalers))}
    unexpected = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. "
        )
    if len(state_dict) != len(scalers):
        maybe_print(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} "
            "loss_scalers are used"
        )
    before = [scaler.value for scaler in scalers]
    try:
        for number, scaler in enumerate(scalers):
            if f"loss_scaler{number}" in state_dict:
                scaler.load_state_dict(state_dict[f"loss_scaler{number}"])
    except BaseException:
        for scaler, value in zip(scalers, before, strict=True):
            scaler.value = value
        raise
