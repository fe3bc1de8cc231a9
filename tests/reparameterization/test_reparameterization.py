"""Weight norm and other computed weights: torch's numbers under the names of old checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tolerances import assert_near
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations

import apex_mp
from apex_mp.reparameterization import (
    Reparameterization,
    WeightNorm,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# Against torch's own.

LAYERS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "Linear": (lambda: nn.Linear(5, 4), (3, 5), "weight"),
    "Bilinear": (lambda: nn.Bilinear(5, 5, 4), (3, 5), "weight"),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 2), (2, 3, 6), "weight"),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 2), (2, 3, 6, 6), "weight"),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 2), (2, 3, 6, 6), "weight"),
    "LSTM": (lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True), (6, 2, 5), "weight_hh_l1"),
    "GRU": (lambda: nn.GRU(5, 4), (6, 2, 5), "weight_ih_l0"),
    "LSTMCell": (lambda: nn.LSTMCell(5, 4), (2, 5), "weight_hh"),
}
DIMENSIONS = {"Bilinear": 3, "Conv1d": 3, "Conv2d": 4, "ConvTranspose2d": 4}
CASES = [
    pytest.param(layer, dim, id=f"{layer}-{dim}")
    for layer in LAYERS
    for dim in [*range(DIMENSIONS.get(layer, 2)), None]
]


@pytest.mark.parametrize(("layer", "dim"), CASES)
def test_values_and_gradients_are_those_of_torchs_weight_norm(
    layer: str, dim: int | None, device: torch.device
) -> None:
    make, shape, name = LAYERS[layer]
    ours = make().to(device)
    theirs = copy.deepcopy(ours)
    parametrizations.weight_norm(theirs, name, dim)  # type: ignore[arg-type]
    assert apply_weight_norm(ours, name, dim) is ours
    copies = theirs.parametrizations[name]
    with torch.no_grad():
        for g in (getattr(ours, f"{name}_g"), copies.original0):
            g.mul_(1.25)
    inputs = [torch.randn(shape, device=device) for _ in range(1 + (layer == "Bilinear"))]
    for module in (ours, theirs):
        output(module(*inputs)).square().sum().backward()
    torch.testing.assert_close(output(ours(*inputs)), output(theirs(*inputs)))
    pairs = [(getattr(ours, name), getattr(theirs, name))]
    for own, other in ((f"{name}_g", copies.original0), (f"{name}_v", copies.original1)):
        param = getattr(ours, own)
        assert param.shape == other.shape
        pairs += [(param, other), (param.grad, other.grad)]
    pairs += [(ours.get_parameter(n).grad, theirs.get_parameter(n).grad) for n in shared(theirs)]
    for own, other in pairs:
        torch.testing.assert_close(own, other)


def shared(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters() if "parametrizations" not in name]


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, None])
def test_the_weight_stays_as_it_is_and_so_does_its_dtype(
    dim: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    module = nn.Conv1d(6, 4, 5).to(device, dtype)
    weight = module.weight
    before = weight.detach().clone()
    apply_weight_norm(module, "weight", dim)
    assert {param.dtype for param in module.parameters()} == {module.weight.dtype} == {dtype}
    if dtype in (F16, BF16):  # Its norms are rounded, and so is the product: each half an ulp.
        torch.testing.assert_close(
            module.weight, before, rtol=torch.finfo(dtype).eps * 1.01, atol=0
        )
    else:
        assert_near(module.weight, before.double())
    assert_near(module.get_parameter("weight_g"), norms(before, dim))
    with torch.no_grad():
        module.get_parameter("weight_v").zero_()
    assert torch.equal(weight, before)  # References to the old parameter keep its values.


def norms(v: Tensor, dim: int | None) -> Tensor:
    others = [d for d in range(v.dim()) if dim is None or d != dim % v.dim()]
    lengths = v.double().square().sum(others, keepdim=dim is not None).sqrt()
    return lengths.reshape(()) if dim is None else lengths


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, None])
def test_low_precision_loses_one_rounding_in_weights_and_gradients(
    dim: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    module = apply_weight_norm(nn.Conv1d(6, 4, 5).to(device, dtype), "weight", dim)
    g, v = module.get_parameter("weight_g"), module.get_parameter("weight_v")
    assert_near(g, norms(v, dim))
    with torch.no_grad():
        g.uniform_(0.5, 2.0)
        v.normal_()
    exact_g, exact_v = (x.detach().double().requires_grad_() for x in (g, v))
    exact = exact_g * exact_v / norms(exact_v, dim)
    weight, towards = module.weight, torch.randn_like(v)
    weight.backward(towards)  # type: ignore[operator]
    exact.backward(towards.double())
    assert_near(weight, exact)  # type: ignore[arg-type]
    for param, reference in ((g, exact_g), (v, exact_v)):
        assert param.grad is not None
        assert reference.grad is not None
        assert param.grad.dtype is dtype
        assert_near(param.grad, reference.grad)


# Which weights.


class Sentiment(nn.Module):
    """Words, a recurrent layer whose weights stand in a list of cells, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(8, 6)
        self.bags = nn.EmbeddingBag(8, 6)
        self.rnns = nn.ModuleList([nn.LSTMCell(6, 6), nn.GRUCell(6, 6)])
        self.scale = Parameter(torch.ones(3, 3))
        self.register_buffer("table", torch.ones(3, 3))
        self.decoder = nn.Linear(6, 8)


