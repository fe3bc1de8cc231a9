"""Where casts are on: threads, workers, optimizers; and how long a cast of a weight is kept."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
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

# Threads.


class Subclass(threading.Thread):
    def __init__(self, target: Callable[[], Any]) -> None:
        super().__init__()
        self.work = target

    def run(self) -> None:
        self.work()


def in_pool(work: Callable[[], Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def finish(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


THREADS: dict[str, Callable[[Callable[[], Any]], None]] = {
    "target": lambda work: finish(threading.Thread(target=work)),
    "subclass": lambda work: finish(Subclass(work)),
    "timer": lambda work: finish(threading.Timer(0.0, work)),
    "pool": in_pool,
}


@pytest.mark.parametrize("start", THREADS.values(), ids=THREADS)
def test_threads_started_later_cast(start: Callable[[Callable[[], Any]], None]) -> None:
    found: list[Any] = []
    amp.init(device_type="cpu")
    start(lambda: found.extend([dtypes_here(), torch.is_autocast_cache_enabled()]))
    assert found == [CAST, False]


def test_threads_started_after_the_end_do_not_cast() -> None:
    found: list[Any] = []
    amp.init(device_type="cpu")._deactivate()
    finish(threading.Thread(target=lambda: found.extend(dtypes_here())))
    assert found == UNCAST


def test_a_thread_with_a_run_of_its_own_keeps_it() -> None:
    amp.init(device_type="cpu")
    found: list[Any] = []
    thread = threading.Thread()
    thread.run = lambda: found.append(dtypes_here())  # type: ignore[method-assign]
    run = thread.run
    finish(thread)
    assert found == [CAST]
    assert thread.run is run


@contextlib.contextmanager
def pool_from_before() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """A thread that was started before `init()`."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield lambda work: pool.submit(work).result()


class Model(nn.Module):
    def forward(self) -> list[torch.dtype]:
        return dtypes_here()


def test_threads_started_before_cast_where_they_call_a_module() -> None:
    with pool_from_before() as run:
        handle = amp.init(device_type="cpu")
        assert run(Model()) == CAST
        assert run(dtypes_here) == UNCAST
        assert run(torch.is_autocast_cache_enabled) is True
        handle._deactivate()
        assert run(Model()) == UNCAST


def test_threads_started_before_follow_a_users_region() -> None:
    def in_region() -> Any:
        with torch.autocast("cpu", enabled=False):
            return Model()()

    def in_block() -> Any:
        with handle._disable_casts():
            return Model()()

    with pool_from_before() as run:
        handle = amp.init(device_type="cpu")
        assert [run(in_region), run(in_block), run(Model())] == [UNCAST, UNCAST, CAST]


def test_disable_casts_is_of_one_thread() -> None:
    handle = amp.init(device_type="cpu")
    with handle._disable_casts(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(dtypes_here).result() == CAST
        assert pool.submit(handle.is_active).result()
        assert dtypes_here() == UNCAST


def test_two_threads_may_train_at_once() -> None:
    amp.init(device_type="cpu")
    models = [nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)) for _ in range(2)]

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train, model) for model in models]:
            done.result()
    for model in models:
        assert float(model(X).detach().abs().max()) < 0.5


# Workers.


class Transformed(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        product, softmax = dtypes_here()
        return torch.tensor([product is F16, softmax is F32, _current.handle is not None])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_dataloader_workers_do_not_cast_and_the_parent_does(context: str) -> None:
    amp.init(device_type="cpu")
    loader = DataLoader(Transformed(), num_workers=1, multiprocessing_context=context)
    assert not torch.cat([*loader]).any()
    assert dtypes_here() == CAST


def test_workers_that_a_thread_forks_do_not_cast() -> None:
    amp.init(device_type="cpu")
    loader = DataLoader(Transformed(), num_workers=1, multiprocessing_context="fork")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert not torch.cat(pool.submit(lambda: [*loader]).result()).any()


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


# How long a cast of a weight is kept.


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
    """Once by torch and once by us, if both have to: neither sees the cast of the other."""
    model = Counted()
    amp.init(device_type="cpu", verbose=verbose)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            assert weight_casts(lambda: model(X), model.weight) == 2


def test_without_caching_each_use_casts() -> None:
    model = Counted()
    handle = amp.init(device_type="cpu", enable_caching=False)
    assert not handle.has_cache
    assert weight_casts(lambda: model(X), model.weight) == 4


def test_outside_of_modules_no_cast_is_kept() -> None:
    model = Counted()
    handle = amp.init(device_type="cpu")
    assert weight_casts(lambda: model.forward(X), model.weight) == 4
    assert handle.cache == {}


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


def test_an_ema_that_is_swapped_in_and_out_is_seen() -> None:
    """Evaluation with averaged weights, which are put into the model through `.data` and back."""
    model = Counted()
    amp.init(device_type="cpu")
    with torch.no_grad():
        own = model(X)
        backup, model.weight.data = model.weight.data, torch.zeros(3, 3)
        assert not model(X).any()
        model.weight.data = backup
        assert torch.equal(model(X), own)


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


def test_an_edit_within_a_forward_is_seen_by_our_casts() -> None:
    """torch's own are kept until the outermost call ends: as in a region of torch.autocast."""

    class Edits(Counted):
        def forward(self, x: Tensor) -> list[Tensor]:
            first = torch.mv(self.weight, x[0])
            with torch.no_grad():
                self.weight.zero_()
            return [first, torch.mv(self.weight, x[0])]

    amp.init(device_type="cpu")
    first, second = Edits()(X)
    assert first.any()
    assert not second.any()
