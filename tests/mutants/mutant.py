"""Mutants: bugs of apex_mp/, each an expression or a statement, by part of the package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bugs import Bug, read

import apex_mp

PARTS = [read(path) for path in sorted(Path(__file__).parent.glob("*.bugs"))]
MUTANTS = {name: bug for part in PARTS for name, bug in part.items()}
PACKAGE = Path(apex_mp.__file__).parent
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Place(NamedTuple):
    """Where an expression or statement stands: the file, and the field of its parent."""

    path: Path
    parent: ast.AST
    field: str
    index: int | None


def places(bug: Bug) -> list[Place]:
    """Return all places in the package of what a bug changes.

    Its scope is the function that holds it, or the class or module outside of functions; with as
    much before it, as in "GradScaler.step", as makes `before` the only one. `before` is one
    expression or statement, as `ast.unparse` writes it: its place and layout do not matter. Its
    tests are a file in a folder of tests/, without "test_" and ".py".
    """
    dotted = f".{bug.scope}"
    scopes = [scope for scope in _index() if scope.endswith(dotted)]
    return [place for scope in scopes for place in _texts(scope).get(bug.before, ())]


def planted(bug: Bug) -> tuple[Path, str]:
    """Return the file that a bug changes, and its text with the change."""
    ((path, parent, field, index),) = places(bug)
    changed = ast.parse(bug.after).body or [ast.Pass()]
    old = getattr(parent, field)
    is_statement = isinstance(old if index is None else old[index], ast.stmt)
    new = changed if is_statement else [_expression(changed)]
    if index is None:
        setattr(parent, field, new[0])
    else:
        old[index : index + 1] = new
    text = ast.unparse(_tree(path))
    for cache in (_tree, _index, _texts):
        cache.cache_clear()  # The tree has the bug now.
    return path, text


def _expression(statements: list[ast.stmt]) -> ast.expr:
    (statement,) = statements
    assert isinstance(statement, ast.Expr), "an expression is replaced by an expression"
    return statement.value


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _texts(scope: str) -> dict[str, list[Place]]:
    """Return the places of the expressions and statements of a scope, by their texts."""
    found: dict[str, list[Place]] = {}
    for node, place in _index()[scope]:
        found.setdefault(ast.unparse(node), []).append(place)
    return found


@functools.cache
def _index() -> dict[str, list[tuple[ast.AST, Place]]]:
    """Return each expression and statement of the package, by its scope."""
    found: dict[str, list[tuple[ast.AST, Place]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for scope, node, place in _walk(path, _tree(path), f".{module.removesuffix('.__init__')}"):
            found.setdefault(scope, []).append((node, place))
    return found


def _walk(path: Path, parent: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST, Place]]:
    for field, value in ast.iter_fields(parent):
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, node in items:
            if not isinstance(node, ast.AST):
                continue
            # An expression that is a statement counts once, as the statement.
            if isinstance(node, (ast.stmt, ast.expr)) and not isinstance(parent, ast.Expr):
                yield scope, node, Place(path, parent, field, index)
            inner = f"{scope}.{node.name}" if isinstance(node, _SCOPES) else scope
            yield from _walk(path, node, inner)
