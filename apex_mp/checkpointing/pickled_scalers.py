"""Convert pickled loss scalers of 2018 to 2020 to ours, with checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

from apex_mp import fp16_utils
from apex_mp.amp.scaler import LossScaler as AmpLossScaler
from apex_mp.loss_scale import AMP_PRESET, FLOAT32_SMALLEST_NORMAL, DynamicLossScale

_Make: TypeAlias = Callable[[Mapping[str, Any]], object]

# Attributes of apex's amp LossScaler; it has had `dynamic` since 2019-03, `_min_loss_scale` since
# 2019-06. The overflow buffer is scratch memory on a GPU.
_AMP_ATTRIBUTES = {
    "dynamic",
    "_loss_scale",
    "_max_loss_scale",
    "_min_loss_scale",
    "_scale_seq_len",
    "_unskipped",
    "_has_overflow",
    "_overflow_buf",
}


def _make_static(state: Mapping[str, Any]) -> object:
    scaler = fp16_utils.LossScaler()
    scaler.load_state_dict(state)
    return scaler


def _make_dynamic(state: Mapping[str, Any]) -> object:
    scaler = fp16_utils.DynamicLossScaler()
    scaler.load_state_dict(state)
    return scaler


def _make_of_amp(state: Mapping[str, Any]) -> object:
    unknown = [key for key in state if key not in _AMP_ATTRIBUTES]
    if unknown or "_loss_scale" not in state:
        raise ValueError(f"its attributes are {[*state]}; they must be among {_AMP_ATTRIBUTES}")
    if state.get("dynamic", True) is False:
        return AmpLossScaler(state["_loss_scale"])
    scaler = AmpLossScaler()
    scaler.value = DynamicLossScale(
        state["_loss_scale"],
        growth_interval=state.get("_scale_seq_len", AMP_PRESET.growth_interval),
        min_scale=state.get("_min_loss_scale") or FLOAT32_SMALLEST_NORMAL,
        max_scale=state.get("_max_loss_scale", AMP_PRESET.max_scale),
        good_steps=state.get("_unskipped", 0),
    )
    return scaler


_MAKERS: dict[str, _Make] = {
    "apex.fp16_utils.loss_scaler.LossScaler": _make_static,
    "apex.fp16_utils.loss_scaler.DynamicLossScaler": _make_dynamic,
    "apex.amp.scaler.LossScaler": _make_of_amp,
    # Names in pickles of our own scalers.
    "apex_mp.fp16_utils.loss_scaler.LossScaler": _make_static,
    "apex_mp.fp16_utils.loss_scaler.DynamicLossScaler": _make_dynamic,
}


class Receivers:
    """Classes that replace the old ones during one load.

    pickle can make an object of them without arguments and set its state once; nothing else. The
    object is then a scaler of ours, whose constructor has checked the values.

    Attributes:
        aliases: For `torch.serialization.safe_globals`.
        refusal: What a file asked for that these classes refuse, or "".
    """

    def __init__(self) -> None:
        self.refusal = ""
        self.aliases: list[Any] = [
            (self._stand_in(name, make), name) for name, make in _MAKERS.items()
        ]
        self._without_state: dict[int, tuple[object, str]] = {}

    def check_complete(self) -> None:
        """Raise an UnpicklingError if an object was made and never got its state."""
        for _, name in self._without_state.values():
            self._refuse(f"a {name} without its attributes")

    def _refuse(self, what: str) -> NoReturn:
        self.refusal = self.refusal or what
        raise pickle.UnpicklingError(self.refusal)

    def _stand_in(self, name: str, make: _Make) -> type:
        receivers = self

        class StandIn:
            def __new__(cls, *args: Any) -> StandIn:
                if args:
                    receivers._refuse(f"a {name} with arguments, {args!r:.60}")
                made = super().__new__(cls)
                receivers._without_state[id(made)] = made, name
                return made

            def __init__(self) -> None:  # Called by a REDUCE, not for an object that was pickled.
                receivers._refuse(f"a call of {name}")

            def __setstate__(self, state: Any) -> None:
                if type(state) is not dict:
                    receivers._refuse(f"a {name} whose attributes are a {type(state).__name__}")
                try:
                    made = make(state)
                except (TypeError, ValueError) as error:
                    receivers._refuse(f"a {name} that makes no sense: {error}")
                del receivers._without_state[id(self)]
                object.__setattr__(self, "__class__", type(made))
                vars(self).update(vars(made))

        return StandIn
