"""A step whose gradients hold inf or NaN is skipped: only the scale changes, and it says why."""

import warnings
from typing import Any

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    INF,
    NAN,
    assert_grads,
    assert_same,
    differ,
    everything,
    faces,
    grads_used,
    master_grads,
    ones,
    probes,
    pull,
)

from apex_mp import fp16_utils, optimizers
from apex_mp.core import readback
from apex_mp.optimizers import FusedAdam

UTILS, FUSED = fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer

MIX = (F16, F32, BF16)
SCALINGS: dict[str, dict[str, Any]] = {
    "static": {"static_loss_scale": 128.0},
    "dynamic": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 128.0}},
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
INNERS: dict[str, Any] = {
    "fused": lambda params: FusedAdam(params, lr=0.1, weight_decay=0.1, max_grad_norm=1.0),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
inners = pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS.keys())


def mixed(device: torch.device) -> list[torch.nn.Parameter]:
    return [ones(2, 3, dtype=dtype, device=device) for dtype in MIX]


def poisoned(params: list[Any], where: int, value: float) -> list[tuple[Any, Any]]:
    """Gradients of 1, but for one element of one parameter."""
    pairs = []
    for index, param in enumerate(params):
        grad = torch.ones(param.shape)
        if index == where:
            grad[-1, -1] = value
        pairs.append((param, grad))
    return pairs


@faces
@inners
@scalings
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("where", range(len(MIX)), ids=["in fp16", "in fp32", "in bf16"])
@pytest.mark.parametrize("update", [True, False], ids=["update", "no update"])
def test_an_overflow_changes_nothing_but_the_scale(
    update: bool,
    where: int,
    value: float,
    scaling: dict[str, Any],
    inner: Any,
    face: Any,
    device: torch.device,
) -> None:
    params = mixed(device)
    optimizer = face(inner(params), verbose=False, **scaling)
    # Once before there is any state, once after.
    for _ in range(2):
        before = everything(optimizer, *params)
        optimizer.zero_grad()
        optimizer.backward(pull(*poisoned(params, where, value)), update_master_grads=update)
        scale = optimizer.loss_scale
        assert optimizer.step() is None
        assert optimizer.overflow is True
        assert optimizer.loss_scale == (scale / 2 if optimizer.dynamic_loss_scale else scale)
        assert_same(everything(optimizer, *params), before)
        optimizer.zero_grad()
        optimizer.backward(pull(*((param, 1.0) for param in params)), update_master_grads=update)
        optimizer.step()
        assert optimizer.overflow is False
        assert differ(everything(optimizer, *params), before)


@faces
@probes
@scalings
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
def test_finite_gradients_whose_sum_is_infinite_are_no_overflow(
    dtype: torch.dtype, scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    largest = torch.finfo(dtype).max
    weight = ones(64, dtype=dtype, device=device)
    optimizer = face(probe([weight], lr=0.25, weight_decay=0.0), verbose=False, **scaling)
    assert optimizer.loss_scale == 128.0  # So the gradient is taken for a scaled one.
    weight.grad = torch.full_like(weight, largest)
    assert not bool(weight.grad.sum().isfinite())
    optimizer.update_master_grads()
    assert optimizer.overflow is False
    optimizer.step()
    assert optimizer.overflow is False
    assert optimizer.loss_scale == 128.0
    assert_grads(grads_used(optimizer), largest / 128.0)


@faces
@probes
@pytest.mark.parametrize("where", range(len(MIX)), ids=["in fp16", "in fp32", "in bf16"])
def test_an_overflow_leaves_every_other_gradient_unscaled(
    where: int, probe: Any, face: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in MIX]
    optimizer = face(probe(params), 128.0, verbose=False)
    others = [index for index in range(len(MIX)) if index != where]
    for count in (1, 2):  # The second backward adds to what the first has left.
        optimizer.backward(pull(*((p, INF if i == where else 3.0) for i, p in enumerate(params))))
        assert optimizer.overflow is True
        shown = master_grads(optimizer)
        assert_grads([shown[index] for index in others], 3.0 * count, 3.0 * count)


# What is printed: by the text of 2019, and then where.


def run_one(optimizer: Any, loss: Any) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss)
    optimizer.step()
    readback.wait()  # On a GPU the host learns it later, unless it asks.


@probes
def test_fp16_utils_prints_the_old_message_and_where(
    probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = mixed(device)
    optimizer = UTILS(
        probe(params), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**15}
    )
    capsys.readouterr()
    pairs = poisoned(params, 0, NAN)
    pairs[0][1][0, :2] = torch.tensor([INF, -INF])
    pairs[1][1][0, 0] = INF
    run_one(optimizer, pull(*pairs))
    assert capsys.readouterr().out == (
        "OVERFLOW! Skipping step. Attempted loss scale: 32768.0, reducing to 16384.0\n"
        "  group 0, parameter 0 [2, 3]: 2 inf, 1 NaN\n"
        "  group 0, parameter 1 [2, 3]: 1 inf, 0 NaN\n"
    )


