"""handle.scale_loss: scaled losses, unscaled gradients, several optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, F64, INF, NAN, assert_grads, parameter, pull
from scale_loss_cases import (
    SCALE,
    Larc,
    PlainSgd,
    backward,
    grads,
    optimizers,
    overflow,
    param,
    sgd,
)
from torch import nn

from apex_mp import amp
from apex_mp.fp16_utils import FP16_Optimizer

pytestmark = pytest.mark.usefixtures("amp_off")

# The scaled loss.


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_the_loss_is_scaled_in_its_own_range(dtype: torch.dtype, handle: Any) -> None:
    optimizer = sgd([param([1.0], torch.device("cpu"))])
    with handle.scale_loss(torch.tensor(3.0, dtype=dtype), optimizer) as scaled_loss:
        assert scaled_loss.item() == 3.0 * SCALE
        assert scaled_loss.dtype is (F64 if dtype is F64 else F32)


def test_a_static_scale_stays(device: torch.device) -> None:
    handle: Any = amp.init(loss_scale=128.0, device_type=device.type)
    weight = param([1.0], device)
    optimizer = sgd([weight])
    overflow(handle, optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]
    with handle.scale_loss(pull((weight, 2.0)), optimizer) as scaled_loss:
        assert scaled_loss.item() == 256.0
        scaled_loss.backward()
    optimizer.step()
    assert handle._default_scaler._loss_scale == 128.0
    assert handle._default_scaler._unskipped == 0


def test_a_written_scale_is_used(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    handle._default_scaler._loss_scale = 1.0
    with handle.scale_loss(pull((weight, 2.0)), sgd([weight])) as scaled_loss:
        assert scaled_loss.item() == 2.0


def test_each_block_counts_as_a_good_step(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    handle._default_scaler._unskipped = 1998
    backward(handle, pull((weight, 1.0)), optimizer)
    assert handle._default_scaler.loss_scale() == SCALE
    backward(handle, pull((weight, 1.0)), optimizer)
    assert handle._default_scaler.loss_scale() == 2 * SCALE
    assert_grads(grads(weight), 2.0)


def test_a_loss_that_is_no_scalar_takes_the_gradient_of_backward(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0, 2.0], device)
    with handle.scale_loss(weight * 3.0, sgd([weight])) as scaled_loss:
        scaled_loss.backward(torch.tensor([1.0, 10.0], device=device))
    assert_grads(grads(weight), [3.0, 30.0])


@pytest.mark.parametrize(
    ("loss", "kind"), [(1.0, "float"), (None, "NoneType"), (torch.ones(1).long(), "torch.int64")]
)
def test_a_loss_that_is_none_is_named(loss: Any, kind: str, handle: Any) -> None:
    with (
        pytest.raises(TypeError, match=rf"loss is a {kind}; it must be a floating tensor"),
        handle.scale_loss(loss, sgd([torch.ones(1)])),
    ):
        pass


def test_an_optimizer_that_is_none_is_named(handle: Any, device: torch.device) -> None:
    loss = torch.ones((), device=device)
    for optimizer in (None, [None]):
        with (
            pytest.raises(TypeError, match="optimizer is a NoneType; it must be an optimizer"),
            handle.scale_loss(loss, optimizer),
        ):
            pass


def test_an_fp16_optimizer_scales_by_itself(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device, F16)
    optimizer = FP16_Optimizer(sgd([weight]), verbose=False)
    with (
        pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\)"),
        handle.scale_loss(pull((weight, 1.0)), optimizer),
    ):
        pass


# Unscaled gradients.


@optimizers
def test_every_gradient_is_unscaled_when_the_block_ends(
    make: Any, handle: Any, device: torch.device
) -> None:
    params = [param([1.0, 2.0], device), param([[3.0]], device, F64), param([4.0], device)]
    optimizer = make(params[:2])
    if not isinstance(optimizer, (PlainSgd, Larc)):
        optimizer.add_param_group({"params": params[2:]})
    with handle.scale_loss(pull((params[0], 3.0), (params[1], -0.25)), optimizer) as scaled_loss:
        scaled_loss.backward()
        made = params[0].grad
        assert_grads(grads(*params), 3.0 * SCALE, -0.25 * SCALE, None)
    assert params[0].grad is made
    assert_grads(grads(*params), 3.0, -0.25, None)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_gradients_of_every_dtype_are_unscaled(
    dtype: torch.dtype, handle: Any, device: torch.device
) -> None:
    handle._default_scaler._loss_scale = 1024.0
    weight = param([1.0, 2.0], device, dtype)
    optimizer = sgd([weight])
    for total in (2.0, 4.0):
        backward(handle, pull((weight, 2.0)), optimizer)
        assert weight.grad.dtype is dtype
        assert_grads(grads(weight), total)


def test_complex_gradients_are_unscaled(handle: Any) -> None:
    weight = parameter([1.0 + 1.0j], torch.complex64)
    optimizer = sgd([weight])
    for total in (2.0, 4.0):
        backward(handle, (weight.real * 2.0 + weight.imag * 3.0).sum(), optimizer)
        assert weight.grad.tolist() == [complex(total, 1.5 * total)]


@pytest.mark.parametrize("layout", ["transposed", "channels last", "expanded"])
def test_gradients_of_every_layout_are_unscaled(
    layout: str, handle: Any, device: torch.device
) -> None:
    weight = torch.arange(24.0, device=device).reshape(2, 3, 2, 2)
    if layout == "transposed":
        weight = weight.transpose(0, 1)
    elif layout == "channels last":
        weight = weight.to(memory_format=torch.channels_last)
    weight = weight.clone().requires_grad_()
    optimizer = sgd([weight])
    factor = torch.full((1,), 3.0, device=device) if layout == "expanded" else weight.detach()
    for count in (1, 2):
        with handle.scale_loss((weight * factor).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert torch.equal(weight.grad, (count * factor).expand_as(weight))


def test_a_gradient_may_lie_otherwise_than_the_one_before(
    handle: Any, device: torch.device
) -> None:
    weight = torch.arange(6.0, device=device).reshape(2, 3).t().contiguous().t().requires_grad_()
    weight.grad = torch.arange(6.0, device=device).reshape(2, 3)  # Contiguous, as weight is not.
    backward(handle, (weight * weight.detach()).sum(), sgd([weight]))
    assert weight.grad.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_rows_whose_sum_overflows_skip_the_step(handle: Any, device: torch.device) -> None:
    handle._default_scaler._loss_scale = 1.0
    layer = nn.Embedding(2, 1, sparse=True, device=device)
    optimizer = sgd(layer.parameters())
    backward(handle, (layer(torch.tensor([1, 1], device=device)) * 2e38).sum(), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is True
    assert bool(layer.weight.isfinite().all())


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, sgd], ids=["SparseAdam", "SGD"])
def test_sparse_gradients_are_unscaled(make: Any, handle: Any, device: torch.device) -> None:
    layer = nn.Embedding(4, 2, sparse=True, device=device)
    other = copy.deepcopy(layer)
    rows = torch.tensor([1, 3, 1], device=device)
    optimizer, reference = make(layer.parameters()), make(other.parameters())
    for count in (1.0, 2.0):  # Two blocks add up.
        backward(handle, layer(rows).sum(), optimizer)
        other(rows).sum().backward()
        assert layer.weight.grad.is_sparse
        wanted = torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2]) * count
        assert torch.equal(layer.weight.grad.to_dense().cpu(), wanted)
    optimizer.step()
    reference.step()
    assert torch.equal(layer.weight, other.weight)
    optimizer.zero_grad()
    backward(handle, (layer(rows) * NAN).sum(), optimizer)
    before = layer.weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("sparse_first", [False, True])
def test_sparse_and_dense_gradients_add_up(
    sparse_first: bool, handle: Any, device: torch.device
) -> None:
    layer = nn.Embedding(3, 1, sparse=True, device=device)
    rows = torch.tensor([0, 2, 2], device=device)
    optimizer = sgd(layer.parameters())
    losses = [lambda: pull((layer.weight, 4.0)), lambda: layer(rows).sum()]
    for loss in reversed(losses) if sparse_first else losses:
        backward(handle, loss(), optimizer)
    assert layer.weight.grad.to_dense().flatten().tolist() == [5.0, 4.0, 6.0]


def test_what_a_loss_does_not_touch_stays_as_it_is(handle: Any, device: torch.device) -> None:
    touched, other, without = (param([1.0], device) for _ in range(3))
    frozen = nn.Parameter(torch.ones(1, device=device), requires_grad=False)
    optimizer = sgd([touched, other, without, frozen])
    backward(handle, pull((other, 1.0 / 3.0)), optimizer)
    kept, values = other.grad, other.grad.clone()
    for value in (1.0, INF):  # An overflow elsewhere changes nothing here.
        backward(handle, pull((touched, value)), optimizer)
        assert other.grad is kept
        assert torch.equal(other.grad, values)
        assert without.grad is None
        assert frozen.grad is None


def test_only_gradients_of_the_optimizer_given_are_unscaled(
    handle: Any, device: torch.device
) -> None:
    ours, others = param([1.0], device), param([1.0], device)
    backward(handle, pull((ours, 2.0), (others, 2.0)), sgd([ours]))
    assert_grads(grads(ours, others), 2.0, 2.0 * SCALE)


def test_weights_are_never_scaled(handle: Any, device: torch.device) -> None:
    weight = param([3.0], device)
    optimizer = sgd([weight])
    for _ in range(2):
        backward(handle, pull((weight, 1.0)), optimizer)
        assert weight.tolist() == [3.0]


@pytest.mark.parametrize("clear", ["to none", "to zero", "by the model"])
def test_blocks_before_a_step_add_their_gradients(
    clear: str, handle: Any, device: torch.device
) -> None:
    model = nn.ParameterList([param([1.0], device), param([1.0, 1.0], device)])
    first, second = model
    optimizer = sgd(model.parameters())
    for _ in range(2):
        for value in (1.0, 10.0, 100.0):
            backward(handle, pull((first, value), (second, -value)), optimizer)
            handle._default_scaler._loss_scale *= 0.5
        assert_grads(grads(first, second), 111.0, -111.0)
        optimizer.step()
        if clear == "by the model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clear == "to none")
    assert first.tolist() == [1.0 - 111.0]


def test_a_sum_that_overflows_float16_skips_the_step(handle: Any, device: torch.device) -> None:
    handle._default_scaler._loss_scale = 1.0
    weight = param([1.0], device, F16)
    optimizer = sgd([weight])
    for _ in range(2):
        backward(handle, pull((weight, 40000.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]
    optimizer.zero_grad()
    handle._default_scaler._loss_scale = 0.25  # Finite as it comes, inf when unscaled.
    backward(handle, pull((weight, 80000.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]


def test_a_block_that_raises_leaves_everything_as_it_was(handle: Any, device: torch.device) -> None:
    weight, fresh = param([1.0], device), param([1.0], device)
    optimizer = sgd([weight, fresh])
    backward(handle, pull((weight, 2.0)), optimizer)
    kept = weight.grad
    state = handle._default_scaler.value
    with (  # noqa: PT012
        pytest.raises(KeyError, match="mine"),
        handle.scale_loss(pull((weight, 1.0), (fresh, 1.0)), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        raise KeyError("mine")
    assert weight.grad is kept
    assert_grads(grads(weight, fresh), 2.0, None)
    assert handle._default_scaler.value == state
    assert handle.is_active()
    assert torch.is_autocast_enabled(device.type)
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0 - 0.5 * 3.0]


def test_a_gradient_that_cannot_be_unscaled_leaves_the_others(handle: Any) -> None:
    weight = parameter([1.0], F32)
    strange = parameter([1.0], torch.float8_e5m2)
    optimizer = sgd([weight, strange])
    backward(handle, pull((weight, 2.0)), optimizer)
    with (  # noqa: PT012
        pytest.raises(RuntimeError),
        handle.scale_loss(pull((weight, 2.0)), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        strange.grad = torch.ones(1, dtype=torch.float8_e5m2)
    assert_grads(grads(weight), 2.0)


# Several optimizers.


def test_one_loss_of_two_optimizers_skips_both(handle: Any, device: torch.device) -> None:
    first, second = param([1.0], device), param([1.0], device)
    pair = [sgd([first]), torch.optim.Adam([second])]
    backward(handle, pull((first, INF), (second, 1.0)), pair)
    for optimizer in pair:
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is True
    assert_grads([first, second], 1.0, 1.0)
    assert handle._default_scaler.loss_scale() == SCALE / 2
    for optimizer in pair:
        optimizer.zero_grad()
    backward(handle, pull((first, 2.0), (second, 1.0)), tuple(pair))
    assert_grads(grads(first, second), 2.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inf_of_one_loss_does_not_skip_an_optimizer_that_only_the_next_is_for(
    dtype: torch.dtype, handle: Any, device: torch.device
) -> None:
    shared, own = (torch.ones(1, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    first, second = sgd([shared]), sgd([own])
    backward(handle, pull((shared, INF)), first)
    backward(handle, pull((shared, 1.0), (own, 1.0)), [first, second])
    assert handle._default_scaler.loss_scale() == SCALE / 2
    first.step()
    second.step()
    assert [amp.step_was_skipped(each) for each in (first, second)] == [True, False]
    assert_grads(grads(own), 1.0)


def test_a_parameter_of_two_optimizers_is_unscaled_once(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    one = sgd([weight])
    for pair in ([one, sgd([weight])], [one, one]):
        backward(handle, pull((weight, 2.0)), pair)
    assert_grads(grads(weight), 4.0)


def test_blocks_of_two_optimizers_nest(handle: Any, device: torch.device) -> None:
    first, second = param([1.0], device), param([1.0], device)
    outer, inner = sgd([first]), sgd([second])
    with handle.scale_loss(pull((first, 2.0)), outer) as scaled_outer:
        with handle.scale_loss(pull((second, INF)), inner) as scaled_inner:
            scaled_inner.backward()
            scaled_outer.backward()
        # The scale has changed within the outer block.
        assert handle._default_scaler.loss_scale() == SCALE / 2
    assert_grads(grads(first, second), 2.0, INF)
    outer.step()
    inner.step()
    assert_grads([first, second], 0.0, 1.0)


def test_blocks_of_one_optimizer_do_not_nest(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    with (
        pytest.raises(RuntimeError, match="inside a scale_loss block of the same optimizer"),
        handle.scale_loss(pull((weight, 2.0)), optimizer),
        handle.scale_loss(pull((weight, 2.0)), optimizer),
    ):
        pass
    backward(handle, pull((weight, 2.0)), optimizer)  # Nothing is left open.
    assert_grads(grads(weight), 2.0)


def test_two_optimizers_take_turns(handle: Any, device: torch.device) -> None:
    """As a GAN does: the second loss goes back through the first one's graph and parameters."""
    critic, maker = param([2.0], device), param([3.0], device)
    of_critic, of_maker = sgd([critic]), sgd([maker])
    for value in (1.0, INF, 1.0):
        start = critic.item(), maker.item()
        of_critic.zero_grad()
        fake = maker * 1.0
        with handle.scale_loss((fake.detach() * critic).sum() * value, of_critic) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        grad_of_critic = critic.grad.clone()
        of_maker.zero_grad()
        with handle.scale_loss((fake * 4.0).sum(), of_maker) as scaled_loss:
            scaled_loss.backward()
        assert torch.equal(critic.grad, grad_of_critic)
        of_critic.step()
        of_maker.step()
        moved = critic.item() != start[0], maker.item() != start[1]
        assert moved == (value != INF, True)
