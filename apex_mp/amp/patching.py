"""Put functions of ours in the place of torch's, and take them away again without a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

_INHERITED = object()


@dataclasses.dataclass
class _Patch:
    owner: Any
    name: str
    before: Any  # what stood in the owner's own dict, if anything did
    ours: Any


class Patches:
    """Replacements of attributes of modules, classes and objects."""

    def __init__(self) -> None:
        self._patches: dict[tuple[int, str], _Patch] = {}

    def __contains__(self, place: tuple[Any, str]) -> bool:
        owner, name = place
        return (id(owner), name) in self._patches

    def install(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Set `owner.name` to `make(original)`; a replacement of ours that is there goes first.

        A static method stays one.
        """
        self.remove(owner, name)
        before = vars(owner).get(name, _INHERITED)
        ours: Any = make(getattr(owner, name))
        setattr(owner, name, staticmethod(ours) if isinstance(before, staticmethod) else ours)
        self._patches[id(owner), name] = _Patch(owner, name, before, vars(owner)[name])

    def remove(self, owner: Any, name: str) -> None:
        """Put back what was there, unless somebody else has replaced ours since."""
        patch = self._patches.pop((id(owner), name), None)
        if patch is None or vars(owner).get(name) is not patch.ours:
            return
        if patch.before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, patch.before)

    def remove_all(self) -> None:
        """Put everything back, the last replacement first."""
        for patch in [*self._patches.values()][::-1]:
            self.remove(patch.owner, patch.name)
