"""`amp.init()`: its arguments, the handle that it returns, and that it can be undone."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import optimizer as torch_optimizer

from apex_mp import amp
from apex_mp.amp import AmpHandle, NoOpHandle
from apex_mp.amp.casts import current as _current

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
X = torch.ones(2, 3)


def casts_are_on(dtype: torch.dtype = F16) -> bool:
    """Whether what torch casts, and what we do, is cast in this thread."""
    matrix, softmax = torch.mm(X, X.t()).dtype, F.softmax(X.to(dtype), 1).dtype
    assert (matrix is dtype) == (softmax is F32), "one part of the casts is on"
    return matrix is dtype


# What init() changes in torch.
PLACES = [
    *[torch, torch.nn.functional, torch.Tensor, torch._VF, torch.nn.Module, torch.autograd],
    *[torch.autograd.function.BackwardCFunction, torch.amp.autocast_mode.autocast],
    *[threading.Thread, torch.jit, torch.jit._script, torch.utils.data._utils.worker],
    *[torch.backends.mha, torch_optimizer, torch.nn.modules.rnn, torch.optim.Optimizer],
]
HOOKS = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]


def autocast_state() -> list[Any]:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    devices = ("cpu", "cuda")
    state = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    return [nesting, torch.is_autocast_cache_enabled(), *state]


def snapshot() -> list[Any]:
    """All attributes, inherited or not, and the state of autocast in this thread."""
    return [*[dict(vars(place)) for place in PLACES], *[dict(h) for h in HOOKS], autocast_state()]


@contextlib.contextmanager
def torch_is_left_as_it_was() -> Iterator[None]:
    torch.float8_e8m0fnu  # noqa: B018 Makes torch load what it loads lazily.
    before = snapshot()
    assert torch.backends.mha.get_fastpath_enabled(), "a test before has left something behind"
    yield
    after = snapshot()
    for place, old, new in zip([*PLACES, *HOOKS], before, after, strict=False):
        changed = [k for k in old.keys() | new.keys() if old.get(k) is not new.get(k)]
        assert not changed, f"{place}: {changed}"
    assert before[-1] == after[-1]
    assert not casts_are_on()


# Arguments.


DYNAMIC = (True, 2.0**16)
ORDERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = {
    "nothing": ((), {}, (*DYNAMIC, True, False)),
    "early: caching off": ((True, False), {}, (*DYNAMIC, False, False)),
    "early: all four": ((True, False, True, True), {}, (*DYNAMIC, False, True)),
    "early: two": ((True, False), {"verbose": True}, (*DYNAMIC, False, True)),
    "early: a keyword": ((True, False), {"loss_scale": 4.0}, (False, 4.0, False, False)),
    "early: keywords": ((), {"enable_caching": False, "verbose": True}, (*DYNAMIC, False, True)),
    "later: dynamic": ((True, "dynamic", False), {}, (*DYNAMIC, False, False)),
    "later: a number": ((True, 128.0), {}, (False, 128.0, True, False)),
    "later: an int": ((True, 1, True, True), {}, (False, 1.0, True, True)),
    "later: keyword": ((), {"loss_scale": 8}, (False, 8.0, True, False)),
}


@pytest.mark.parametrize(("args", "kwargs", "expected"), ORDERS.values(), ids=ORDERS)
def test_init_knows_the_order_of_arguments_of_both_eras(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    handle = amp.init(*args, **kwargs, device_type="cpu")
    assert isinstance(handle, AmpHandle)
    scaler = handle._default_scaler
    assert scaler is not None
    found = (scaler.dynamic, scaler.loss_scale(), handle.has_cache, handle.verbose)
    assert found == expected


@pytest.mark.parametrize("allowed", [False, True])
def test_the_fourth_argument_of_the_early_order_is_allow_banned(allowed: bool) -> None:
    amp.init(True, True, False, allowed, device_type="cpu")
    half = torch.full((2,), 0.5, dtype=F16)
    with contextlib.nullcontext() if allowed else pytest.raises(NotImplementedError):
        assert F.binary_cross_entropy(half, half).dtype is F32


def test_another_string_counts_as_true_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "apex_mp.amp"):
        handle = amp.init(True, "yes", True, device_type="cpu")
    assert "the second argument is 'yes'; it is taken for enable_caching=True" in caplog.text
    assert handle.has_cache
    assert handle.verbose


@pytest.mark.parametrize(("args", "kwargs"), [((True,), {}), ((), {"enabled": True})])
def test_enable_beside_enabled_is_refused_and_changes_nothing(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    first = amp.init(device_type="cpu")
    with pytest.raises(TypeError, match="enable is False and enabled is True; they are two names"):
        amp.init(*args, **kwargs, enable=False)
    assert _current.handle is first
    assert first.is_active()


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"dtype": torch.float64}, "dtype is torch.float64; it must be torch.float16 or"),
        ({"dtype": "half"}, "dtype is 'half'; it must be torch.float16 or torch.bfloat16"),
        ({"device_type": "xpu"}, 'device_type is \'xpu\'; it must be "cpu" or "cuda"'),
        ({"loss_scale": -1.0}, "scale is -1.0"),
        ({"loss_scale": float("nan")}, "scale is nan"),
    ],
)
def test_a_wrong_argument_is_refused_and_changes_nothing(
    kwargs: dict[str, Any], error: str
) -> None:
    first = amp.init(device_type="cpu")
    with pytest.raises(ValueError, match=error):
        amp.init(**kwargs)
    assert _current.handle is first
    assert first.is_active()


def test_a_failure_half_way_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr(torch_optimizer, "register_optimizer_step_post_hook", fail)
    with torch_is_left_as_it_was():
        with pytest.raises(RuntimeError, match="half way"):
            amp.init(device_type="cpu")
        assert _current.handle is None


# No casts.


def test_the_handle_that_does_nothing_has_what_the_other_one_has() -> None:
    names = {n for n in vars(AmpHandle) if not n.startswith("__")}
    public = {n for n in names if not n.startswith("_")} | {
        "_disable_casts",
        "_clear_cache",
        "_deactivate",
    }
    assert public <= {*dir(NoOpHandle)}
    handle = amp.init(False)
    assert [handle.is_active(), handle.has_cache, handle.verbose] == [False, False, False]
    assert handle.cache == {}
    handle.remove_cache(torch.ones(1))
    handle._clear_cache()
    handle._deactivate()
    loss = torch.ones(())
    with handle._disable_casts(), handle.scale_loss(loss, None) as scaled:
        assert scaled is loss


# The handle.


def test_init_returns_a_handle_that_is_active_until_it_is_not() -> None:
    handle = amp.init(device_type="cpu")
    assert handle.is_active()
    with handle._disable_casts():
        assert not handle.is_active()
        assert not casts_are_on()
        with handle._disable_casts():
            assert not casts_are_on()
        assert not casts_are_on()
        assert nn.Linear(3, 2)(X).dtype is F32
    assert handle.is_active()
    assert casts_are_on()
    handle._deactivate()
    assert not handle.is_active()
    assert not casts_are_on()


def test_a_second_init_replaces_the_first() -> None:
    with torch_is_left_as_it_was():
        first = amp.init(device_type="cpu")
        with first._disable_casts():
            second = amp.init(dtype=BF16, device_type="cpu")
            assert casts_are_on(BF16)
        assert casts_are_on(BF16)
        assert [first.is_active(), second.is_active()] == [False, True]
        first._deactivate()
        assert second.is_active()
        assert casts_are_on(BF16)
        second._deactivate()
        second._deactivate()


# Undoing.


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_deactivate_leaves_torch_exactly_as_it_was(device_type: str, verbose: bool) -> None:
    with torch_is_left_as_it_was():
        handle = amp.init(device_type=device_type, verbose=verbose, dtype=BF16)
        amp.register_half_function(torch, "softmax")
        amp.register_half_function(F, "softmax")  # listed, too
        nn.Linear(3, 2)(X).sum().backward()
        handle._deactivate()


def deactivate_in_disable_casts(handle: AmpHandle) -> None:
    with handle._disable_casts():
        handle._deactivate()


def deactivate_in_two(handle: AmpHandle) -> None:
    with handle._disable_casts(), handle._disable_casts():
        handle._deactivate()
        assert not casts_are_on()


def deactivate_in_a_users_region(handle: AmpHandle) -> None:
    with torch.autocast("cpu", dtype=BF16):
        handle._deactivate()
        assert torch.mm(X, X.t()).dtype is BF16


def deactivate_in_regions(handle: AmpHandle) -> None:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        with torch.autocast("cpu", dtype=BF16):
            handle._deactivate()
            assert torch.mm(X, X.t()).dtype is BF16
        assert not casts_are_on()


def deactivate_in_a_module(handle: AmpHandle) -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            handle._deactivate()
            return torch.mm(x, x.t())

    assert Model()(X).dtype is F32


def deactivate_in_a_closure(handle: AmpHandle) -> None:
    weight = nn.Parameter(torch.ones(2))

    def closure() -> Any:
        handle._deactivate()
        return weight.sum()

    torch.optim.SGD([weight], lr=0.1).step(closure)


def init_in_a_closure(handle: AmpHandle) -> None:
    weight, handles = nn.Parameter(torch.ones(2)), []

    def closure() -> Any:
        handles.append(amp.init(device_type="cpu"))
        return weight.sum()

    torch.optim.SGD([weight], lr=0.1).step(closure)
    assert casts_are_on()
    handles[0]._deactivate()


def deactivate_after_an_exception(handle: AmpHandle) -> None:
    with contextlib.suppress(ValueError), handle._disable_casts():
        raise ValueError
    handle._deactivate()


def init_again_in_a_region(handle: AmpHandle) -> None:
    with torch.autocast("cpu", dtype=BF16):
        second = amp.init(device_type="cpu")
        assert casts_are_on()
    assert nn.Linear(3, 2)(X).dtype is F16
    assert casts_are_on()
    second._deactivate()


def deactivate_in_another_thread_and_here(handle: AmpHandle) -> None:
    thread = threading.Thread(target=casts_are_on)
    thread.start()
    thread.join()
    handle._deactivate()


WAYS = [
    deactivate_in_disable_casts,
    deactivate_in_two,
    deactivate_in_a_users_region,
    deactivate_in_regions,
    deactivate_in_a_module,
    deactivate_in_a_closure,
    init_in_a_closure,
    deactivate_after_an_exception,
    init_again_in_a_region,
    deactivate_in_another_thread_and_here,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_torch_is_as_it_was_whatever_the_order_of_nesting(
    way: Callable[[AmpHandle], None],
) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # torch wraps its step when first used.
    with torch_is_left_as_it_was():
        handle = amp.init(device_type="cpu")
        assert isinstance(handle, AmpHandle)
        way(handle)


# What a newcomer stumbled over.


def test_a_handle_that_was_replaced_goes_on_scaling_while_its_successor_is_on() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    first = amp.init(device_type="cpu")
    wrapper = amp.init(device_type="cpu").wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    last = amp.init(device_type="cpu")
    for block in (first.scale_loss(weight.sum(), optimizer), wrapper.scale_loss(weight.sum())):
        with block as scaled_loss:
            assert scaled_loss.item() == 2.0 * 2.0**16
    with last._disable_casts(), first.scale_loss(weight.sum(), optimizer) as loss:
        assert loss.item() == 2.0
    last._deactivate()
    with first.scale_loss(weight.sum(), optimizer) as loss:
        assert loss.item() == 2.0


@pytest.mark.parametrize("call", [lambda: amp.init("O1"), lambda: amp.init(enabled="False")])
def test_a_string_is_not_taken_for_enabled(call: Any) -> None:
    with pytest.raises(TypeError, match=r"enabled is '.*'; it must be True or False"):
        call()
    assert _current.handle is None
