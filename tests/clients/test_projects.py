"""Scripts of 2019 and 2020 on libraries with apex behind fp16: losses are those of float32."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import folder_of, run

from apex_mp._check.report import examine

SCRIPTS = Path(__file__).parent / "scripts"
PROJECTS = {
    "pytorch-transformers==1.2.0": "glue.py",
    "transformers==2.11.0": "trainer.py",
    "pytorch-lightning==0.9.0": "lightning_module.py",
}
# How far the mean loss of an epoch may be from that of float32. 3 seeds: 3e-5, and 0.007 with the
# step that O2 skips at its first scale.
BOUNDS = {"O1": 1e-4, "O2": 0.02}


def losses(folder: Path, project: str, *options: str) -> list[float]:
    script = SCRIPTS / PROJECTS[project]
    output = run(folder, "--device", "cpu", "--modernize", script, *options, project=project)
    return [float(loss) for loss in re.findall(r"^loss (.*)$", output, re.MULTILINE)]


@pytest.mark.parametrize("project", PROJECTS)
def test_it_trains_in_fp16_as_in_fp32(project: str, tmp_path: Path) -> None:
    expected = losses(tmp_path, project)
    assert expected[-1] < 0.95 * expected[0]
    for level, bound in BOUNDS.items():
        found = losses(tmp_path, project, "--fp16", "--fp16_opt_level", level)
        assert found != expected  # It has cast.
        assert found == pytest.approx(expected, abs=bound)


@pytest.mark.parametrize("project", PROJECTS)
def test_check_names_the_options(project: str) -> None:
    report = examine(folder_of(project))
    assert report.options() == ["--modernize"]
    assert examine(SCRIPTS / PROJECTS[project]).unsupported == {}
