"""Make a process what the settings of a run say."""

from __future__ import annotations

import sys

from apex_mp._as_apex.install import ON_THE_COMMAND_LINE, install
from apex_mp._run import bfloat16, cpu, hints, launched, modernize
from apex_mp._run.replacements import Replacements
from apex_mp._run.settings import Settings


def apply(settings: Settings, *, child: bool) -> Replacements:
    """Install the name apex, and what else is asked for.

    Args:
        settings: The options.
        child: A parent process has announced them already.

    Returns:
        What was replaced in torch and elsewhere.

    Raises:
        RuntimeError: See `install_as_apex`.
    """
    install(settings.era, settings.force, ON_THE_COMMAND_LINE)
    replacements = Replacements()
    launched.accept_local_rank(replacements)
    if settings.modernize:
        modernize.supply(replacements)
    if settings.dtype == "bfloat16":
        bfloat16.cast_instead(replacements)
    if settings.device == "cpu":
        if not child:
            print(cpu.ANNOUNCEMENT, file=sys.stderr)
            if settings.dtype is None:
                print(cpu.SLOW, file=sys.stderr)
        cpu.redirect(replacements)
    return replacements


def apply_in_child() -> None:
    """Do in a child process what the parent did: sitecustomize.py calls it."""
    settings = Settings.from_parent()
    apply(settings, child=True)
    sys.excepthook = hints.after(sys.excepthook, settings)
