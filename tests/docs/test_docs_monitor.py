"""docs/monitor.md: its code runs, and prints what the page says."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import wrap
from torch import nn

from apex_mp.monitor import Monitor, find_nonfinite
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "monitor.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MADE, GOES, PLAIN, WATCH, SAMPLE, FIND, RUN, LOST = BLOCKS
REPORT, _, ORIGIN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def example() -> Any:
    spec = importlib.util.spec_from_file_location(
        "monitor_example", ROOT / "examples/monitor/monitor.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(text: str) -> list[str]:
    """Return the words of a report, without its numbers and the names of its parameters."""
    return re.findall(r"[a-z]{3,}", re.sub(r"^.*\d\.(weight|bias).*\n?", "", text, flags=re.M))


@pytest.mark.slow
def test_the_report_of_the_example_is_that_of_the_page() -> None:
    # Numbers differ from one processor to the next.
    said = example().train().report()
    assert words(said) == words(REPORT)
    assert said.splitlines()[0].startswith("steps           600, ")


def test_the_handler_hears_of_a_skipped_step(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("apex_mp")
    before = [*logger.handlers]
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = wrap(torch.optim.SGD([weight], lr=0.1), dynamic_loss_scale=True, verbose=True)
    optimizer.loss_scale = 16.0
    try:
        exec(WATCH, {})
        optimizer.backward(weight.sum().float() * float("inf"))
        optimizer.step()
    finally:
        logger.handlers[:] = before
    assert capsys.readouterr().out.splitlines()[-1] == "loss scale: 8.0"


def loop() -> dict[str, Any]:
    model = nn.Linear(4, 2).half()
    optimizer = wrap(FusedAdam(model.parameters()), model=model)
    batches = [(torch.randn(8, 4).half(), torch.randn(8, 2).half()) for _ in range(3)]

    def criterion(y: Any, target: Any) -> Any:
        return nn.functional.mse_loss(y.float(), target.float())

    return {
        "torch": torch,
        "Monitor": Monitor,
        "model": model,
        "optimizer": optimizer,
        "criterion": criterion,
        "batches": batches,
        "x": batches[0][0],
        "y": batches[0][1],
    }


def train(there: dict[str, Any]) -> None:
    for x, y in there["batches"]:
        there["optimizer"].zero_grad()
        there["optimizer"].backward(there["criterion"](there["model"](x), y))
        there["optimizer"].step()


def test_steps_go_where_they_are_to_go() -> None:
    class Writer:
        tags: set[str] = set()  # noqa: RUF012

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.tags.add(tag)

    there = {**loop(), "writer": Writer(), "steps": []}
    exec(GOES, there)
    train(there)
    assert there["steps"] == [(number, 128.0, False) for number in (1, 2, 3)]
    assert Writer.tags == {"amp/loss_scale", "amp/skipped", "amp/grad_norm"}


def test_a_batch_is_looked_into(capsys: pytest.CaptureFixture[str]) -> None:
    there = loop()
    exec(FIND, there)
    assert capsys.readouterr().out == "None\n"
    there["monitor"] = Monitor(there["optimizer"], model=there["model"], after=1)
    there["batches"][1][0][0, 0] = torch.inf
    exec(RUN, there)
    (found,) = there["monitor"].history.origins.values()
    assert found.startswith("inf or NaN is in the inputs of the model itself (Linear)")


def test_the_origin_of_the_page_is_what_is_printed() -> None:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.square().sum(1, keepdim=True).sqrt()

    torch.manual_seed(0)
    encoder = nn.Module()
    model = nn.Module()
    model.encoder, encoder.norm, encoder.linear = encoder, Norm(), nn.Linear(4, 16)
    nn.init.zeros_(encoder.linear.weight)
    nn.init.zeros_(encoder.linear.bias)
    weights = torch.randn(8, 1)

    def run() -> torch.Tensor:
        return ((encoder.norm(encoder.linear(torch.randn(8, 4))) + 1.0) * weights).sum()

    said = str(find_nonfinite(model, run, scale=2.0**16)).splitlines()
    told = ORIGIN.splitlines()
    assert said[0] == told[0]
    for ours, theirs in zip(said[1:], told[1:], strict=True):
        assert ours.split(":")[0] == theirs.split(":")[0]
        assert ours.split(",")[0] == theirs.split(",")[0]
