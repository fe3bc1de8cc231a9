"""Fused optimizers in place of torch's: what a script changes later counts as with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex_mp
from apex_mp.optimizers import MasterWeights

BF16 = torch.bfloat16


class Pair:
    """An optimizer of torch with bfloat16 weights and masters, and the same with float32 weights.

    Args:
        kind: A class of torch.optim.
        options: Its options.
    """

    def __init__(self, kind: Callable[..., Any], options: dict[str, Any]) -> None:
        self.params = [nn.Parameter(torch.full((8,), value, dtype=BF16)) for value in (1.0, -2.0)]
        self.twins = [nn.Parameter(param.detach().float()) for param in self.params]
        self.ours = kind(self.params[:1], **options)
        self.torchs = kind(self.twins[:1], **options)

    def both(self, change: Callable[[Any, nn.Parameter], None]) -> None:
        """Change both optimizers; the change gets a parameter that is not in the optimizer yet."""
        change(self.ours, self.params[1])
        change(self.torchs, self.twins[1])

    def step(self, number: int) -> None:
        for param, twin in zip(self.params, self.twins, strict=True):
            param.grad = torch.linspace(-1.0, 2.0, 8).roll(number).to(BF16).to(param.dtype)
            twin.grad = param.grad.float()
        self.ours.step()
        self.torchs.step()

    def check(self) -> None:
        stepped = [param for group in self.ours.param_groups for param in group["params"]]
        for param, twin in zip(stepped, self.twins, strict=False):
            torch.testing.assert_close(self.ours.master(param), twin.detach(), rtol=1e-5, atol=1e-6)


def setting(name: str, value: Any) -> Callable[..., None]:
    def change(optimizer: Any, _: nn.Parameter) -> None:
        optimizer.param_groups[0][name] = value

    return change


def adding(**options: Any) -> Callable[..., None]:
    return lambda optimizer, param: optimizer.add_param_group({"params": [param], **options})


def loading(**options: Any) -> Callable[..., None]:
    """The file has no masters, which are then the weights, rounded."""

    def change(optimizer: Any, _: nn.Parameter) -> None:
        param = nn.Parameter(torch.ones(8))
        other = own(type(optimizer))([param], **options)
        param.grad = torch.linspace(0.5, 1.5, 8)
        other.step()
        optimizer.load_state_dict(other.state_dict())
        loaded = optimizer.param_groups[0]["params"][0]
        loaded.data = loaded.data.to(BF16).to(loaded.dtype)

    return change


def own(kind: type) -> Any:
    return getattr(torch.optim, kind.__name__)


ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
DECAY = {"lr": 0.1, "weight_decay": 0.5}
MOMENTUM = {"lr": 0.1, "momentum": 0.5}
# The optimizer, its options, the change, and whether it keeps the fused step.
CHANGES: dict[str, tuple[Any, dict[str, Any], Callable[..., None], bool]] = {
    "Adam becomes AdamW": (ADAM, DECAY, setting("decoupled_weight_decay", True), True),
    "AdamW becomes Adam": (ADAMW, DECAY, setting("decoupled_weight_decay", False), True),
    "Adam gets a group of AdamW's": (ADAM, DECAY, adding(decoupled_weight_decay=True), True),
    "Adam loads AdamW's option": (ADAM, DECAY, loading(**DECAY, decoupled_weight_decay=True), True),
    "Adam maximizes": (ADAM, DECAY, setting("maximize", True), True),
    "Adam gets amsgrad": (ADAM, DECAY, adding(amsgrad=True), False),
    "Adam loads amsgrad": (ADAM, DECAY, loading(**DECAY, amsgrad=True), False),
    "AdamW loads amsgrad": (ADAMW, DECAY, loading(**DECAY, amsgrad=True), False),
    "the decay becomes negative": (ADAMW, DECAY, setting("weight_decay", -0.5), False),
    "SGD maximizes": (SGD, MOMENTUM, setting("maximize", True), False),
    "SGD loads maximize": (SGD, MOMENTUM, loading(**MOMENTUM, maximize=True), False),
    "the momentum becomes negative": (SGD, MOMENTUM, setting("momentum", -0.5), False),
    "Nesterov without momentum": (SGD, MOMENTUM, adding(nesterov=True, momentum=0.0), True),
    "Nesterov with dampening": (SGD, MOMENTUM, adding(nesterov=True, dampening=0.5), True),
}


@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_options_that_change_are_as_with_torchs(name: str, when: int) -> None:
    kind, options, change, stays_fused = CHANGES[name]
    with apex_mp.use_master_weights():
        pair = Pair(kind, options)
        for number in range(8):
            if number == when:
                pair.both(change)
            pair.step(number)
            pair.check()
    assert isinstance(pair.ours, MasterWeights) != stays_fused
    assert pair.ours.state_dict()["param_groups"][0].keys() >= options.keys()
    pair.torchs.load_state_dict(pair.ours.state_dict())


def test_the_step_that_a_scheduler_keeps_goes_on_after_a_change() -> None:
    with apex_mp.use_master_weights():
        pair = Pair(ADAM, DECAY)
        schedulers = [
            torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (pair.ours, pair.torchs)
        ]
        for number in range(6):
            if number == 3:
                pair.both(setting("weight_decay", -0.5))
            pair.step(number)
            pair.check()
            for each in schedulers:
                each.step()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_sparse_embedding_in_float32_is_stepped(
    scaled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(dtype: torch.dtype, sparse: bool) -> list[Tensor]:
        torch.manual_seed(0)
        table, linear = nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 1).to(dtype)
        optimizer = torch.optim.SGD([*linear.parameters(), *table.parameters()], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for number in range(5):
            optimizer.zero_grad()
            rows = table(torch.tensor([number, number + 1]))
            scaler.scale(linear(rows.to(dtype)).float().square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        masters = getattr(optimizer, "master", lambda param: param.detach())
        return [masters(param) for group in optimizer.param_groups for param in group["params"]]

    expected = run(torch.float32, sparse=False)
    with apex_mp.use_master_weights():
        found = run(torch.float16, sparse=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    assert "0 of 5 steps skipped" in capsys.readouterr().err


def test_steps_with_and_without_the_fused_one_are_counted_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with apex_mp.use_master_weights():
        pair = Pair(ADAM, DECAY)
        for number in range(6):
            if number == 3:
                pair.both(setting("weight_decay", -0.5))
            if number == 4:
                pair.both(adding())
            pair.step(number)
    said = capsys.readouterr().err
    assert said.count("Adam stepped") == 1
    assert "(64 bytes); 0 of 6 steps" in said
