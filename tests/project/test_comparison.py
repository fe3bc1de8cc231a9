"""The comparison of two builds sees what is changed, and nothing where nothing is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import apex_mp

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]

TOOL = Path(__file__).parents[1] / "comparison" / "compare.py"
PACKAGE = Path(apex_mp.__file__).parent

# In which file, what, by what; and what the report says of it.
PLANTED = {
    "a step": (
        "optimizers/_legacy_call.py",
        "scale = grad_scale",
        "scale = grad_scale * 2",
        "state",
    ),
    "an exception": (
        "optimizers/_legacy_call.py",
        'ValueError(f"{who}.step: scale is',
        'TypeError(f"{who}.step: scale is',
        "exception",
    ),
    "a key": ("optimizers/fp16_optimizer.py", '"cur_iter": self.', '"steps": self.', "value"),
    "a message": ("optimizers/_legacy_call.py", "it must have one for", "give one for", "message"),
}


def compare(base: Path, programs: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, f"--base={base}", f"--tree={PACKAGE.parent}"]
    return subprocess.run([*command, f"--programs={programs}"], capture_output=True, text=True)


def test_a_tree_is_equal_to_itself() -> None:
    done = compare(PACKAGE.parent, 40)
    assert (done.returncode, done.stdout) == (0, "40 programs: 0 differ, in 0 ways\n"), done.stderr


def test_planted_changes_are_reported(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "apex_mp", ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, after, _ in PLANTED.values():
        path = tmp_path / "apex_mp" / file
        assert path.read_text().count(before) == 1
        path.write_text(path.read_text().replace(before, after))
    done = compare(tmp_path, 150)
    assert done.returncode == 1, done.stderr
    for name, (*_, aspect) in PLANTED.items():
        assert f": {aspect} differs" in done.stdout, f"{name}: {done.stdout}"
