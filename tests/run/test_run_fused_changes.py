"""Fused optimizers in place of torch's: what a script changes later counts as with torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from master_weights_cases import is_fused
from torch import Tensor, nn

import apex_mp
from apex_mp.optimizers import FusedAdam, MasterWeights

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
    assert is_fused(pair.ours) == stays_fused
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
    outcome = "0 of 5 steps skipped" if scaled else "5 steps without a scaler"
    assert outcome in capsys.readouterr().err


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
    assert "(64 bytes); 6 steps without a scaler" in said  # Whole ones since the change.


def clamped_by_data(optimizer_class: Any, changes_at: int) -> tuple[float, float]:
    param = nn.Parameter(torch.zeros(8, dtype=BF16))
    optimizer = optimizer_class([param], lr=0.02, weight_decay=0.0)
    for number in range(58):
        if number == changes_at:
            optimizer.param_groups[0]["weight_decay"] = -1e-3
        param.grad = -torch.ones_like(param)
        optimizer.step()
        largest = optimizer.master(param).max().item()
        param.data.clamp_(-0.5, 0.5)
    return largest, param.max().item()


@pytest.mark.filterwarnings("ignore:.*changed :RuntimeWarning")
def test_writes_by_data_count_after_a_change() -> None:
    with apex_mp.use_master_weights():
        assert clamped_by_data(ADAMW, changes_at=34)[0] < 0.55


def test_a_checkpoint_keeps_its_masters_after_a_change() -> None:
    with apex_mp.use_master_weights():
        pair = Pair(ADAM, DECAY)
        for number in range(3):
            pair.step(number)
        (param,) = pair.ours.param_groups[0]["params"]
        master, saved = pair.ours.master(param), pair.ours.state_dict()
        saved["param_groups"][0]["weight_decay"] = -0.5
        pair.ours.load_state_dict(saved)
        assert isinstance(pair.ours, MasterWeights)
        assert saved["state"][0]["master_param"].equal(master)
        assert pair.ours.master(param).equal(master)


def test_an_option_is_saved_as_it_was_written() -> None:
    with apex_mp.use_master_weights():
        pair = Pair(ADAM, DECAY)
        pair.both(setting("decoupled_weight_decay", True))
        pair.both(adding(decoupled_weight_decay=True))
        groups = pair.ours.state_dict()["param_groups"]
        assert [group["decoupled_weight_decay"] for group in groups] == [True, True]
        again = type(pair.ours)(pair.params, **pair.ours.defaults)
        assert type(again).__name__ == "Adam"


def test_masters_without_other_state_are_saved_again_after_they_were_loaded() -> None:
    params = [nn.Parameter(torch.tensor([value, 1.0], dtype=BF16)) for value in (0.3, 0.7)]
    groups = [{"params": [params[0]], "momentum": 0.5}, {"params": [params[1]]}]
    with apex_mp.use_master_weights():
        first, second, third = (SGD(groups, lr=1e-3, maximize=True) for _ in range(3))
        for _ in range(3):
            for param in params:
                param.grad = torch.full_like(param, 0.1)
            first.step()
        second.load_state_dict(first.state_dict())
        third.load_state_dict(copy.deepcopy(second).state_dict())
        for param in params:
            assert third.master(param).equal(first.master(param))
            assert not first.master(param).equal(param.float())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_that_was_made_before_its_weights_became_16_bit_gets_masters(
    copied: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with apex_mp.use_master_weights():
        model = nn.Linear(4, 4)
        model, optimizer = copied((model, ADAM(model.parameters(), lr=1e-4)))
        model.to(BF16)
        before = model.weight.detach().clone()
        for _ in range(20):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        copied((model, optimizer))[1].step()
    assert abs((optimizer.master(model.weight) - before).mean().item() + 0.002) < 1e-3
    said = capsys.readouterr().err
    assert "2 optimizers of Adam stepped float32 masters of 4 parameters in 16 bits" in said
    assert "(80 bytes); 21 steps without a scaler" in said


def test_a_hook_after_the_step_may_be_there() -> None:
    calls: list[int] = []
    with apex_mp.use_master_weights():
        pair = Pair(ADAM, DECAY)
        pair.ours.register_step_post_hook(lambda *_: calls.append(1))
        for number in range(4):
            if number == 2:
                pair.both(setting("weight_decay", -0.5))
            pair.step(number)
            pair.check()
    assert len(calls) == 4


def test_a_group_that_is_appended_by_hand_has_masters() -> None:
    def append(optimizer: Any, param: nn.Parameter) -> None:
        options = SGD([nn.Parameter(torch.ones(1))], **MOMENTUM).param_groups[0]
        optimizer.param_groups.append({**options, "params": [param]})

    with apex_mp.use_master_weights():
        pair = Pair(SGD, MOMENTUM)
        pair.both(append)
        for number in range(4):
            pair.step(number)
            pair.check()


def test_blocks_may_be_nested() -> None:
    with apex_mp.use_master_weights(), apex_mp.use_master_weights():
        assert torch.amp.GradScaler("cpu").is_enabled()


def test_a_frozen_parameter_is_loaded() -> None:
    frozen = nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = MasterWeights([param, frozen], torch.optim.RMSprop, lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert frozen.dtype == torch.float16
    assert frozen.eq(1).all()


@pytest.mark.parametrize("kind", [ADAM, torch.optim.NAdam])
def test_a_state_that_is_loaded_while_its_parameter_is_frozen_keeps_its_digits(kind: Any) -> None:
    with apex_mp.use_master_weights():
        param = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = kind([param], lr=1e-3)
        for _ in range(3):
            param.grad = torch.full_like(param, 1e-4)
            optimizer.step()
        frozen = nn.Parameter(param.detach().clone(), requires_grad=False)
        resumed = kind([frozen], lr=1e-3)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        frozen.requires_grad_(True)
        for each, owner in ((param, optimizer), (frozen, resumed)):
            each.grad = torch.full_like(each, 1e-4)
            owner.step()
        assert resumed.master(frozen).equal(optimizer.master(param))


def test_an_optimizer_that_was_made_before_stays_as_it_is_when_it_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    param = nn.Parameter(torch.ones(4, dtype=BF16))
    before = [ADAM([param]), FusedAdam([param])]
    with apex_mp.use_master_weights():
        copies = copy.deepcopy(before)
        for optimizer in (*before, *copies):
            optimizer.load_state_dict(optimizer.state_dict())
            (each,) = optimizer.param_groups[0]["params"]
            each.grad = torch.ones_like(each)
            optimizer.step()
    assert type(before[0]) is ADAM
    for optimizer, has_masters in zip((*before, *copies), (0, 0, 1, 1), strict=True):
        (state,) = optimizer.state_dict()["state"].values()
        assert ("master_param" in state) == has_masters
    assert capsys.readouterr().err.count("stepped float32 masters of 1 parameter") == 2