def test_without_a_name_all_weights_of_two_dimensions_are_taken_but_those_of_embeddings() -> None:
    model = apply_weight_norm(Sentiment())
    computed = [name for name in dict(model.named_parameters()) if name.endswith("_g")]
    assert computed == [
        "scale_g",
        "rnns.0.weight_ih_g",
        "rnns.0.weight_hh_g",
        "rnns.1.weight_ih_g",
        "rnns.1.weight_hh_g",
        "decoder.weight_g",
    ]
    kept = {name for name in dict(model.named_parameters()) if name[-2:] not in ("_g", "_v")}
    assert {"encoder.weight", "bags.weight", "decoder.bias"} <= kept


# What a module with a computed weight is.


@pytest.mark.parametrize(
    ("dim", "shape"), [(0, (4, 1)), (1, (1, 5)), (None, ()), (None, (1,))]
)  # One number was a vector until torch 0.4.
@pytest.mark.parametrize("half_first", [True, False])
def test_a_checkpoint_of_2018_loads_into_float32_and_float16(
    dim: int | None, shape: tuple[int, ...], half_first: bool, device: torch.device
) -> None:
    old = {
        "bias": torch.randn(4),
        "weight_g": torch.rand(shape) + 0.5,
        "weight_v": torch.randn(4, 5),
    }
    model = nn.Linear(5, 4).to(device)
    if half_first:
        model.half()
    apply_weight_norm(model, "weight", dim)
    model.load_state_dict(old)
    model.half()
    g, v = old["weight_g"].half().double(), old["weight_v"].half().double()
    expected = (g.reshape(()) if dim is None else g) * v / norms(v, dim)
    assert model.weight.dtype is F16
    assert_near(model.weight, expected.to(device))


def test_a_script_that_tries_without_weight_norm_and_then_with_it_loads_either() -> None:
    source = apply_weight_norm(nn.LSTM(4, 5))
    with torch.no_grad():
        source.get_parameter("weight_hh_l0_g").mul_(2)
    model, x = nn.LSTM(4, 5), torch.randn(3, 1, 4)
    with pytest.raises(RuntimeError, match="weight_hh_l0_g"):
        model.load_state_dict(source.state_dict())
    apply_weight_norm(model, hook_child=False)
    model.load_state_dict(source.state_dict())
    remove_weight_norm(model)
    assert torch.equal(model(x)[0], source(x)[0])
    model.load_state_dict(nn.LSTM(4, 5).state_dict())


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 5), lambda: nn.LSTM(4, 5)])
@pytest.mark.parametrize("called", [False, True])
def test_copies_and_pickles_compute_from_parameters_of_their_own(
    make: Any, called: bool, device: torch.device
) -> None:
    model = apply_weight_norm(make()).to(device)
    x = torch.randn(2, 3, 4, device=device)
    if called:
        output(model(x)).sum().backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(model, protocol=0)),
        torch.load(stream, weights_only=False),
    ]
    expected = output(model(x)).detach()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for twin in twins:
        assert type(twin) is type(model)
        assert torch.equal(output(twin(x)), expected)
        for name, param in twin.named_parameters():
            assert param.is_leaf, name
        remove_weight_norm(twin)
        assert torch.equal(output(twin(x)), expected)


