"""A weight that is edited while a module is called is seen as it is by every product after that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from amp_cases import Runs
from torch import Tensor

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


# What no version and no access to `.data` shows.
