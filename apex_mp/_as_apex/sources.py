"""Python files that are parsed, not run: what their names stand for, and which are of apex."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from apex_mp._as_apex.table import MISSING, MODULES, TOP_LEVEL

_NOT_SOURCES = {"build", "dist", "node_modules", "site-packages", "venv"}


class Use(NamedTuple):
    """A name that a file uses, in full, and the line."""

    name: str
    where: str


class Call(NamedTuple):
    """A call, with the full names that the function may have."""

    names: tuple[str, ...]
    node: ast.Call
    where: str


@dataclass(frozen=True)
class Source:
    """A parsed file.

    Attributes:
        name: Its path from the folder that is examined.
        tree: The syntax tree.
        meanings: For each name that an import binds, the full names that it may stand for; with
            `try` there may be several.
    """

    name: str
    tree: ast.Module
    meanings: dict[str, tuple[str, ...]]

    def where(self, node: ast.expr | ast.stmt) -> str:
        """Return the file and line of a node."""
        return f"{self.name}:{node.lineno}"

    def full_names(self, node: ast.expr) -> tuple[str, ...]:
        """Return the full names that `a.b.c` may stand for; empty if `a` is not imported."""
        if isinstance(node, ast.Name):
            return self.meanings.get(node.id, ())
        if isinstance(node, ast.Attribute):
            return tuple(f"{name}.{node.attr}" for name in self.full_names(node.value))
        return ()

    def uses(self) -> Iterator[Use]:
        """Yield each imported name, and each name of a module that is read as an attribute."""
        inner = {id(n.value) for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in _imported(node):
                    yield Use(name, self.where(node))
            elif isinstance(node, ast.Attribute) and id(node) not in inner:
                for name in self.full_names(node):
                    yield Use(name, self.where(node))

    def calls(self) -> Iterator[Call]:
        """Yield all calls."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield Call(self.full_names(node.func), node, self.where(node))


def files_of(path: Path) -> list[Path]:
    """Return a file, or the Python files below a folder; environments and builds are left out."""
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [
            name
            for name in folders
            if name not in _NOT_SOURCES
            and not name.startswith((".", "__"))
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found)


def name_of(path: Path, root: Path) -> str:
    """Return the path of a file from `root`, a folder or the file itself."""
    return path.name if path == root else path.relative_to(root).as_posix()


def read(path: Path, root: Path) -> Source:
    """Parse a file.

    Raises:
        SyntaxError: It is not Python 3.
        OSError: It cannot be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings
        try:
            tree = ast.parse(path.read_bytes())
        except (ValueError, RecursionError, MemoryError) as error:  # a byte of 0; too deep
            raise SyntaxError(str(error) or "it is nested too deeply") from None
    meanings: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias, name in zip(node.names, _imported(node), strict=False):
                bound = alias.asname or alias.name.partition(".")[0]
                whole = name if alias.asname or isinstance(node, ast.ImportFrom) else bound
                meanings[bound] = (*meanings.get(bound, ()), whole)
    return Source(name_of(path, root), tree, meanings)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the full names that an import binds; relative imports give none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:
        return []
    return [f"{node.module}.{alias.name}" for alias in node.names]


def program(start: Path, root: Path, package: str = "") -> Iterator[Path]:
    """Yield a script and the files that it imports, and those that these import.

    Args:
        start: The script.
        root: The folder from which imports are resolved.
        package: Follow only imports from this package, if it is given.
    """
    found, waiting = {start}, [start]
    while waiting:
        path = waiting.pop()
        yield path
        try:
            tree = read(path, root).tree
        except (SyntaxError, OSError):
            continue  # Python will say so, if it comes to that.
        new = {*_local(tree, path, root, package)} - found
        found |= new
        waiting += sorted(new)


def _local(tree: ast.Module, path: Path, root: Path, package: str) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(root, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else root
            module = node.module or ""
            names = [(folder, f"{module}.{alias.name}".lstrip(".")) for alias in node.names]
        else:
            continue
        for folder, name in names:
            parts = name.split(".")
            if folder == root and package not in ("", parts[0]):
                continue
            for count in range(1, len(parts) + 1):
                whole = folder.joinpath(*parts[:count])
                yield from filter(Path.is_file, (whole.with_suffix(".py"), whole / "__init__.py"))


# Names of apex.


def is_of_apex(name: str) -> bool:
    """Return whether a full name is one of apex or its compiled modules."""
    return name.partition(".")[0] in TOP_LEVEL


def places_of(name: str) -> list[tuple[str, str]]:
    """Return the places (module, name) in the table for a full name; none if it is a module's."""
    parts = name.split(".")
    splits = ((".".join(parts[:n]), parts[n]) for n in range(len(parts) - 1, 0, -1))
    return [(module, each) for module, each in splits if each in names_of(module)]


def names_of(module: str) -> set[str]:
    """Return the names in a module of apex, including those that apex_mp lacks."""
    origins = MODULES.get(module, {}).values()
    return {name for names in origins for name in names.split()} | {*MISSING.get(module, {})}
