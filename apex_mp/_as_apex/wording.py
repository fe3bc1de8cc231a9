"""How messages say where to set another era: in Python, or on a command line."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Wording:
    """The words of one place where a user may stand.

    Attributes:
        caller: Who refuses.
        force: How to hide an apex that is installed.
        era: How to have another era, with a place for its name.
    """

    caller: str
    force: str
    era: str
