"""`--modernize`: supply what later versions removed, with a note on stderr at each first use."""

from __future__ import annotations

from apex_mp._run.modernize import (
    arrays,
    division,
    masks,
    names,
    packages,
    source,
    torch_functions,
    training,
)
from apex_mp._run.replacements import Replacements


def supply(replacements: Replacements) -> None:
    """Restore features in this process that scripts of 2018-2019 rely on."""
    for module in (names, packages, torch_functions, division, masks, training, arrays):
        module.supply(replacements)
    source.supply(replacements.set)
