"""amp.fp16_compute: float32 parameters, a forward on casts of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from amp_level_cases import BF16, F16, F32, Net, batches, dtypes, initialize, train, twins
from tolerances import assert_same_bits
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.amp.compute import LowPrecisionCompute

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def images() -> Tensor:
    return next(batches(1))[0]


@dtypes
def test_the_forward_computes_on_casts_and_parameters_stay_float32(dtype: torch.dtype) -> None:
    model = Net()
    compute = amp.fp16_compute(model, dtype)
    seen: dict[str, list[torch.dtype]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            tensors = [*args, module.weight, output] if hasattr(module, "weight") else [*args]
            seen[name] = [tensor.dtype for tensor in tensors]

        return hook

    for name, child in model.named_children():
        child.register_forward_hook(look(name))
    outputs = compute(images())
    assert seen == {
        "conv": [dtype] * 3,
        "batch_norm": [dtype, F32, dtype],
        "group_norm": [dtype] * 3,
        "layer_norm": [dtype] * 3,
        "cell": [dtype],
        "out": [dtype] * 3,
    }
    assert outputs.dtype is dtype
    outputs.float().sum().backward()
    for param in model.parameters():
        assert param.dtype is F32
        assert param.grad is not None
        assert param.grad.dtype is F32
    assert model.batch_norm.running_mean.dtype is F32
    assert model.batch_norm.num_batches_tracked.item() == 1


@dtypes
def test_gradients_are_those_of_casts_by_hand(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
    by_hand = copy.deepcopy(module).to(dtype)
    x = torch.randn(5, 3)
    outputs, expected = amp.fp16_compute(module, dtype)(x), by_hand(x.to(dtype))
    assert_same_bits(outputs.detach(), expected.detach())
    outputs.float().square().sum().backward()
    expected.float().square().sum().backward()
    for ours, theirs in zip(module.parameters(), by_hand.parameters(), strict=True):
        assert_same_bits(ours.grad, theirs.grad.float())


class Two(nn.Module):
    def forward(self, x: Tensor, *, more: dict[str, list[Tensor]], ints: Tensor) -> Any:
        return x, more, ints, self.weight + more["y"][0]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_float32_arguments_are_cast_however_deep_and_others_are_not() -> None:
    y, double, ints = torch.ones(2), torch.ones(2).double(), torch.arange(2)
    x, more, same, _ = amp.fp16_compute(Two())(y, more={"y": [y, double]}, ints=ints)
    assert (x.dtype, [t.dtype for t in more["y"]]) == (F16, [F16, torch.float64])
    assert same is ints


def test_a_second_use_in_one_graph_adds_its_gradient() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    compute = amp.fp16_compute(layer)
    x = torch.full((1, 1), 3.0)
    (compute(x) + compute(compute(x))).float().sum().backward()
    assert layer.weight.grad.item() == 3.0 + 2 * 3.0


def test_a_weight_that_two_layers_share_stays_shared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    by_hand = copy.deepcopy(model).half()
    x = torch.randn(3, 2)
    amp.fp16_compute(model)(x).float().sum().backward()
    by_hand(x.half()).float().sum().backward()
    torch.testing.assert_close(
        model[0].weight.grad, by_hand[0].weight.grad.float(), rtol=2e-3, atol=1e-5
    )


class Counter(nn.Module):
    """Adds a float buffer, and counts in others: in place, and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("offset", torch.full((2,), 1 / 3))
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.add_(1)
        self.replaced = self.replaced + 1
        return self.linear(x + self.offset)


@pytest.mark.parametrize("compiled", [False, True])
def test_float_buffers_are_cast_and_what_the_forward_writes_there_stays(compiled: bool) -> None:
    module = Counter()
    compute = amp.fp16_compute(module)
    if compiled:
        compute = torch.compile(compute, backend="aot_eager")
    for _ in range(2):
        assert compute(torch.ones(1, 2)).dtype is F16
    buffers = {name: (value.dtype, value[0].item()) for name, value in module.named_buffers()}
    third = torch.tensor(1 / 3).item()
    assert buffers == {"offset": (F32, third), "in_place": (F32, 2.0), "replaced": (F32, 2.0)}


def test_parametrized_weights_are_computed_from_casts() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    compute = amp.fp16_compute(module)
    compute(torch.ones(1, 2)).float().sum().backward()
    assert {param.dtype for param in module.parameters()} == {F32}
    assert all(param.grad is not None for param in module.parameters())


