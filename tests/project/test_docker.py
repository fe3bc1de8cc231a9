"""examples/docker: the image is untried; what can be known without Docker is tested here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "examples" / "docker" / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    if line and not line.startswith("#")
]


def instructions(keyword: str) -> list[str]:
    return [rest for word, rest in INSTRUCTIONS if word == keyword]


def test_the_two_install_lines_are_those_of_readme() -> None:
    section = (ROOT / "README.md").read_text().split("## Install\n")[1].split("\n## ")[0]
    lines = re.findall(r"^(pip install .*)$", section, re.MULTILINE)
    assert len(lines) == 2
    at = instructions("RUN").index(lines[0])
    assert instructions("RUN")[at + 1] == lines[1]


@pytest.mark.slow
def test_setup_has_what_it_needs_in_the_files_that_are_copied(tmp_path: Path) -> None:
    sources = [line.split()[:-1] for line in instructions("COPY") if "/workspace/" not in line]
    copied = [name for names in sources for name in names]
    for name in copied:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for command in (["egg_info"], ["build_py", "--build-lib", "built"]):
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", *command],
            cwd=tmp_path,
            env={**os.environ, "FORCE_CUDA": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    listed = (tmp_path / "apex_mp.egg-info" / "SOURCES.txt").read_text().split()
    assert {"LICENSE", "README.md", "csrc/ops.cpp"} <= {*listed}
    assert (tmp_path / "built" / "apex_mp" / "py.typed").exists()
    assert "csrc" in copied
