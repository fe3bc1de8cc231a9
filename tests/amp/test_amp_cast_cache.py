"""How long a cast of a weight is kept: no longer than the weight stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from amp_cases import Runs
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.optimizers import FusedSGD

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


X = torch.ones(2, 3)


class Counted(nn.Module):
    """Uses one weight twice in a call, by a listed function that torch casts and one that we do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        once = F.linear(F.linear(x, self.weight), self.weight)
        return once + torch.mv(self.weight, torch.mv(self.weight, x[0]))


def weight_casts(call: Callable[[], Any], weight: Tensor) -> int:
    """How often the weight is cast in a call."""
    casts = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal casts
            if func is torch.ops.aten._to_copy.default and args[0].shape == weight.shape:
                casts += 1
            return func(*args, **(kwargs or {}))

    with Count():
        call()
    return casts


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("grad", [True, False])
def test_a_tied_weight_is_cast_once_in_a_forward(grad: bool, verbose: bool) -> None:
    model = Counted()
    amp.init(device_type="cpu", verbose=verbose)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            assert weight_casts(lambda: model(X), model.weight) == 1


def test_the_handle_shows_and_forgets_what_is_kept() -> None:
    handle = amp.init(device_type="cpu")
    seen: list[Any] = []

    class Looks(Counted):
        def forward(self, x: Tensor) -> None:
            torch.mv(self.weight, x[0])
            seen.append({param: cast.dtype for param, cast in handle.cache.items()})
            handle.remove_cache(self.weight)
            seen.append(dict(handle.cache))
            torch.mv(self.weight, x[0])
            handle._clear_cache()
            seen.append(dict(handle.cache))

    model = Looks()
    assert weight_casts(lambda: model(X), model.weight) == 2
    assert seen == [{model.weight: F16}, {}, {}]


def adam_step(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, -1.0)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.add_(1.0)


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data += 1.0


def through_new_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data + 1.0


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1.0 for name, value in model.state_dict().items()})


def assign(model: nn.Module) -> None:
    new = {name: value + 1.0 for name, value in model.state_dict().items()}
    model.load_state_dict(new, assign=True)


def new_parameters(model: nn.Module) -> None:
    model.weight = nn.Parameter(model.weight.detach() + 1.0)


