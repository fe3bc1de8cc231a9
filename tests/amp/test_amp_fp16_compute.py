"""amp.fp16_compute: float32 parameters, a forward on casts of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from amp_level_cases import F16, F32, Net, batches, dtypes
from tolerances import assert_same_bits
from torch import Tensor, nn

from apex_mp import amp

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


# A module like the one in it.


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
