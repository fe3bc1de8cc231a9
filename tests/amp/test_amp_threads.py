"""Where casts hold: threads, worker processes, optimizer steps, regions of the user's own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, mm, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import DataLoader, Dataset

from apex_mp import amp
from apex_mp.amp.casts import current as _current

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


X = torch.ones(2, 3)


Run = Callable[[Callable[[], Any]], Any]


class Model(nn.Module):
    def forward(self) -> list[torch.dtype]:
        return dtypes_of(F16)


def dtypes_of(low: torch.dtype) -> list[torch.dtype]:
    """Dtypes of a product, which is low with casts, and of a softmax, which is float32 then."""
    return [torch.mm(X, X.t()).dtype, F.softmax(X.to(low), 1).dtype]


CAST, UNCAST = [F16, F32], [F32, F16]


# By names of torch's and by names that were imported before, which no wrapper stands behind.
CALLS: dict[str, Callable[[], Any]] = {
    "function": lambda: torch.mm(X, X.t()).dtype,
    "operator": lambda: (X @ X.t()).dtype,
    "imported before": lambda: mm(X, X.t()).dtype,
    "linear imported before": lambda: linear(X, X).dtype,
    "module": lambda: nn.Linear(3, 2)(X).dtype,
    "einsum": lambda: torch.einsum("ij,kj->ik", X, X).dtype,
}


def autocast_state() -> list[Any]:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    of_devices = [
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    ]
    return [nesting, torch.is_autocast_cache_enabled(), *of_devices]


@contextlib.contextmanager
def executor() -> Iterator[Run]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield lambda work: pool.submit(work).result()


@contextlib.contextmanager
def thread_pool() -> Iterator[Run]:
    with ThreadPool(1) as pool:
        pool.apply(int)
        yield pool.apply


@contextlib.contextmanager
def own_loop() -> Iterator[Run]:
    """A thread that takes its work from a queue, in one call that never returns."""
    todo: queue.Queue[Any] = queue.Queue()
    done: queue.Queue[Any] = queue.Queue()

    def loop() -> None:
        while (work := todo.get()) is not None:
            done.put(work())

    def run(work: Callable[[], Any]) -> Any:
        todo.put(work)
        return done.get(timeout=30)

    thread = threading.Thread(target=loop)
    thread.start()
    run(int)
    yield run
    todo.put(None)
    thread.join()


POOLS = [executor, thread_pool, own_loop]


with_every_pool = pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.__name__)


@with_every_pool
@pytest.mark.parametrize("started", ["before init", "during init"])
def test_a_thread_casts_as_the_current_init_says(pool: Callable[[], Any], started: str) -> None:
    """What another thread did with casts on, it does without them once they are off."""
    with contextlib.ExitStack() as stack:
        if started == "before init":
            run = stack.enter_context(pool())
            at_rest = run(autocast_state)
        handle = amp.init(device_type="cpu")
        if started == "during init":
            run = stack.enter_context(pool())
            at_rest = run(autocast_state)

        def dtypes() -> set[torch.dtype]:
            return {run(call) for name, call in CALLS.items() if "imported" not in name}

        def of_imported() -> set[torch.dtype]:
            return {run(CALLS["imported before"]), run(CALLS["linear imported before"])}

        assert dtypes() == {F16}
        handle._deactivate()
        assert dtypes() | of_imported() == {F32}
        assert run(autocast_state) == at_rest
        amp.init(device_type="cpu", dtype=BF16)
        assert dtypes() == {BF16}
        amp.init(device_type="cpu")
        assert dtypes() == {F16}
        assert run(autocast_state) == at_rest
        amp.init(enabled=False)
        assert dtypes() | of_imported() == {F32}
        assert run(autocast_state) == at_rest


# Every rule of the main thread.

QUERY = torch.rand(1, 1, 2, 4)


LOSS_INPUT, CLASSES = torch.rand(2, 3).half(), torch.tensor([0, 2])


RESULTS: dict[str, Callable[[], Any]] = {
    "attention": lambda: F.scaled_dot_product_attention(QUERY, QUERY, QUERY).dtype,
    "float function": lambda: torch.exp(X.half()).dtype,
    "loss imported before": lambda: cross_entropy(LOSS_INPUT, CLASSES).dtype,
    "promotion": lambda: torch.cat([X.half(), X]).dtype,
    "recurrent cell": lambda: nn.LSTMCell(3, 3)(X)[0].dtype,
    "decorated": lambda: amp.half_function(lambda x: x)(X).dtype,
    "banned": lambda: raises(NotImplementedError, lambda: X.half().exp_()),
    "region": lambda: in_region(enabled=False),
    "region of the default dtype": lambda: in_region(),
    "region of another dtype": lambda: in_region(dtype=BF16),
    "region of another device": lambda: in_region(device="cuda", enabled=False),
    "step": lambda: dtypes_in_step(closure=False),
    "step with a closure": lambda: dtypes_in_step(closure=True),
    "backward": lambda: dtypes_in_backward(),
}


def raises(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def in_region(device: str = "cpu", **options: Any) -> list[Any]:
    with torch.autocast(device, **options):
        found = [dtypes_of(F16), Model()()]
    return [*found, dtypes_of(F16)]


def dtypes_in_step(*, closure: bool) -> list[Any]:
    found: list[Any] = []

    class Product(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found.append(dtypes_of(F16))
            return super().step(closure)

    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)

    def loss() -> Any:
        found.append(dtypes_of(F16))
        return weight.sum()

    Product([weight], lr=0.1).step(loss if closure else None)
    return [*found, dtypes_of(F16)]


def dtypes_in_backward() -> list[Any]:
    found: list[Any] = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            found.append(dtypes_of(F16))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.append(dtypes_of(F16))
            return grad * 2

    weight = nn.Parameter(torch.ones(3))
    weight.register_hook(lambda _: found.append(dtypes_of(F16)))
    Own.apply(weight).sum().backward()
    return [*found, dtypes_of(F16)]


@pytest.mark.parametrize("started", ["before init", "during init"])
def test_another_thread_follows_every_rule_of_the_main_thread(started: str) -> None:
    with contextlib.ExitStack() as stack:
        if started == "before init":
            run = stack.enter_context(executor())
        handle = amp.init(device_type="cpu")
        if started == "during init":
            run = stack.enter_context(executor())
        at_rest = run(autocast_state)
        for name, result in RESULTS.items():
            assert (name, run(result)) == (name, result())
            assert run(autocast_state) == at_rest
        with handle._disable_casts():
            assert run(lambda: dtypes_of(F16)) == CAST


def test_disable_casts_is_of_one_thread() -> None:
    handle = amp.init(device_type="cpu")

    def in_block() -> Any:
        with handle._disable_casts():
            with handle._disable_casts():
                pass
            return dtypes_of(F16), Model()()

    with executor() as run:
        with handle._disable_casts():
            assert run(lambda: dtypes_of(F16)) == CAST
            assert run(handle.is_active)
            assert dtypes_of(F16) == UNCAST
        assert run(in_block) == (UNCAST, UNCAST)
        assert run(lambda: dtypes_of(F16)) == CAST


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


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
