"""examples/speech_ctc: a float32 checkpoint goes on in mixed precision, and a killed run too."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import wave
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import apex_mp

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "speech_ctc" / "speech_ctc.py"
ON = "gone on"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("speech_ctc", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "speech_ctc", module)
    spec.loader.exec_module(module)
    # Fewer utterances than the recipe has.
    monkeypatch.setattr(
        module,
        "load_data",
        lambda folder, load=module.load_data, scanned=sys.modules["speech_data"].scanned: (
            load(folder) if folder else (scanned(600, 0, 1400, 1), scanned(100, 1400, 1797, 2))
        ),
    )
    return module


def table(output: str) -> dict[str, dict[str, str]]:
    lines = [line.strip("| ").split("|") for line in output.splitlines() if line[:1] == "|"]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {cells[0]: dict(zip(head, cells, strict=True)) for cells in rows}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("variables", ["float16", "float32"])
def test_mixed_precision_errs_as_float32_and_holds_less(
    recipe: ModuleType, variables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--steps", "140", "--more_steps", "50", "--out", str(tmp_path)]
    recipe.main([*size, "--variables", variables])
    output = capsys.readouterr().out
    start, plain, mixed = table(output).values()
    assert (plain["steps"], mixed["steps"]) == ("190", "190")
    errors = [float(row["error rate, %"]) for row in (start, plain, mixed)]
    assert errors[0] < 40
    assert max(errors[1:]) < errors[0]
    assert abs(errors[2] - errors[1]) < 4
    held = float(mixed["held, KiB/utterance"]) / float(plain["held, KiB/utterance"])
    assert held < 0.75
    halved = variables == "float16"
    model = float(mixed["model, KiB"]) / float(plain["model, KiB"])
    assert model < 0.55 if halved else model == 1
    lines = re.findall(r"^  (\S+) from (\S+) to (\S+)$", output, re.MULTILINE)
    saved = apex_mp.load_checkpoint(tmp_path / "float32.pt")["model"]
    assert [name for name, _, _ in lines] == [*saved]
    for name, before, after in lines:
        assert before == str(saved[name].dtype).removeprefix("torch.")
        is_convolution = halved and saved[name].dim() and name.startswith("encoder")
        is_norm = re.match(r"encoder\.[147]\.", name)
        assert after == ("float16" if is_convolution and not is_norm else before), name


@pytest.mark.parametrize("variables", ["float16", "float32"])
def test_head_softmax_and_loss_compute_in_float32_and_the_encoder_in_float16(
    recipe: ModuleType, variables: str, tmp_path: Path
) -> None:
    args = recipe.parse_args(["--out", str(tmp_path), "--variables", variables])
    run = recipe.Run(args, f"mixed, {ON}", 8, 1)
    seen: dict[str, list[torch.dtype]] = {}
    for name in ("encoder.3", "head", "softmax", "loss"):
        run.model.get_submodule(name).register_forward_hook(
            lambda part, args, output, name=name: seen.update(
                {name: [args[0].dtype, *{p.dtype for p in part.parameters()}, output.dtype]}
            )
        )
    run.step(recipe.load_data(None)[0])
    half, full = torch.float16, torch.float32
    assert seen == {
        "encoder.3": [half, half, half],
        "head": [half, full, full],
        "softmax": [full, full],
        "loss": [full, full],
    }


@pytest.mark.parametrize("variables", ["float16", "float32"])
@pytest.mark.parametrize("killed_at", [4, 16])  # in the first run, in the mixed one
def test_a_killed_run_resumes_to_the_same_bits(
    recipe: ModuleType,
    variables: str,
    killed_at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--steps 6 --more_steps 5 --save_every 2 --channels 8 --init_loss_scale 1e9 --variables"
    flags = [*flags.split(), variables, "--out"]
    recipe.main([*flags, str(tmp_path / "whole")])
    expected = capsys.readouterr().out
    steps, step = [0], recipe.Run.step

    def killed(run: Any, data: Any) -> float:
        steps[0] += 1
        if steps[0] == killed_at:
            raise KeyboardInterrupt
        return float(step(run, data))

    monkeypatch.setattr(recipe.Run, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        recipe.main([*flags, str(tmp_path / "killed")])
    monkeypatch.setattr(recipe.Run, "step", step)
    recipe.main([*flags, str(tmp_path / "killed"), "--resume"])
    assert capsys.readouterr().out == expected
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == ["float32-gone-on.pt", "float32.pt", "mixed-gone-on.pt"]
    for name in files:
        states = [apex_mp.load_checkpoint(tmp_path / run / name) for run in ("whole", "killed")]
        assert same(*states), name
    assert states[0]["progress"][1] > 0  # Steps were skipped, and the scale has changed.


def write_wav(path: Path, labels: list[int], width: int = 2) -> None:
    """A tone for each digit."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(8000)
        for label in labels:
            tone = [int(9999 * math.sin(i * (0.1 + 0.2 * label))) for i in range(1600)]
            file.writeframes(b"".join(x.to_bytes(2, "little", signed=True) for x in tone))


def recordings(folder: Path) -> Path:
    for i in range(12):
        write_wav(folder / f"{i % 10}{(i + 1) % 10}_tone{i}.wav", [i % 10, (i + 1) % 10])
    return folder


def test_recordings_are_read_and_trained_on(
    recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = recipe.load_data(recordings(tmp_path))
    assert (len(train), len(test)) == (9, 3)
    frames = next(frames for frames, labels in train if labels == [1, 2])
    assert frames.shape == (41, sys.modules["speech_data"].BANDS)  # a frame each 10 ms
    loudest = frames.argmax(1)
    assert loudest[5] < loudest[35]  # A 2 has the higher tone.
    recipe.main(f"--data {tmp_path} --steps 2 --more_steps 1 --out {tmp_path / 'out'}".split())
    assert "9 utterances to train on, 3 to test on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda f: [path.unlink() for path in f.glob("*.wav")], "holds 0 WAV files; there must be"),
        (lambda f: write_wav(f / "anna.wav", [1]), "anna.wav must begin with the digits said"),
        (lambda f: (f / "1.wav").write_bytes(b"no sound"), "1.wav is no WAV file: "),
        (lambda f: write_wav(f / "1.wav", [1], width=1), "1.wav has 8 bits a sample and 8000 Hz"),
        (lambda f: write_wav(f / "1.wav", []), "1.wav is shorter than 25 ms"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_and_nothing_is_written(
    recipe: ModuleType, spoil: Any, sentence: str, tmp_path: Path
) -> None:
    spoil(recordings(tmp_path))
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        recipe.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not [*tmp_path.glob("out/*")]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--keep_fp32 hed", "keep_fp32: there is no 'hed' in the model; there are ['encoder', "),
        ("--loss_scale 0.5", "FixedLossScaleManager: loss_scale is 0.5; it must lie in"),
        ("--incr_every_n_steps 0", "incr_every_n_steps is 0; it must lie in"),
    ],
)
def test_a_wrong_flag_is_refused_in_a_sentence(
    recipe: ModuleType, flags: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        recipe.main([*flags.split(), "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("said", "heard", "number"),
    [
        ([1, 2, 3], [1, 2, 3], 0),
        ([1, 2, 3], [], 3),
        ([1, 2], [2, 1], 2),
        ([1, 2, 3], [1, 3, 3, 4], 2),
    ],
)
def test_the_edit_distance(
    recipe: ModuleType, said: list[int], heard: list[int], number: int
) -> None:
    assert recipe.edits(said, heard) == recipe.edits(heard, said) == number
