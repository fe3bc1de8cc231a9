"""A Sphinx extension that warns of a public name whose docstring leaves something out.

A function describes each parameter below `Args:` and says what it returns below `Returns:` or in
its first sentence. A class describes the arguments of its constructor, a dataclass those or its
`Attributes:`. What a base class says counts for its subclasses; "arguments as of `f`" counts too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

_logger = logging.getLogger(__name__)
_NOTHING = (None, inspect.Signature.empty, "None", "NoReturn", "Iterator[None]", "Self")


def gaps(kind: str, thing: Any, docstring: str) -> Iterator[str]:
    """Yield a sentence for each thing that a docstring leaves out.

    Args:
        kind: "function", "method", "class" or another kind that autodoc knows.
        thing: The function or class.
        docstring: Its docstring.
    """
    if not docstring.strip():
        yield "has no docstring"
    elif kind in ("function", "method", "class"):
        try:
            signature = inspect.signature(thing)
        except ValueError:  # Compiled, without a signature.
            return
        described = _described(thing, docstring)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = [each for each in signature.parameters.values() if each.kind not in variadic]
        names = [each.name for each in parameters if each.name not in ("self", "cls")]
        if "rguments as of `" not in docstring and {*names} - described:
            left_out = ", ".join(name for name in names if name not in described)
            yield f"does not describe {left_out} below Args:"
        returned = signature.return_annotation
        first = docstring.split("\n\n")[0]
        if kind == "class" or returned in _NOTHING or "Returns:" in docstring:
            return
        if not re.search(r"\b(return|yield)s?\b", first, re.IGNORECASE):
            yield f"does not say what it returns ({returned})"


def _described(thing: Any, docstring: str) -> set[str]:
    """Names that a docstring, or that of a base class, describes."""
    name, _, method = thing.__qualname__.partition(".")
    owner = getattr(sys.modules[thing.__module__], name, None)
    bases = owner.__mro__[1:-1] if inspect.isclass(owner) else ()
    same = (getattr(base, method, None) if method else base for base in bases)
    texts = [docstring, *(inspect.getdoc(each) or "" for each in same)]
    sections = "Args|Attributes" if dataclasses.is_dataclass(thing) else "Args"
    found = set()
    for text in texts:
        for section in re.findall(rf"^(?:{sections}):\n((?: .*\n|\n)*)", text + "\n", re.MULTILINE):
            found |= {*re.findall(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", section, re.MULTILINE)}
    return found


def _check(_app: Sphinx, kind: str, name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    for gap in gaps(kind, thing, "\n".join(lines)):
        _logger.warning("%s %s", name, gap, type="docstrings")


def _mark_code(
    _app: Sphinx, _kind: str, _name: str, _thing: Any, _options: Any, lines: list[str]
) -> None:
    """Put `::` before each indented paragraph that follows one which is not indented."""
    for i in range(len(lines) - 2, 0, -1):
        indented = lines[i + 1].startswith("    ")
        if indented and not lines[i] and lines[i - 1][:1].strip(" ="):
            lines[i : i + 1] = ["", "::", ""]


def _public_bases(_app: Sphinx, _name: str, thing: Any, _options: Any, bases: list[Any]) -> None:
    """Show the nearest public base of each line in the place of a private one."""

    def public(base: Any) -> Any:
        is_private = any(
            part.startswith("_") for part in f"{base.__module__}.{base.__name__}".split(".")
        )
        return next(filter(None, map(public, base.__bases__)), None) if is_private else base

    found = [public(base) if inspect.isclass(base) else base for base in bases]
    bases[:] = dict.fromkeys(base for base in found if base is not None)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to autodoc, before napoleon rewrites the docstrings."""
    app.connect("autodoc-process-docstring", _check, priority=1)
    app.connect("autodoc-process-docstring", _mark_code, priority=2)
    app.connect("autodoc-process-bases", _public_bases)
    return {"parallel_read_safe": True}
