"""find_nonfinite names the module in which inf or NaN begins, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp16_cases import PROBES, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex_mp.monitor import Origin, find_nonfinite


class Cache(nn.Module):
    """Has a buffer that its first forward fills, and makes another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.late = torch.ones(3)
        self.register_buffer("new", torch.ones(3))
        return self.weight * x


INF, NAN = float("inf"), float("nan")


class Inf(nn.Module):
    """Its forward makes inf of what is finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e38 * 1e38


class BadBackward(nn.Module):
    """Its forward is finite, and its backward is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0.0).sqrt()


class Block(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(4, 4), middle, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.before(x))
        while not isinstance(y, Tensor):
            y = next(iter(y.values())) if isinstance(y, dict) else y[0]
        return self.after(y) + x  # Two uses of x.


class Net(nn.Module):
    """Three blocks; the second holds what is planted."""

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block(nn.ReLU()), Block(planted), Block(nn.Tanh())])
        self.drop, self.norm, self.head = nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.drop(x)))


def find(model: nn.Module, *, scale: Any = 1.0, **more: Any) -> Origin | None:
    x = torch.randn(8, 4)
    return find_nonfinite(model, lambda: model(x, **more).sum(), scale=scale)


def place(origin: Origin | None) -> tuple[Any, ...]:
    assert origin is not None
    return origin.phase, origin.module, origin.kind


def test_a_layer_that_emits_inf_in_forward_is_named_with_its_inputs() -> None:
    origin = find(Net(Inf()))
    assert place(origin) == ("forward", "layers.1.middle", "Inf")
    assert origin is not None
    (given,) = origin.inputs
    assert (given.name, given.shape, given.dtype) == ("[0]", (8, 4), "float32")
    assert (given.inf, given.nan) == (0, 0)
    assert given.smallest is not None
    assert given.largest is not None
    assert 0.0 < given.smallest < given.largest < 10.0
    assert origin.results[0].inf == 32
    assert str(origin).startswith(
        "inf or NaN begins in the forward of layers.1.middle (Inf)\n"
        "  result [0]: float32 [8, 4], 32 inf, 0 NaN\n  input [0]: float32 [8, 4], magnitudes "
    )


def test_a_layer_whose_backward_makes_inf_is_named_with_its_inputs() -> None:
    origin = find(Net(BadBackward()))
    assert place(origin) == ("backward", "layers.1.middle", "BadBackward")
    assert origin is not None
    assert origin.operation == "SqrtBackward0"
    assert [each.inf + each.nan for each in origin.grads] == [0]
    assert [each.shape for each in origin.inputs] == [(8, 4)]
    assert "in the backward of layers.1.middle (BadBackward), in SqrtBackward0" in str(origin)
    assert "input in forward [0]: float32 [8, 4]" in str(origin)


@pytest.mark.parametrize("planted", [Inf, BadBackward])
def test_of_layers_that_share_an_input_the_right_one_is_named(planted: Any) -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.left, self.right = nn.Linear(4, 4), nn.Tanh(), planted()
            self.last = nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.left(x) + self.right(x) + self.last(x)

    origin = find(Fork())
    assert origin is not None
    assert origin.module == "right"


