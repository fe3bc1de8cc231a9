"""A step whose gradients hold inf or NaN is skipped: only the scale changes, and it says why."""

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
    faces,
    master_grads,
    ones,
    probes,
    pull,
)

from apex_mp import fp16_utils, optimizers
from apex_mp.core import readback

UTILS, FUSED = fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer

MIX = (F16, F32, BF16)
SCALINGS: dict[str, dict[str, Any]] = {
    "static": {"static_loss_scale": 128.0},
    "dynamic": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 128.0}},
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())


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
