"""apex_mp.convert: float32 checkpoints into mixed precision, masters out of it, and their keys."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, F64, faces, pull
from torch import nn

from apex_mp import amp, convert
from apex_mp.fp16_utils import FP16_Optimizer, FP16Model, network_to_half
from apex_mp.optimizers import FusedAdam

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        with torch.no_grad():
            self.bn.running_mean.add_(1 / 3)
            self.bn.running_var.add_(1 / 7)


WRAPS: dict[str, Any] = {
    "plain": lambda net: net,
    "half": lambda net: net.half(),
    "network_to_half": network_to_half,
    "FP16Model": FP16Model,
    "DataParallel": nn.DataParallel,
    "DataParallel of network_to_half": lambda net: nn.DataParallel(network_to_half(net)),
    "FP16Model of DataParallel": lambda net: FP16Model(nn.DataParallel(net)),
}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())


def float32_state() -> OrderedDict[str, Any]:
    torch.manual_seed(11)
    return copy.deepcopy(OrderedDict(Net().state_dict()))


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01)


# Into a model.


@wraps
def test_a_float32_checkpoint_goes_into_a_model_of_any_dtype_and_wrapper(wrap: Any) -> None:
    state, model = float32_state(), wrap(Net())
    dtypes = [tensor.dtype for tensor in [*model.parameters(), *model.buffers()]]
    convert.load(model, state)
    assert [tensor.dtype for tensor in [*model.parameters(), *model.buffers()]] == dtypes
    for (name, value), wanted in zip(model.state_dict().items(), state.values(), strict=True):
        assert torch.equal(value, wanted.to(value.dtype)), name


def test_each_tensor_is_reported_in_one_line() -> None:
    lines: list[str] = []
    model = nn.DataParallel(network_to_half(Net()))
    convert.load(model, float32_state(), report=lines.append)
    assert (
        lines
        == [
            "module.conv.weight from float32 to float16",
            "module.conv.bias from float32 to float16",
            "module.bn.weight from float32 to float32",
            "module.bn.bias from float32 to float32",
            "module.bn.running_mean from float32 to float32",
            "module.bn.running_var from float32 to float32",
            "module.bn.num_batches_tracked from int64 to int64",
            "module.out.1.weight from float32 to float16",
            "module.out.1.bias from float32 to float16",
            "module.mask from bool to bool",
        ][-1:]
        + lines[1:]
    )
    told: list[str] = []
    mixed = convert.to_mixed(float32_state(), model, report=told.append)
    assert sorted(told) == sorted(lines)
    back: list[str] = []
    convert.to_float32(mixed, report=back.append)
    assert "module.conv.weight from float16 to float32" in back
    assert "module.bn.running_mean from float32 to float32" in back
    assert len(back) == len(lines) == 10


@faces
@pytest.mark.parametrize("make", [adam, FusedAdam], ids=["Adam", "FusedAdam"])
def test_masters_get_the_float32_values_before_they_are_rounded(make: Any, face: Any) -> None:
    state, model = float32_state(), network_to_half(Net())
    optimizer = face(make(model.parameters()), 64.0, verbose=False)
    convert.load(model, state, optimizer)
    exported = convert.masters(model, optimizer)
    for name, value in state.items():
        assert torch.equal(exported[name], value), name
    assert not torch.equal(exported["conv.weight"], model[1].conv.weight.float())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(model[1].conv.weight, state["conv.weight"].half())


def test_to_mixed_gives_the_models_dtypes_and_float32_statistics() -> None:
    state = float32_state()
    mixed = convert.to_mixed(state, network_to_half(Net()))
    assert mixed["conv.weight"].dtype == F16
    assert mixed["bn.weight"].dtype == mixed["bn.running_var"].dtype == F32
    assert mixed["mask"].dtype == torch.bool
    whole = convert.to_mixed(state, Net().half())
    assert whole["bn.weight"].dtype == F16
    assert torch.equal(whole["bn.running_mean"], state["bn.running_mean"])
    assert whole["bn.running_mean"].dtype == F32
    assert convert.to_mixed(state, Net().bfloat16())["conv.bias"].dtype == BF16
    assert {value.dtype for value in state.values()} == {F32, torch.int64, torch.bool}


def test_to_float32_widens_what_is_narrow_and_nothing_else() -> None:
    state: dict[str, Any] = {
        "half": torch.tensor([1 / 3], dtype=F16),
        "bf16": torch.tensor([1 / 3], dtype=BF16),
        "double": torch.tensor([1 / 3], dtype=F64),
        "count": torch.tensor(3),
        "extra": "text",
    }
    wide = convert.to_float32(state)
    dtypes = [wide[key].dtype for key in ("half", "bf16", "double", "count")]
    assert dtypes == [F32, F32, F64, torch.int64]
    assert wide["extra"] == "text"
    assert wide["half"].item() == state["half"].item()


# Masters out of an optimizer.


def trained(model: nn.Module, optimizer: FP16_Optimizer) -> None:
    params = [*model.parameters()]
    optimizer.backward(pull(*((param, 2.0**-12) for param in params)))
    optimizer.step()


@faces
@pytest.mark.parametrize(
    "wrap", [WRAPS[name] for name in WRAPS if name not in ("plain", "DataParallel")]
)
def test_masters_are_a_float32_state_dict_of_the_plain_network(wrap: Any, face: Any) -> None:
    model = wrap(Net())
    optimizer = face(torch.optim.SGD(model.parameters(), lr=2.0**-4), 64.0, verbose=False)
    trained(model, optimizer)
    state = convert.masters(model, optimizer)
    plain = Net()
    assert [*state] == [*plain.state_dict()]
    in_use = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert in_use.isdisjoint(value.untyped_storage().data_ptr() for value in state.values())
    assert state._metadata == plain.state_dict()._metadata
    plain.load_state_dict(state)
    for ours, theirs in zip(plain.parameters(), optimizer.param_groups[0]["params"], strict=True):
        assert ours.dtype == F32
        assert torch.equal(ours, theirs)
    weight = state["conv.weight"]
    assert not torch.equal(weight, weight.half().float())
    before = weight.clone()
    trained(model, optimizer)
    assert torch.equal(weight, before)


def test_masters_of_o2_are_exported() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for master in amp.master_params(optimizer):
        master.grad = torch.full_like(master, 2.0**-12)
    optimizer.step()
    state, lines = convert.masters(nn.DataParallel(model), [optimizer]), []
    convert.masters(model, optimizer, report=lines.append)
    assert lines[0] in ("conv.weight from float16 to float32", "mask from bool to bool")
    for (name, _), master in zip(
        model.named_parameters(), amp.master_params(optimizer), strict=True
    ):
        assert torch.equal(state[name], master)


# What does not fit changes nothing.


def huge(state: Any) -> None:
    state["out.1.weight"][0, 0] = 1e5


DAMAGES: dict[str, tuple[Any, str]] = {
    "too large": (huge, "out.1.weight holds 100000, which float16 cannot hold"),
    "another shape": (
        lambda state: state.update({"out.1.bias": torch.ones(4)}),
        "out.1.bias has shape [4], the model's has [3]; they must match",
    ),
    "missing": (lambda state: state.pop("conv.bias"), "lacks ['conv.bias'] and has []"),
    "no tensor": (lambda state: state.update({"out.1.bias": 3}), "out.1.bias is a int; it must be"),
    "unexpected": (lambda state: state.update(more=1), "lacks [] and has ['more']"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_checkpoint_that_does_not_fit_changes_nothing(case: str) -> None:
    damage, words = DAMAGES[case]
    state, model = float32_state(), network_to_half(Net())
    damage(state)
    optimizer = FP16_Optimizer(adam(model.parameters()), verbose=False)
    before = [str(model.state_dict()), str(optimizer.state_dict())]
    for convert_it in (
        lambda: convert.load(model, state, optimizer),
        lambda: convert.to_mixed(state, model),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            convert_it()
        assert words in str(raised.value)
    assert [str(model.state_dict()), str(optimizer.state_dict())] == before


# What is no state_dict, no model, no optimizer.

WITH_STATE: list[Any] = [
    convert.rename,
    lambda state, model: convert.load(model, state),
    convert.to_mixed,
    lambda state, model: convert.to_float32(state),
]
with_state = pytest.mark.parametrize("function", WITH_STATE)


@with_state
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("a.pt", "state_dict is a str, 'a.pt', which apex_mp.load_checkpoint opens; it must be"),
        (Path("a.pt"), "Path, 'a.pt', which apex_mp.load_checkpoint opens; it must be"),
        (Net(), "state_dict is a Net; it must be what a model's state_dict() returns"),
        ([1], "state_dict is a list; it must be"),
        ({0: torch.ones(1)}, "state_dict is a dict, not a dict by names; it must be"),
    ],
)
def test_what_is_no_state_dict_is_refused(function: Any, state: Any, words: str) -> None:
    with pytest.raises(TypeError) as raised:
        function(state, Net())
    assert words in str(raised.value)


@with_state
@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_whole_checkpoint_is_refused_and_its_part_named(function: Any, key: str) -> None:
    whole = {"epoch": 3, key: float32_state(), "optimizer": {"state": {}, "param_groups": []}}
    with pytest.raises(ValueError, match="state_dict is a whole checkpoint") as raised:
        function(whole, Net())
    assert f"of ['epoch', '{key}', 'optimizer']" in str(raised.value)
    assert f"such as checkpoint['{key}']" in str(raised.value)


@faces
def test_an_optimizer_of_another_model_is_refused_and_so_is_the_one_inside(face: Any) -> None:
    model = Net().half()
    before = str(model.state_dict())
    optimizer = face(adam(model.parameters()), verbose=False)
    other = face(adam(Net().half().parameters()), verbose=False)
    for wrong in (other, optimizer.optimizer, [optimizer, other]):
        words = r"the optimizer, a \w+, steps no parameter of this model; give the one that does"
        with pytest.raises(ValueError, match=words):
            convert.load(model, float32_state(), wrong)
        with pytest.raises(ValueError, match=words):
            convert.masters(model, wrong)
    assert str(model.state_dict()) == before


@wraps
@pytest.mark.parametrize(
    "prefix", ["", "module.", "1.", "network.", "module.1.", "module.network.", "0.", "1.module."]
)
def test_prefixes_of_wrappers_are_found_and_replaced(prefix: str, wrap: Any) -> None:
    state, model = Net().state_dict(), wrap(Net())
    saved = OrderedDict((prefix + key, value) for key, value in state.items())
    renamed = convert.rename(saved, model)
    assert [*renamed] == [*model.state_dict()]
    assert all(map(lambda a, b: a is b, renamed.values(), state.values()))


class Odd(nn.Module):
    """Has a parameter, and one of the same name in a child that is called like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.module = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("saved", "model", "words"),
    [
        (["module.weight"], Odd(), "the keys fit in several ways, with '' for '' (1 of 2) or with"),
        (
            ["1.weight", "1.bias"],
            nn.Sequential(nn.Linear(2, 2)),
            "the keys begin with '1.', the model's with '0.'; these may be wrappers or positions",
        ),
        (
            ["encoder.w", "encoder.b"],
            nn.Linear(2, 2),
            "no key is one of the model's; there is 'encoder.w', the model has 'weight'",
        ),
        ([], nn.Linear(2, 2), "there is 'no key', the model has 'weight'"),
    ],
    ids=["several ways", "positions", "none", "empty"],
)
def test_keys_that_might_mean_several_things_are_refused(
    saved: list[str], model: nn.Module, words: str
) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        convert.rename(dict.fromkeys(saved, torch.ones(2, 2)), model)
    assert words in str(raised.value)


def test_an_inf_that_was_there_before_stays() -> None:
    state = {"weight": torch.tensor([[float("inf")]])}
    model = nn.Linear(1, 1, bias=False).half()
    convert.load(model, state)
    assert model.weight.item() == float("inf")


def test_versions_of_modules_move_with_their_keys() -> None:
    wrapped, plain = nn.DataParallel(Net()), Net()
    there = convert.rename(wrapped.state_dict(), plain)._metadata
    assert there == plain.state_dict()._metadata
    back = convert.rename(plain.state_dict(), wrapped)._metadata
    wanted = dict(wrapped.state_dict()._metadata)
    del wanted[""]  # The wrapper's own.
    assert back == wanted
