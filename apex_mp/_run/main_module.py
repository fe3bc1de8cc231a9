"""Run a script or a module as `__main__`, as `python` does."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from apex_mp._run import hints
from apex_mp._run.modernize import source as source_of_project
from apex_mp._run.settings import Settings


class Target:
    """The script or module to run.

    Args:
        name: A path, or the name of a module.
        is_module: Whether it is a module.
    """

    def __init__(self, name: str, *, is_module: bool) -> None:
        self.name = name
        self.is_module = is_module
        # A folder or an archive with a __main__.py.
        self.is_container = not is_module and pkgutil.get_importer(name) is not None

    def take_over(self, arguments: Sequence[str]) -> None:
        """Set sys.argv and sys.path as python does before it runs the target."""
        sys.argv[:] = [self.name, *arguments]
        if self.is_module:
            return  # The current folder is there already.
        if self.is_container:
            folder = os.path.abspath(self.name)
        else:
            folder = os.path.dirname(os.path.realpath(self.name))
        if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
            sys.path[0] = folder
        elif self.is_container:
            sys.path.insert(0, folder)

    def execute(self, settings: Settings) -> None:
        """Run it; tracebacks of its errors look as under `python`, perhaps with a hint."""
        global _first_main
        try:
            if self.is_module or self.is_container:
                _first_main = sys.modules["__main__"]
                sys.modules["__main__"] = ModuleType("__main__")
                vars(sys.modules["__main__"])["__annotations__"] = {}
                name = self.name if self.is_module else "__main__"
                # The function that python -m calls.
                runpy._run_module_as_main(name, alter_argv=self.is_module)  # type: ignore[attr-defined]
            else:
                _run_script(self.name, settings)
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook = hints.after(_without_our_frames(sys.excepthook), settings)
            raise


# Kept alive: its functions are still running.
_first_main: ModuleType | None = None


def _run_script(name: str, settings: Settings) -> None:
    global _first_main
    path = os.path.abspath(name)
    code = _compiled(path, settings)
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    vars(main).update(__builtins__=builtins, __cached__=None, __annotations__={}, __package__=None)
    _first_main = sys.modules["__main__"]
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _compiled(path: str, settings: Settings) -> CodeType:
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        sys.exit(2)
    if settings.modernize:
        return source_of_project.compiled(source, path)
    return compile(source, path, "exec", dont_inherit=True)


def _without_our_frames(hook: Any) -> Any:
    """Return an excepthook that removes the frames of this package before it calls `hook`."""

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        kept = _after_ours(traceback)
        hook(kind, error.with_traceback(kept), kept)

    return excepthook


def _after_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames up to the last one of this file."""
    ours = traceback
    while ours is not None and ours.tb_frame.f_code.co_filename != __file__:
        ours = ours.tb_next
    while ours is not None and ours.tb_frame.f_code.co_filename == __file__:
        ours = ours.tb_next
        traceback = ours
    return traceback
