"""Apply the settings of a run to a process."""

from __future__ import annotations

import sys

from apex_mp._as_apex.install import ON_THE_COMMAND_LINE, install
from apex_mp._run import bfloat16, cpu, hints, launched, master_weights, modernize
from apex_mp._run.replacements import Replacements
from apex_mp._run.settings import Settings


def apply(settings: Settings, *, child: bool) -> Replacements:
    """Install the name apex, and apply the other options.

    Returns:
        The replaced attributes of torch and other modules.
    """
    if settings.apex:
        install(settings.era, settings.force, ON_THE_COMMAND_LINE)
    replacements = Replacements()
    launched.accept_local_rank(replacements)
    if settings.modernize:
        modernize.supply(replacements)
    if settings.dtype == "bfloat16":
        bfloat16.cast_instead(replacements)
    if settings.master_weights:
        giving = master_weights.Giving(
            settings.master_weights,
            settings.init_scale,
            settings.strict,
            says_nothing_found=not child,
        )
        master_weights.give_everywhere(replacements, giving)
    if settings.device == "cpu":
        if not child:
            print(cpu.ANNOUNCEMENT, file=sys.stderr)
        cpu.redirect(replacements)
    return replacements


def apply_in_child() -> None:
    """Apply the parent's settings in a child process; sitecustomize.py calls it."""
    settings = Settings.from_parent()
    apply(settings, child=True)
    sys.excepthook = hints.after(sys.excepthook, settings)
