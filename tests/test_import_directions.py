"""Which modules and packages of apex_mp may import which."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import apex_mp

pytestmark = pytest.mark.cpu_only

PACKAGE = Path(apex_mp.__file__).parent
# A module or package imports from the rows above its own only. A new one is added to its row.
ROWS = [
    {"_version", "_C", "loss_scale"},
    {"core"},
    {"multi_tensor_apply", "normalization", "parallel", "reparameterization", "RNN"},
    {"fp16_utils"},
    {"loss_scale_manager", "optimizers"},
    {"amp"},
    {"checkpointing", "monitor"},
    {"checkpoint", "convert", "trainers"},
    {"_as_apex"},
    {"accelerate", "as_apex", "lightning", "pytorch_lightning", "_run"},
    {"__init__", "__main__"},
]
HEIGHTS = {name: height for height, row in enumerate(ROWS) for name in row}
FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_package_imports_only_from_packages_below() -> None:
    wrong = []
    for path in FILES:
        own = package_of(path)
        inner = {name.split(".")[1] for name in imports(path) if name.startswith("apex_mp.")}
        higher = [other for other in inner - {own} if HEIGHTS[other] >= HEIGHTS[own]]
        wrong += [f"{path} imports {other}, which is not below {own}" for other in higher]
    assert not wrong


def test_loss_scale_knows_nothing_of_torch() -> None:
    allowed = {"__future__", "dataclasses", "math", "typing", "collections"}
    roots = {name.split(".")[0] for name in imports(PACKAGE / "loss_scale.py")}
    assert roots <= allowed


def test_only_the_front_door_calls_the_operators() -> None:
    calling = [
        path
        for path in FILES
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.apex_mp"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert calling == [PACKAGE / "core" / "ops.py"]
