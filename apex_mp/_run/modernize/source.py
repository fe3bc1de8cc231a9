"""The source of a project, compiled so that what later versions refuse is supplied.

Items and in-place calls of a project go through functions here. A method of Tensor in the place of
its C slot would do the same, but then torch takes each tensor of one number for a sequence.

It imports neither torch nor apex_mp: a child process loads this file before its script is compiled.
"""

from __future__ import annotations

import ast
import builtins
import io
import itertools
import operator
import os
import sys
import sysconfig
import tokenize
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, SimpleNamespace
from typing import Any

_LEAF = "a view of a leaf Variable that requires grad is being used in an in-place operation"
# Methods that change what a tensor views: through `.data` they changed the tensor itself.
OF_DATA = ("set_", "resize_", "resize_as_", "t_", "transpose_", "squeeze_", "unsqueeze_")
_OURS = "_apex_mp"
_INSTALLED = [os.path.realpath(path) for path in {*sysconfig.get_paths().values()} if "lib" in path]
_APEX_MP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "itruediv",
    ast.BitAnd: "iand",
    ast.BitOr: "ior",
    ast.BitXor: "ixor",
    ast.Mult: "imul",
    ast.MatMult: "imatmul",
}  # The others are called like their nodes.


def supply(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Compile scripts and modules of projects by `compiled`, in this process."""
    if hasattr(builtins, _OURS):  # Our sitecustomize has done it.
        return
    get_code = SourceFileLoader.get_code

    def get_code_of(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if not is_of_project(path):
            return get_code(self, fullname)
        # Not a cached file, which may be that of a run without --modernize.
        return compiled(self.get_data(path), path, is_script=isinstance(self, _Script))

    set_attribute(SourceFileLoader, "get_code", get_code_of)
    functions = (first, read_item, set_item, augment, in_place, in_data, slice)
    set_attribute(builtins, _OURS, SimpleNamespace(**{each.__name__: each for each in functions}))
    set_attribute(sys, "path_hooks", [_importer_of_script, *sys.path_hooks])


def is_of_project(path: str) -> bool:
    """Return whether a file is no part of Python, of an installed package or of apex_mp."""
    real = os.path.realpath(path)
    if any(real.startswith(folder + os.sep) for folder in (*_INSTALLED, _APEX_MP)):
        return False
    return {"site-packages", "dist-packages"}.isdisjoint(real.split(os.sep))


def compiled(source: bytes, path: str, *, is_script: bool = False) -> CodeType:
    """Return the code of a file, which may say `async=True` and what else is supplied here."""
    try:
        tree = ast.parse(source, path)
    except SyntaxError:
        text = without_async(source)
        if text is None:
            raise
        tree = ast.parse(text, path)
        _note("async=True", "is non_blocking=True")
    tree = _Rewriter().visit(tree)
    if is_script:  # multiprocessing takes a script by its path if it has no spec.
        place = int(ast.get_docstring(tree) is not None)
        while place < len(tree.body) and getattr(tree.body[place], "module", "") == "__future__":
            place += 1
        tree.body[place:place] = ast.parse("__spec__ = None").body
    code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    return code


def without_async(source: bytes) -> str | None:
    """Return a source with `non_blocking` for the name `async`; None if it has no such name."""
    try:
        encoding, *tokens = tokenize.tokenize(io.BytesIO(source).readline)
        lines = source.decode(encoding.string).split("\n")  # A form feed ends no line.
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
        return None
    places = [
        one.start
        for one, after in itertools.pairwise(tokens)
        if one.string == "async" and after.string not in ("def", "for", "with")
    ]
    for row, column in reversed(places):
        line = lines[row - 1]
        lines[row - 1] = f"{line[:column]}non_blocking{line[column + len('async') :]}"
    return "\n".join(lines) if places else None


class _Rewriter(ast.NodeTransformer):
    """Replaces items and in-place calls; annotations stay as they are."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        key = node.slice
        is_first = isinstance(key, ast.Constant) and type(key.value) is int and key.value == 0
        reads = isinstance(node.ctx, ast.Load)
        return _call(node, "first", node.value) if is_first and reads else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        target = node.targets[0]
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript):
            return node
        call = _call(node, "set_item", node.value, target.value, _key(target.slice))
        return ast.copy_location(ast.Expr(call), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        target = node.target
        if not isinstance(target, ast.Subscript):
            return node
        name = _OPERATORS.get(type(node.op), f"i{type(node.op).__name__.lower()}")
        item = _call(node, "read_item", target.value, _key(target.slice))
        call = _call(node, "augment", item, ast.Constant(name), node.value)
        return ast.copy_location(ast.Expr(call), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute) or not _is_in_place(function.attr):
            return node
        name, ours, owner = ast.Constant(function.attr), "in_place", function.value
        if function.attr in OF_DATA and isinstance(owner, ast.Attribute) and owner.attr == "data":
            ours, owner = "in_data", owner.value
        return _call(node, ours, owner, name, *node.args, keywords=node.keywords)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__")


def _call(place: ast.AST, name: str, *args: ast.expr, keywords: Any = ()) -> ast.Call:
    function = ast.Attribute(ast.Name(_OURS, ast.Load()), name, ast.Load())
    return ast.copy_location(ast.Call(function, [*args], [*keywords]), place)


def _key(key: ast.expr) -> ast.expr:
    """Return an index as an expression of its own, with calls of `slice` for colons."""
    if isinstance(key, ast.Slice):
        none = ast.Constant(None)
        return _call(key, "slice", key.lower or none, key.upper or none, key.step or none)
    if isinstance(key, ast.Tuple):
        return ast.copy_location(ast.Tuple([*map(_key, key.elts)], ast.Load()), key)
    return key


# What the compiled code calls.


def first(owner: Any) -> Any:
    """Return `owner[0]`; of a tensor of one number the number, as for `loss.data[0]`."""
    if _is_tensor(owner) and owner.dim() == 0:
        what = "is the number, of one with a gradient itself"
        _note("index 0 of a tensor of one number", what)
        return owner if owner.requires_grad else owner.item()
    return owner[0]


def read_item(owner: Any, key: Any) -> tuple[Any, Any, Any]:
    """Return an item, after what it is an item of, for `augment`."""
    return owner, key, owner[key]


def augment(item: tuple[Any, Any, Any], name: str, value: Any) -> None:
    """Do `owner[key] += value` and the like."""
    owner, key, old = item
    new = on_leaf(old, lambda: getattr(operator, name)(old, value))
    on_leaf(owner, lambda: operator.setitem(owner, key, new))


def set_item(value: Any, owner: Any, key: Any) -> None:
    """Do `owner[key] = value`."""
    if _is_tensor(owner):
        key = tuple(map(_as_bool, key)) if isinstance(key, tuple) else _as_bool(key)
    on_leaf(owner, lambda: operator.setitem(owner, key, value))


def in_place(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method whose name ends in `_`."""
    method = getattr(owner, name)
    return on_leaf(owner, lambda: method(*args, **kwargs))


def in_data(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of `owner.data` that changed `owner` itself until torch 1.0."""
    data = owner.data
    result = getattr(data, name)(*args, **kwargs)
    if _is_tensor(owner):
        _note(f"x.data.{name}", "changes x, as before torch 1.1")
        owner.data = data
    return result


def on_leaf(owner: Any, change: Callable[[], Any]) -> Any:
    """Make a change; of a view of a parameter without recording it."""
    try:
        return change()
    except RuntimeError as error:
        if _LEAF not in str(error) or not _is_tensor(owner):
            raise
    _note("an in-place change of a view of a parameter", "is not recorded")
    with sys.modules["torch"].no_grad():
        return change()


def _as_bool(mask: Any) -> Any:
    if _is_tensor(mask) and mask.dtype == sys.modules["torch"].uint8:
        _note("x[mask] = value with a uint8 mask", "taken for a bool one")
        return mask.bool()
    return mask


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _note(name: str, what: str) -> None:
    notes = sys.modules.get("apex_mp._run.modernize.notes")
    if notes is not None:
        notes.note(name, what)
    else:  # It is the script that says so, before it has imported torch.
        print(f"apex_mp run: --modernize: {name}: {what}", file=sys.stderr)


# Scripts that are run by their path: in child processes by Python itself, and by multiprocessing.


class _Script(SourceFileLoader):
    """Loads a script as `__main__`."""

    def get_data(self, path: str) -> bytes:
        """Return the source; the folder of the script comes into sys.path in its place."""
        if sys.path and sys.path[0] == self.path:
            sys.path[0] = os.path.dirname(os.path.realpath(self.path))
        return super().get_data(path)


class _Importer:
    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, name: str, target: object = None) -> ModuleSpec | None:
        """Return the script as the module `__main__`."""
        if name != "__main__":
            return None
        return spec_from_file_location(name, self._path, loader=_Script(name, self._path))


def _importer_of_script(path: str) -> _Importer:
    if path.endswith(".py") and os.path.isfile(path) and is_of_project(path):
        return _Importer(path)
    raise ImportError(path)
