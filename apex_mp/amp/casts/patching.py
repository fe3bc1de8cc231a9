"""Replace functions of torch, and restore them exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

_INHERITED = object()


@dataclasses.dataclass
class _Patch:
    owner: Any
    name: str
    before: Any  # what stood in the owner's own dict, if anything did
    ours: Any

    def is_there(self) -> bool:
        return vars(self.owner).get(self.name) is self.ours

    def put_back(self) -> None:
        if self.before is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class Patches:
    """Replacements of attributes of modules, classes and objects."""

    def __init__(self) -> None:
        self._patches: dict[tuple[int, str], _Patch] = {}

    def __contains__(self, place: tuple[Any, str]) -> bool:
        owner, name = place
        return (id(owner), name) in self._patches

    def install(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Set `owner.name` to `make(original)`, after removing an earlier replacement of ours.

        A bound method, class method or static method is replaced by one of the same kind.

        Raises:
            AttributeError, TypeError: The owner has no such attribute, or it cannot be replaced.
        """
        self.remove(owner, name)
        original = getattr(owner, name)  # First: some modules put it into their dict only now.
        before = vars(owner).get(name, _INHERITED)
        setattr(owner, name, _replacement(owner, name, original, make))
        self._patches[id(owner), name] = _Patch(owner, name, before, vars(owner)[name])

    def remove(self, owner: Any, name: str) -> None:
        """Restore the original, unless someone has replaced our replacement."""
        patch = self._patches.pop((id(owner), name), None)
        if patch is not None and patch.is_there():
            patch.put_back()

    def remove_all(self) -> None:
        """Restore all originals, the last replacement first."""
        for patch in [*self._patches.values()][::-1]:
            self.remove(patch.owner, patch.name)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore all originals for a `with` block."""
        there = [patch for patch in self._patches.values() if patch.is_there()]
        for patch in there:
            patch.put_back()
        try:
            yield
        finally:
            for patch in there:
                setattr(patch.owner, patch.name, patch.ours)


def _replacement(
    owner: Any, name: str, original: Any, make: Callable[[Any], Callable[..., Any]]
) -> Any:
    """Return `make(original)` as a method of the same kind as the original."""
    if not isinstance(owner, type):
        if isinstance(original, types.MethodType) and original.__self__ is owner:
            # A bound method: when the object is copied, the copy gets a method of its own.
            return types.MethodType(make(original.__func__), owner)
        return make(original)
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, classmethod):
        return classmethod(make(found.__func__))
    if hasattr(type(found), "__get__") and not isinstance(
        found, (staticmethod, types.ClassMethodDescriptorType)
    ):
        return make(original)
    return staticmethod(make(original))  # A class does not bind C functions, for one.
