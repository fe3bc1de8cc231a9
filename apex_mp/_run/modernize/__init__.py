"""`--modernize`: what later versions took away; each thing is named on stderr at its first use."""

from __future__ import annotations

from apex_mp._run.modernize import division, masks, names, packages, torch_functions, training
from apex_mp._run.replacements import Replacements


def supply(replacements: Replacements) -> None:
    """Restore in this process what scripts of 2018-2019 rely on."""
    for module in (names, packages, torch_functions, division, masks, training):
        module.supply(replacements)