def test_the_weight_follows_any_change_of_its_parameters_at_once() -> None:
    module = apply_weight_norm(nn.Linear(3, 4))
    module(torch.ones(1, 3))
    before = module.weight.detach().clone()
    module.get_parameter("weight_g").data.mul_(2)
    assert torch.equal(module.weight, before * 2)
    module.load_state_dict(apply_weight_norm(nn.Linear(3, 4)).state_dict())
    assert not torch.equal(module.weight, before * 2)
    with torch.no_grad():
        assert not module.weight.requires_grad
    assert module.weight.requires_grad


@pytest.mark.cpu_only
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 5), lambda: nn.Conv1d(4, 5, 1)])
def test_it_compiles_as_one_graph_that_sees_later_changes(make: Any) -> None:
    model, x = apply_weight_norm(make()), torch.randn(1, 4, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x).sum().backward()
        with torch.no_grad():
            model.get_parameter("weight_g").mul_(2)
    assert model.get_parameter("weight_v").grad is not None


# Recurrent layers.


class Counting(WeightNorm):
    """Counts how often a weight is computed."""

    times = 0

    def compute_weight(self, module: nn.Module | None = None, name: str | None = None) -> Tensor:
        Counting.times += 1
        return super().compute_weight(module, name)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_sequence_takes_one_computation_of_each_weight(kind: Any, device: torch.device) -> None:
    layer = apply_reparameterization(kind(3, 4).to(device), Counting)
    x = torch.randn(7, 2, 3, device=device)
    layer(x)
    Counting.times = 0
    layer(x)
    assert Counting.times == 2


# Other reparameterizations.


class Logarithmic(Reparameterization):
    """A user's own: each row's size as a logarithm."""

    def compute_weight(self, module: Any = None, name: str | None = None) -> Tensor:
        sizes, values = self.get_params(module)
        assert name == self.name
        return sizes.exp() * values

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[list[str], list[Parameter]]:
        assert dim == self.dim
        sizes = weight.detach().abs().amax(dim=1, keepdim=True).log()
        return [f"{name}_log", f"{name}_rest"], [
            Parameter(sizes),
            Parameter(weight.detach() / sizes.exp()),
        ]


def test_a_users_own_reparameterization_is_applied_trained_and_removed(
    device: torch.device,
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 5)).to(device)
    before = model[0].weight.detach().clone()
    apply_reparameterization(model, Logarithmic, dim=0)
    assert "1.weight_hh_l0_log" in model.state_dict()
    torch.testing.assert_close(model[0].weight, before)
    model(torch.randn(2, 3, device=device))[0].sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    remove_weight_norm(model)  # Takes only its own away.
    assert "0.weight_log" in model.state_dict()
    remove_reparameterization(model, Logarithmic, "0.weight")
    torch.testing.assert_close(model[0].weight, before)
    remove_reparameterization(model)
    assert [*model[1].state_dict()] == [
        "bias_ih_l0",
        "bias_hh_l0",
        "weight_ih_l0",
        "weight_hh_l0",
    ]


