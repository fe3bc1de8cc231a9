"""A wrong expression in the package makes a test fail that otherwise passes: `make mutants`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bugs import Bug
from mutant import MUTANTS, PACKAGE, planted

TESTS = Path(__file__).parent.parent
SOME_FAILED = 1


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=[*MUTANTS])
def test_a_mutant_is_caught(mutant: Bug, tmp_path: Path) -> None:
    copy = tmp_path / "apex_mp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path, source = planted(mutant)
    (copy / path.relative_to(PACKAGE)).write_text(source)
    (tests,) = TESTS.glob(f"*/test_{mutant.tests}.py")
    # The folder of the copy comes first on the path; the root of the project does not come at all.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--rootdir={TESTS.parent}", f"-c={TESTS.parent / 'pyproject.toml'}"]
    done = subprocess.run(
        [*command, "-m", "not slow", tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == SOME_FAILED, done.stdout[-5000:] + done.stderr[-2000:]
