"""Each class that users make has an example in its docstring, which runs."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import apex_mp
from apex_mp import amp, normalization, optimizers, parallel

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

CLASSES: list[Any] = [
    *(getattr(optimizers, name) for name in optimizers.__all__),
    amp.GradScaler,
    amp.AmpHandle,
    apex_mp.AveragedMasters,
    apex_mp.monitor.Monitor,
    normalization.FusedLayerNorm,
    normalization.FusedRMSNorm,
    parallel.SyncBatchNorm,
]


def example(kind: Any) -> str:
    """The first indented paragraphs of a docstring, before `Args:`."""
    text = (inspect.getdoc(kind) or "").split("\nArgs:")[0]
    found = re.search(r"\n\n((?:    .*\n|\n)+)", text + "\n")
    return inspect.cleandoc(found[1]) if found else ""


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_example_runs(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer = optimizers.FusedAdamW(model.parameters(), master_weights=True)
    scaler = amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    there: dict[str, Any] = {
        "torch": torch,
        "apex_mp": apex_mp,
        "amp": amp,
        **{each.__name__: each for each in CLASSES},
        "model": model,
        "optimizer": optimizer,
        "loss": model(torch.ones(2, 4)).sum(),
        "scaler": scaler,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
    }
    code = example(kind)
    assert kind.__name__ in code or kind is amp.AmpHandle
    exec(code.replace('"cuda"', '"cpu"'), there)
