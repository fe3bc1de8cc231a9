"""Pickled loss scalers of 2018 to 2020 become ours; what else a file asks for is named."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NoReturn, TypeAlias

from apex_mp.loss_scale import AMP_PRESET, FLOAT32_SMALLEST_NORMAL, DynamicLossScale
from apex_mp.scale.amp_scaler import LossScaler as AmpLossScaler
from apex_mp.scale.fp16_scalers import DynamicLossScaler, LossScaler

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
    scaler = LossScaler()
    scaler.load_state_dict(state)
    return scaler


def _make_dynamic(state: Mapping[str, Any]) -> object:
    scaler = DynamicLossScaler()
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


# A file that is no archive has five pickles: number, version, system, object and storages.
_PICKLES_IN_OLD_FILE = 5


def names_in(file: IO[bytes]) -> list[str]:
    """Return the names that the pickles of a checkpoint ask for, as far as they can be read."""
    names: dict[str, None] = {}
    try:
        for stream in _pickles(file):
            for name in _names_in_pickle(stream):
                names[name] = None
    except Exception:  # No pickle from here on: pickletools and zipfile raise many things.
        pass
    return [*names]


def _pickles(file: IO[bytes]) -> Iterator[IO[bytes]]:
    start = file.tell()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as stream:
                        yield stream
        return
    file.seek(start)
    for _ in range(_PICKLES_IN_OLD_FILE):
        yield file


def _names_in_pickle(stream: IO[bytes]) -> Iterator[str]:
    strings: list[str] = []
    memo: dict[Any, Any] = {}
    top: Any = None
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(strings[-2:])
        elif "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = top
            continue
        top = memo.get(argument) if "GET" in opcode.name else argument
        if isinstance(top, str):
            strings.append(top)
