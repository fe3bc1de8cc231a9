"""Where casts are on: workers, optimizers, after exceptions, in regions of the user's own."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path
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


class Model(nn.Module):
    def forward(self) -> list[torch.dtype]:
        return dtypes_here()


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


@pytest.mark.slow
def test_workers_forked_by_the_main_thread_and_by_another_do_not_cast(tmp_path: Path) -> None:
    """In a new process: a child forked beside the threads of other tests can wait forever."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, __file__], cwd=tmp_path, env=environment, check=True, timeout=120
    )


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


def test_lbfgs_calls_its_closure_with_casts_and_computes_without() -> None:
    torch.manual_seed(0)
    layer, data = nn.Linear(3, 1), torch.randn(8, 3)
    amp.init(device_type="cpu")
    optimizer = torch.optim.LBFGS(layer.parameters(), line_search_fn="strong_wolfe", max_iter=10)
    seen = set()

    def closure() -> Tensor:
        optimizer.zero_grad()
        out = layer(data)
        seen.add(out.dtype)
        loss = (out - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert closure().item() < first / 100
    assert seen == {F16}
    assert dtypes_here() == CAST


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_steps_as_without_casts() -> None:
    results = []
    for casts in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 4))
        optimizer = torch.optim.Muon([weight], lr=0.1)
        weight.grad = torch.randn(4, 4)
        handle = amp.init(casts, device_type="cpu")
        optimizer.step()
        handle._deactivate()
        results.append(weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("where", ["step", "closure"])
def test_after_an_exception_in_a_step_the_next_forward_casts(where: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    amp.init(device_type="cpu")

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("broken")

    def closure() -> Any:
        raise ValueError("broken")

    optimizer = Broken([weight], lr=0.1) if where == "step" else torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(ValueError, match="broken"):
        optimizer.step(closure)
    assert Model()() == CAST
    assert dtypes_here() == CAST
    torch.optim.SGD([weight], lr=0.1).step()
    assert dtypes_here() == CAST


# Exceptions and regions.


def test_an_exception_in_a_module_leaves_casts_and_caches_as_they_were() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor, *, fails: bool) -> Tensor:
            if fails:
                raise ValueError("broken")
            return x @ x.t()

    handle = amp.init(device_type="cpu")
    model = Broken()
    with pytest.raises(ValueError, match="broken"):
        model(X, fails=True)
    assert not torch.is_autocast_cache_enabled()
    assert dtypes_here() == CAST
    with pytest.raises(ValueError, match="broken"), handle._disable_casts():
        model(X, fails=True)
    assert handle.is_active()
    assert model(X, fails=False).dtype is F16


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
