"""Recurrent layers train in mixed precision: FP16_Optimizer, amp.init, amp.initialize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rnn_cases import KINDS
from torch import Tensor, nn

from apex_mp import amp, fp16_utils, optimizers

pytestmark = [
    pytest.mark.usefixtures("amp_off"),
    # Of cuDNN, where weights are computed or cast.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]


class Reader(nn.Module):
    """Says which letter comes next, as models of language do."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.Embedding(8, 8)
        self.rnn = KINDS[kind](8, 16, 2, **options)
        self.decoder = nn.Linear(32 if options.get("bidirectional") else 16, 8)

    def forward(self, letters: Tensor) -> Tensor:
        output, _ = self.rnn(self.encoder(letters))
        logits: Tensor = self.decoder(output)
        return logits


LETTERS = torch.tensor([0, 3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 7]).reshape(12, 1)


def losses_of(
    model: Any, device: torch.device, step: Callable[[Tensor], None], count: int = 60
) -> list[float]:
    """Train to go on from each half of the letters to the next, without an end."""
    letters = LETTERS.to(device)
    losses = []
    model.rnn.reset_hidden(1)
    for number in range(count):
        half = letters[:6] if number % 2 == 0 else letters[6:]
        following = letters[1:7] if number % 2 == 0 else letters[[*range(7, 12), 0]]
        model.rnn.detach_hidden()
        logits = model(half)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())
        step(loss)
        losses.append(loss.item())
    return losses


def learned(losses: list[float]) -> bool:
    return sum(losses[-2:]) < 0.3 * sum(losses[:2])


@pytest.mark.parametrize("inner", [optimizers.FusedAdam, torch.optim.Adam])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_float16_learns_with_fp16_optimizer(
    kind: str, inner: Any, device: torch.device
) -> None:
    model = Reader(kind).to(device).half()
    optimizer = fp16_utils.FP16_Optimizer(
        inner(model.parameters(), lr=0.02), static_loss_scale=128.0, verbose=False
    )

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()

    losses = losses_of(model, device, step)
    assert learned(losses)
    assert not optimizer.overflow
    assert {param.dtype for param in model.parameters()} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_amp_init_runs_it_in_low_precision(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    handle = amp.init(dtype=dtype)
    model = Reader(kind, bidirectional=kind == "GRU").to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    assert learned(losses_of(model, device, step))
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    if kind != "mLSTM":
        assert model.rnn(torch.randn(3, 1, 8, device=device))[0].dtype is dtype


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_level_of_amp_initialize_runs_it(kind: str, level: str, device: torch.device) -> None:
    model: Any = Reader(kind).to(device)
    adam = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4)
    # A scale below the overflow, so that each step is taken.
    model, optimizer = amp.initialize(
        model, adam, opt_level=level, loss_scale=128.0, verbosity=0, device_type=device.type
    )

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    assert learned(losses_of(model, device, step))
