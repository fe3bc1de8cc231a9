"""Measures of source text, for `benchmarks.house`: imports, classes, sizes, words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ANSWER = re.compile(r"(^|_)(found_inf|overflow|overflowed|skipped|finite|nonfinite)$")
SCALE = re.compile(r"_?((cur|current|device|loss|init_loss)_)?scale_?$")
RECORDS = {"dataclass", "NamedTuple", "Protocol"}
UNSCALING = {
    "ops.unscale_",
    "ops.axpby_",
    "torch._amp_foreach_non_finite_check_and_unscale_",
}
UPDATES = {"update", "update_scale", "adjust"}
# Words that names no longer have. In a sentence they are plain English, and do not count.
NAME_WORDS = ["tell", "send", "look", "hold", "marks", "seen", "needs", "bring", "settle", "route"]
# Words that neither names nor sentences have.
WORDS = [
    "told",
    "came_in",
    "own_params",
    "verdict",
    "lie_as",
    "home_of",
    "wishes",
    "followers",
    "stay_here",
    "room",
    "rim",
    "dear",
    "whoever",
    "somebody",
]
IN_NAMES = re.compile(rf"(?<![a-z])({'|'.join(NAME_WORDS + WORDS)})(?![a-z])")
IN_PROSE = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield full names of what is imported: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_circles(package: Path) -> list[str]:
    """Return the strongly connected components of more than one module, as sorted names.

    `from package import name` imports the package only if `name` is no module.

    Args:
        package: Folder of a package whose modules import each other by full names.
    """
    files = {module_name(path, package.parent): path for path in python_files(package)}
    # An extension module is a file for itself, and imports nothing.
    stubs = {module_name(path, package.parent) for path in package.rglob("*.pyi")}
    imports: dict[str, set[str]] = {name: set() for name in stubs}
    for module, path in files.items():
        known = set()
        for name in _imported(parse(path)):
            while name and name not in files and name not in stubs:
                name = name.rpartition(".")[0]
            known.add(name)
        imports[module] = known - {"", module}

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        todo = [module]
        while todo:
            new = imports[todo.pop()] - found
            found |= new
            todo += new
        return found

    reach = {module: reached(module) for module in imports}
    circles = {frozenset(o for o in reach[m] if m in reach[o]) for m in reach if m in reach[m]}
    return sorted(", ".join(sorted(circle)) for circle in circles)


def classes(package: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    for path in python_files(package):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(package.parent)}:{node.lineno} {node.name}", node


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef)]


def fields(node: ast.ClassDef) -> set[str]:
    """Return names of annotated fields, properties, and attributes that methods assign to self."""
    found = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for method in methods(node):
        if any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list):
            found.add(method.name)
        for part in ast.walk(method):
            stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            if stored and ast.unparse(part).startswith("self."):
                found.add(ast.unparse(part).removeprefix("self."))
    return found


def is_record(node: ast.ClassDef) -> bool:
    marks = " ".join(ast.unparse(mark) for mark in [*node.decorator_list, *node.bases])
    return bool(RECORDS & {*re.findall(r"\w+", marks)})


def structs(csrc: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield place and name of each struct of `csrc`, and its members that are not pointers."""
    for path in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cpp"), *csrc.rglob("*.cu")]):
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(
            r"^ *(?:struct|class) (?:alignas\(\d+\) )?(\w+)[^;{]*\{(.*?)^ *\};",
            text,
            re.DOTALL | re.MULTILINE,
        ):
            members = re.findall(
                r"^ +(?:const )?[\w:<>]+ (\w+)(?: = [^;]*)?;", found[2], re.MULTILINE
            )
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(csrc.parent)}:{line} {found[1]}", members


def overflow_answers(package: Path) -> tuple[list[str], list[str]]:
    """Return records with a field that says "did it overflow", and other classes that keep one."""
    records: list[str] = []
    others: list[str] = []
    for place, node in classes(package):
        names = sorted(name for name in fields(node) if ANSWER.search(name))
        if names:
            (records if is_record(node) else others).append(f"{place}: {', '.join(names)}")
    for place, members in structs(package.parent / "csrc"):
        names = [name for name in members if ANSWER.search(name.rstrip("_"))]
        if names:
            records.append(f"{place}: {', '.join(names)}")
    return records, others


def scale_holders(package: Path) -> list[str]:
    """Return classes that have a loss scale and a method which updates it, and so the structs."""
    updating = [
        (place, fields(node))
        for place, node in classes(package)
        if UPDATES & {method.name for method in methods(node)}
    ]
    kept = [(place, {*members}) for place, members in structs(package.parent / "csrc")]
    updating += [row for row in kept if row[0].endswith(("LossScale", "LossScaleState"))]
    found = [(place, sorted(filter(SCALE.match, names))) for place, names in updating]
    return [f"{place}: {', '.join(names)}" for place, names in found if names]