# Removal.


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("frozen", [False, True])
def test_removing_restores_a_parameter_with_value_dtype_and_requires_grad(
    frozen: bool, dtype: torch.dtype, device: torch.device
) -> None:
    module = nn.Conv2d(2, 3, 2).to(device, dtype)
    module.weight.requires_grad_(not frozen)
    apply_weight_norm(module)
    params = {name: param for name, param in module.named_parameters() if "weight" in name}
    assert {param.requires_grad for param in params.values()} == {not frozen}
    with torch.no_grad():
        params["weight_g"].mul_(3)
    value = module.weight.detach().clone()
    assert remove_weight_norm(module) is module
    assert isinstance(module.weight, Parameter)
    assert torch.equal(module.weight, value)
    assert module.weight.requires_grad is not frozen
    assert module.weight.is_leaf
    assert (module.weight.dtype, module.weight.device) == (value.dtype, value.device)
    assert [*module.state_dict()] == ["bias", "weight"]
    assert {param.requires_grad for param in params.values()} == {not frozen}
    apply_weight_norm(module)


# What is refused.


def refused(sentence: str, model: nn.Module, *arguments: Any, error: Any = ValueError) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=sentence):
        apply_reparameterization(model, *arguments)
    after = model.state_dict()
    assert [*after] == [*before]
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_what_cannot_be_meant_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    refused(r"weight norm of weight: dim is 2; for the shape \[2, 2\]", model, WeightNorm, "", 2)
    refused(r"between -3 and 2, or None", model, WeightNorm, "0.weight", -4)
    refused(r"weight norm of weight: dim is 'a'", model, WeightNorm, "0.weight", "a")
    refused(
        r"1\.wait is no parameter of Linear, which has weight, bias", model, WeightNorm, "1.wait"
    )
    refused(r"2\.running_mean is no parameter of", model, WeightNorm, "2.running_mean")
    refused("has no attribute `3`", model, WeightNorm, "3.weight", error=AttributeError)
    refused("reparameterization is None; it must be", model, error=TypeError)
    refused("must be a subclass of Reparam", model, nn.Linear, error=TypeError)
    refused("Reparameterization must define", model, Reparameterization, error=NotImplementedError)
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="weight has no shape yet; call the model once"):
        apply_weight_norm(lazy)


def test_norms_of_zero_and_weights_that_stay_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Embedding(2, 2))
    with torch.no_grad():
        model[0].weight[0] = 0.0
    apply_weight_norm(model, "0.weight")
    apply_weight_norm(model, "1.weight")
    assert "weight norm of weight in Linear: 1 of 3 norms are zero or not finite" in caplog.text
    assert "1.weight is left as it is: it belongs to an embedding" in caplog.text
    caplog.clear()
    apply_weight_norm(nn.Linear(2, 3))
    assert caplog.text == ""


def test_a_weight_that_is_written_is_that_of_new_parameters() -> None:
    model, weight = apply_weight_norm(nn.Linear(2, 2)), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    model.weight = weight
    assert torch.equal(model.weight, weight)
    assert model.weight_g.flatten().tolist() == [5.0, 2.0]


def test_an_old_script_finds_it_where_it_was() -> None:
    apex_mp.install_as_apex()
    try:
        names: dict[str, Any] = {}
        exec(
            "from apex.reparameterization import *\n"
            "from apex.reparameterization.weight_norm import WeightNorm as W\n"
            "from apex.reparameterization.reparameterization import Reparameterization as R\n",
            names,
        )
        assert names["W"] is WeightNorm
        assert names["R"] is Reparameterization
        assert names["apply_weight_norm"] is apply_weight_norm
        assert issubclass(names["W"], names["R"])
    finally:
        apex_mp.uninstall_as_apex()


def test_the_object_that_computes_a_weight_has_what_it_had() -> None:
    module = nn.Sequential(nn.Linear(3, 4))
    present = Reparameterization.apply(module, "0.weight", 0, WeightNorm)
    assert isinstance(present, WeightNorm)
    assert (present.name, present.dim, present.module) == ("weight", 0, module[0])
    assert present.reparameterization_names == ["weight_g", "weight_v"]
    assert present.get_params(module[0]) == [module[0].weight_g, module[0].weight_v]
    assert torch.equal(present.compute_weight(), module[0].weight)
    assert torch.equal(present.compute_weight(module, "0.weight"), module[0].weight)
    assert Reparameterization.get_module_and_name(module, "0.weight") == (module[0], "weight")
    assert Reparameterization.get_module_and_name(module, "") == (None, None)
    assert present.remove(module[0]) is module[0].weight
