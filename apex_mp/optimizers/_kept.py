"""Tensors of a loaded state that keep their dtype, whatever that of their parameter is."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor that Optimizer.load_state_dict passes on as it is.

    A bare one it casts to the parameter's dtype, which loses the moments of a float16 parameter.
    """

    tensor: Tensor


def unpack(
    states: Mapping[Any, dict[str, Any]],
) -> collections.defaultdict[Any, dict[str, Any]]:
    """Return the states with the tensors that were packed."""
    plain: collections.defaultdict[Any, dict[str, Any]] = collections.defaultdict(dict)
    for param, state in states.items():
        plain[param] = {
            key: value.tensor if isinstance(value, Kept) else value for key, value in state.items()
        }
    return plain
