"""Ten steps, a file, a new process, ten more: the same bits as twenty steps."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import resume_cases
import torch
from tolerances import assert_same_bits

import apex_mp

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow, pytest.mark.usefixtures("amp_off")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], list[Path]]]:
    """Run all first halves here, and all second ones in one other process."""
    folder = tmp_path_factory.mktemp("resume")
    done = {}
    for name in resume_cases.CASES:
        scales, result = resume_cases.first_half(name, folder)
        torch.save(result, resume_cases.file_of(folder, name, "whole"))
        files = [resume_cases.file_of(folder, name, part) for part in ("whole", "second")]
        done[name] = scales, files
    subprocess.run(
        [sys.executable, resume_cases.__file__, str(folder)],
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(apex_mp.__file__).parent.parent)},
    )
    return done


@pytest.mark.parametrize("name", resume_cases.CASES)
def test_a_run_resumed_in_a_new_process_ends_with_the_same_bits(name: str, runs: dict) -> None:
    scales, files = runs[name]
    whole, resumed = (torch.load(file, weights_only=True) for file in files)
    assert len(whole) == len(resumed) > 10
    for ours, theirs in zip(resumed, whole, strict=True):
        assert_same_bits(ours, theirs)
        assert theirs.isfinite().all()
    if "dynamic" in name:
        assert scales[resume_cases.OVERFLOW_AT] < scales[resume_cases.OVERFLOW_AT - 1]
        # It grows in the second half, after steps that were counted in both.
        grown = [after > before for before, after in itertools.pairwise(scales)]
        assert grown[resume_cases.STEPS - 1 : resume_cases.STEPS + 1] == [False, True]
    else:
        assert len({*scales}) == 1
