"""Python files that are parsed, not run: what their names stand for, and which are of apex."""

from __future__ import annotations

import ast
import functools
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from apex_mp._as_apex.table import MISSING, MODULES, TOP_LEVEL

_IMPORT_ERRORS = re.compile(r"\b(ImportError|ModuleNotFoundError|Exception)\b")
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

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return [*ast.walk(self.tree)]

    def where(self, node: ast.expr | ast.stmt) -> str:
        """Return the file and line of a node."""
        return f"{self.name}:{node.lineno}"

    def full_names(self, node: ast.expr) -> tuple[str, ...]:
        """Return the full names that `a.b.c` may stand for; empty if `a` is not imported."""
        if isinstance(node, ast.Name):
            return self.meanings.get(node.id, ())
        if isinstance(node, ast.Attribute):
            whole = tuple(f"{name}.{node.attr}" for name in self.full_names(node.value))
            return whole or (self._kept and self.meanings.get(ast.unparse(node), ()))
        return _imported_by_call(node)

    @functools.cached_property
    def _kept(self) -> tuple[str, ...]:
        """The attributes that modules are kept in, such as `self.amp`."""
        return tuple(name for name in self.meanings if "." in name)

    @functools.cached_property
    def uses(self) -> list[Use]:
        """Each imported name, and each name of a module that is read as an attribute."""
        found = []
        inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found += [Use(name, self.where(node)) for name in _imported(node)]
            elif isinstance(node, ast.Call):
                found += [Use(name, self.where(node)) for name in _imported_by_call(node)]
            elif isinstance(node, ast.Attribute) and id(node) not in inner:
                found += [Use(name, self.where(node)) for name in self.full_names(node)]
        return found

    @functools.cached_property
    def calls(self) -> list[Call]:
        """All calls."""
        return [
            Call(self.full_names(node.func), node, self.where(node))
            for node in self.nodes
            if isinstance(node, ast.Call)
        ]

    @functools.cached_property
    def optional(self) -> frozenset[str]:
        """Names that are imported where the code does without them, and nowhere else."""
        caught = {
            id(statement)
            for each in self.nodes
            if _does_without(each)
            for statement in each.body  # type: ignore[attr-defined]
        }
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names[id(node) in caught].update(_imported(node))
        return frozenset(names[True] - names[False])

    @functools.cached_property
    def packages(self) -> set[str]:
        """The packages that it imports, its own by their names."""
        imports = (node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
        return {name.partition(".")[0] for node in imports for name in _imported(node)}

    def is_optional(self, name: str) -> bool:
        """Return whether a full name, or what it is an attribute of, is in `optional`."""
        return any(f"{name}.".startswith(f"{each}.") for each in self.optional)


def files_of(path: Path, suffix: str = ".py") -> list[Path]:
    """Return a file, or those below a folder with a suffix; environments, builds are left out."""
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
        found += [Path(folder) / name for name in names if name.endswith(suffix)]
    return sorted(each for each in found if each.is_file() or not each.exists())  # No pipes.


def name_of(path: Path, root: Path) -> str:
    """Return the path of a file from `root`, a folder or the file itself."""
    return path.name if path == root else path.relative_to(root).as_posix()


def read(path: Path, root: Path, text: str | None = None) -> Source:
    """Parse a file, or the text that is given in its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings
        try:
            tree = ast.parse(path.read_bytes() if text is None else text)
        except (RecursionError, MemoryError):
            raise SyntaxError("it is nested too deeply") from None
        except ValueError as error:  # a byte of 0
            raise SyntaxError(str(error)) from None
    meanings: dict[str, tuple[str, ...]] = {}
    source = Source(name_of(path, root), tree, meanings)
    for node in source.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias, name in zip(node.names, _imported(node), strict=False):
                bound = alias.asname or alias.name.partition(".")[0]
                whole = name if alias.asname or isinstance(node, ast.ImportFrom) else bound
                meanings[bound] = (*meanings.get(bound, ()), whole)
    assigned = (node for node in source.nodes if isinstance(node, ast.Assign))
    kept = [(node.targets, names) for node in assigned if (names := source.full_names(node.value))]
    for targets, names in kept:
        for target in targets:
            if isinstance(target, (ast.Name, ast.Attribute)):  # amp_ = amp, self.amp = amp
                bound = ast.unparse(target)
                meanings[bound] = (*meanings.get(bound, ()), *names)
    vars(source).pop("_kept", None)
    return source


def _does_without(node: ast.AST) -> bool:
    """Return whether code goes on if an import among the statements of a node fails."""
    if isinstance(node, ast.With):
        return any("suppress(" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    handlers = [each for each in getattr(node, "handlers", ()) if not _ends(each.body)]
    kinds = [ast.unparse(each.type) if each.type else "Exception" for each in handlers]
    return any(_IMPORT_ERRORS.search(kind) for kind in kinds)


def _ends(body: list[ast.stmt]) -> bool:
    """Return whether statements end in an error, or the program."""
    return isinstance(body[-1], ast.Raise) or ast.unparse(body[-1]).startswith(("sys.exit", "exit"))


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the full names that an import binds; relative imports give none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:
        return []
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _imported_by_call(node: ast.AST) -> tuple[str, ...]:
    """Return what a call of import_module or __import__ imports, if it says so."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return ()
    function = getattr(node.func, "attr", getattr(node.func, "id", ""))  # Of a name, or the last.
    name = node.args[0].value
    if function in ("import_module", "__import__") and isinstance(name, str):
        return (name,)
    return ()


def program(start: Path, root: Path, package: str = "") -> Iterator[Path]:
    """Yield a script and the files that it imports, and those that these import."""
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


def imports_from(path: Path, package: str) -> bool:
    """Return whether a script has relative imports, or imports from a package."""
    try:
        source = read(path, path)
    except (SyntaxError, OSError):
        return False
    is_relative = (isinstance(node, ast.ImportFrom) and node.level for node in source.nodes)
    return package in source.packages or any(is_relative)


def local_imports(source: Source, path: Path, root: Path) -> set[Path]:
    """Return the files that a file of a project imports: from the root, its folder, its package."""
    outside = next((each for each in path.parents if not (each / "__init__.py").is_file()), root)
    folders = {root, path.parent, outside}
    return {file for folder in folders for file in _local(source.tree, path, folder, "")}


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
