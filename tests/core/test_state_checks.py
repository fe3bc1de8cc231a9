"""What load_state_dict refuses before it reads anything: other things, and whole checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import F32, ones

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.scale.amp_scaler import LossScaler

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def wrapper() -> Any:
    handle = amp.init(device_type="cpu")
    return handle.wrap_optimizer(torch.optim.Adam([ones(2, dtype=F32)]))


def amp_itself() -> Any:
    amp.initialize(torch.nn.Linear(1, 1), verbosity=0)
    return amp


OF_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "FusedAdam": lambda: optimizers.FusedAdam([ones(2)]),
    "FusedSGD": lambda: optimizers.FusedSGD([ones(2)], lr=0.1, momentum=0.9),
    "FusedAdagrad": lambda: optimizers.FusedAdagrad([ones(2)]),
    "FusedNovoGrad": lambda: optimizers.FusedNovoGrad([ones(2)]),
    "FusedLAMB": lambda: optimizers.FusedLAMB([ones(2)]),
    "FP16_Optimizer": lambda: fp16_utils.FP16_Optimizer(
        torch.optim.Adam([ones(2)]), dynamic_loss_scale=True, verbose=False
    ),
    "OptimWrapper": wrapper,
}
LOADERS: dict[str, Callable[[], Any]] = {
    **OF_OPTIMIZERS,
    "AmpHandle": lambda: amp.init(device_type="cpu"),
    "amp": amp_itself,
    "LossScaler": LossScaler,
    "DynamicLossScaler": fp16_utils.DynamicLossScaler,
}


@pytest.mark.parametrize("who", LOADERS)
def test_what_is_no_dict_is_refused_by_its_type(who: str) -> None:
    loader = LOADERS[who]()
    before = str(loader.state_dict())
    for given in (None, 5, [], [("state", {})]):
        with pytest.raises(TypeError) as raised:
            loader.load_state_dict(given)
        assert str(raised.value) == (
            f"{who}.load_state_dict: state_dict is a {type(given).__name__}; it must be what "
            "state_dict() returned"
        )
    assert str(loader.state_dict()) == before


@pytest.mark.parametrize("who", OF_OPTIMIZERS)
def test_of_a_whole_checkpoint_the_optimizers_part_is_named(who: str) -> None:
    loader = OF_OPTIMIZERS[who]()
    state = loader.state_dict()
    before = str(state)
    whole = {"epoch": 3, "model": {"weight": torch.ones(2)}, "optim": copy.deepcopy(state)}
    with pytest.raises(ValueError, match="missing") as raised:
        loader.load_state_dict(whole)
    assert str(raised.value).startswith(f"{who}.load_state_dict: key")
    assert str(raised.value).endswith(
        "has ['epoch', 'model', 'optim']; give the part that is an optimizer's, checkpoint['optim']"
    )
    assert str(loader.state_dict()) == before
    loader.load_state_dict(whole["optim"])


@pytest.mark.parametrize("who", OF_OPTIMIZERS)
@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"state": 5}, "state is 5; it must be a dict"),
        ({"state": {0: 5}}, r"state\[0\] is 5; it must be a dict"),
        ({"param_groups": 5}, "param_groups is 5; it must be a list"),
        ({"param_groups": [5]}, r"param_groups\[0\] is 5; it must be a dict with a list of params"),
        ({"param_groups": [{"lr": 1.0}]}, r"param_groups\[0\] is {'lr': 1.0}; it must be a dict"),
    ],
)
def test_a_part_of_another_type_is_named(who: str, part: dict[str, Any], sentence: str) -> None:
    loader = OF_OPTIMIZERS[who]()
    state = loader.state_dict()
    before = str(state)
    (state if "param_groups" in state else state["optimizer_state_dict"]).update(part)
    with pytest.raises(TypeError, match=sentence):
        loader.load_state_dict(state)
    assert str(loader.state_dict()) == before
