"""How messages say to choose another era: in Python, or on a command line."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Wording:
    """The words for Python or for a command line.

    Attributes:
        caller: The function or command, for the message.
        force: How to hide an apex that is installed.
        era: How to choose another era, with a placeholder for its name.
    """

    caller: str
    force: str
    era: str
