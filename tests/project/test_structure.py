"""How apex_mp is built: who may import whom, what is called where, how long things are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

import apex_mp

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PACKAGE = Path(apex_mp.__file__).parent
ROOT = PACKAGE.parent
# A module or package imports from the rows above its own only. A new one is added to its row.
ROWS = [
    {"_version", "_C", "loss_scale"},
    {"core"},
    {"grads"},
    {"masters"},
    {"scale"},
    {"saved"},
    {"step"},
    {"engine"},
    {"multi_tensor_apply", "normalization", "parallel", "reparameterization", "RNN"},
    {"fp16_utils"},
    {"loss_scale_manager", "optimizers"},
    {"amp"},
    {"monitor"},
    {"checkpoint", "convert", "trainers"},
    {"averaged_masters"},
    {"_as_apex"},
    {"accelerate", "as_apex", "lightning", "pytorch_lightning", "_run"},
    {"_check"},
    {"__init__", "__main__"},
]
HEIGHTS = {name: height for height, row in enumerate(ROWS) for name in row}
TREES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

LINES_OF_A_FILE, LINES_OF_A_FUNCTION, METHODS_OF_A_CLASS = 700, 60, 45


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in TREES}


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, in functions and for annotations too."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(path: Path, name: str) -> bool:
    """Whether a file says a dotted name."""
    attributes = (node for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute))
    return any(ast.unparse(node) == name for node in attributes)


def test_a_package_imports_only_from_packages_below() -> None:
    wrong = []
    for path in TREES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        inner = {name.split(".")[1] for name in imports(path) if name.startswith("apex_mp.")}
        higher = [other for other in inner - {own} if HEIGHTS[other] >= HEIGHTS[own]]
        wrong += [f"{path} imports {other}, which is not below {own}" for other in higher]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    def modules(path: Path) -> Iterator[str]:
        for name in imports(path):
            # `from package import name` imports the package only if `name` is no module.
            while name and name not in MODULES and name != "apex_mp._C":
                name = name.rpartition(".")[0]
            if MODULES.get(name, path) != path:
                yield name

    left = {name: {*modules(path)} for name, path in MODULES.items()}
    while True:
        leaves = {name for name, needed in left.items() if not needed & left.keys()}
        if not leaves:
            break
        left = {name: needed for name, needed in left.items() if name not in leaves}
    assert not left, f"a circle is among {sorted(left)}"


def test_no_two_folders_import_each_other() -> None:
    """Between folders, too, imports go one way; a folder and those inside it are left out."""
    between: set[tuple[str, str]] = set()
    for path in TREES:
        own = path.parent.relative_to(ROOT).as_posix()
        for name in imports(path):
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name and path.name != "__main__.py":
                between.add((own, MODULES[name].parent.relative_to(ROOT).as_posix()))
    both = {(one, other) for one, other in between if (other, one) in between and one < other}
    assert not {pair for pair in both if not pair[1].startswith(f"{pair[0]}/")}


def test_loss_scale_knows_nothing_of_torch() -> None:
    allowed = {"__future__", "dataclasses", "math", "typing", "collections"}
    roots = {name.split(".")[0] for name in imports(PACKAGE / "loss_scale.py")}
    assert roots <= allowed


def test_what_only_one_file_may_call_is_called_there() -> None:
    for name, *where in (
        ("torch.ops.apex_mp", "core/ops.py"),
        ("ops.unscale_", "grads/found_inf.py", "multi_tensor_apply/amp_C.py"),
    ):
        calling = [path.relative_to(PACKAGE).as_posix() for path in TREES if calls(path, name)]
        assert calling == where, name


def test_only_three_modules_copy_without_waiting() -> None:
    # A copy to the CPU that the host does not wait for is read before its numbers arrive.
    found = {
        module_name(path)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "non_blocking"
    }
    core = ("tensors", "readback", "transfers")
    assert found == {f"apex_mp.core.{name}" for name in core}


def test_files_classes_and_functions_are_short() -> None:
    long = set()
    for path, tree in TREES.items():
        file = path.relative_to(PACKAGE).as_posix()
        if len(path.read_text("utf-8").splitlines()) > LINES_OF_A_FILE:
            long.add(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, Function)]
                if len(methods) > METHODS_OF_A_CLASS:
                    long.add(f"{file} {node.name}")
            elif isinstance(node, Function) and _lines_of_code(node) > LINES_OF_A_FUNCTION:
                long.add(f"{file} {node.name}")
    assert not long


def _lines_of_code(node: Function) -> int:
    """Lines of the body without the docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_internal_modules_lie_in_packages() -> None:
    public = {"__init__", "__main__", "_version", "loss_scale", "loss_scale_manager", "checkpoint"}
    public |= {
        "averaged_masters",
        "convert",
        "as_apex",
        "accelerate",
        "lightning",
        "pytorch_lightning",
    }
    assert {path.stem for path in PACKAGE.glob("*.py")} == public


def test_every_path_in_the_glossary_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    paths = re.findall(r"\| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(paths) == text.count("\n|") - 2 * text.count("\n| term |")
    for path in paths:
        home = ROOT if path.startswith("csrc/") else PACKAGE
        assert (home / path).exists(), path


def test_every_path_in_the_table_of_what_to_edit_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## What to edit")[2]
    rows = re.findall(r"^\|.*\|$", text.partition("\n## ")[0], re.MULTILINE)
    paths = re.findall(r"`(\w[\w/]*(?:/|\.\w+))`", "".join(rows))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_table_of_folders_has_their_order() -> None:
    text = (ROOT / "docs" / "how_it_works.md").read_text().partition("## The folders of apex_mp")[2]
    text = text.partition("\n## ")[0]
    told = [re.findall(r"`(\w+)/`", row) for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE)]
    heights = [HEIGHTS[name] for row in told for name in row]
    assert heights == sorted(heights)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {name for row in told for name in row} == folders


def test_no_file_of_tests_is_longer_than_500_lines() -> None:
    paths = (ROOT / "tests").rglob("*.py")
    assert [path for path in paths if len(path.read_text("utf-8").splitlines()) > 500] == []


def test_no_two_test_files_have_one_name() -> None:
    # The Makefile and the table of mutants name a test file without its folder.
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_package_completes_its_public_names() -> None:
    names = {*dir(apex_mp)}
    assert {"optimizers", "amp", "use_master_weights"} <= names
    assert names.isdisjoint({"core", "engine", "grads", "masters", "saved", "scale", "step"})
    with pytest.raises(AttributeError, match="module 'apex_mp' has no attribute 'nothing'"):
        _ = apex_mp.nothing
