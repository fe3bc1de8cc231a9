"""examples/bert/bert.py: each API of mixed precision reaches the accuracy of float32."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from apex_mp import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "bert"
SCRIPT = EXAMPLES / "bert.py"
sys.path.append(str(EXAMPLES))

import bert  # noqa: E402
import bert_apis  # noqa: E402
import bert_data  # noqa: E402

SMALL = [
    "--device",
    "cpu",
    "--max_seq_len",
    "24",
    "--hidden_size",
    "48",
    "--layers",
    "1",
    "--learning_rate",
    "1e-3",
]
# 650 texts to judge by, no dropout and a small rate: float16 then stays within a point or two of
# float32 for each seed, where seeds differ by six.
LEARNS = [*SMALL, "--split", "0.6", "--dropout", "0", "--learning_rate", "3e-4", "--epochs", "10"]

SLOW_APIS = [pytest.param(api, marks=pytest.mark.slow) for api in ("init", "O1", "O2", "autocast")]


@pytest.fixture(scope="module")
def tsv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 lines of three labels: with batches of 32, five steps an epoch."""
    path = tmp_path_factory.mktemp("data") / "few.tsv"
    examples = bert_data.docstrings()
    lines = [
        f"{label}\t{' '.join(text.split())}"
        for wanted in ("asyncio", "email", "xml")
        for label, text, _ in [each for each in examples if each.label == wanted][:64]
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def command(*flags: str | Path, before: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *before, str(SCRIPT), *SMALL, *map(str, flags)]


def run(
    *flags: str | Path, before: tuple[str, ...] = (), timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*flags, before=before),
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def losses(folder: Path) -> list[float]:
    return load_checkpoint(folder / "last.pt")["losses"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def accuracies() -> dict[str, float]:
    """Mean dev accuracy of three seeds by each API, as --compare prints it."""
    ended = run(*LEARNS, "--compare", "--seeds", "3", timeout=1100)
    assert not ended.returncode, ended.stderr
    rows = re.findall(r"^\| (\w+) +\| +([\d.]+) \(", ended.stdout, re.MULTILINE)
    return {name: float(accuracy) for name, accuracy in rows}


@pytest.mark.slow
def test_float32_reaches_three_times_chance(accuracies: dict[str, float]) -> None:
    assert accuracies["none"] >= 3 * 100 / 6


@pytest.mark.slow
@pytest.mark.parametrize("api", [name for name in bert.APIS if name != "none"])
def test_mixed_precision_reaches_the_accuracy_of_float32(
    api: str, accuracies: dict[str, float]
) -> None:
    assert accuracies[api] >= accuracies["none"] - 2.0


def test_a_static_scale_of_autocast_is_the_same_after_a_skipped_step() -> None:
    args = bert.parse_args([*SMALL, "--amp", "autocast", "--loss_scale", "128"])
    model = torch.nn.Linear(2, 2)
    api = bert_apis.ByAutocast(model, args)
    skipped = []
    for factor in (math.inf, 1.0):
        api.backward(factor * model(torch.ones(1, 2)).sum())
        api.step()
        api.optimizer.zero_grad()
        skipped.append(api.was_skipped())
        assert api.loss_scale() == 128.0
    assert skipped == [True, False]


def test_the_report_has_each_label_and_the_best_weights_are_kept(
    tsv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*SMALL, "--data", str(tsv), "--epochs", "3", "--eval_step", "5"]
    bert.main([*flags, "--ckpt_path", str(tmp_path), "--fp16", "--loss_scale", "128"])
    out = capsys.readouterr().out
    for word in ("asyncio", "email", "xml", "precision", "seconds per epoch", "loss scale 128"):
        assert word in out
    assert "fp16_optimizer in 1 process" in out
    best = load_checkpoint(tmp_path / "best.pt")
    last = load_checkpoint(tmp_path / "last.pt")
    assert best["best"] == last["best"] > 0
    assert best["step"] <= last["step"] == 15
    assert best["model"]["classifier.weight"].dtype == torch.float16


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_two_processes_have_the_losses_of_one(launcher: str, tsv: Path, tmp_path: Path) -> None:
    flags = ("--data", tsv, "--epochs", "1", "--dropout", "0", "--ckpt_path")
    bert.main([*SMALL, *map(str, flags), str(tmp_path / "one")])
    if launcher == "spawn":
        ended = run(*flags, tmp_path / "two", "--local_world_size", "2")
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        ended = run(*flags, tmp_path / "two", before=torchrun)
    assert not ended.returncode, ended.stderr
    assert "in 2 processes" in ended.stdout
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 5
    assert two == pytest.approx(one, rel=0.01)
    assert max(one) > 1.01 * min(one)  # They are not equal for want of change.


def test_accumulated_batches_have_the_losses_of_one_batch(tsv: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--data", str(tsv), "--epochs", "1", "--dropout", "0", "--ckpt_path"]
    bert.main([*flags, str(tmp_path / "one")])
    halves = ["--train_batch_size", "16", "--gradient_accumulation_steps", "2"]
    bert.main([*flags, str(tmp_path / "two"), *halves])
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("api", ["fp16_optimizer", *SLOW_APIS])
def test_a_killed_run_goes_on_to_the_same_bits(api: str, tsv: Path, tmp_path: Path) -> None:
    flags = ("--data", tsv, "--amp", api, "--epochs", "4", "--eval_step", "3", "--ckpt_path")
    whole = run(*flags, tmp_path / "whole")
    assert not whole.returncode, whole.stderr
    process = subprocess.Popen(
        command(*flags, tmp_path / "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    last = tmp_path / "killed" / "last.pt"
    while not last.exists():
        assert process.poll() is None, "the run ended before it saved"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert load_checkpoint(last)["step"] < 20
    again = run(*flags, tmp_path / "killed", "--resume")
    assert not again.returncode, again.stderr
    expected, found = load_checkpoint(tmp_path / "whole" / "last.pt"), load_checkpoint(last)
    for state in (expected, found):
        del state["seconds"], state["setup"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_real_model_and_its_tokenizer_are_loaded(tsv: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "return", "a", "message"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    folder = tmp_path / "model"
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=9,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    flags = [*SMALL, "--data", str(tsv), "--epochs", "1", "--model_path", str(folder)]
    bert.main([*flags, "--ckpt_path", str(tmp_path / "ck")])
    saved = load_checkpoint(tmp_path / "ck" / "last.pt")["model"]
    assert saved["bert.embeddings.word_embeddings.weight"].shape == (9, 16)
    assert saved["classifier.weight"].shape == (3, 16)


# Bad input.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no tab", "line 2: 'no tab'; it must be label<TAB>text"),
        ("\ttext", "line 2: '\\ttext'; it must be label<TAB>text"),
        ("label\t ", "line 2: 'label\\t '; it must be label<TAB>text"),
        ("one\tmore", "all labels of its 2 lines are equal; give two"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.tsv"
    path.write_text(f"one\tgood text\n{line}\n")
    with pytest.raises(SystemExit, match=re.escape(message)):
        bert.main([*SMALL, "--data", str(path), "--ckpt_path", str(tmp_path / "ck")])
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--local_world_size", "9999"], "--local_world_size is 9999; this machine has"),
        (["--compare", "--local_world_size", "2"], "--compare trains in one process"),
        (["--split", "1"], "--split is 1.0; it must be between 0 and 1"),
        (["--epochs", "0"], "'0'; it must be a whole number, at least 1"),
        (["--train_batch_size", "9999"], "--train_batch_size is 9999: more than the"),
        (["--loss_scale", "-1"], "--loss_scale is -1.0; it must be 0 (dynamic) or more"),
    ],
)
def test_a_wrong_flag_is_refused_with_a_sentence(
    flags: list[str], message: str, tsv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ck"
    with pytest.raises(SystemExit) as exited:
        bert.main([*SMALL, "--data", str(tsv), "--ckpt_path", str(folder), *flags])
    assert message in capsys.readouterr().err + str(exited.value)
    assert not folder.exists()
