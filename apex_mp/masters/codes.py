"""Moments in one byte: int8 codes in blocks of 32 numbers, and one uint8 exponent for each block.

The format is that of csrc/math/codes.h. In a state the exponents of `exp_avg` are
`exp_avg_exponents`; blocks count along the memory of the codes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core.tensors import local_part, match_strides
from apex_mp.masters.joined import like

CODES = torch.int8
BLOCK = 32
# Parameters of fewer elements keep moments in float32: kLeastCoded of csrc/math/codes.h.
LEAST_CODED = 4096
_EXPONENTS = "_exponents"


def exponents_of(name: str) -> str:
    """Return the name of a moment's exponents in a state."""
    return sys.intern(name + _EXPONENTS)  # The plan compares addresses.


def is_exponents(name: Any) -> bool:
    """Return whether that is the name of exponents in a state."""
    return isinstance(name, str) and name.endswith(_EXPONENTS)


def encoded(
    name: str, which: int, numbers: Tensor | None, param: Tensor, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return the entries of a moment in a state, in the parameter's memory order.

    Args:
        name: The moment's name.
        which: Its number in the state: 0 has signs, 1 has none.
        numbers: Its values, in any floating dtype and memory order [None: zeros].
        param: The parameter.
        device: Where the entries are made [None: where the parameter is].
    """
    codes = like(param, CODES, device)
    here = local_part(codes)
    exponents = torch.zeros(-(-here.numel() // BLOCK), dtype=torch.uint8, device=here.device)
    if numbers is not None:
        laid = match_strides(numbers.detach().float(), param).to(codes.device)
        _C.write_codes(local_part(laid), here, exponents, which)
    return {name: codes, exponents_of(name): exponents}


def decoded(name: str, which: int, state: Mapping[str, Any]) -> Tensor:
    """Return a moment in float32, in the memory order of its codes.

    Raises:
        ValueError: There is no exponent for each block.
    """
    codes, exponents = state[name], state.get(exponents_of(name))
    numbers = like(codes, torch.float32)
    here = local_part(codes)
    if not (isinstance(exponents, Tensor) and exponents.numel() == -(-here.numel() // BLOCK)):
        found = f"{exponents.numel()}" if isinstance(exponents, Tensor) else "no"
        raise ValueError(
            f"the state has {here.numel()} codes of one byte in {name!r} and {found} exponents in "
            f"{exponents_of(name)!r}; there must be one for each {BLOCK} codes"
        )
    _C.read_codes(here, exponents.contiguous(), local_part(numbers), which)
    return numbers


def widened(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a state with moments in float32 in place of codes, as other optimizers have them."""
    wide = {name: value for name, value in state.items() if not is_exponents(name)}
    for which, name in enumerate(names):
        if getattr(wide.get(name), "dtype", None) == CODES:
            wide[name] = decoded(name, which, state)
    return wide
