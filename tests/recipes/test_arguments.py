"""The recipes end with one sentence where an argument is wrong, and have written nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BERT, DCGAN, SPEECH = "bert/bert.py", "dcgan/dcgan.py", "speech_ctc/speech_ctc.py"
IMAGENET, RL = "imagenet/main_amp.py", "rl/rl_fp16.py"
PRETRAIN = "pretrain/pretrain.py"
NO_FILE = "'none'; there is no such file or folder"


def run(folder: Path, script: str, *flags: str, python: tuple[str, ...] = ()) -> tuple[int, str]:
    """Return the exit status and what was printed."""
    command = [sys.executable, *python, str(EXAMPLES / script), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("script", "flags", "sentence"),
    [
        (BERT, "--data none", f"--data: {NO_FILE}"),
        (BERT, "--data one_label.tsv", "one_label.tsv: all labels of its 2 lines are equal"),
        (BERT, "--data wrong.tsv", "wrong.tsv, line 2: 'b z'; it must be label<TAB>text"),
        (BERT, "--model_path .", "--model_path .: transformers finds no tokenizer there"),
        (BERT, "--device cuda", "--device: 'cuda' ("),
        (DCGAN, "--resume none", f"--resume: {NO_FILE}"),
        (DCGAN, "--resume wrong.tsv", "--resume wrong.tsv: "),
        (DCGAN, "--dataroot none", f"--dataroot: {NO_FILE}"),
        (DCGAN, "--batchSize 0", "'0'; it must be a whole number, at least 1"),
        (DCGAN, "--device cuda", "--device cpu runs anywhere"),
        (SPEECH, "--data none", f"--data: {NO_FILE}"),
        (SPEECH, "--batch_size 0", "'0'; it must be a whole number, at least 1"),
        (SPEECH, "--device cuda", "--device cpu runs anywhere"),
        (RL, "--resume none", f"--resume: {NO_FILE}"),
        (RL, "--resume wrong.tsv", "wrong.tsv"),
        (RL, "--group 0", "'0'; it must be a whole number, at least 1"),
        (RL, "--group 1", "--group 1: an answer is compared with the others of its group"),
        (RL, "--compare --save rl.pt", "--save and --resume go without it"),
        (RL, "--save-results rl.json", "--save-results goes with --compare"),
        (RL, "--loss_scale 0", "rl_fp16.py: GradScaler: init_scale is 0.0; it must lie in"),
        (RL, "--learning_rate nan", "rl_fp16.py: FusedAdam: lr is nan; it must be 0 or more"),
        (RL, "--width 30", "--width 30: it must be a multiple of 8"),
        (PRETRAIN, "--offload --device cpu", "--offload needs one process and a GPU, not 1 and c"),
        (IMAGENET, "none", "there is no such folder; DIR must be"),
        (IMAGENET, "--device cpu --resume none", "--resume none: there is no such file"),
        (IMAGENET, "--loss-scale abc", "'abc'; it must be a number or dynamic"),
    ],
)
def test_a_wrong_argument_is_a_sentence(
    script: str, flags: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "one_label.tsv").write_text("a\tx y\na\tz\n")
    (tmp_path / "wrong.tsv").write_text("a\tx y\nb z\n")
    status, printed = run(tmp_path, script, *flags.split())
    assert status
    assert sentence in " ".join(printed.split())
    assert "Traceback" not in printed
    assert {each.name for each in tmp_path.iterdir()} == {"one_label.tsv", "wrong.tsv"}


@pytest.mark.parametrize(
    ("script", "package"),
    [(BERT, "sklearn"), (DCGAN, "sklearn"), (SPEECH, "sklearn"), (RL, "transformers")],
)
def test_a_package_that_is_missing_is_a_sentence_with_the_command(
    script: str, package: str, tmp_path: Path
) -> None:
    block = f"import sys, runpy; sys.modules['{package}'] = None; sys.argv = sys.argv[1:]; "
    block += "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    block += "runpy.run_path(sys.argv[0], run_name='__main__')"
    status, printed = run(tmp_path, script, python=("-c", block))
    assert status
    assert "this recipe needs: pip install" in printed
    assert "Traceback" not in printed
