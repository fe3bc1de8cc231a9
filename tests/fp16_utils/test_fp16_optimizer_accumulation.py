"""FP16_Optimizer: gradients of several backward calls, and closures."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    assert_grads,
    assert_same,
    differ,
    everything,
    faces,
    grads_used,
    master_grads,
    ones,
    parameter,
    probes,
    pull,
    wrap,
)
from torch import Tensor

from apex_mp.optimizers import FusedAdam

UPDATES = list(itertools.product([True, False], repeat=3))


@probes
@pytest.mark.parametrize("ends", ["step", "update", "look", "overflow"])
@pytest.mark.parametrize("updates", UPDATES, ids=str)
def test_backward_calls_add_up_whenever_master_grads_are_updated(
    updates: tuple[bool, ...], ends: str, probe: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32, BF16, F64)]
    optimizer = wrap(probe(params))
    for index, update in enumerate(updates):
        optimizer.backward(pull(*((p, 2.0**index) for p in params)), update_master_grads=update)
    if ends == "update":
        optimizer.update_master_grads()
    elif ends == "look":
        optimizer.update_master_grads()
        assert_grads(master_grads(optimizer), 7.0, 7.0, 7.0, 7.0)
    elif ends == "overflow":
        assert optimizer.overflow is False
    optimizer.step()
    assert_grads(grads_used(optimizer), 7.0, 7.0, 7.0, 7.0)


@probes
@pytest.mark.parametrize("update", [True, False])
def test_a_retained_graph_can_be_run_backward_again(
    update: bool, probe: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params))
    loss = pull(*((p, 3.0) for p in params))
    optimizer.backward(loss, update, retain_graph=True)
    optimizer.backward(loss, update_master_grads=update)
    optimizer.step()
    assert_grads(grads_used(optimizer), 6.0, 6.0)


@probes
@pytest.mark.parametrize("update", [True, False])
def test_scaled_gradients_that_came_without_our_backward_are_unscaled(
    update: bool, probe: Any, device: torch.device
) -> None:
    # `loss_scaler.backward(loss)` of old code, or (loss * optimizer.loss_scale).backward().
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params))
    optimizer.loss_scaler.backward(pull(*((p, 3.0) for p in params)))
    if update:
        optimizer.update_master_grads()
    optimizer.step()
    assert_grads(grads_used(optimizer), 3.0, 3.0)


@probes
@pytest.mark.parametrize(
    ("before", "by"),
    [
        ("backward", "optimizer"),
        ("step", "optimizer"),
        ("step", "model"),
        ("look, step", "optimizer"),
        ("look, step", "model"),
    ],
)
def test_gradients_that_came_without_our_backward_have_the_scale_of_now(
    by: str, before: str, probe: Any, device: torch.device
) -> None:
    model = torch.nn.Linear(2, 3, device=device)
    model.weight = ones(3, 2, device=device)
    optimizer = wrap(probe(list(model.parameters())))
    optimizer.backward(pull((model.weight, 5.0), (model.bias, 5.0)))
    if "look" in before:
        assert_grads(master_grads(optimizer), 5.0, 5.0)
    if "step" in before:
        optimizer.step()
    (optimizer if by == "optimizer" else model).zero_grad(set_to_none=True)
    optimizer.loss_scale = 512.0
    (pull((model.weight, 3.0), (model.bias, 3.0)) * 512.0).backward()
    optimizer.state.clear()
    optimizer.step()
    assert_grads(grads_used(optimizer), 3.0, 3.0)


@probes
def test_a_model_that_clears_its_gradients_in_between_forgets_them_all(
    probe: Any, device: torch.device
) -> None:
    model = torch.nn.Linear(2, 3, device=device)
    model.weight = ones(3, 2, device=device)
    optimizer = wrap(probe(list(model.parameters())))
    optimizer.backward(pull((model.weight, 64.0), (model.bias, 64.0)))
    optimizer.backward(pull((model.weight, 64.0), (model.bias, 64.0)), update_master_grads=False)
    model.zero_grad()
    optimizer.backward(pull((model.weight, 1.0), (model.bias, 1.0)))
    assert_grads(master_grads(optimizer), 1.0, 1.0)
    optimizer.step()
    assert_grads(grads_used(optimizer), 1.0, 1.0)


@probes
def test_a_loss_that_is_no_scalar_is_refused_and_nothing_lost(
    probe: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params))
    optimizer.backward(pull(*((p, 3.0) for p in params)))
    with pytest.raises(RuntimeError, match="scalar"):
        optimizer.backward(params[0] * 2)
    assert_grads(master_grads(optimizer), 3.0, 3.0)
    optimizer.step()
    assert_grads(grads_used(optimizer), 3.0, 3.0)


@probes
def test_clipping_after_the_step_does_not_unscale_again(probe: Any, device: torch.device) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params))
    optimizer.backward(pull(*((p, 3.0) for p in params)))
    optimizer.step()
    for _ in range(3):  # As old code logs the norm.
        assert float(optimizer.clip_master_grads(100.0)) == pytest.approx(6.0)
    assert_grads(optimizer.inspect_master_grad_data()[0], 3.0, 3.0)


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


@probes
@pytest.mark.parametrize("second", [256.0, 32.0])
@pytest.mark.parametrize("updates", UPDATES, ids=str)
def test_gradients_of_two_scales_add_up(
    updates: tuple[bool, ...], second: float, probe: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params))
    for index, (scale, update) in enumerate(zip((128.0, second, 128.0), updates, strict=True)):
        optimizer.loss_scale = scale
        optimizer.backward(pull(*((p, 2.0**index) for p in params)), update_master_grads=update)
    optimizer.step()
    assert_grads(grads_used(optimizer), 7.0, 7.0)
