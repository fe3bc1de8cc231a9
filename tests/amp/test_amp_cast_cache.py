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


# Gradients through a cast that is kept.


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
