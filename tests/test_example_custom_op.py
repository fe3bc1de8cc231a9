"""examples/custom_op: a C++ function that demands float32 runs under amp once amp is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

RUN = Path(__file__).resolve().parent.parent / "examples" / "custom_op" / "run.py"


@pytest.fixture(scope="module")
def transcript(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the example printed, by the first words of each line."""
    built = tmp_path_factory.mktemp("extensions")
    done = subprocess.run(
        [sys.executable, str(RUN)],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(built)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert [*built.rglob("custom_op*.so")]
    return dict(re.findall(r"^(.*?) +((?:fails|trains): .*)$", done.stdout, re.MULTILINE))


def test_without_registration_the_function_refuses_half(transcript: dict[str, str]) -> None:
    assert transcript["as it is"].startswith("fails: ")
    assert transcript["as it is"].endswith("x is Half; it must be Float")


def test_a_decorator_or_a_registration_makes_the_model_train(transcript: dict[str, str]) -> None:
    found = re.fullmatch(r"trains: loss (\S+) -> (\S+)", transcript["decorated"])
    assert found is not None
    first, last = map(float, found.groups())
    assert last < 0.1 * first
    assert transcript["registered by name"] == transcript["decorated"]
    assert len(transcript) == 3
