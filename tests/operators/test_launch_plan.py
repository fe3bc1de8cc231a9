"""csrc/launch_plan.h, tried exhaustively by launch_plan_test.cpp under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = [
    pytest.mark.any_torch,
    pytest.mark.cpu_only,
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]
SECTIONS = [
    "a tensor too large for a launch is refused",
    "all alignments",
    "all short lists",
    "as many chunks as a launch takes",
    "beyond 32 bits in few chunks",
    "chunks are as large as can be",
    "chunks on CUDA are as many as multiprocessors need",
    "the largest sizes are counted",
]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile launch_plan_test.cpp with the system's compiler."""
    assert COMPILER is not None
    built = tmp_path_factory.mktemp("launch_plan") / "launch_plan_test"
    warnings = ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
    sanitizers = ["-fsanitize=undefined,address", "-fno-sanitize-recover=all"]
    flags = ["-std=c++17", "-O1", "-g", *warnings, *sanitizers, "-I", ROOT / "csrc"]
    result = run(COMPILER, *flags, ROOT / "tests/operators/launch_plan_test.cpp", "-o", built)
    assert result.returncode == 0, result.stdout
    return built


@pytest.mark.slow
def test_every_section_of_the_program_is_run(program: Path) -> None:
    assert run(program).stdout.splitlines() == SECTIONS


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_the_plan_is_right(section: str, program: Path) -> None:
    result = run(program, section)
    assert result.returncode == 0, result.stdout
