"""Several backward calls before a step: nothing is lost, nothing is counted or unscaled twice."""

import itertools
from typing import Any

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    F64,
    BackwardError,
    assert_grads,
    grads_used,
    master_grads,
    ones,
    probes,
    pull,
    raise_in_backward,
    wrap,
)

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
@pytest.mark.parametrize("looks", [1, 2, 3])
def test_looking_and_updating_twice_changes_nothing(
    looks: int, probe: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params))
    for _ in range(2):
        optimizer.backward(pull(*((p, 1.0) for p in params)))
        for _ in range(looks):
            optimizer.update_master_grads()
            master_grads(optimizer)
            assert optimizer.overflow is False
    assert_grads(master_grads(optimizer), 2.0, 2.0)
    optimizer.step()
    assert_grads(grads_used(optimizer), 2.0, 2.0)


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
@pytest.mark.parametrize("updates", UPDATES, ids=str)
def test_a_parameter_may_be_unused_in_some_of_the_backward_calls(
    updates: tuple[bool, ...], probe: Any, device: torch.device
) -> None:
    a, b = ones(2, device=device), ones(2, dtype=F32, device=device)
    c, d = ones(3, device=device), ones(3, dtype=F32, device=device)
    e, f = ones(1, device=device), ones(1, dtype=F32, device=device)
    optimizer = wrap(probe([a, b, c, d, e, f]))
    losses = [[(a, 1.0), (b, 1.0)], [(c, 2.0), (d, 2.0)], [(a, 4.0), (b, 4.0)]]
    for pairs, update in zip(losses, updates, strict=True):
        optimizer.backward(pull(*pairs), update_master_grads=update)
    optimizer.step()
    # e and f are in none: no gradient, no step, no state.
    assert_grads(grads_used(optimizer), 5.0, 5.0, 2.0, 2.0, None, None)
    assert bool((e == 1).all())
    assert bool((f == 1).all())


@probes
def test_parameters_without_gradients_stay_as_they_are(probe: Any, device: torch.device) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32, F16)]
    optimizer = wrap(probe(params))
    for index in (0, 2, 1):  # Another one is used in each step.
        before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
        optimizer.zero_grad(set_to_none=True)
        optimizer.backward(pull((params[index], 1.0)))
        assert [grad is not None for grad in master_grads(optimizer)] == [
            i == index for i in range(3)
        ]
        optimizer.step()
        after = optimizer.param_groups[0]["params"]
        assert [not torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [
            i == index for i in range(3)
        ]


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


@probes
@pytest.mark.parametrize("clear", [True, False])
def test_a_dynamic_scale_that_grows_between_steps_unscales_by_the_right_one(
    clear: bool, probe: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(
        probe(params),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 64.0, "scale_window": 1},
    )
    expected = 0.0
    for index in range(4):
        assert optimizer.loss_scale == 64.0 * 2**index
        if clear:
            optimizer.zero_grad()
        optimizer.backward(pull(*((p, 1.0) for p in params)))
        expected = 1.0 if clear else expected + 1.0
        assert_grads(master_grads(optimizer), expected, expected)
        optimizer.step()


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


# An exception inside backward, which the caller survives.


def failing_loss(before: list[Any], own: Any) -> Any:
    """A loss whose backward gives `own` its gradient and raises before it reaches the rest."""
    product = raise_in_backward(pull(*((p, 16.0) for p in before)))
    return product + pull((own, 16.0))  # Made last, so run backward first.


@probes
@pytest.mark.parametrize("raising_update", [True, False])
@pytest.mark.parametrize("update", [True, False])
def test_an_exception_inside_backward_loses_nothing(
    update: bool, raising_update: bool, probe: Any, device: torch.device
) -> None:
    params = [ones(2, dtype=dtype, device=device) for dtype in (F16, F32)]
    optimizer = wrap(probe(params))
    optimizer.backward(pull(*((p, 3.0) for p in params)), update_master_grads=update)
    with pytest.raises(BackwardError):
        optimizer.backward(
            raise_in_backward(pull(*((p, 16.0) for p in params))),
            update_master_grads=raising_update,
        )
    optimizer.step()
    assert_grads(grads_used(optimizer), 3.0, 3.0)


@probes
@pytest.mark.parametrize("earlier", [3.0, None])
def test_half_a_backward_leaves_no_scaled_gradient_in_fp32_parameters(
    earlier: float | None, probe: Any, device: torch.device
) -> None:
    low, own = ones(2, device=device), ones(2, dtype=F32, device=device)
    optimizer = wrap(probe([low, own]))
    optimizer.backward(pull((low, 3.0), *([(own, earlier)] if earlier else [])))
    with pytest.raises(BackwardError):
        optimizer.backward(failing_loss([low], own))
    optimizer.backward(pull((low, 4.0), (own, 4.0)))
    optimizer.step()
    used = grads_used(optimizer)
    # Whether the half that came through counts is torch's affair; unscaled it must be.
    assert float(used[0][0]) == 7.0
    assert float(used[1][0]) in ((earlier or 0.0) + 4.0, (earlier or 0.0) + 20.0)


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