def delegating_optimizers(package: Path) -> list[str]:
    """Return subclasses of torch.optim.Optimizer whose `param_groups` is a property."""
    return [
        place
        for place, node in classes(package)
        if any(ast.unparse(base).endswith("optim.Optimizer") for base in node.bases)
        and any(method.name == "param_groups" for method in methods(node))
    ]


def masters_adopted(package: Path) -> list[str]:
    return [p for p, node in classes(package) if any(m.name == "adopt" for m in methods(node))]


def unscaling_files(package: Path) -> list[str]:
    """Return files that call an operator which unscales, but for the operators of apex."""
    return [
        str(path.relative_to(package.parent))
        for path in python_files(package)
        if "multi_tensor_apply" not in path.parts
        and any(
            isinstance(node, ast.Call) and ast.unparse(node.func) in UNSCALING
            for node in ast.walk(parse(path))
        )
    ]


def patching_modules(package: Path) -> list[str]:
    """Return files that set attributes by name and delete them again."""
    undone = re.compile(r"(?<![\w.])setattr\(.*(?<![\w.])delattr\(|delattr\(.*setattr\(", re.DOTALL)
    return [
        str(path.relative_to(package.parent))
        for path in python_files(package)
        if undone.search(path.read_text(encoding="utf-8"))
    ]


def loose_modules(package: Path, pages: list[Path]) -> list[str]:
    """Return modules of the top level that users do not import.

    Users import what `__init__.py` or a page names with the package, but for _private names.
    """
    pages = [package / "__init__.py", *pages]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    public = {*re.findall(rf"\b{package.name}[./](\w+)", text)}
    names = [path.stem for path in sorted(package.glob("*.py"))]
    spared = {"__init__", "__main__", "_version"}
    return [n for n in names if n not in spared and (n.startswith("_") or n not in public)]


def sizes(package: Path) -> dict[str, list[tuple[int, str]]]:
    """Return lines of files, methods of classes and lines of functions, the largest first."""
    found: dict[str, list[tuple[int, str]]] = {"file": [], "class": [], "function": []}
    for path in python_files(package):
        name = str(path.relative_to(package.parent))
        found["file"].append((len(path.read_text(encoding="utf-8").splitlines()), name))
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                found["class"].append((len(methods(node)), f"{name}:{node.lineno} {node.name}"))
            elif isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found["function"].append((lines, f"{name}:{node.lineno} {node.name}"))
    return {kind: sorted(rows, reverse=True) for kind, rows in found.items()}


def lines_not_blank(paths: list[Path]) -> int:
    return sum(
        bool(line.strip())
        for path in paths
        for line in path.read_text(errors="replace").splitlines()
    )


def _defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _prose(path: Path, tree: ast.Module, text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            for offset, line in enumerate(ast.literal_eval(first.value).splitlines()):
                yield first.lineno + offset, line


def retired_words(package: Path) -> tuple[Counter[str], list[str]]:
    """Return how often each retired word stands in names, comments and docstrings, and where.

    A name counts once a file, where it is defined; of `csrc` every identifier does.
    """
    counts: Counter[str] = Counter()
    places: list[str] = []

    def count(name: str, line: int, found: list[str], said: str) -> None:
        counts.update(word.lower() for word in found)
        places.extend(f"{name}:{line}: {word.lower()}: {said.strip()[:80]}" for word in found)

    for path in python_files(package):
        text, tree, name = path.read_text(), parse(path), str(path.relative_to(package.parent))
        seen: set[str] = set()
        for line, defined in _defined(tree):
            if defined not in seen:
                seen.add(defined)
                snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", defined).lower()
                count(name, line, IN_NAMES.findall(snake), defined)
        for line, said in _prose(path, tree, text):
            count(name, line, IN_PROSE.findall(said), said)
    csrc = package.parent / "csrc"
    for path in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cpp"), *csrc.rglob("*.cu")]):
        name, seen = str(path.relative_to(csrc.parent)), set()
        for line, said in enumerate(path.read_text().splitlines(), 1):
            code, _, comment = said.partition("//")
            count(name, line, IN_PROSE.findall(comment), comment)
            for identifier in {*re.findall(r"[A-Za-z_]\w*", code)} - seen:
                seen.add(identifier)
                snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", identifier).lower()
                count(name, line, IN_NAMES.findall(snake), identifier)
    return counts, places
