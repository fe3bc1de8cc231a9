"""O2 after the first lines: averages swapped in, a second optimizer, and inputs in containers."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tolerances import assert_same_bits
from torch import Tensor, nn

from apex_mp import amp, convert
from apex_mp.amp import _amp_state
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("amp_off")


def train(model: nn.Module, optimizer: Any, steps: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        data = torch.randn(8, 4, generator=generator).to(device)
        with amp.scale_loss(model(data).float().pow(2).mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()


def trained(device: torch.device, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, **options)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=8.0)
    train(model, optimizer, 3, device)
    return model, optimizer


def masters_of(optimizer: Any) -> list[Tensor]:
    return [master.detach().clone() for master in amp.master_params(optimizer)]


def test_weights_in_use_are_saved_and_masters_once_they_are_back(device: torch.device) -> None:
    model, optimizer = trained(device)
    names, masters = [*model.state_dict()], masters_of(optimizer)
    weights = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.view(-1)[::2] = 0.5
    for saved in (model.state_dict(), convert.masters(model, optimizer)):
        for name, param, master, old in zip(
            names, model.parameters(), masters, weights, strict=True
        ):
            expected = torch.where(param.detach() == old, master, param.detach().float())
            assert_same_bits(saved[name], expected)
    with torch.no_grad():
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.copy_(weight)
    for saved in (model.state_dict(), convert.masters(model, optimizer)):
        for name, master in zip(names, masters, strict=True):
            assert_same_bits(saved[name], master)


@pytest.mark.parametrize("write", [False, True], ids=["as it is", "written"])
def test_a_second_optimizer_goes_on_from_the_masters_and_they_are_saved(
    write: bool, device: torch.device
) -> None:
    model, first = trained(device)
    before = masters_of(first)
    if write:
        with torch.no_grad():
            next(model.parameters()).fill_(0.5)
        before[0].fill_(0.5)
    second = torch.optim.SGD(model.parameters(), 1e-2)
    assert amp.initialize([], second, opt_level="O2", verbosity=0, loss_scale=8.0)[1] is second
    for master, expected in zip(masters_of(second), before, strict=True):
        assert_same_bits(master, expected)
    train(model, second, 5, device)
    for saved, master, old in zip(
        model.state_dict().values(), masters_of(second), before, strict=True
    ):
        assert_same_bits(saved, master)
        assert not torch.equal(master, old)


def test_an_optimizer_of_what_was_frozen_is_saved(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    model[0].requires_grad_(False)
    head = torch.optim.SGD(model[1].parameters(), 1e-2)
    model, head = amp.initialize(model, head, opt_level="O2", verbosity=0, loss_scale=8.0)
    train(model, head, 3, device)
    model[0].requires_grad_(True)
    body = torch.optim.SGD(model[0].parameters(), 1e-2)
    amp.initialize([], body, opt_level="O2", verbosity=0, loss_scale=8.0)
    train(model, body, 3, device)
    saved = [*model.state_dict().values()]
    for value, master in zip(saved, masters_of(body) + masters_of(head), strict=True):
        assert_same_bits(value, master)


def test_a_model_given_twice_is_refused_with_the_way(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_amp_state, "allow_incoming_model_not_fp32", False, raising=False)
    model, _ = trained(device)
    with pytest.raises(RuntimeError, match=r"goes there alone: amp\.initialize\(\[\], optimizer\)"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), 1.0), opt_level="O2")


# --- Inputs.


class Frozen(Mapping[str, Any]):
    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Batch:
    """A user's own class, which knows what of it to cast."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.data.to(dtype))


Pair = collections.namedtuple("Pair", ["one", "other"])

NESTED: dict[str, Any] = {
    "a list": (lambda x: [x, [x]], lambda v: v[1][0]),
    "a tuple": (lambda x: (1, (x,)), lambda v: v[1][0]),
    "a named tuple": (lambda x: Pair("a", [x]), lambda v: v.other[0]),
    "a dict": (lambda x: {"a": {"b": x}}, lambda v: v["a"]["b"]),
    "an OrderedDict": (lambda x: collections.OrderedDict(a=[x]), lambda v: v["a"][0]),
    "a UserDict": (lambda x: collections.UserDict(a=[x]), lambda v: v["a"][0]),
    "a deque": (lambda x: collections.deque([1, [x]], maxlen=3), lambda v: v[1][0]),
    "another mapping": (lambda x: Frozen(a=[x]), lambda v: v["a"][0]),
    "an object": (Batch, lambda v: v.data),
    "an object in a list": (lambda x: [{"a": Batch(x)}], lambda v: v[0]["a"].data),
}


@pytest.mark.parametrize("name", NESTED)
def test_inputs_are_cast_at_any_depth_and_kept_where_nothing_is(
    name: str, device: torch.device
) -> None:
    make, find = NESTED[name]
    seen: list[Any] = []

    class Net(nn.Linear):
        def forward(self, value: Any, also: Any = None) -> Tensor:  # type: ignore[override]
            seen.extend([value, also])
            return super().forward(find(value))

    model = amp.initialize(Net(4, 4).to(device), opt_level="O2", verbosity=0)
    given = make(torch.ones(2, 4, device=device))
    kept = make(torch.ones(2, 4, device=device, dtype=torch.int64))
    model(given, also=kept)
    assert type(seen[0]) is (dict if isinstance(given, Frozen) else type(given))
    assert find(seen[0]).dtype is torch.float16
    assert find(given).dtype is torch.float32
    if "object" not in name:
        assert seen[1] is kept
    if name == "a deque":
        assert seen[0].maxlen == 3
