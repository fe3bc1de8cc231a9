"""The handle whose casts are on in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from apex_mp.amp.casts.casting import Caster
from apex_mp.amp.casts.patching import Patches


class Handle(Protocol):
    """The methods of an `AmpHandle` that other modules of amp call."""

    _caster: Caster
    _patches: Patches
    _was_replaced: bool

    def is_active(self) -> bool:
        """Whether casts and loss scaling are on here."""

    def _deactivate(self) -> None:
        """Switch casts off."""

    def _disable_casts(self) -> AbstractContextManager[None]:
        """Switch casts off in a block."""

    def _clear_cache(self) -> None:
        """Drop the cached casts of weights."""


handle: Handle | None = None
