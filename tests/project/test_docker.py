"""examples/docker: the image is untried; what can be known without Docker is tested here."""

from __future__ import annotations

import re
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
    # README's reader goes on in the folder of the sources, which the image does not keep.
    assert instructions("RUN")[at + 1] == lines[1].replace(" -e ", " ")
