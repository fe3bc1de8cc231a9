"""A script that trains in several processes, as it was taught in 2019, by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_program import EPOCHS
from snippet_cases import BATCHES
from tolerances import FP16_TRAINING

import apex_mp

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]

TESTS = Path(__file__).parents[1]
SCRIPT = "distributed_fp16_optimizer"
WORLD = 2
BAD = [30, 41]  # Forward passes of the last rank whose gradients overflow.


def torchrun(folder: Path, processes: int, kind: str, bad: list[int]) -> list[dict[str, Any]]:
    root = str(Path(apex_mp.__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, str(TESTS)]),
        "OMP_NUM_THREADS": "1",
        "BAD_FORWARDS": json.dumps(bad),
    }
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    program = (str(TESTS / "launched_program.py"), SCRIPT, kind, str(folder))
    result = subprocess.run(
        [sys.executable, *launcher, *program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[5]) for line in result.stdout.splitlines() if line[:5] == "epoch"]
    assert len(losses) >= EPOCHS
    assert losses[-1] < losses[0]
    return [torch.load(folder / f"{kind}-{rank}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return torchrun(tmp_path_factory.mktemp("launched"), WORLD, "apex_mp", BAD)


def all_finite(found: list[dict[str, Any]]) -> list[bool]:
    """For each step, whether the gradients of all processes were, before they were averaged."""
    return [all(each) for each in zip(*(one["finite"] for one in found), strict=True)]


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]]
) -> dict[str, Any]:
    """One process that has all, in float32, with infinite gradients wherever there were any."""
    bad = [number for number, is_finite in enumerate(all_finite(found)) if not is_finite]
    (one,) = torchrun(tmp_path_factory.mktemp("alone"), 1, "fp32", bad)
    return one


def test_both_processes_end_with_the_same_weights_near_those_in_float32(
    found: list[dict[str, Any]], reference: dict[str, Any]
) -> None:
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert not torch.equal(found[0]["start"], found[1]["start"])
    way = reference["weights"] - reference["start"]
    off = found[0]["weights"] - reference["weights"]
    assert off.norm() < FP16_TRAINING.weights * way.norm()


def test_both_skip_the_steps_in_which_one_has_infinite_gradients(
    found: list[dict[str, Any]],
) -> None:
    finite = all_finite(found)
    assert len(finite) == EPOCHS * BATCHES
    assert [each["moved"] for each in found] == [finite] * WORLD
    assert [found[0]["finite"][number] for number in BAD] == [True] * len(BAD)
    assert [found[1]["finite"][number] for number in BAD] == [False] * len(BAD)
