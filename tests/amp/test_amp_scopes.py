"""Where casts are on: workers, optimizers, after exceptions, in regions of the user's own."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from apex_mp import amp
from apex_mp.amp import _current

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
X = torch.ones(2, 3)


def dtypes_here() -> list[torch.dtype]:
    """Dtypes of a product, which is half with casts, and of a softmax, which is float32 then."""
    return [torch.mm(X, X.t()).dtype, F.softmax(X.half(), 1).dtype]


CAST, UNCAST = [F16, F32], [F32, F16]


# Workers.


class Transformed(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        product, softmax = dtypes_here()
        return torch.tensor([product is F16, softmax is F32, _current.handle is not None])


@pytest.mark.slow
def test_dataloader_workers_do_not_cast_and_the_parent_does() -> None:
    amp.init(device_type="cpu")
    loader = DataLoader(Transformed(), num_workers=1, multiprocessing_context="spawn")
    assert not torch.cat([*loader]).any()
    assert dtypes_here() == CAST


def fork_workers() -> None:
    amp.init(device_type="cpu")
    loader = DataLoader(Transformed(), num_workers=1, multiprocessing_context="fork")
    assert not torch.cat([*loader]).any()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert not torch.cat(pool.submit(lambda: [*loader]).result()).any()
    assert dtypes_here() == CAST


# Optimizers.


class Product(torch.optim.SGD):
    """An optimizer whose step multiplies matrices, as Muon does."""

    def step(self, closure: Any = None) -> Any:
        self.found = dtypes_here()
        return super().step(closure)


def test_the_step_of_an_optimizer_is_not_cast_and_its_closure_is() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Product([weight], lr=0.1)  # Made before: torch has wrapped its step.
    amp.init(device_type="cpu")
    in_closure = []

    def closure() -> Tensor:
        in_closure.append(dtypes_here())
        loss = weight.sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert [optimizer.found, in_closure, dtypes_here()] == [UNCAST, [CAST], CAST]
    optimizer.step(closure=closure)
    optimizer.step()
    assert [optimizer.found, in_closure, dtypes_here()] == [UNCAST, [CAST] * 2, CAST]


# Exceptions and regions.


def test_a_users_own_regions_have_their_way() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> list[torch.dtype]:
            found = [self.layer(x).dtype]
            with torch.autocast("cpu", enabled=False):
                found += [self.layer(x).dtype, *dtypes_here()]
            with torch.autocast("cpu", dtype=BF16):
                found += [self.layer(x).dtype, F.softmax(x.bfloat16(), 1).dtype]
                with torch.autocast("cpu", dtype=F16):
                    found += [self.layer(x).dtype]
                found += [self.layer(x).dtype]
            return [*found, self.layer(x).dtype]

    for verbose in (False, True):
        amp.init(device_type="cpu", verbose=verbose)
        assert Mixed()(X) == [F16, F32, *UNCAST, BF16, F32, F16, BF16, F16]


if __name__ == "__main__":
    fork_workers()
