"""Optimizers and models of libraries, with bfloat16 weights under `run --master-weights`.

That masters are those of float32, to the bit, `tests/optimizers/test_master_weights.py` says of any
optimizer; here the libraries are whole, and their losses are those of float32.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_scripts_of_today import ROOT, SCRIPTS

pytestmark = pytest.mark.cpu_only
LIBRARIES = Path(sys.prefix) / "libraries"
# Of the first loss; weights are rounded when the model is cast, and in each forward.
NEAR = 0.003
# (script, its arguments, parameters with masters)
CASES = {
    "lion-pytorch": ("optimizers_of_today.py", "lion-pytorch", 6),
    "schedulefree": ("optimizers_of_today.py", "schedulefree", 6),
    "heavyball": ("optimizers_of_today.py", "heavyball", 6),
    "torchao, 8 bits": ("optimizers_of_today.py", "torchao", 6),
    "came-pytorch": ("optimizers_of_today.py", "came-pytorch", 6),
    "adam-mini": ("optimizers_of_today.py", "adam-mini", 6),
    "litgpt": ("litgpt_loop.py", "", 28),
    "litgpt, LoRA": ("litgpt_loop.py", "--lora", 4),
    "timm, --model-dtype": ("timm_loop.py", "", 32),
    "open_clip, pure_bf16": ("open_clip_loop.py", "", 62),
    "sentence-transformers": ("sentence_transformers_trainer.py", "", 37),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_its_losses_are_those_of_float32(case: str) -> None:
    script, argument, count = CASES[case]

    def printed(*options: str) -> tuple[torch.Tensor, str]:
        command = [sys.executable, "-m", "apex_mp", "run", "--no-apex", *options]
        half = ["--half"] if options else []
        done = subprocess.run(
            [*command, str(SCRIPTS / script), *filter(None, [argument]), *half],
            env={"PYTHONPATH": f"{LIBRARIES}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return torch.tensor([*map(float, re.findall(r"'loss': (\S+)}", done.stdout))]), done.stderr

    expected, _ = printed()
    found, said = printed("--master-weights")
    assert len(expected) >= 20
    torch.testing.assert_close(found, expected, rtol=0, atol=NEAR * float(expected[0]))
    assert f"stepped float32 masters of {count} parameters in 16 bits" in said
