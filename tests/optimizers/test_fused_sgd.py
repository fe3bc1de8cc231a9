"""FusedSGD is torch.optim.SGD: all options, groups that change between steps, errors."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    SHAPES,
    Unchanged,
    copies_of,
    give_grads,
    make_params,
    state_of,
    train,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch.nn import Parameter

from apex_mp.optimizers import FusedSGD

MODES: list[dict[str, Any]] = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.0), (0.9, 0.3))
    for decay in (0.0, 0.1)
    for nesterov in (False, True)
    if not (nesterov and (momentum == 0.0 or dampening))
]
# All factors are powers of two: see test_operator_sgd.py.
MOMENTUM: dict[str, Any] = {"lr": 2.0**-4, "momentum": 0.5, "dampening": 0.75}


def mode_name(mode: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in mode.items() if value) or "plain"


def assert_same_trajectory(
    optimizer: Any, params: list[Parameter], expected: Any, expected_params: list[Parameter]
) -> None:
    """Demand nearly equal parameters and momentum buffers."""
    bounds = TRAJECTORY_TOLERANCES[params[0].dtype]
    for param, wanted in zip(params, expected_params, strict=True):
        assert_near(param.detach(), wanted.detach(), bounds)
        state, wanted_state = state_of(optimizer, param), expected.state.get(wanted, {})
        assert state.keys() == wanted_state.keys()
        for key, value in state.items():
            assert_near(value, wanted_state[key], bounds)


# --- The same as torch.


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_the_trajectory_is_that_of_torch(
    dtype: torch.dtype, mode: dict[str, Any], device: torch.device
) -> None:
    params = make_params(device, dtype)
    theirs = copies_of(params)
    optimizer, expected = FusedSGD(params, 0.01, **mode), torch.optim.SGD(theirs, 0.01, **mode)
    # Some have no gradient in some steps, and the second none before the third.
    how = {"missing": lambda step, index: (step + index) % 5 == 0 or (index == 1 and step < 2)}
    for each, its in ((optimizer, params), (expected, theirs)):
        train(each, its, range(50), **how)
    assert_same_trajectory(optimizer, params, expected, theirs)


def test_every_bit_is_that_of_torch_where_products_are_exact(device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    options = MOMENTUM | {"weight_decay": 0.25}
    optimizer, expected = FusedSGD(params, **options), torch.optim.SGD(theirs, **options)
    for each, its in ((optimizer, params), (expected, theirs)):
        train(each, its, range(20))
    for param, wanted in zip(params, theirs, strict=True):
        assert torch.equal(param, wanted)
        states = optimizer.state[param], expected.state[wanted]
        assert torch.equal(*(state["momentum_buffer"] for state in states))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=NAMES.get)
def test_low_precision_parameters_keep_float32_momentum(
    dtype: torch.dtype, device: torch.device
) -> None:
    params = make_params(device, dtype)
    optimizer = FusedSGD(params, 0.01, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        before = [reference.Sgd(p, optimizer.state[p].get("momentum_buffer")) for p in params]
        give_grads(params, step)
        optimizer.step()
        for param, each in zip(params, before, strict=True):
            each.update(
                param.grad,
                lr=0.01,
                inv_scale=1.0,
                momentum=0.9,
                dampening=0.0,
                weight_decay=0.1,
                nesterov=False,
                wd_after_momentum=False,
            )
            buffer = optimizer.state[param]["momentum_buffer"]
            assert buffer.dtype == F32
            assert_near(buffer, each.buffer)
            assert_near(param.detach(), each.param)


def test_weight_decay_after_momentum_decays_the_weights_alone(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, 0.5, momentum=0.5, weight_decay=0.25, wd_after_momentum=True)
    assert optimizer.wd_after_momentum is True
    expected = [p.detach().clone() for p in params]
    give_grads(params, 0)
    optimizer.step()
    for param, before in zip(params, expected, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], param.grad)
        assert_near(param.detach(), before - 0.5 * (param.grad + 0.25 * before))


def test_a_learning_rate_may_be_a_tensor(device: torch.device) -> None:
    params, others = make_params(device), make_params(device)
    lr = torch.tensor(0.125, device=device)
    optimizer, other = FusedSGD(params, lr, momentum=0.5), FusedSGD(others, 0.125, momentum=0.5)
    train(optimizer, params, range(2))
    train(other, others, range(2))
    lr.fill_(0.5)
    other.param_groups[0]["lr"] = 0.5
    train(optimizer, params, range(2, 4))
    train(other, others, range(2, 4))
    for param, wanted in zip(params, others, strict=True):
        assert_same_bits(param.detach(), wanted.detach())


def test_parameters_in_any_order_of_memory_are_stepped_as_they_lie(device: torch.device) -> None:
    weight = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=torch.channels_last)
    params = [Parameter(weight), Parameter(torch.randn(4, 6, device=device).t())]
    theirs = [Parameter(p.detach().contiguous()) for p in params]
    optimizer, expected = FusedSGD(params, **MOMENTUM), torch.optim.SGD(theirs, **MOMENTUM)
    for step in range(3):
        give_grads(params, step)
        params[0].grad = params[0].grad.contiguous()
        if step == 1:  # As after loading a checkpoint that was contiguous.
            state = optimizer.state[params[0]]
            state["momentum_buffer"] = state["momentum_buffer"].contiguous()
        optimizer.step()
        give_grads(theirs, step)
        expected.step()
    for param, wanted in zip(params, theirs, strict=True):
        assert torch.equal(param, wanted)


# --- Options and groups that change.


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.5}, {"momentum": 0.5, "dampening": 0.5}], ids=mode_name
)
def test_options_that_change_between_steps_count_at_once(
    options: dict[str, Any], device: torch.device
) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    pairs = [(FusedSGD(params, 0.01, **options), params)]
    pairs += [(torch.optim.SGD(theirs, 0.01, **options), theirs)]
    changes: list[dict[str, Any]] = [
        {"lr": 0.1},
        {"momentum": 0.9},  # set where there was none
        {"weight_decay": 0.5},
        {"momentum": 0.0},
        {"momentum": 0.9, "dampening": 0.1},
        {"dampening": 0.0, "nesterov": True},
    ]
    for number, change in enumerate(changes):
        for optimizer, its in pairs:
            optimizer.param_groups[0].update(change)
            train(optimizer, its, range(2 * number, 2 * number + 2))
    (optimizer, _), (expected, _) = pairs
    assert_same_trajectory(optimizer, params, expected, theirs)


def test_a_scheduler_sets_learning_rate_and_momentum(device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    pairs = []
    for optimizer, its in (
        (FusedSGD(params, 0.1, momentum=0.9), params),
        (torch.optim.SGD(theirs, 0.1, momentum=0.9), theirs),
    ):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        train(optimizer, its, range(18), after=scheduler.step)
        pairs.append((optimizer, its))
    (optimizer, _), (expected, _) = pairs
    assert optimizer.param_groups[0]["momentum"] == expected.param_groups[0]["momentum"] != 0.9
    assert_same_trajectory(optimizer, params, expected, theirs)


def test_groups_have_options_of_their_own_and_may_be_added(device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    pairs = []
    for cls, its in ((FusedSGD, params), (torch.optim.SGD, theirs)):
        optimizer = cls([{"params": its[:2]}, {"params": its[2:3], "lr": 0.5}], 0.01, momentum=0.9)
        train(optimizer, its[:3], range(3))
        optimizer.add_param_group({"params": its[3:], "momentum": 0.0, "weight_decay": 0.1})
        train(optimizer, its, range(3, 6))
        pairs.append(optimizer)
    assert_same_trajectory(pairs[0], params, pairs[1], theirs)
    assert [len(pairs[0].state.get(param, {})) for param in params] == [1, 1, 1, 0, 0, 0]


def test_a_closure_is_called_with_grad_and_its_loss_returned(device: torch.device) -> None:
    weight = Parameter(torch.ones(3, device=device))
    optimizer = FusedSGD([weight], 0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * 2.0).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert weight.tolist() == [0.0, 0.0, 0.0]


def test_zero_grad_sets_gradients_to_none_whatever_set_grad_none_says() -> None:
    weight = Parameter(torch.ones(3))
    for wish in (False, True):
        weight.grad = torch.ones(3)
        FusedSGD([weight], 0.5, set_grad_none=wish).zero_grad()
        assert weight.grad is None


def test_the_arguments_have_the_order_that_they_had() -> None:
    optimizer = FusedSGD([Parameter(torch.ones(1))], 0.1, 0.9, 0.0, 0.01, True, True, False, True)
    group = optimizer.param_groups[0]
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum")
    assert [group[name] for name in names] == [0.1, 0.9, 0.0, 0.01, True, True]
    assert (optimizer.materialize_master_grads, optimizer.set_grad_none) == (False, True)


# --- Clipping.


@pytest.mark.parametrize("scale", [1.0, 1024.0, "tensor"])
def test_each_group_is_clipped_by_its_own_norm(scale: Any, device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    number = 1024.0 if scale == "tensor" else scale
    given = torch.tensor(number, device=device) if scale == "tensor" else scale
    groups = [{"params": params[:3], "max_grad_norm": 0.5}, {"params": params[3:]}]
    optimizer = FusedSGD(groups, 0.1, momentum=0.9)
    expected = torch.optim.SGD(theirs, 0.1, momentum=0.9)
    for step in range(5):
        give_grads(params, step, factor=number)
        optimizer.step(scale=given)
        give_grads(theirs, step)
        torch.nn.utils.clip_grad_norm_(theirs[:3], 0.5)
        expected.step()
    assert_same_trajectory(optimizer, params, expected, theirs)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_norm_that_is_given_is_that_of_the_scaled_gradients(
    as_tensor: bool, device: torch.device
) -> None:
    weight = Parameter(torch.zeros(4, device=device))
    optimizer = FusedSGD([weight], 1.0, max_grad_norm=1.0)
    norm: Any = torch.tensor(16.0, device=device) if as_tensor else 16.0
    # Twice the true norm: so each gradient, 1 unscaled, is divided by 4.
    optimizer.step(grads=[torch.full((4,), 4.0, device=device)], scale=4.0, grad_norms=[norm])
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.25, device=device))


def test_clipping_divides_as_torch_does_where_norms_are_tiny(device: torch.device) -> None:
    weight = Parameter(torch.zeros(1, device=device))
    weight.grad = torch.full((1,), 1e-3, device=device)
    FusedSGD([weight], 1.0, max_grad_norm=1e-4).step()
    expected = torch.full((1,), -1e-3, device=device, requires_grad=True)
    expected.grad = torch.full((1,), 1e-3, device=device)
    torch.nn.utils.clip_grad_norm_([expected], 1e-4)
    torch.testing.assert_close(-weight.detach(), expected.grad, rtol=1e-6, atol=0.0)


# --- The legacy call.


def test_the_legacy_call_takes_lists_groups_or_a_generator(device: torch.device) -> None:
    results = []
    for kind in ("flat", "nested", "generator"):
        params = make_params(device)
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = FusedSGD(groups, 0.125, momentum=0.5)
        copies = [torch.zeros_like(p, dtype=F16) for p in params]
        give_grads(params, 0)
        grads: list[Any] = [p.grad.half() * 8.0 for p in params]
        grads[1] = None
        for param in params:
            param.grad = None
        given: dict[str, Any] = {"grads": grads, "output_params": copies}
        if kind == "nested":
            given = {name: [each[:2], each[2:]] for name, each in given.items()}
        if kind == "generator":
            given = {name: (one for one in each) for name, each in given.items()}
        optimizer.step(scale=8.0, **given)
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            wanted = torch.zeros_like(copy) if index == 1 else param.detach().half()
            assert_same_bits(copy, wanted)
        results.append([p.detach().clone() for p in params])
    expected = make_params(device)
    give_grads(expected, 0, missing=lambda step, index: index == 1)
    torch.optim.SGD(expected, 0.125, momentum=0.5).step()
    for result in results:
        for param, wanted in zip(result, expected, strict=True):
            assert torch.equal(param, wanted)


# --- Errors: a sentence, and nothing is written.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -0.1}, r"lr is -0\.1; it must be 0 or more"),
        ({"lr": float("nan")}, "lr is nan; it must be 0 or more"),
        ({"lr": torch.zeros(2)}, "lr is a tensor of 2 elements; it must have 1"),
        ({"lr": 0.1, "momentum": -1.0}, r"momentum is -1\.0; it must be 0 or more"),
        ({"lr": 0.1, "weight_decay": -1.0}, r"weight_decay is -1\.0; it must be 0 or more"),
        ({"lr": 0.1, "max_grad_norm": -1.0}, r"max_grad_norm is -1\.0; it must be 0 or more"),
        ({"lr": 0.1, "nesterov": True}, "nesterov is True, momentum 0.* needs momentum"),
        (
            {"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1},
            r"nesterov is True, momentum 0\.9 and dampening 0\.1; it needs momentum and no",
        ),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^FusedSGD: {sentence}"):
        FusedSGD([Parameter(torch.ones(1))], **options)
    optimizer = FusedSGD([Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ValueError, match=f"^FusedSGD: {sentence}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(1))], **options})


def test_a_learning_rate_is_required() -> None:
    with pytest.raises(ValueError, match=r"didn't specify a value of required.* lr"):
        FusedSGD([Parameter(torch.ones(1))])
    FusedSGD([{"params": [Parameter(torch.ones(1))], "lr": 0.1}])


@pytest.mark.parametrize("lr", [-0.1, float("nan")])
def test_a_schedule_past_its_end_steps_as_in_torch(lr: float, device: torch.device) -> None:
    params = make_params(device)
    theirs = copies_of(params)
    for optimizer, its in (
        (FusedSGD(params, 0.1), params),
        (torch.optim.SGD(theirs, 0.1), theirs),
    ):
        optimizer.param_groups[0]["lr"] = lr
        train(optimizer, its, range(1))
    for param, wanted in zip(params, theirs, strict=True):
        assert_near(param.detach(), wanted.detach())


@pytest.mark.parametrize("name", ["lr", "momentum", "dampening", "weight_decay", "max_grad_norm"])
def test_an_option_that_is_no_number_is_refused(name: str) -> None:
    sentence = f"^FusedSGD: {name} is '1e-3'; it must be a number .YAML reads 1e-3 as text"
    params = [Parameter(torch.ones(1))]
    with pytest.raises(TypeError, match=sentence):
        FusedSGD(params, **{"lr": 0.1, name: "1e-3"})
    optimizer = FusedSGD(params, 0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = "1e-3"
    with Unchanged(optimizer), pytest.raises(TypeError, match=sentence):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0][name] = "1e-3"
    with pytest.raises(TypeError, match=f"^FusedSGD: {name} is '1e-3'; it must be a number"):
        optimizer.step()


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "max_grad_norm"])
def test_an_option_that_comes_out_of_range_later_is_refused(
    name: str, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = FusedSGD([{"params": params[:2]}, {"params": params[2:]}], **MOMENTUM)
    give_grads(params, 0)
    optimizer.param_groups[1][name] = -1.0
    with Unchanged(optimizer), pytest.raises(ValueError, match=f"^FusedSGD: {name} is -1"):
        optimizer.step()


def spoil_grad(optimizer: FusedSGD, params: list[Parameter]) -> dict[str, Any]:
    return {"grads": [p.grad for p in params[:-1]] + [torch.ones(3, device=params[0].device)]}


def spoil_dtype(optimizer: FusedSGD, params: list[Parameter]) -> dict[str, Any]:
    return {"grads": [p.grad for p in params[:-1]] + [params[-1].grad.int()]}


def spoil_device(optimizer: FusedSGD, params: list[Parameter]) -> dict[str, Any]:
    return {"grads": [p.grad for p in params[:-1]] + [params[-1].grad.to("meta")]}


def spoil_copy(optimizer: FusedSGD, params: list[Parameter]) -> dict[str, Any]:
    copies = [torch.zeros_like(p, dtype=F16) for p in params]
    return {"output_params": copies[:-1] + [torch.zeros(29, 23, device=params[0].device).t()]}


def spoil_buffer(optimizer: FusedSGD, params: list[Parameter]) -> dict[str, Any]:
    optimizer.state[params[-1]]["momentum_buffer"] = torch.ones(3, device=params[0].device)
    return {}


def spoil_param(optimizer: FusedSGD, params: list[Parameter]) -> dict[str, Any]:
    params[-1].data = torch.ones(23, 58, device=params[0].device)[:, ::2]
    return {}


def spoil_sparse(optimizer: FusedSGD, params: list[Parameter]) -> dict[str, Any]:
    params[-1].grad = params[-1].grad.to_sparse()
    return {}


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_grad, r"grads\[1\]\[3\] has 3 elements, params\[1\]\[3\] has 667; they must match"),
        (spoil_dtype, r"grads\[1\]\[3\] is of dtype Int; it must be Half or BFloat16"),
        (spoil_device, r"grads\[1\]\[3\] is on meta, params\[1\]\[3\] on .*; they must be on one"),
        (spoil_copy, r"output_params\[1\]\[3\] has sizes .*; they must lie in memory in the same"),
        (spoil_buffer, r"momentum_buffer\[1\]\[3\] has 3 elements, params\[1\]\[3\] has 667"),
        (spoil_param, r"params\[1\]\[3\] has sizes \[23, 29\] and strides \[58, 2\]; its elements"),
        (spoil_sparse, "^FusedSGD does not support sparse gradients; layers with sparse=False"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_fit_is_named_before_any_group_is_stepped(
    spoil: Any, sentence: str, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = FusedSGD([{"params": params[:2]}, {"params": params[2:]}], **MOMENTUM)
    give_grads(params, 0)
    arguments = spoil(optimizer, params)
    before = [p.detach().clone() for p in params]
    states = {param: dict(state) for param, state in optimizer.state.items()}
    with pytest.raises(RuntimeError, match=sentence):
        optimizer.step(**arguments)
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param.detach(), old)
    assert {param: dict(state) for param, state in optimizer.state.items()} == states


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(scale: float, device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, 0.1)
    give_grads(params, 0)
    with Unchanged(optimizer), pytest.raises(ValueError, match=r"^FusedSGD\.step: scale is"):
        optimizer.step(scale=scale)


def test_lists_that_do_not_fit_the_groups_are_refused(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, 0.1)
    for name in ("grads", "output_params"):
        with pytest.raises(ValueError, match=rf"^FusedSGD\.step: {name} has lists of \[1\]"):
            optimizer.step(**{name: [params[0]]})
    with pytest.raises(ValueError, match=r"^FusedSGD\.step: grad_norms has 2 numbers"):
        optimizer.step(grad_norms=[1.0, 2.0])
    with pytest.raises(TypeError, match=r"^FusedSGD\.step: grads\[0\]\[0\] is a str"):
        optimizer.step(grads=["a"] * len(SHAPES))


def test_a_buffer_that_no_step_uses_is_left_alone(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedSGD(params, 0.1)
    stale = torch.ones(7, device=device)
    optimizer.state[params[0]]["momentum_buffer"] = stale
    give_grads(params, 0)
    optimizer.step()
    assert optimizer.state[params[0]]["momentum_buffer"] is stale
