"""Clients of apex's inside: Megatron-core of 2025 with its optimizers, TAPE of 2019 with amp's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import folder_of, run

from apex_mp._check.report import examine

SCRIPTS = Path(__file__).parent / "scripts"
MEGATRON, TAPE = "megatron-core==0.16.0", "tape-proteins==0.5"


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^loss (.*)$", output, re.MULTILINE)]


def megatron(folder: Path, *options: str) -> str:
    script = SCRIPTS / "megatron_gpt.py"
    return run(folder, "--device", "cpu", script, *options, project=MEGATRON)


def tape(folder: Path, *options: str) -> str:
    script = SCRIPTS / "tape_pretraining.py"
    return run(folder, "--device", "cpu", "--modernize", script, *options, project=TAPE)


@pytest.mark.parametrize(
    "options", [("--fp16",), ("--bf16",), ("--fp16", "--distributed-optimizer")]
)
def test_megatron_core_steps_by_fused_adam_and_trains_as_in_fp32(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    expected = losses(megatron(tmp_path))
    output = megatron(tmp_path, *options)
    # Its era is that of a name that the library asks for.
    assert "apex_mp run: --era 2020, by " in output
    assert "optimizer apex_mp." in output
    found = losses(output)
    assert expected[-1] < 0.7 * expected[0]
    assert found != expected
    assert found == pytest.approx(expected, abs=0.01)  # Measured: 0.002.


def test_tape_averages_gradients_by_hand_and_resumes(tmp_path: Path) -> None:
    expected = losses(tape(tmp_path))
    output = tape(tmp_path, "--fp16")
    # Its scale starts at 2**20, which skips steps, and it counts those that it takes.
    (steps,) = re.findall(r"^steps (\d+)$", output, re.MULTILINE)
    assert 30 <= int(steps) < 40
    found = losses(output)
    assert found == pytest.approx(expected, abs=0.5)  # It is five steps behind.
    resumed = losses(tape(tmp_path, "--fp16", "--resume"))
    assert resumed[-1] < 0.75 * resumed[0] < 0.75 * found[-1] < 0.7 * found[0]


def test_check_names_the_options() -> None:
    assert examine(folder_of(MEGATRON)).options()[:2] == ["--era", "2020"]
    report = examine(folder_of(TAPE))
    assert "--modernize" in report.options()
    assert "apex.amp.scale_loss" in report.names
