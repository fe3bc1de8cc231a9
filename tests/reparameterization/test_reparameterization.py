"""Weight norm and other computed weights: torch's numbers under the names of old checkpoints."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tolerances import assert_near
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations, parametrize

import apex_mp
from apex_mp import amp
from apex_mp.fp16_utils import FP16_Optimizer, network_to_half
from apex_mp.optimizers import FusedAdam
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
    assert torch.equal(weight, before)  # Whoever holds the old parameter keeps its values.


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


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("size", [300.0, 1e-4])
def test_norms_in_float16_neither_overflow_nor_vanish(
    size: float, dim: int | None, device: torch.device
) -> None:
    module = nn.Conv1d(16, 16, 16).to(device, F16)
    nn.init.constant_(module.weight, size)
    apply_weight_norm(module, "weight", dim)
    weight = module.weight
    weight.sum().backward()
    assert_near(module.get_parameter("weight_g"), norms(torch.full_like(weight, size), dim))
    torch.testing.assert_close(weight, torch.full_like(weight, size), rtol=2.0**-10, atol=0)
    gradient = module.get_parameter("weight_g").grad
    assert gradient is not None
    assert gradient.isfinite().all()


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


@pytest.mark.parametrize("hook_child", [True, False])
def test_a_name_with_dots_reaches_a_child_whoever_was_to_have_the_hook(hook_child: bool) -> None:
    model = Sentiment()
    before = model.rnns[0].weight_hh
    apply_weight_norm(model, "rnns.0.weight_hh", hook_child=hook_child)
    assert {name for name in model.state_dict() if "_g" in name} == {"rnns.0.weight_hh_g"}
    assert torch.allclose(model.rnns[0].weight_hh, before)  # type: ignore[arg-type]
    remove_weight_norm(model, "rnns.0.weight_hh")
    assert isinstance(model.rnns[0].weight_hh, Parameter)


def test_the_name_of_a_module_means_all_its_weights() -> None:
    model, part = Sentiment(), Sentiment()
    apply_weight_norm(model, "rnns", hook_child=False)  # As sentiment-discovery does.
    apply_weight_norm(part.rnns)
    assert [*model.state_dict()] == [*part.state_dict()]
    model.lower = nn.Linear(4, 4)
    model.upper = nn.Linear(4, 4)
    model.upper.weight = model.lower.weight
    with pytest.raises(
        ValueError, match=r"weight is one parameter with lower\.weight, and would be"
    ):
        apply_weight_norm(model, "upper")


@pytest.mark.parametrize("name", ["decoder.bias", "encoder.weight"])
def test_a_name_that_is_not_for_it_is_left_with_a_word(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Sentiment()
    keys = [*model.state_dict()]
    apply_weight_norm(model, name)
    assert [*model.state_dict()] == keys
    assert caplog.messages == [
        f"{name} is left as it is: it "
        + ("has no two dimensions" if "bias" in name else "belongs to an embedding")
        + " [docs/troubleshooting.md#weight-norm]"
    ]
    assert Reparameterization.apply(model, name, 0, WeightNorm) is None


def test_one_parameter_with_two_names_stays_one(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    model[1].weight = model[0].weight
    apply_weight_norm(model)
    assert model[1].weight_v is model[0].weight_v
    assert len([*model.parameters()]) == 4
    assert [*model.state_dict()] == [
        f"{i}.{name}" for i in range(2) for name in ("bias", "weight_g", "weight_v")
    ]
    model(torch.ones(1, 4, device=device)).sum().backward()
    remove_weight_norm(model)
    assert model[1].weight is model[0].weight


def test_a_weight_that_is_an_embeddings_too_is_left_alone() -> None:
    model = Sentiment()
    model.decoder.weight = model.encoder.weight
    apply_weight_norm(model)
    assert model.decoder.weight is model.encoder.weight


def test_a_name_that_would_part_one_parameter_is_refused() -> None:
    model = Sentiment()
    model.decoder.weight = model.encoder.weight
    with pytest.raises(ValueError, match=r"decoder\.weight is one parameter with encoder\.weight"):
        apply_weight_norm(model, "decoder.weight")
    assert model.decoder.weight is model.encoder.weight


# What a module with a computed weight is.


def test_parameters_have_the_old_names_in_the_old_order() -> None:
    model = apply_weight_norm(nn.Sequential(nn.Conv2d(2, 3, 1), nn.LSTM(4, 5, bias=False)))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert list(shapes.items()) == [
        ("0.bias", (3,)),
        ("0.weight_g", (3, 1, 1, 1)),
        ("0.weight_v", (3, 2, 1, 1)),
        ("1.weight_ih_l0_g", (20, 1)),
        ("1.weight_ih_l0_v", (20, 4)),
        ("1.weight_hh_l0_g", (20, 1)),
        ("1.weight_hh_l0_v", (20, 5)),
    ]
    assert [*dict(model.named_parameters())] == [*shapes]


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


def test_a_checkpoint_can_be_assigned() -> None:
    model, other = (apply_weight_norm(nn.Linear(3, 4)) for _ in range(2))
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model.weight, other.weight)


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


def test_a_replica_of_data_parallel_computes_from_the_tensors_it_is_given() -> None:
    model = apply_weight_norm(nn.Linear(3, 4))
    replica = model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, param in model.named_parameters():  # What replicate does, on another GPU.
        setattr(replica, name, param * 2)
    assert torch.allclose(replica.weight, model.weight * 2)
    replica.weight.sum().backward()
    assert model.get_parameter("weight_g").grad is not None


def test_the_type_says_what_it_did() -> None:
    module = apply_weight_norm(nn.Linear(3, 4))
    assert repr(module) == repr(nn.Linear(3, 4))
    assert isinstance(module, nn.Linear)
    assert str(type(module)) == str(nn.Linear)
    assert type(module) is type(apply_weight_norm(nn.Linear(5, 6)))
    assert type(remove_weight_norm(module)) is nn.Linear


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


def test_a_weight_can_be_assigned() -> None:
    module, new = apply_weight_norm(nn.Linear(3, 4)), torch.randn(4, 3)
    params = [*module.parameters()]
    module.weight = new
    assert_near(module.weight, new.double())
    assert all(a is b for a, b in zip(module.parameters(), params, strict=True))


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


def test_a_functional_call_computes_from_what_it_is_given() -> None:
    model, x = apply_weight_norm(nn.Linear(4, 5, bias=False)), torch.randn(1, 4)
    twice = {"weight_g": model.get_parameter("weight_g") * 2}
    torch.testing.assert_close(torch.func.functional_call(model, twice, x), model(x) * 2)


def test_torchs_parametrizations_go_on_top_and_come_off() -> None:
    first, second = (apply_weight_norm(nn.Linear(4, 5)) for _ in range(2))
    for model in (first, second):
        parametrizations.orthogonal(model, "weight_v")
        model(torch.ones(1, 4)).sum().backward()
    parametrize.remove_parametrizations(first, "weight_v")
    value = first.weight.detach().clone()
    remove_weight_norm(first)
    assert type(first) is nn.Linear
    assert torch.equal(first.weight, value)
    # The other way round the parametrization would be left without what it computes.
    with pytest.raises(
        ValueError, match=r"weight of ParametrizedLinear is computed from weight_v, which is"
    ):
        remove_weight_norm(second)


def test_weights_come_and_go_under_a_parametrization_of_torch() -> None:
    layer, x = apply_weight_norm(nn.LSTM(3, 4), "weight_hh_l0"), torch.randn(2, 1, 3)
    expected = layer(x)[0]
    parametrize.register_parametrization(layer, "bias_hh_l0", nn.Identity())
    apply_weight_norm(layer, "weight_ih_l0")
    torch.testing.assert_close(layer(x)[0], expected)
    remove_weight_norm(layer)
    assert isinstance(layer.weight_hh_l0, Parameter)
    torch.testing.assert_close(layer(x)[0], expected)
    parametrize.remove_parametrizations(layer, "bias_hh_l0")
    torch.testing.assert_close(layer(x)[0], expected)


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


def test_a_recurrent_layer_learns_through_its_computed_weights(device: torch.device) -> None:
    layer = apply_weight_norm(nn.LSTM(3, 4, num_layers=2)).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x, losses = torch.randn(7, 2, 3, device=device), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (layer(x)[0] - 0.5).square().mean()
        loss.backward()
        losses.append(loss.item())
        assert all(param.grad is not None for param in layer.parameters())
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_a_recurrent_layer_knows_its_weights_again_when_they_are_parameters() -> None:
    layer, x = apply_weight_norm(nn.GRU(3, 4)), torch.randn(2, 1, 3)
    layer(x)[0].sum().backward()
    twin = remove_weight_norm(copy.deepcopy(layer))
    assert torch.equal(twin(x)[0], layer(x)[0])
    with torch.no_grad():
        twin.get_parameter("weight_hh_l0").zero_()
        twin.get_parameter("weight_ih_l0").zero_()
        twin.get_parameter("bias_ih_l0").zero_()
        twin.get_parameter("bias_hh_l0").zero_()
    assert twin(x)[0].abs().sum() == 0
    assert [w is p for w, p in zip(twin._flat_weights, twin.all_weights[0], strict=True)] == [
        True
    ] * 4
    copy.deepcopy(twin)


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


class Fixed(Reparameterization):
    """Needs no parameters."""

    def compute_weight(self, module: Any = None, name: str | None = None) -> Tensor:
        return torch.full((2, 2), 0.5)

    def reparameterize(self, name: str, weight: Tensor, dim: int | None) -> tuple[list[Any], Any]:
        return [], []


def test_weights_that_need_no_parameters_become_one_each() -> None:
    model = apply_reparameterization(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Fixed)
    assert [*model.state_dict()] == ["0.bias", "1.bias"]
    remove_reparameterization(model)
    assert model[0].weight is not model[1].weight
    assert model[0].weight.tolist() == [[0.5, 0.5]] * 2


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


def test_all_are_removed_wherever_they_are() -> None:
    for options in ({}, {"remove_all": True}, {"remove_all": True, "name": "weight"}):
        model = apply_weight_norm(Sentiment())
        assert remove_weight_norm(model, **options) is model
        assert set(model.state_dict()) == set(Sentiment().state_dict())


def test_where_there_is_nothing_removing_all_does_nothing() -> None:
    model = nn.Linear(2, 2)
    assert remove_weight_norm(model) is remove_weight_norm(model, remove_all=True) is model


@pytest.mark.parametrize("name", ["weight", "0.bias", "0.weight.more", "1.weight", "nothing"])
def test_removing_what_is_not_there_is_refused(name: str) -> None:
    model = apply_weight_norm(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    sentence = f"reparameterization of '{name}' not found in {model}"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        remove_weight_norm(model, name)
    with pytest.raises(ValueError, match=r"of '0\.weight' not found"):
        remove_reparameterization(model, Logarithmic, "0.weight")


# What is refused.


def refused(sentence: str, model: nn.Module, *arguments: Any, error: Any = ValueError) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=sentence):
        apply_reparameterization(model, *arguments)
    after = model.state_dict()
    assert [*after] == [*before]
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_second_application_is_refused() -> None:
    model = apply_weight_norm(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "0.weight")
    sentence = r"0\.weight is computed by WeightNorm already; call remove_reparameterization"
    refused(sentence, model, WeightNorm, "0.weight")
    refused(sentence, model, Logarithmic)


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


def test_what_torch_computes_already_is_refused() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))
    sentence = r"0\.parametrizations\.weight\.original0 is what torch\.nn\.utils\.parametrize"
    refused(sentence, model, WeightNorm)
    refused(r"0\.weight is no parameter of", model, WeightNorm, "0.weight")


class Careless(Reparameterization):
    """Returns what it is told to."""

    names: Sequence[str] = ("weight_a",)
    params: Sequence[Any] = ()

    def compute_weight(self, module: Any = None, name: str | None = None) -> Tensor:
        return module.weight_b  # type: ignore[no-any-return]

    def reparameterize(self, name: str, weight: Tensor, dim: int | None) -> Any:
        return self.names, self.params


def test_a_users_mistake_is_named() -> None:
    model = nn.Linear(2, 2)
    refused(r"returned 1 names and \[\]; it must return", model, Careless, error=TypeError)
    Careless.params = [torch.ones(2)]
    refused(r"and \['Tensor'\]; it must return", model, Careless, error=TypeError)
    Careless.params, Careless.names = [Parameter(torch.ones(2))], ["bias"]
    refused(r"wants the names \['bias'\], which Linear has", model, Careless)
    Careless.names = ["weight_a"]
    apply_reparameterization(model, Careless)
    with pytest.raises(RuntimeError, match=r"Careless\.compute_weight.* no attribute 'weight_b'"):
        model(torch.ones(1, 2))


def test_a_row_of_zeros_is_told_and_can_be_loaded_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "apex_mp.reparameterization")
    module = nn.Linear(3, 4)
    with torch.no_grad():
        module.weight[1] = 0
    apply_weight_norm(module)
    assert caplog.messages == [
        "weight norm of weight in Linear: 1 of 4 norms are zero or not finite; there the weight is "
        "NaN until other values are loaded [docs/troubleshooting.md#weight-norm]"
    ]
    assert module.weight.isnan().any(dim=1).tolist() == [False, True, False, False]
    module.load_state_dict(apply_weight_norm(nn.Linear(3, 4)).state_dict())
    assert module.weight.isfinite().all()
    apply_weight_norm(nn.Linear(2, 2, device="meta"))


# Mixed precision.


def learnable(device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4, device=device)
    return x, (x[:, :1] > 0).float()


def network(device: torch.device) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    apply_weight_norm(model)
    return model


def train(
    model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], steps: int
) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(batch[0]).float() - batch[1]).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("inner", [torch.optim.Adam, FusedAdam])
def test_fp16_optimizer_trains_it_and_goes_on_with_the_same_bits(
    inner: Any, device: torch.device
) -> None:
    batch = learnable(device)

    def begin() -> tuple[nn.Module, Any]:
        model = network_to_half(network(device))
        optimizer = FP16_Optimizer(
            inner(model.parameters(), lr=0.03), dynamic_loss_scale=True, verbose=False
        )
        return model, optimizer

    model, optimizer = begin()
    losses = train(model, optimizer, batch, 30)
    assert losses[-1] < 0.5 * losses[0]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    weight = model[1][0].weight  # type: ignore[index]
    rest = train(model, optimizer, batch, 5)
    assert not torch.equal(weight, model[1][0].weight)  # type: ignore[index]
    model, optimizer = begin()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.equal(weight, model[1][0].weight)  # type: ignore[index]
    assert train(model, optimizer, batch, 5) == rest


def test_no_forward_uses_the_weight_from_before_a_step(device: torch.device) -> None:
    """The old one kept it until a backward: two forwards after a step saw it, if one had none."""
    model, (x, y) = network(device).half(), learnable(device)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), verbose=False)
    optimizer.backward((model(x.half()).float() - y).square().mean())
    with torch.no_grad():
        before = model(x.half())
    optimizer.step()
    with torch.no_grad():
        after = model(x.half())
    assert not torch.equal(before, after)
    assert torch.equal(model(x.half()), after)


@pytest.mark.usefixtures("amp_off")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_amp_initialize_trains_it(level: str, device: torch.device) -> None:
    model, (x, y) = network(device), learnable(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, device_type=device.type
    )
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    expected = F16 if level in ("O2", "O3") else F32
    assert model[0].weight.dtype is expected
    state = model.state_dict()
    assert [*state] == [*before]
    if level != "O3":
        assert {value.dtype for value in state.values()} == {F32}
    for name, value in state.items():
        assert not torch.equal(value, before[name]), name


@pytest.mark.usefixtures("amp_off")
def test_amp_init_casts_the_computed_weight(device: torch.device) -> None:
    model, (x, y) = network(device), learnable(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    handle = amp.init(device_type=device.type)
    result = model(x)
    assert result.dtype is F16
    with handle.scale_loss((result.float() - y).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {F32}
    assert all(param.grad is not None for param in model.parameters())


def test_fp16_compute_casts_what_the_weight_is_computed_from(device: torch.device) -> None:
    model, (x, _) = network(device), learnable(device)
    compute = amp.fp16_compute(model)
    result = compute(x)
    assert result.dtype is F16
    result.float().sum().backward()
    assert all(param.grad is not None and param.dtype is F32 for param in model.parameters())


# The name apex.


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
