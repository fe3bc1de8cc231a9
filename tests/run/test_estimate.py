"""`python -m apex_mp estimate`: bytes are those of real training, by each way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from apex_mp._check.estimate import WAYS, Loss, estimate, main
from benchmarks import memory_probe

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
def build():
    model = torch.nn.Linear(8, 4).to("cpu")
    return model, lambda model: model(torch.ones(2, 8)).float().sum()
def reads_loss():
    return torch.nn.Linear(8, 4), lambda model: torch.tensor(model(torch.ones(2, 8)).sum().item())
def wrong():
    return [1]
"""


def build() -> tuple[nn.Module, Loss]:
    """A model with batch norms, shared weights and copied layers, as nn.Transformer makes them."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
        2,
        enable_nested_tensor=False,
    )
    model = nn.Sequential(nn.Linear(16, 16), encoder, nn.BatchNorm1d(5), nn.Linear(16, 16))
    model[3].weight = model[0].weight
    x = torch.ones(4, 5, 16)

    def loss_of(model: nn.Module) -> Tensor:
        return nn.functional.mse_loss(model(x), x)

    return model, loss_of


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_what_is_counted_is_what_a_run_holds(dtype: torch.dtype) -> None:
    counted = estimate(build, "cpu", dtype, run=False)
    run = estimate(build, "cpu", dtype, run=True)
    for one, other in zip(counted, run, strict=True):
        # Kernels of a CPU keep 64-byte blocks and tables of dropout beyond the shapes.
        assert one[:5] == other[:5]
        assert one.backward == pytest.approx(other.backward, rel=0.03)


def test_bytes_of_states_are_those_of_the_published_table() -> None:
    def linear() -> nn.Module:
        return nn.Linear(256, 64, bias=False)

    per_element = {
        row.name: row.total / (256 * 64)
        for row in estimate(linear, "cpu", torch.bfloat16, run=False)
    }
    assert [*per_element.values()] == [16, 16, 16, 14, 10, 8.0625, 8]
    assert [*per_element] == [way.name for way in WAYS]


def test_activations_are_those_that_autograd_saves() -> None:
    model, loss_of = build()
    known = [*model.parameters(), *model.buffers()]
    held = memory_probe.held_for_backward(lambda: loss_of(model), known)
    row = estimate(build, "cpu", torch.float16, run=True)[0]
    assert row.backward == sum(held.values())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "has no function 'nothing'"),
        ("wrong", "the callable returned list; it must return a Module"),
        ("reads_loss", "reads numbers of a tensor"),
    ],
)
def test_bad_input_is_a_sentence(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    try:
        status = main([f"{script}:{name}"])
        printed = capsys.readouterr().err
    except SystemExit as error:
        status, printed = 1, str(error)
    assert status == 1
    assert said in printed
    with pytest.raises(SystemExit):
        main([f"{script}:build", "--device", "nowhere"])


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main([f"{script}:build", "--count", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(WAYS) + 2
    assert lines[1].split()[:6] == ["float32", "weights", "144", "B", "144", "B"]


def test_the_lines_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "memory.md").read_text("utf-8").partition("## Your own model")[2]
    code, command = re.findall(r"```(?:python|sh)\n(.*?)```", page, re.DOTALL)[:2]
    (tmp_path / "build.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = command.split()
    assert words[:4] == ["python", "-m", "apex_mp", "estimate"]
    assert main(words[4:]) == 0
    assert "16-bit weights, split masters" in capsys.readouterr().out
