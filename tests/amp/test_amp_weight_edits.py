"""A weight that is edited while a module is called is seen as it is by every product after that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from amp_cases import Runs
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.optimizers import FusedSGD

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16, BF16 = torch.float16, torch.bfloat16
X = torch.ones(2, 3)

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
with_every_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)


@torch.no_grad()
def sgd_by_hand(weight: Tensor) -> None:
    weight.sub_(0.1 * weight.grad)


def sgd_through_data(weight: Tensor) -> None:
    weight.data.sub_(0.1 * weight.grad)


def sgd_of_torch(weight: Tensor) -> None:
    torch.optim.SGD([weight], lr=0.1).step()


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


STEPS = [sgd_by_hand, sgd_through_data, sgd_of_torch, sgd_of_ours]


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


def test_a_weight_that_is_swapped_between_two_uses_is_seen_by_every_product() -> None:
    amp.init(device_type="cpu")
    for product in PRODUCTS.values():
        model, other = Runs(), nn.Parameter(torch.eye(3))
        with torch.no_grad():
            other.mul_(2)
            model.weight.mul_(1)
            assert model.weight._version == other._version

            def uses() -> Tensor:
                product(X, model.weight)  # noqa: B023
                torch.utils.swap_tensors(model.weight, other)  # noqa: B023
                return product(X, model.weight)  # noqa: B023

            second = model(uses)
        assert torch.equal(second, product(X, 2 * torch.eye(3)))


def test_an_ema_that_is_swapped_in_and_out_inside_a_forward_is_seen() -> None:
    """Between the calls of a model by another module: `.data.copy_` changes no version."""

    class Evaluates(nn.Module):
        def __init__(self, model: nn.Module, average: Tensor) -> None:
            super().__init__()
            self.model, self.average = model, average

        def forward(self, x: Tensor) -> list[Tensor]:
            own, results = self.model.weight.data.clone(), []
            for weights in (None, self.average, own):
                if weights is not None:
                    for param in self.model.parameters():
                        param.data.copy_(weights)
                results.append(self.model(x).detach())
            return results

    amp.init(device_type="cpu")
    own, averaged, back = Evaluates(nn.Linear(3, 3, bias=False), torch.zeros(3, 3))(X)
    assert own.any()
    assert not averaged.any()
    assert torch.equal(back, own)


@with_every_product
@pytest.mark.parametrize("inside", [True, False], ids=["in a module", "without a module"])
def test_the_users_own_region_keeps_no_cast_beyond_its_end(
    product: Callable[[Tensor, Tensor], Tensor], inside: bool
) -> None:
    """As torch promises: even an edit that leaves no trace is seen in the next region."""
    model = Runs()
    alias = model.weight.data

    def uses() -> list[Tensor]:
        results = []
        for dtype in (F16, F16, BF16):
            with torch.autocast("cpu", dtype=dtype, cache_enabled=True):
                results.append(product(X, model.weight).detach())
            alias.mul_(2)
        return results

    amp.init(device_type="cpu")
    results = model(uses) if inside else uses()
    assert [r.dtype for r in results] == [F16, F16, BF16]
    amp.init(device_type="cpu")
    for factor, dtype, result in zip((1, 2, 4), (F16, F16, BF16), results, strict=True):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(result, product(X, factor * torch.eye(3)))


@with_every_product
@pytest.mark.parametrize("inside", [True, False], ids=["in a module", "without a module"])
def test_an_edit_inside_a_users_region_is_seen(
    product: Callable[[Tensor, Tensor], Tensor], inside: bool
) -> None:
    model = Runs()

    def uses() -> list[Tensor]:
        with torch.autocast("cpu", dtype=BF16):
            first = product(X, model.weight)
            adds(model.weight)
            return [first, product(X, model.weight)]

    amp.init(device_type="cpu")
    first, second = model(uses) if inside else uses()
    assert torch.equal(second, 2 * first)


def test_a_region_in_which_init_is_called_keeps_torchs_promise() -> None:
    model = Runs()
    alias = model.weight.data
    with torch.autocast("cpu", dtype=F16):
        amp.init(device_type="cpu")
        before = F.linear(X, model.weight).detach()
        alias.mul_(2)
        assert torch.equal(F.linear(X, model.weight), 2 * before)
    alias.mul_(2)
    with torch.autocast("cpu", dtype=F16):
        assert torch.equal(F.linear(X, model.weight), 4 * before)


# What no version and no access to `.data` shows.


def test_clear_cache_forgets_casts_of_weights_that_were_edited_past_torch() -> None:
    """Through a tensor that was taken from `.data` before the first use."""
    model = Runs()
    alias = model.weight.data

    def uses() -> list[Tensor]:
        results = [F.linear(X, model.weight)]
        alias.mul_(2)
        results.append(F.linear(X, model.weight))
        amp.clear_cache()
        return [*results, F.linear(X, model.weight)]

    for start in (
        lambda: amp.init(device_type="cpu"),
        lambda: amp.initialize(Runs(), opt_level="O1", device_type="cpu", verbosity=0),
    ):
        start()
        first, stale, fresh = model(uses)
        assert torch.equal(stale, first)
        assert torch.equal(fresh, 2 * first)
    amp.init(device_type="cpu", enable_caching=False)
    first, second, third = model(uses)
    assert torch.equal(second, 2 * first)
    assert torch.equal(third, second)


def test_clear_cache_does_nothing_where_no_casts_are_on() -> None:
    amp.clear_cache()
    amp.init(enabled=False)
    amp.clear_cache()
    model = amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)
    amp.clear_cache()
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(1, 2)).dtype is torch.float32
