"""An optimizer whose eps is 0 in float16 gets a warning before it divides by 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apex_mp import amp
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.cpu_only

SENTENCE = r"steps parameters of float16 with eps=1e-08, which is 0 in float16"


def at_o3(model: nn.Module, optimizer: Any) -> None:
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)


def at_o2(model: nn.Module, optimizer: Any) -> None:
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


def under_a_grad_scaler(model: nn.Module, optimizer: Any) -> None:
    scaler = GradScaler("cpu")
    model.half()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3).half()).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()


Adam = torch.optim.Adam
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": Adam,
    "RMSprop": torch.optim.RMSprop,
    "larger eps": lambda params: Adam(params, eps=1e-4),
    "fused": lambda params: Adam(params, fused=True),
    "FusedAdam": FusedAdam,
    "SGD": torch.optim.SGD,
}


@pytest.mark.parametrize("setting", [at_o3, under_a_grad_scaler])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_eps_of_zero_is_named_once(optimizer: str, setting: Any) -> None:
    model = nn.Linear(3, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        setting(model, OPTIMIZERS[optimizer](model.parameters()))
    said = [str(each.message) for each in caught if "with eps=" in str(each.message)]
    assert len(said) == (optimizer in ("Adam", "RMSprop"))


def test_the_sentence_says_what_to_do() -> None:
    model = nn.Linear(3, 2)
    with pytest.warns(RuntimeWarning, match=SENTENCE) as caught:
        at_o3(model, Adam(model.parameters()))
    assert "Use FusedAdam" in str(caught[0].message)
    assert "explain nan-from-the-first-step" in str(caught[0].message)


def test_masters_of_float32_need_no_warning() -> None:
    model = nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_o2(model, Adam(model.parameters()))
