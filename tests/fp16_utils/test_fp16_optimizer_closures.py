"""Steps with a closure: LBFGS and line searches, and closures that overflow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import (
    F16,
    F32,
    INF,
    assert_grads,
    assert_same,
    differ,
    everything,
    faces,
    grads_used,
    parameter,
    probes,
    pull,
)
from torch import Tensor

from apex_mp.optimizers import FusedAdam


def lbfgs(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, **{"lr": 0.5, "max_iter": 3, "history_size": 4, **more})


def bowl(params: list[Any]) -> Tensor:
    """A quadratic whose minimum is at 0.25 in every element."""
    return torch.stack([(param.float() - 0.25).square().sum() for param in params]).sum()


def closure_of(
    optimizer: Any, loss: Callable[[], Tensor], calls: list[float] | None = None, **options: Any
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        optimizer.backward(value, **options)
        if calls is not None:
            calls.append(optimizer.loss_scale)
        return value.detach()

    return closure


def mixed(device: torch.device) -> list[Any]:
    return [parameter([2.0, -1.0], F16, device), parameter([1.5], F32, device)]


@faces
@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_lbfgs_finds_the_minimum(
    dynamic: bool, line_search: str | None, update: bool, face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = face(
        lbfgs(params, line_search_fn=line_search), 128.0, dynamic_loss_scale=dynamic, verbose=False
    )
    closure = closure_of(optimizer, lambda: bowl(params), update_master_grads=update)
    first = float(optimizer.step(closure))
    assert first == float(bowl(mixed(device)).detach())
    for _ in range(10):
        optimizer.step(closure)
    assert optimizer.overflow is False
    for param in params:
        assert float((param.detach() - 0.25).abs().max()) < 1e-3


@faces
@probes
def test_a_closure_may_run_backward_several_times(
    probe: Any, face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = face(probe(params), 128.0, verbose=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        for value in (1.0, 2.0, 4.0):
            loss = pull(*((param, value) for param in params))
            optimizer.backward(loss, update_master_grads=value == 2.0)
        return loss

    optimizer.step(closure)
    assert_grads(grads_used(optimizer), 7.0, 7.0)


@faces
@pytest.mark.parametrize("make", [lbfgs, lambda ps: torch.optim.AdamW(ps, lr=0.1)])
def test_the_scale_backs_off_until_the_closure_is_finite(
    make: Any, face: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = mixed(device)
    optimizer = face(
        make(params), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**17}
    )
    capsys.readouterr()
    calls: list[float] = []
    # 2 * (2 - 0.25) * scale must stay below 65504: 2**14.
    assert optimizer.step(closure_of(optimizer, lambda: bowl(params), calls)) is not None
    assert calls[:4] == [2.0**17, 2.0**16, 2.0**15, 2.0**14]
    assert set(calls[4:]) <= {2.0**14}
    assert optimizer.loss_scale == 2.0**14
    assert optimizer.overflow is False
    assert capsys.readouterr().out == "".join(
        f"OVERFLOW within closure! Skipping step. Attempted loss scale: {scale}, "
        f"reducing to {scale / 2}\n"
        for scale in (2.0**17, 2.0**16, 2.0**15)
    )
    assert params[0][0].item() < 2.0


SCALINGS: dict[str, dict[str, Any]] = {
    "static": {"static_loss_scale": 128.0},
    "dynamic": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 4.0}},
}
LBFGS: dict[str, Any] = {
    "LBFGS": lbfgs,
    "LBFGS with a line search": lambda ps: lbfgs(ps, line_search_fn="strong_wolfe"),
}
INNERS: dict[str, Any] = {
    **LBFGS,
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "fused": lambda ps: FusedAdam(ps, lr=0.1),
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())


def assert_a_bad_closure_changes_only_the_scale(
    optimizer: Any, params: list[Any], good_calls: int
) -> None:
    good = closure_of(optimizer, lambda: bowl(params))
    for _ in range(2):
        optimizer.step(good)
    before, scale = everything(optimizer, *params), optimizer.loss_scale
    calls: list[float] = []

    def loss() -> Tensor:
        factor = 1.0 if len(calls) < good_calls else INF
        return bowl(params) * factor

    assert optimizer.step(closure_of(optimizer, loss, calls)) is None
    assert len(calls) > good_calls
    assert optimizer.overflow is True
    assert_same(everything(optimizer, *params), before)
    assert (optimizer.loss_scale < scale) == optimizer.dynamic_loss_scale
    assert optimizer.step(good) is not None
    assert optimizer.overflow is False


@faces
@scalings
@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS.keys())
def test_a_closure_that_never_is_finite_changes_nothing_but_the_scale(
    inner: Any, scaling: dict[str, Any], face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = face(inner(params), verbose=False, **scaling)
    assert_a_bad_closure_changes_only_the_scale(optimizer, params, good_calls=0)


@faces
@scalings
@pytest.mark.parametrize("inner", LBFGS.values(), ids=LBFGS.keys())
@pytest.mark.parametrize("good_calls", [1, 2])
def test_a_line_search_that_runs_into_inf_is_taken_back(
    good_calls: int, inner: Any, scaling: dict[str, Any], face: Any, device: torch.device
) -> None:
    params = [parameter([200.0, -100.0], F16, device), parameter([150.0], F32, device)]
    optimizer = face(inner(params), verbose=False, **scaling)
    assert_a_bad_closure_changes_only_the_scale(optimizer, params, good_calls)


@faces
@pytest.mark.parametrize("inner", [lbfgs, FusedAdam], ids=["LBFGS", "fused"])
def test_an_exception_in_the_closure_comes_out(inner: Any, face: Any, device: torch.device) -> None:
    class Stop(Exception):
        pass

    params = mixed(device)
    optimizer = face(inner(params), 128.0, verbose=False)

    def closure() -> Tensor:
        raise Stop

    before = [param.detach().clone() for param in params]
    with pytest.raises(Stop):
        optimizer.step(closure)
    assert_same(params, before)
    optimizer.step(closure_of(optimizer, lambda: bowl(params)))
    assert differ(params, before)
