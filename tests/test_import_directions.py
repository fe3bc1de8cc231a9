"""Arrows only run down: which room of the package may import which."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import apex_mp

pytestmark = pytest.mark.cpu_only

PACKAGE = Path(apex_mp.__file__).parent
# A room imports from lower rows only. A new room is a name in the row where it belongs.
ROWS = [
    {"_version", "_C", "_log", "_missing", "_state_checks", "_traced_ops", "loss_scale", "tensors"},
    {"_convert_checks", "_extension", "_ops", "_options", "_pickled_names", "_rename", "master"},
    {
        "RNN",
        "device_scale",
        "_environment",
        "_float32_parts",
        "multi_tensor_apply",
        "normalization",
        "parallel",
        "reparameterization",
    },
    {"grads"},
    {"_step_notes", "_step_request"},
    {"master_grads"},
    {"fp16_utils"},
    {"loss_scale_manager", "optimizers"},
    {"amp"},
    {"convert", "monitor", "_pickled_scalers", "_trainers"},
    {"checkpoint", "_lightning_plugin"},
    {"_as_apex"},
    {"accelerate", "as_apex", "lightning", "pytorch_lightning", "_run"},
    {"__init__", "__main__"},
]
HEIGHTS = {room: height for height, row in enumerate(ROWS) for room in row}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_a_room_imports_only_from_rooms_below(path: Path) -> None:
    room = room_of(path)
    inner = {name.split(".")[1] for name in imports(path) if name.startswith("apex_mp.")}
    for other in inner - {room}:
        assert HEIGHTS[other] < HEIGHTS[room], f"{room} imports {other}, which is not below it"


def test_loss_scale_knows_nothing_of_torch() -> None:
    allowed = {"__future__", "dataclasses", "math", "typing", "collections"}
    roots = {name.split(".")[0] for name in imports(PACKAGE / "loss_scale.py")}
    assert roots <= allowed


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_only_the_front_door_calls_the_operators(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    says = any(
        isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.ops.apex_mp"
        for n in ast.walk(tree)
    )
    assert says == (path == PACKAGE / "_ops.py")
