"""Find the era of apex that a script was written for, by the names and arguments that it uses."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from apex_mp._as_apex.eras import ERAS, eras_with
from apex_mp._as_apex.sources import (
    Call,
    Source,
    files_of,
    is_of_apex,
    places_of,
    program,
    read,
)
from apex_mp._as_apex.table import TOP_LEVEL

DEFAULT = "2019-03"
_BEFORE, _SINCE = ("2019-03",), ("2019-08", "2020")
# Arguments of FusedAdam that exist only before its rewriting in August 2019, or only since.
_ADAM = {
    "eps_inside_sqrt": _BEFORE,
    "max_grad_norm": _BEFORE,
    "adam_w_mode": _SINCE,
    "set_grad_none": _SINCE,
    "capturable": ("2020",),
    "master_weights": ("2020",),
}
_ADAMS = ("apex.optimizers.FusedAdam", "apex.optimizers.fused_adam.FusedAdam")
# Large packages that ask for nothing of apex.
_WITHOUT_EVIDENCE = frozenset({"apex", "apex_mp", "numpy", "pandas", "scipy", "sklearn", "torch"})
_INITS = ("apex.amp.init", "apex.amp.amp.init")


@dataclass(frozen=True)
class Evidence:
    """A name or argument that only some eras have.

    Attributes:
        what: The name or argument.
        where: File and line.
        eras: The eras that have it.
    """

    what: str
    where: str
    eras: tuple[str, ...]


def evidence_in(source: Source) -> Iterator[Evidence]:
    """Yield what a file uses that only some eras have."""
    for name, where in source.uses:
        for place in places_of(name) if is_of_apex(name) else ():
            eras = tuple(eras_with(place))
            if len(eras) < len(ERAS):
                yield Evidence(place[1], where, eras)
    for call in source.calls:
        yield from _of_arguments(call)


def _of_arguments(call: Call) -> Iterator[Evidence]:
    if any(name in _ADAMS for name in call.names):
        for keyword in call.node.keywords:
            if keyword.arg in _ADAM:
                what = f"FusedAdam({keyword.arg}=)"
                yield Evidence(what, call.where, _ADAM[keyword.arg])
    if any(name in _INITS for name in call.names) and len(call.node.args) > 1:
        second = call.node.args[1]
        if isinstance(second, ast.Constant):
            eras = _BEFORE if isinstance(second.value, bool) else _SINCE
            yield Evidence(f"amp.init(..., {second.value!r})", call.where, eras)


def era_of(evidence: Iterable[Evidence]) -> str:
    """Return the era with the most evidence; the first one of several."""
    found = [*evidence]
    return max(ERAS, key=lambda era: (sum(era in each.eras for each in found), era == DEFAULT))


def in_libraries(names: Iterable[str], root: Path) -> list[Evidence]:
    """Return the evidence in installed packages."""
    found: list[Evidence] = []
    for name in sorted({*names} - sys.stdlib_module_names - _WITHOUT_EVIDENCE):
        if (root / name / "__init__.py").is_file() or (root / f"{name}.py").is_file():
            continue
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            is_own = folder.resolve().is_relative_to(root.resolve())
            for path in () if is_own else files_of(folder):
                with contextlib.suppress(SyntaxError, OSError, RecursionError):
                    text = path.read_bytes()
                    if any(name.encode() in text for name in TOP_LEVEL):
                        found += evidence_in(read(path, folder.parent))
    return found


def in_program(start: Path, root: Path, package: str = "") -> tuple[list[Evidence], set[str]]:
    """Return the evidence in a script and in what it imports, and the packages it imports."""
    found: list[Evidence] = []
    imports: set[str] = set()
    for path in program(start, root, package):
        with contextlib.suppress(SyntaxError, OSError, RecursionError):  # The run will say so.
            source = read(path, root)
            found += evidence_in(source)
            imports |= source.packages
    return found, imports


def in_module(name: str) -> tuple[list[Evidence], set[str]]:
    """Return the same for what `python -m name` runs, and for its imports from its package."""
    package = name.partition(".")[0]
    for folder in map(Path, sys.path):
        whole = folder.joinpath(*name.split("."))
        for start in (whole.with_suffix(".py"), whole / "__main__.py"):
            if start.is_file():
                found, imports = in_program(start, folder, package)
                return found, imports - {package}
    return [], set()
