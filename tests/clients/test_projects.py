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


# Trainers that stop and go on: (project, script, its file, its option of epochs, levels, how near
# the losses are to those of a run that did not stop: scripted functions round otherwise at first)
RESTARTED = {
    "Transformer-XL": (
        *("pytorch-transformers==1.2.0", "transformer_xl.py"),
        *("checkpoint_last.pt", "--max_epoch", ("O1", "O2"), 0.0),
    ),
    "FastPitch": ("TTS==0.22.0", "fast_pitch.py", "checkpoint.pt", "--epochs", ("O1",), 1e-4),
}


@pytest.mark.parametrize("name", RESTARTED)
def test_it_trains_with_fused_lamb_and_goes_on_from_its_checkpoint(
    name: str, tmp_path: Path
) -> None:
    project, script, file, epochs, levels, bound = RESTARTED[name]

    def lines(*options: str) -> list[float]:
        words = ("--device", "cpu", "--modernize", SCRIPTS / script, *options)
        output = run(tmp_path, *words, project=project)
        assert "--era 2019-08, by FusedLAMB" in output
        return [float(loss) for loss in re.findall(r"^loss (.*)$", output, re.MULTILINE)]

    expected = lines()
    assert expected[-1] < 0.2 * expected[0]
    for level in levels:
        options = ("--fp16", "--fp16_opt_level", level)
        whole = lines(*options)
        assert whole == pytest.approx(expected, abs=1e-3)
        assert whole != expected  # It has cast.
        both = [*lines(*options, epochs, "1"), *lines(*options, "--restart", file)]
        assert both == pytest.approx(whole, rel=0, abs=bound)