@probes
@scalings
def test_the_fused_one_prints_its_own_old_message_and_where(
    scaling: dict[str, Any], probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = mixed(device)
    optimizer = FUSED(probe(params), **scaling)
    assert capsys.readouterr().out == ""
    kind = "dynamic" if optimizer.dynamic_loss_scale else "static"
    for iteration, value in enumerate((1.0, NAN, 1.0, INF)):
        scale = optimizer.loss_scale
        run_one(optimizer, pull(*poisoned(params, 1, value)))
        where = "1 inf, 0 NaN" if value == INF else "0 inf, 1 NaN"
        assert capsys.readouterr().out == (
            ""
            if value == 1.0
            else f"\nGrad overflow on iteration {iteration}\n"
            f"Using {kind} loss scale of {scale}\n"
            f"  group 0, parameter 1 [2, 3]: {where}\n"
        )


@probes
def test_a_message_names_the_three_worst_and_counts_the_others(
    probe: Any, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    params = [ones(size, device=device) for size in (1, 5, 3, 2, 4)]
    optimizer = UTILS(probe(params), 128.0)
    capsys.readouterr()
    run_one(optimizer, pull(*((param, INF) for param in params)))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  group 0, parameter 1 [5]: 5 inf, 0 NaN",
        "  group 0, parameter 4 [4]: 4 inf, 0 NaN",
        "  group 0, parameter 2 [3]: 3 inf, 0 NaN",
        "  and 2 more parameters",
    ]


@faces
@probes
@scalings
def test_fifty_skipped_steps_in_a_row_warn_once(
    scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(probe([weight]), verbose=False, **scaling)
    good, bad = (lambda: pull((weight, 1.0))), (lambda: pull((weight, INF)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(49):
            run_one(optimizer, bad())
        run_one(optimizer, good())
        for _ in range(49):
            run_one(optimizer, bad())
        assert caught == []
        run_one(optimizer, bad())
        assert len(caught) == 1
        for _ in range(60):
            run_one(optimizer, bad())
        assert len(caught) == 1
        run_one(optimizer, good())
        for _ in range(50):
            run_one(optimizer, bad())
        assert len(caught) == 2
    assert caught[0].category is RuntimeWarning
    assert "50 steps in a row" in str(caught[0].message)
    assert "group 0, parameter 0 [2]: 2 inf, 0 NaN" in str(caught[0].message)
    assert caught[0].filename == __file__  # The line that called step().


@faces
@probes
def test_hysteresis_lets_the_scale_stand_for_some_overflows(
    probe: Any, face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(
        probe([weight]),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 64.0, "hysteresis": 3, "scale_window": 4},
        verbose=False,
    )
    scales = []
    for value in (INF, 1.0, INF, 1.0, INF, INF, 1.0, 1.0, 1.0, 1.0, INF, INF, INF):
        before = everything(optimizer)
        run_one(optimizer, pull((weight, value)))
        assert differ(everything(optimizer), before) == (value == 1.0)  # Every overflow skips.
        scales.append(optimizer.loss_scale)
    # Two overflows are tolerated, then each backs off, until the scale has grown.
    assert scales == [64, 64, 64, 64, 32, 16, 16, 16, 16, 32, 32, 32, 16]


@faces
@probes
def test_a_hook_that_makes_gradients_infinite_does_not_reach_the_weights(
    probe: Any, face: Any, device: torch.device
) -> None:
    for dtype in (F16, F32):
        weight = ones(2, dtype=dtype, device=device)
        optimizer = face(probe([weight]), 128.0, verbose=False)

        def spoil(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.param_groups[0]["params"][0].grad.fill_(INF)

        optimizer.register_step_pre_hook(spoil)
        optimizer.backward(pull((weight, 1.0)))
        assert optimizer.step() is None
        assert optimizer.overflow
        assert bool((weight == 1.0).all())


@faces
@probes
@scalings
@pytest.mark.parametrize("constant", [NAN, INF])
def test_a_loss_that_is_not_finite_is_no_overflow_if_gradients_are(
    constant: float, scaling: dict[str, Any], probe: Any, face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = face(probe(params), verbose=False, **scaling)
    optimizer.backward(pull(*((param, 3.0) for param in params)) + constant)
    optimizer.step()
    assert optimizer.overflow is False
    assert optimizer.loss_scale == 128.0
    assert_grads(grads_used(optimizer), 3.0, 3.0, 3.0)
