"""Ten steps, a file, a new process, seven more: the same bits as without a break."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import resume_cases
import torch
from fp16_cases import assert_same

import apex_mp

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow, pytest.mark.usefixtures("amp_off")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run all first halves here, and all second ones in one other process."""
    folder = tmp_path_factory.mktemp("resume")
    whole = {name: resume_cases.first_half(way, folder) for name, way in resume_cases.CASES.items()}
    subprocess.run(
        [sys.executable, resume_cases.__file__, str(folder)],
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(apex_mp.__file__).parent.parent)},
    )
    return folder, whole


@pytest.mark.parametrize("name", resume_cases.CASES)
def test_a_run_resumed_in_a_new_process_ends_with_the_same_bits(
    name: str, folder: tuple[Path, dict[str, Any]]
) -> None:
    where, whole = folder
    second = resume_cases.file_of(where, resume_cases.CASES[name], "second")
    assert_same(torch.load(second, weights_only=True), whole[name])
