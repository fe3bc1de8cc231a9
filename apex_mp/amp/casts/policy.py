"""The casts that the lists ask for, and which of them torch.autocast does not do itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from apex_mp.amp.casts.casting import Caster, Function
from apex_mp.amp.casts.recurrent import wrap_recurrent
from apex_mp.amp.lists import (
    functional_overrides,
    recurrent_overrides,
    tensor_overrides,
    torch_overrides,
)

LIBRARIES = {
    "torch.nn.functional": functional_overrides,
    "torch": torch_overrides,
    "torch.Tensor": tensor_overrides,
    "recurrent": recurrent_overrides,
}

# The kinds of rules: what they do with a function's arguments.
LOW = "low precision"
FLOAT = "float32"
PROMOTE = "widest"
MATCH = "as the tensor that is written"
REFUSE_FIRST = "refused for a low-precision tensor that is written"
REFUSE = "refused for low precision"

_CASTS = {LOW: "to_low", FLOAT: "to_float", PROMOTE: "promote", MATCH: "match_first"}

# Names for which torch has rules that we do not use, and why.
_NOT_LEFT_TO_TORCH = {
    "__rdiv__",  # computes a reciprocal, which is float32 by the lists
    "__rtruediv__",  # the same
    "__rpow__",  # calls torch.pow, which is listed too: verbose output would name it twice
    "norm",  # torch.Tensor's calls torch's
    "binary_cross_entropy",  # the rule for CUDA is an error
}
# Functions without a rule of torch's own that call functions with one.
_COMPOSITES = {"chain_matmul", "einsum", "inner", "kron", "tensordot"}
# Where Python finds torch's operators, and the prefix that their names lack there.
_PLACES: list[tuple[Any, str]] = [
    (torch, ""),
    (torch.Tensor, ""),
    (torch.nn.functional, ""),
    (torch._C._nn, ""),  # torch.nn.functional calls these, under whatever name it was imported.
    (torch.linalg, "linalg_"),
    (torch.fft, "fft_"),
]
_ALIASES = {"truediv": "div", "rtruediv": "div"}


@dataclasses.dataclass(frozen=True)
class Rule:
    """The cast of one function of a library.

    Attributes:
        library: A key of LIBRARIES.
        owner: Module or class that holds the function.
        name: The function's name there.
        kind: LOW, FLOAT, PROMOTE, MATCH, REFUSE_FIRST or REFUSE.
        message: The error of REFUSE_FIRST and REFUSE.
    """

    library: str
    owner: Any
    name: str
    kind: str
    message: str = ""

    def wrap(self, function: Function, caster: Caster) -> Function:
        """Return a wrapper of the function that casts by this rule."""
        if self.is_done_by_torch(caster.device_type):
            return caster.follow(function, self.name, _CASTS[self.kind])
        if self.library == "recurrent":
            return wrap_recurrent(function, self.name, caster)
        if self.kind == REFUSE:
            return caster.refuse_low(function, self.message)
        if self.kind == REFUSE_FIRST:
            return caster.refuse_low_first(function, self.name, self.message)
        return caster.wrap(function, self.name, _CASTS[self.kind], casts_inside=False)

    def is_done_by_torch(self, device_type: str) -> bool:
        """Return whether torch does the same by itself when autocast is on for the device."""
        if self.name in _NOT_LEFT_TO_TORCH:
            return False
        if self.library == "recurrent":
            return device_type != "cpu"
        if self.is_type_promotion():
            return True
        if self.kind in (LOW, FLOAT, PROMOTE):
            return any(_has_autocast_rule(each, device_type) for each in _overloads(self.name))
        return False

    def is_type_promotion(self) -> bool:
        """Return whether torch's type promotion does the same without autocast."""
        if self.name in _NOT_LEFT_TO_TORCH or self.kind not in (PROMOTE, MATCH):
            return False
        return any(torch.Tag.pointwise in each.tags for each in _overloads(self.name))


def rules(*, allow_banned: bool) -> Iterator[Rule]:
    """Yield all rules.

    Args:
        allow_banned: Cast to float32 the functions that are refused otherwise.
    """
    for library, lists in LIBRARIES.items():
        for attribute, kind in (
            ("FP16_FUNCS", LOW),
            ("FP32_FUNCS", FLOAT),
            ("CASTS", PROMOTE),
            ("SEQUENCE_CASTS", PROMOTE),
        ):
            for name in getattr(lists, attribute, []):
                yield Rule(library, lists.MODULE, name, kind)
    for name, message in functional_overrides.BANNED_FUNCS:
        kind = FLOAT if allow_banned else REFUSE
        yield Rule(
            "torch.nn.functional", torch.nn.functional, name, kind, "" if allow_banned else message
        )
    yield from _in_place_rules()


def unlisted(device_type: str) -> Iterator[tuple[Any, str]]:
    """Yield owner and name of each function in which torch.autocast casts by a rule of its own."""
    key = f"Autocast{device_type.upper()}"
    operators = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {name.removeprefix("aten::").split(".")[0] for name in operators} | _COMPOSITES
    for owner, prefix in _PLACES:
        for name in sorted(names):
            short = name.removeprefix(prefix)
            is_there = name.startswith(prefix) and not short.startswith("_")
            if is_there and callable(getattr(owner, short, None)):
                yield owner, short


def _in_place_rules() -> Iterator[Rule]:
    """Yield rules for in-place functions, whose first argument keeps its dtype."""
    for name in torch_overrides.FP32_FUNCS:
        if hasattr(torch, f"{name}_"):
            message = f"Cannot call in-place function {name}_ with fp16 arguments."
            yield Rule("torch", torch, f"{name}_", REFUSE, message)
        if hasattr(torch.Tensor, f"{name}_"):
            message = f"Cannot call in-place method {name}_ on fp16 Tensors."
            yield Rule("torch.Tensor", torch.Tensor, f"{name}_", REFUSE_FIRST, message)
    for name in [*torch_overrides.FP16_FUNCS, *torch_overrides.CASTS]:
        if hasattr(torch.Tensor, f"{name}_"):
            yield Rule("torch.Tensor", torch.Tensor, f"{name}_", MATCH)


def _overloads(name: str) -> list[Any]:
    """Return the torch operators behind a name; for `__radd__` and `add_` those of add."""
    plain = name.strip("_")
    plain = _ALIASES.get(plain, plain)
    for prefix in ("", "r"):
        packet = getattr(torch.ops.aten, plain.removeprefix(prefix), None)
        if packet is not None:
            return [getattr(packet, overload) for overload in packet.overloads()]
    return []


def _has_autocast_rule(overload: Any, device_type: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(
            overload.name(), f"Autocast{device_type.upper()}"
        )
    except RuntimeError:  # TorchScript's own overloads, for numbers.
        return False
