"""The meta path finder that makes the modules of apex, in memory, when they are imported."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from apex_mp._as_apex.eras import Era, Wording, eras_with
from apex_mp._as_apex.table import EAGER, MISSING, MODULES, PROGRAMS, TOP_LEVEL, is_package


class _Absent(type):
    """Class of the stand-ins, so that `isinstance` and subclassing still work."""

    sentence: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(cls.sentence)


def stand_in(module: str, name: str, instead: str) -> type:
    """Return a class that raises a NotImplementedError when it is called or instantiated."""
    sentence = f"{module}.{name} is not in apex_mp; {instead}"
    return _Absent(name, (), {"__module__": module, "__doc__": sentence, "sentence": sentence})


class ApexFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads every module of the table, as it was in one era.

    Args:
        era: The era.
        wording: How messages say to choose another era.
    """

    def __init__(self, era: Era, wording: Wording) -> None:
        self.era = era
        self.wording = wording
        self._refused: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec for a module of the table, None for any other."""
        module, _, name = fullname.rpartition(".")
        if (module, name) in self.era.absent:
            raise ImportError(self._refusal(module, name), name=fullname)
        if fullname not in MODULES:
            return None
        # A package, too, if it lacks a name in this era: then `from module import name` looks for a
        # submodule of that name, and the lines above raise the error.
        like_package = is_package(fullname) or any(fullname == of for of, _ in self.era.absent)
        return ModuleSpec(fullname, self, origin="apex_mp", is_package=like_package)

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m` runs for a module of the table."""
        if fullname not in PROGRAMS:
            raise ImportError(f"{fullname} is no program; it is to be imported", name=fullname)
        (origin,) = MODULES[fullname]
        return compile(f"from {origin} import main\nmain()\n", f"<{fullname}>", "exec")

    def exec_module(self, module: ModuleType) -> None:
        """Fill a new module with its submodules and names."""
        here = module.__name__
        module.__doc__ = f"{here}, by apex_mp, as of {self.era.name}."
        children = EAGER if here == "apex" else _children(here)
        for child in children:
            importlib.import_module(child)
        # Names after submodules: apex.amp._amp_state is a module, but an object as attribute.
        names = self.names(here)
        vars(module).update(names)
        shown = names or [child.rpartition(".")[2] for child in children]
        public = [name for name in shown if not name.startswith("_")]
        vars(module)["__all__"] = sorted(public)
        if any(here == of for of, _ in self.era.absent):
            vars(module)["__getattr__"] = functools.partial(self._refuse, here)

    def _refuse(self, module: str, name: str) -> Any:
        """Raise the AttributeError of a module for a name that it lacks."""
        if (module, name) in self.era.absent:
            raise AttributeError(self._refusal(module, name))
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def _refusal(self, module: str, name: str) -> str:
        """Return that a name is of another era; print it once, because libraries catch the error.

        They do without apex then, and nothing else would say so.
        """
        others = eras_with((module, name))
        said = (
            f"{module} has no {name} as of {self.era.name!r}, but as of "
            f"{' and '.join(map(repr, others))}; {self.wording.era.format(others[0])} gives it"
        )
        if name not in self._refused:
            self._refused.add(name)
            print(f"{self.wording.caller}: {said}", file=sys.stderr)
        return said

    def names(self, module: str) -> dict[str, Any]:
        """Return the names of a module of the table in this era, without submodules."""
        absent, origins = self.era.absent, self.era.origins
        found: dict[str, Any] = {}
        for origin, names in MODULES[module].items():
            for name in names.split():
                place = (module, name)
                if place not in absent:
                    source = importlib.import_module(origins.get(place, origin))
                    found[name] = getattr(source, name)
        for name, instead in MISSING.get(module, {}).items():
            if (module, name) not in absent:
                found[name] = stand_in(module, name, instead)
        return found

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yield a distribution named apex: libraries ask importlib.metadata for its version."""
        if context.name is None or context.name.lower() == "apex":
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """Package metadata as apex had it: always version 0.1."""

    _FILES: ClassVar = {
        "METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n",
        "top_level.txt": "\n".join(TOP_LEVEL),
    }

    def read_text(self, filename: str) -> str | None:
        """Return the text of a metadata file, or None."""
        return self._FILES.get(filename)

    def locate_file(self, path: Any) -> Path:
        """Return where a file of the package would be."""
        return Path(__file__).parent / str(path)


def _children(module: str) -> list[str]:
    names = [name for name in MODULES if name.rpartition(".")[0] == module]
    return [name for name in names if name not in PROGRAMS]  # runpy warns of one that is there.