EDITS = [adam_step, in_place, through_data, through_new_data, load, assign, new_parameters]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_the_next_forward_sees_edited_weights(
    edit: Callable[[nn.Module], None], grad: bool, verbose: bool
) -> None:
    model = Counted()
    amp.init(device_type="cpu", verbose=verbose)
    with torch.set_grad_enabled(grad):
        before = model(X).detach()
        edit(model)
        after = model(X).detach()
    fresh = Counted()
    fresh.load_state_dict({"weight": torch.eye(3) + 1.0})
    assert not torch.equal(before, after)
    assert torch.equal(after, fresh(X).detach())


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [F.linear, lambda x, w: torch.mv(w, x[0])], ids=["ours", "mv"])
def test_a_forward_without_grad_costs_a_later_one_no_gradient(
    quiet: Callable[[], Any], function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Within one outer module, as in BYOL; in 2019 the weight got no gradient, without a word."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            with quiet():
                function(x, self.weight)
            return function(x, self.weight)

    model = Outer()
    amp.init(device_type="cpu")
    model(X).float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.any()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.eye(8) + 0.02 * torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(F.linear(x, self.weight))
        return x.to(self.weight.dtype).square().sum()


def weight_gradient(model: nn.Module, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(model(x), model.weight)
    return grad


@pytest.mark.parametrize("low", [F16, BF16], ids=["fp16", "bf16"])
def test_the_gradient_of_a_weight_used_100_times_is_that_of_torch_autocast(
    low: torch.dtype,
) -> None:
    """Its hundred parts are added up in low precision; without caching in float32."""
    model, x = Recurrent(), torch.randn(4, 8)
    exact = weight_gradient(Recurrent().double(), x.double())
    with torch.autocast("cpu", dtype=low):
        of_torch = weight_gradient(model, x)
    with torch.autocast("cpu", dtype=low, cache_enabled=False):
        of_torch_uncached = weight_gradient(model, x)
    amp.init(device_type="cpu", dtype=low)
    cached = weight_gradient(model, x)
    amp.init(device_type="cpu", dtype=low, enable_caching=False)
    uncached = weight_gradient(model, x)
    assert cached.dtype is F32
    assert torch.equal(cached, of_torch)
    assert torch.equal(uncached, of_torch_uncached)
    # Each of the 100 steps rounds, forward and backward.
    bound = 100 * torch.finfo(low).eps * exact.norm()
    for found in (cached, uncached):
        assert (found - exact).norm() < bound


def test_a_second_backward_and_a_second_derivative_go_through_a_kept_cast() -> None:
    model = Recurrent()
    x = torch.randn(4, 8)

    def twice() -> list[Tensor]:
        one = torch.tanh(F.linear(x, model.weight)).float().sum()
        other = torch.tanh(F.linear(2 * x, model.weight)).float().sum()
        (first,) = torch.autograd.grad(one, model.weight, create_graph=True)
        (second,) = torch.autograd.grad(other, model.weight)
        (third,) = torch.autograd.grad(first.square().sum(), model.weight)
        return [first.detach(), second, third]

    expected = twice()
    amp.init(device_type="cpu")
    for found, wanted in zip(Runs()(twice), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.01 * float(wanted.abs().max()))


def test_a_compiled_model_may_use_data_and_sees_edits() -> None:
    torch._dynamo.reset()

    class Edits(Runs):
        def forward(self, x: Tensor) -> list[Tensor]:
            first = F.linear(x, self.weight)
            self.weight.data.mul_(2)
            return [first, F.linear(x, self.weight)]

    amp.init(device_type="cpu")
    model = Edits()
    first, second = torch.compile(model, backend="aot_eager")(X)
    assert first.dtype is F16
    assert torch.equal(second, 2 * first)


def test_a_region_of_another_dtype_in_a_module_gets_casts_of_its_own() -> None:
    class TwoDtypes(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            around = F.linear(x, self.weight)
            with torch.autocast("cpu", torch.bfloat16):
                return around, F.linear(x, self.weight)

    model = TwoDtypes(3, 2)
    nn.init.constant_(model.weight, 1e5)  # too large for float16
    amp.init(device_type="cpu")
    around, inside = model(X)
    assert (around.dtype, inside.dtype) == (F16, BF16)
    assert around.isinf().all()
    assert inside.isfinite().all()


F16, BF16 = torch.float16, torch.bfloat16


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "matmul": lambda x, w: x @ w.t(),
    "addmm": lambda x, w: torch.addmm(torch.zeros(3, 1), w, x.t()).t(),
    "conv": lambda x, w: F.conv1d(x[:, :, None], weight=w[:, :, None])[:, :, 0],
    "mv": lambda x, w: torch.stack([torch.mv(w, row) for row in x]),
    "recurrent cell": lambda x, w: (
        torch._VF.rnn_relu_cell(x, torch.zeros_like(x), w, w, torch.ones(3), torch.zeros(3)) - 1
    ),
}


@torch.no_grad()
def sgd_by_hand(weight: Tensor) -> None:
    weight.sub_(0.1 * weight.grad)


def sgd_through_data(weight: Tensor) -> None:
    weight.data.sub_(0.1 * weight.grad)


def sgd_of_torch(weight: Tensor) -> None:
    torch.optim.SGD([weight], lr=0.1).step()


def fused_sgd_of_torch(weight: Tensor) -> None:
    torch.optim.SGD([weight], lr=0.1, fused=True).step()


def sgd_of_ours(weight: Tensor) -> None:
    FusedSGD([weight], lr=0.1).step()


def losses_of(
    product: Callable[[Tensor, Tensor], Tensor], step: Callable[[Tensor], None], weight: Tensor
) -> list[float]:
    """Train in one call."""
    torch.manual_seed(0)
    x, target, losses = torch.randn(8, 3), torch.rand(8, 3), []
    for _ in range(15):
        weight.grad = None
        loss = (product(x, weight).float() - target).square().mean()
        loss.backward()
        step(weight)
        losses.append(loss.item())
    return losses


STEPS = [sgd_by_hand, sgd_through_data, sgd_of_torch, fused_sgd_of_torch, sgd_of_ours]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_training_loop_inside_a_forward_learns(step: Callable[[Tensor], None]) -> None:
    for product in PRODUCTS.values():
        expected = losses_of(product, step, Runs().weight)
        assert expected[-1] < 0.7 * expected[0]
        model = Runs()
        handle = amp.init(device_type="cpu")
        assert model(losses_of, product, step, model.weight) == pytest.approx(expected, rel=0.01)
        handle._deactivate()
        model = amp.initialize(Runs(), opt_level="O1", device_type="cpu", verbosity=0)
        assert model(losses_of, product, step, model.weight) == pytest.approx(expected, rel=0.01)
        amp.init(enabled=False)


@torch.no_grad()
def copies(weight: Tensor) -> None:
    weight.copy_(2 * weight)


@torch.no_grad()
def adds(weight: Tensor) -> None:
    weight.add_(weight)


def clamps_data(weight: Tensor) -> None:
    weight.data.mul_(2).clamp_(-2, 2)


def copies_into_data(weight: Tensor) -> None:
    weight.data.copy_(2 * weight.data)


def assigns_data(weight: Tensor) -> None:
    weight.data = 2 * weight.data


def steps(weight: Tensor) -> None:
    weight.grad = -weight.detach()
    torch.optim.SGD([weight], lr=1.0).step()


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(
    "edit",
    [copies, adds, clamps_data, copies_into_data, assigns_data, steps],
    ids=lambda edit: edit.__name__,
)
def test_an_edit_between_two_uses_in_one_forward_is_seen_by_every_product(
    edit: Callable[[Tensor], None], grad: bool
) -> None:
    amp.init(device_type="cpu")
    for product in PRODUCTS.values():
        model = Runs()

        def uses() -> list[Tensor]:
            first = product(X, model.weight)  # noqa: B023
            edit(model.weight)  # noqa: B023
            return [first, product(X, model.weight)]  # noqa: B023

        with torch.set_grad_enabled(grad):
            first, second = model(uses)
        fresh = [product(X, torch.eye(3)), product(X, 2 * torch.eye(3))]
        assert torch.equal(first, fresh[0])
        assert torch.equal(second, fresh[1])
