"""The handle whose casts are on in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apex_mp.amp.handle import AmpHandle

handle: AmpHandle | None = None