def test_recurrent_layers_compute_on_casts_and_can_be_copied_afterwards() -> None:
    layer = nn.LSTM(3, 4)
    compute = amp.fp16_compute(layer, BF16)
    x = torch.randn(2, 1, 3)
    outputs, _ = compute(x)
    assert outputs.dtype is BF16
    outputs.float().sum().backward()
    assert all(param.grad is not None for param in layer.parameters())
    assert layer._flat_weights[0] is layer.weight_ih_l0  # no cast outlives the call
    twin = copy.deepcopy(compute)
    layer(x)  # in float32, as before
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
    assert not torch.equal(compute(x)[0], twin(x)[0])


# A module like the one in it.


def test_keys_are_those_of_the_module_and_both_kinds_are_read() -> None:
    module = Net()
    compute = amp.fp16_compute(module)
    outer = nn.ModuleDict({"part": compute, "rest": nn.Linear(1, 1)})
    assert [*compute.state_dict()] == [*module.state_dict()]
    assert [*outer.state_dict()][: len(module.state_dict())] == [
        f"part.{name}" for name in module.state_dict()
    ]
    assert {value.dtype for value in compute.state_dict().values()} == {F32, torch.int64}
    new = Net().state_dict()
    for state in (new, {f"module.{name}": value + 1 for name, value in new.items()}):
        assert str(compute.load_state_dict(state)) == "<All keys matched successfully>"
        for name, value in module.state_dict().items():
            assert torch.equal(value, state.get(name, state.get(f"module.{name}")))
    outer.load_state_dict({f"part.{n}": v for n, v in new.items()}, strict=False)
    assert torch.equal(module.conv.weight, new["conv.weight"])


def test_it_uses_the_module_and_has_what_the_module_has() -> None:
    module = Net()
    compute = amp.fp16_compute(module)
    assert isinstance(compute, LowPrecisionCompute)
    assert compute.module is module
    assert [*compute.parameters()] == [*module.parameters()]
    assert compute.conv is module.conv
    assert compute.eval().batch_norm.training is False
    with pytest.raises(AttributeError, match="no_such"):
        compute.no_such  # noqa: B018


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_are_their_own(how: Any) -> None:
    compute = amp.fp16_compute(Net()).eval()
    compute(images())
    copied = how(compute)
    expected = compute(images())
    with torch.no_grad():
        for param in compute.parameters():
            param.zero_()
    assert_same_bits(copied(images()).detach(), expected.detach())
    assert [*copied.state_dict()] == [*Net().state_dict()]


def test_a_part_of_a_model_may_compute_in_low_precision() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = amp.fp16_compute(nn.Linear(3, 4))
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).float())

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(8, 3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert {param.dtype for param in model.parameters()} == {F32}


class To(nn.Module):
    """Casts what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def test_one_inside_another_keeps_its_own_dtype() -> None:
    inner, layer = amp.fp16_compute(nn.Linear(2, 2), BF16), nn.Linear(2, 2)
    outer = amp.fp16_compute(nn.Sequential(To(F32), inner, To(F16), layer), F16)
    outer(torch.ones(1, 2)).float().sum().backward()
    assert inner.module.weight.grad.dtype is layer.weight.grad.dtype is F32


def test_it_goes_with_initialize() -> None:
    model, reference = twins(lambda: nn.Sequential(amp.fp16_compute(Net())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
    losses = train(model, optimizer, 10)
    assert losses[-1] < losses[0]
    model = reference
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    torch.testing.assert_close(train(model, optimizer, 10), losses, rtol=0, atol=2e-3)
    assert model.state_dict()["0.conv.weight"].dtype is F32


def test_it_can_be_compiled() -> None:
    compute = amp.fp16_compute(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 3)
    assert_same_bits(compiled(x).detach(), compute(x).detach())
    compiled(x).float().sum().backward()
    assert compute.module[0].weight.grad.dtype is F32


def test_what_is_no_module_or_no_low_precision_is_refused() -> None:
    with pytest.raises(TypeError, match="module is a function; it must be a Module"):
        amp.fp16_compute(lambda x: x)
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; it must be torch\.float16 or"):
        amp.fp16_compute(nn.Linear(1, 1), F32)
