"""keep_fp32: named parts of a half-precision model stay in float32, with casts at their borders."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex_mp import amp, convert, keep_fp32
from apex_mp.fp16_utils import FP16_Optimizer, FP16Model, convert_network, network_to_half

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Net(nn.Module):
    """A norm in the middle, and a head of two layers with a softmax at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        self.softmax = nn.LogSoftmax(-1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.softmax(self.head(self.second(self.norm(self.first(inputs)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs(dtype: torch.dtype = F16) -> Tensor:
    return torch.linspace(-1, 1, 20).view(5, 4).to(dtype)


def pieces(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.dtype]
    if isinstance(value, (list, tuple)):
        return [dtype for item in value for dtype in pieces(item)]
    return [dtype for item in value.values() for dtype in pieces(item)]


def kept(model: nn.Module) -> nn.Module:
    return keep_fp32(model, ["head", "norm"])


WAYS: dict[str, Callable[[Net], nn.Module]] = {
    "half-after": lambda model: kept(model).half(),
    "half-before": lambda model: kept(model.half()),
    "half-twice": lambda model: kept(model.half()).half(),
    "to": lambda model: kept(model).to("cpu", F16),
    "each-module": lambda model: [each.half() for each in [*kept(model).modules()][::-1]][-1],
    "convert_network": lambda model: convert_network(kept(model), F16),
    "network_to_half": lambda model: network_to_half(kept(model)),
    "FP16Model": lambda model: FP16Model(kept(model)),
    "O3": lambda model: amp.initialize(kept(model), opt_level="O3", verbosity=0),
}


@pytest.mark.parametrize("way", WAYS)
def test_named_parts_stay_float32_however_the_model_is_halved(way: str) -> None:
    original = net()
    keys = [*original.state_dict()]
    model = WAYS[way](original)
    assert [*model.state_dict()] == keys
    for name, param in original.named_parameters():
        assert param.dtype is (F32 if name.startswith(("head", "norm")) else F16), name
    assert original.norm.running_mean.dtype is F32
    assert isinstance(original.head, nn.Sequential)
    if way != "half-before" and way != "half-twice":
        assert torch.equal(original.head[0].weight, net().head[0].weight)
    seen: dict[str, list[Any]] = {}
    for name in ("second", "softmax"):
        original.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: pieces(args)})
        )
    output = model(inputs())
    assert seen == {"second": [F16], "softmax": [F16]}
    output.float().sum().backward()
    assert {param.grad.dtype for param in original.head.parameters()} == {F32}


def test_the_part_computes_in_float32_and_its_output_is_rounded_once() -> None:
    part = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3))
    expected = copy.deepcopy(part)(inputs(F32).half().float())
    model = keep_fp32(nn.Sequential(part), "0").half()
    assert torch.equal(model(inputs()), expected.half())
    assert torch.equal(keep_fp32(model, "0", outputs=F32)(inputs()), expected)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_outputs_go_back_to_what_came_in_or_to_what_was_asked_for(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1)).to(dtype)
    assert keep_fp32(model, nn.LogSoftmax)(inputs(dtype)).dtype is dtype
    assert keep_fp32(model, "1", outputs=F32)(inputs(dtype)).dtype is F32
    assert model[0].weight.dtype is dtype


def pickled_by_an_earlier_build(model: nn.Module, then: bytes) -> nn.Module:
    """Pickle with the module path that keep_fp32 had, in the protocol that names it in one line."""
    now = b"capex_mp.masters.float32_parts\n"
    data = pickle.dumps(model, protocol=0)
    assert now in data
    return pickle.loads(data.replace(now, b"capex_mp." + then + b"\n"))


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: pickled_by_an_earlier_build(m, b"_float32_parts"),
        lambda m: pickled_by_an_earlier_build(m, b"core.float32_parts"),
    ],
)
def test_copies_and_pickles_keep_float32_too(copied: Callable[[nn.Module], Any]) -> None:
    model = keep_fp32(net(), ["head", "norm"]).half().eval()
    other = copied(model).half()
    assert other.head[1].weight.dtype is F32
    assert other.head is not model.head
    assert isinstance(other.head, nn.Sequential)
    assert torch.equal(other(inputs()), model(inputs()))


def test_fp16_compute_leaves_the_parts_in_float32() -> None:
    model = keep_fp32(net(), ["head"], outputs=F32)
    seen: dict[str, torch.dtype] = {}
    model.head[1].register_forward_hook(lambda part, *_: seen.update(weight=part.weight.dtype))
    output = amp.fp16_compute(model)(inputs(F32))
    assert (seen, output.dtype) == ({"weight": F32}, F32)


def test_it_trains_under_fp16_optimizer_and_a_float32_checkpoint_goes_in() -> None:
    model = keep_fp32(net(), ["head", nn.LogSoftmax], outputs=F32).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), 8.0, verbose=False)
    lines: list[str] = []
    convert.load(model, net().state_dict(), optimizer, report=lines.append)
    assert "first.weight from float32 to float16" in lines
    assert "head.0.weight from float32 to float32" in lines
    assert torch.equal(model.head[0].weight, net().head[0].weight)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(inputs()), torch.tensor([0, 0, 1, 2, 2]))
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("parts", "error", "sentence"),
    [
        (
            "hed",
            ValueError,
            "keep_fp32: there is no 'hed' in the model; there are ['first', 'norm', ",
        ),
        (nn.GRU, ValueError, "there is no GRU in the model; there are ['BatchNorm1d', 'Linear',"),
        (["head", "hed"], ValueError, "there is no 'hed'"),
        ([], ValueError, "names_or_types is empty"),
        ([3], TypeError, "names_or_types has 3; it must be the name of a module or a class"),
        (3, TypeError, "names_or_types has 3; it must be the name of a module or a class"),
        (int, TypeError, "names_or_types has <class 'int'>; it must be"),
    ],
)
def test_a_part_that_is_not_there_is_refused_and_nothing_changes(
    parts: Any, error: type[Exception], sentence: str
) -> None:
    model = net().half()
    with pytest.raises(error, match=re.escape(sentence)):
        keep_fp32(model, parts)
    assert {param.dtype for param in model.parameters()} == {F16}


def test_a_parameter_that_another_part_shares_is_refused_until_both_are_named() -> None:
    model = net().half()
    model.second.weight = model.head[0].weight
    with pytest.raises(ValueError, match=r"second.weight is a parameter of a part that is to stay"):
        keep_fp32(model, "head")
    assert model.head[0].weight.dtype is F16
    assert keep_fp32(model, ["head", "second"])(inputs()).dtype is F16
