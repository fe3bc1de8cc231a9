"""A weight-normed multiplicative LSTM learns in fp16, as a script of 2018 taught it.

The reference is the same script in float32, with stand-ins that say what the names mean: the
formulas of the paper, and torch's own weight norm.
"""

from __future__ import annotations

import argparse
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from snippet_cases import REPLACED
from tolerances import FP16_TRAINING
from torch import Tensor, nn

from apex_mp.reparameterization import apply_weight_norm

FOLDER = Path(__file__).parents[1] / "whole_scripts"
TOKENS, BATCH, LENGTH, BATCHES = 8, 16, 8, 4
ARGS = {
    "ntokens": TOKENS,
    "emsize": 8,
    "nhid": 16,
    "nlayers": 2,
    "lr": 0.01,
    "clip": 0.5,
    "epochs": 25,
    "batch_size": BATCH,
    "init_scale": 2.0**8,
}


def text() -> str:
    return (FOLDER / "weight_normed_mlstm.py").read_text(encoding="utf-8")


def batches() -> list[tuple[Tensor, Tensor]]:
    """Sequences that go round by one, two or three: the two before it say what comes next."""
    steps = torch.arange(BATCH) % 3 + 1
    times = torch.arange(BATCHES * LENGTH + 1).unsqueeze(1)
    tokens = (torch.arange(BATCH) + times * steps) % TOKENS
    starts = range(0, BATCHES * LENGTH, LENGTH)
    return [(tokens[s : s + LENGTH], tokens[s + 1 : s + LENGTH + 1]) for s in starts]


def run(kind: str, device: torch.device) -> dict[str, Any]:
    source = text()
    for pattern, replacement in REPLACED[kind]:
        source = re.sub(pattern, replacement, source)
    # Both begin with the same weights.
    source = source.replace("\napply_weight_norm(", "\nbegin(model)\napply_weight_norm(", 1)

    def begin(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(4)
        for _, param in sorted(model.named_parameters()):
            with torch.no_grad():
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)

    names: dict[str, Any] = {"args": argparse.Namespace(**ARGS), "batches": batches()}
    names |= {"device": device.type, "begin": begin}
    exec(compile(source, kind, "exec"), names)
    return names


@functools.cache
def run_of(kind: str, device: torch.device) -> dict[str, Any]:
    return run(kind, device)


def test_it_learns_in_fp16_what_it_learns_in_float32(device: torch.device) -> None:
    ours, theirs = run_of("apex_mp", device), run_of("fp32", torch.device("cpu"))
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-3)
    assert ours["losses"][-1] < 0.1 * ours["losses"][0]
    expected = theirs["model"].state_dict()
    found = ours["model"].state_dict()
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.dtype == torch.float16
        off = values.float().cpu() - expected[name]
        assert off.norm() < FP16_TRAINING.weights * expected[name].norm(), name


def test_its_checkpoint_has_the_old_names_and_goes_into_a_new_model(device: torch.device) -> None:
    names = run_of("apex_mp", device)
    hidden, inputs = ARGS["nhid"], ARGS["emsize"]
    shapes = {key: [*value.shape] for key, value in names["saved"].items()}
    assert shapes["rnn.rnns.0.w_ih_v"] == [4 * hidden, inputs]
    assert shapes["rnn.rnns.0.w_ih_g"] == [4 * hidden, 1]
    assert shapes["rnn.rnns.1.w_mhh_v"] == [hidden, hidden]
    assert "rnn.rnns.0.w_ih" not in shapes
    new = names["RNNModel"](TOKENS, inputs, hidden, ARGS["nlayers"]).to(device).half()
    apply_weight_norm(new.rnn)
    new.load_state_dict(names["saved"])
    (tokens, _), *_ = names["batches"]
    for model in (new, names["model"]):
        model.rnn.reset_hidden(BATCH)
    with torch.no_grad():
        outputs = [model(tokens.to(device)) for model in (new, names["model"])]
    torch.testing.assert_close(*outputs)


def test_nothing_but_the_imports_and_cuda_is_replaced() -> None:
    changed = [line for line in text().splitlines() if "apex" in line or ".cuda()" in line]
    assert [line for line in changed if ".cuda()" not in line] == [
        "from apex import RNN",
        "from apex.fp16_utils import FP16_Optimizer",
        "from apex.reparameterization import apply_weight_norm, remove_weight_norm",
    ]
