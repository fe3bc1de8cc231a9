"""Install the name `apex` in this process, and remove it again without a trace."""

from __future__ import annotations

import sys
from types import ModuleType

# Import the eras' modules here, so that installing changes nothing but the name apex.
from apex_mp._as_apex import contrib, since_2019_08, until_2019_08  # noqa: F401
from apex_mp._as_apex.eras import ERAS, Wording
from apex_mp._as_apex.finder import ApexFinder
from apex_mp._as_apex.table import TOP_LEVEL

_AS_APEX = "apex_mp.as_apex"
_IN_PYTHON = Wording("install_as_apex", "force=True", "install_as_apex(era={!r})")
ON_THE_COMMAND_LINE = Wording("apex_mp run", "--force", "--era {}")


class _Installation:
    """The finder in sys.meta_path, and the modules that it hides."""

    def __init__(self, finder: ApexFinder) -> None:
        self.finder = finder
        self.hidden = _take_out()
        sys.meta_path.insert(0, finder)

    def undo(self) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self.finder]
        _take_out()
        sys.modules.update(self.hidden)


_installation: _Installation | None = None


def install_as_apex(era: str = "2019-03", force: bool = False) -> None:
    """Make `import apex`, its modules, `amp_C` and the like find apex_mp in this process.

    Nothing is written to disk. Names and defaults that changed over the years are those of `era`. A
    name that apex_mp lacks can be imported; calling it raises an error that says what to use
    instead. `docs/apex_names.md` has the table. A second call for the same era does nothing.

    Args:
        era: "2019-03", the API of `amp.init`, with `amp.initialize` beside it; "2019-08", after
            FusedAdam's arguments changed; "2020", after FP16_Optimizer moved to contrib
            ["2019-03"].
        force: Hide an apex that is installed, until `uninstall_as_apex` [False].

    Raises:
        ValueError: There is no such era.
        RuntimeError: Another era is installed, or an apex that is not ours can be imported and
            `force` is False.
    """
    install(era, force, _IN_PYTHON)


def install(era: str, force: bool, wording: Wording) -> None:
    """As `install_as_apex`, with messages for Python or for a command line."""
    global _installation
    if era not in ERAS:
        raise ValueError(
            f"{wording.caller}: era is {era!r}; it must be one of {', '.join(map(repr, ERAS))}"
        )
    present = installed_era()
    if present == era:
        return
    if present is not None:
        raise RuntimeError(
            f"{wording.caller}: era is {era!r}, but apex is installed as of {present!r} and may be "
            "in use; call apex_mp.uninstall_as_apex() first"
        )
    if not force:
        _refuse_to_hide(wording)
    _installation = _Installation(ApexFinder(ERAS[era], wording))


def uninstall_as_apex() -> None:
    """Undo `install_as_apex`: restore an apex that it hid, and remove our modules.

    If nothing is installed it does nothing.
    """
    global _installation
    if _installation is None:
        return
    _installation.undo()
    _installation = None
    # So that another import of it installs again.
    if sys.modules.pop(_AS_APEX, None) is not None:
        vars(sys.modules["apex_mp"]).pop("as_apex", None)


def installed_era() -> str | None:
    """Return the era that is installed, or None."""
    return None if _installation is None else _installation.finder.era.name


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in TOP_LEVEL]
    return {name: sys.modules.pop(name) for name in names}


def _refuse_to_hide(wording: Wording) -> None:
    for name in TOP_LEVEL:
        where = _place_of(name)
        if where is not None:
            raise RuntimeError(
                f"{wording.caller}: {name} can be imported already, from {where}; uninstall it, or "
                f"give {wording.force} to hide it in this process"
            )


def _place_of(name: str) -> str | None:
    """Return where a module that is not ours would be imported from, unless it is a mere folder."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or "sys.modules"
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = None if find_spec is None else find_spec(name, None)
        if spec is not None and spec.loader is not None:
            return spec.origin or type(spec.loader).__name__
    return None
