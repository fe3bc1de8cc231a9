"""examples/dcgan/dcgan.py: both APIs of amp train two networks with three losses, and resume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--imageSize=8", "--ngf=16", "--ndf=16", "--nz=16", "--lr=0.003", "--device=cpu"]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        str(ROOT / "examples" / "dcgan" / "dcgan.py"),
        *SMALL,
        "--outf",
        str(folder),
    ]
    return subprocess.run(
        [*command, *flags],
        env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def table(done: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    """Return the figures of each row by its name."""
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (\S.*?) +\|((?: +-?[\d.]+ \|)+)$", done.stdout, re.MULTILINE)
    return {name: [float(x) for x in re.findall(r"[\d.]+", figures)] for name, figures in rows}


def has_learned(rows: dict[str, list[float]]) -> bool:
    score, distance = rows["generated"]
    return score > 3 and distance < rows["before training"][1] / 3


@pytest.mark.parametrize("flags", [["--opt_level", "O0"], ["--opt_level", "O2"], ["--handle"]])
def test_each_api_learns_to_draw_digits(tmp_path: Path, flags: list[str]) -> None:
    rows = table(run(tmp_path, "--niter", "12" if "O0" in flags else "8", *flags))
    assert has_learned(rows)
    scales = [rows[loss][1] for loss in ("errD_real", "errD_fake", "errG")]
    assert all(scale == 1 if "O0" in flags else scale > 1 for scale in scales)
    assert (tmp_path / "dcgan.png").stat().st_size > 0


def same_bits(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        assert isinstance(right, dict)
        return left.keys() == right.keys() and all(same_bits(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        assert isinstance(right, (list, tuple))
        return all(same_bits(a, b) for a, b in zip(left, right, strict=True))
    return left == right


@pytest.mark.parametrize(
    "flags", [["--opt_level", "O1"], pytest.param(["--handle"], marks=pytest.mark.slow)]
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, flags: list[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run(whole, "--niter", "2", *flags)
    table(run(parts, "--niter", "1", *flags))
    file = parts / "checkpoint.pt"
    found = run(parts, "--niter", "2", "--resume", str(file), *flags)
    assert table(found) == table(expected)
    states = [torch.load(f / "checkpoint.pt", weights_only=True) for f in (whole, parts)]
    assert states[0]["progress"][0] == 2
    assert same_bits(*states)