@pytest.mark.parametrize("planted", [Inf(), BadBackward()], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "pack",
    [lambda y: (y, 1), lambda y: {"y": y, "none": None}, lambda y: [{"y": (y,)}]],
    ids=["tuple", "dict", "nested"],
)
def test_modules_whose_outputs_are_containers_are_named(planted: nn.Module, pack: Any) -> None:
    class Packs(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return pack(planted.forward(x))

    origin = find(Net(Packs()))
    assert origin is not None
    assert origin.module == "layers.1.middle"


def test_inputs_that_are_not_finite_are_said_to_be() -> None:
    model = Net(nn.ReLU())
    origin = find_nonfinite(model, lambda: model(torch.full((8, 4), NAN)).sum())
    assert place(origin) == ("inputs", "", "Net")
    assert "[0]: float32 [8, 4], 0 inf, 32 NaN" in str(origin)


def test_a_weight_or_a_buffer_that_is_not_finite_is_named() -> None:
    model = Net(nn.ReLU())
    with torch.no_grad():
        model.layers[2].after.weight[1, 2] = NAN  # type: ignore[union-attr, index]
    origin = find(model)
    assert place(origin) == ("weights", "layers.2.after", "Linear")
    assert "weight: float32 [4, 4], magnitudes" in str(origin)
    model = Net(nn.ReLU())
    model.norm.running_mean[0] = INF  # type: ignore[index]
    assert place(find(model)) == ("weights", "norm", "BatchNorm1d")


# -inf, which masks consist of.


def test_a_mask_that_is_given_does_not_hide_the_module_that_makes_nan_of_it() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x + mask).softmax(-1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.attend = nn.Linear(4, 4), Softmax()

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(self.linear(x), mask=torch.full((4,), -INF))

    origin = find(Model())
    assert place(origin) == ("forward", "attend", "Softmax")
    assert "[1]['mask']: float32 [4], 4 inf, 0 NaN" in str(origin)


# Half precision and scales.


class Masked(nn.Module):
    """Its scores are -inf in part, and depend on the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.eye(4, dtype=torch.bool)[[0] * 8], -INF)


def test_minus_inf_of_which_softmax_makes_zeros_is_none() -> None:
    assert find(nn.Sequential(nn.Linear(4, 4), Masked(), nn.Softmax(-1), nn.Linear(4, 1))) is None
    assert place(find(nn.Sequential(nn.Linear(4, 4), Masked()))) == ("forward", "1", "Masked")


def test_an_inf_of_the_loss_itself_is_named() -> None:
    model = nn.Linear(1, 1)
    origin = find_nonfinite(model, lambda: model(torch.ones(1)).sum() / 0)
    assert place(origin) == ("loss", None, "")


def test_the_overflow_of_a_scale_is_named_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    x = torch.ones(64, 4).half()

    def run() -> Tensor:
        return model(x).float().sum()

    assert find_nonfinite(model, run, scale=8.0) is None
    origin = find_nonfinite(model, run, scale=torch.tensor(8192.0))
    assert place(origin) == ("backward", "1", "Linear")
    assert origin is not None
    assert origin.operation == "AddmmBackward0"
    assert [each.largest for each in origin.grads] == [8192.0]
    origin = find_nonfinite(model, run, scale=2.0**17)
    assert place(origin) == ("backward", None, "")


def test_a_sum_of_finite_gradients_that_overflows_is_named() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            y = self.weight * x
            return self.a(y).float() + self.b(y).float()

    model = Fork()
    x = torch.ones(1, dtype=torch.float16)
    origin = find_nonfinite(model, lambda: model(x).sum(), scale=50000.0)
    assert origin is not None
    assert (origin.phase, origin.operation) == ("backward", "a sum of gradients")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.float() + self.weight.float()

    twice = nn.Sequential(Twice())
    origin = find_nonfinite(twice, lambda: twice(x).sum(), scale=50000.0)
    assert place(origin) == ("backward", "0", "Twice")
    assert origin is not None
    assert origin.operation == "a sum of gradients"


@pytest.mark.parametrize("planted", [Inf, BadBackward])
def test_a_checkpointed_part_is_named(planted: Any) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = planted()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]

    origin = find(Net(Checkpointed()))
    assert origin is not None
    assert origin.module == "layers.1.middle.inside"


# What is left as it was.


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES.keys())
def test_a_training_goes_on_with_the_same_bits(probe: Any) -> None:
    ends = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).half()
        optimizer = wrap(probe(model.parameters()), dynamic_loss_scale=True)
        for _ in range(30):
            optimizer.zero_grad()
            x = torch.randn(8, 4).half()

            def run(x: Tensor = x, model: nn.Module = model) -> Tensor:
                return model(x).float().square().sum()

            optimizer.backward(run())
            if looks:
                find_nonfinite(model, run, scale=optimizer.loss_scale)
            optimizer.step()
        ends.append([*model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("run", "error", "wish"),
    [
        (lambda model: None, TypeError, "returned a NoneType; it must return the loss"),
        (lambda model: model(torch.ones(8, 4)), ValueError, "the shape \\[8, 1\\]"),
        (lambda model: torch.ones(()), ValueError, "requires_grad is False"),
    ],
)
def test_a_run_that_returns_no_loss_is_refused(run: Any, error: Any, wish: str) -> None:
    model = Net(nn.ReLU())
    with pytest.raises(error, match=wish):
        find_nonfinite(model, lambda: run(model))


def compiled_whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def compiled_layer(model: nn.Module) -> Any:
    model.layers[1] = torch.compile(model.layers[1], backend="eager")  # type: ignore[operator, index]
    return model


@pytest.mark.parametrize("how", [compiled_whole, compiled_in_place, compiled_layer])
@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (Inf(), ("forward", "layers.1.middle", "Inf")),
        (BadBackward(), ("backward", "layers.1.middle", "BadBackward")),
    ],
)
def test_a_layer_of_a_compiled_module_is_named_as_if_it_were_not(
    planted: nn.Module, found: tuple[str, ...], how: Any
) -> None:
    torch._dynamo.reset()
    net = Net(planted)
    net.norm = nn.Identity()  # It would keep the inf.
    model, x = how(net), torch.randn(8, 4)
    model(x)  # It is compiled now.
    assert place(find(model)) == found
    frames = torch._dynamo.utils.counters["frames"]["total"]
    assert frames > 0
    model(x)
    assert torch._dynamo.utils.counters["frames"]["total"] == frames  # And still is.


def test_code_between_modules_counts_as_that_of_the_module_around_it() -> None:
    class Middle(nn.Module):
        def __init__(self, planted: nn.Module) -> None:
            super().__init__()
            self.first, self.last, self.planted = nn.Linear(4, 4), nn.Linear(4, 4), [planted]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.planted[0].forward(self.first(x)))

    for planted, phase in ((Inf(), "forward"), (BadBackward(), "backward")):
        assert place(find(Net(Middle(planted)))) == (phase, "layers.1.middle", "Middle")


def test_buffers_that_forward_makes_are_gone_afterwards() -> None:
    model = Cache()
    assert find_nonfinite(model, lambda: model(torch.ones(3)).sum()) is None
    assert model._buffers == {"late": None}


class Between(nn.Module):
    """Has code between, before and after the layers that it calls."""

    def __init__(self, where: str, planted: nn.Module) -> None:
        super().__init__()
        self.where, self.first, self.second = where, nn.Linear(4, 4), nn.Linear(4, 4)
        self.code = [planted]  # Hidden: it counts as code.

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in (("before", self.first), ("between", self.second)):
            x = layer(self.code[0](x) if place == self.where else x)
        return self.code[0](x) if self.where == "after" else x


@pytest.mark.parametrize("planted", [Inf(), BadBackward()], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("where", "place"),
    [
        ("before", "before layer.first"),
        ("between", "between layer.first and layer.second"),
        ("after", "after layer.second"),
    ],
)
def test_the_place_in_the_code_of_a_module_is_named(
    where: str, place: str, planted: nn.Module
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("layer", Between(where, planted))
    x = torch.ones(2, 4, requires_grad=True)
    found = find_nonfinite(model, lambda: model(x).sum())
    assert found is not None
    assert found.module == "layer"
    assert found.place == place
    assert f"of layer (Between), {place}" in str(found)
