"""handle.scale_loss: scaled losses, unscaled gradients, and one skipped step after an overflow."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, F64, INF, NAN, assert_grads, parameter, pull
from torch import Tensor, nn
from torch.optim import lr_scheduler

from apex_mp import amp
from apex_mp.amp import scaling
from apex_mp.amp.scaler import LossScaler
from apex_mp.amp.step_guard import guard_of
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("amp_off")

SCALE = 65536.0


class PlainSgd:
    """An optimizer that knows nothing of torch's."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        self.param_groups = [{"params": [*params], "lr": lr}]
        self.calls: list[Any] = []

    def zero_grad(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None

    def step(self, closure: Any = None) -> Any:
        """Step."""
        loss = None if closure is None else closure()
        self.calls.append(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param -= self.param_groups[0]["lr"] * param.grad
        return loss


class Larc:
    """Rescales the learning rate around another optimizer, as apex.parallel.LARC does."""

    def __init__(self, optimizer: Any) -> None:
        self.optim = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optim.param_groups

    @property
    def state(self) -> Any:
        return self.optim.state

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        self.optim.step()


sgd = functools.partial(torch.optim.SGD, lr=0.5)
# "on CPU": torch's fused and capturable flags want kernels that not every device has.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": sgd,
    "SGD momentum nesterov": functools.partial(sgd, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "Rprop": torch.optim.Rprop,
    "FusedAdam": FusedAdam,
    "PlainSgd": PlainSgd,
    "Larc": lambda params: Larc(sgd(params)),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@pytest.fixture
def handle(device: torch.device) -> Any:
    return amp.init(device_type=device.type)


def param(values: Any, device: torch.device, dtype: torch.dtype = F32) -> nn.Parameter:
    return parameter(values, dtype, device)


def backward(handle: Any, loss: Tensor, optimizer: Any) -> None:
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def overflow(handle: Any, optimizer: Any, value: float = INF) -> None:
    backward(handle, pull((optimizer.param_groups[0]["params"][0], value)), optimizer)


def grads(*params: nn.Parameter) -> list[Tensor | None]:
    return [each.grad for each in params]


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


# Overflow.


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1e36])
@optimizers
def test_an_overflow_skips_the_step_and_nothing_changes(
    make: Any, value: float, handle: Any, device: torch.device
) -> None:
    weight, other = param([1.0, 2.0], device), param([3.0], device)
    optimizer = make([weight, other])
    backward(handle, pull((weight, 1.0), (other, 1.0)), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy([[weight, other], [*getattr(optimizer, "state", {}).values()]])
    backward(handle, pull((weight, [1.0, value]), (other, 1.0)), optimizer)
    assert optimizer.step() is None
    assert amp.step_was_skipped(optimizer) is True
    after = [[weight, other], [*getattr(optimizer, "state", {}).values()]]
    assert str(after) == str(before)
    assert handle._default_scaler.loss_scale() == SCALE / 2
    optimizer.zero_grad()
    backward(handle, pull((weight, 1.0), (other, 1.0)), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is False
    assert not torch.equal(weight, before[0][0])


def test_however_many_losses_overflow_one_step_is_skipped(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    for value in (INF, NAN, 1.0, INF):
        backward(handle, pull((weight, value)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]
    optimizer.zero_grad()
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [0.5]
    assert handle._default_scaler.loss_scale() == SCALE / 8


def test_an_overflow_that_nobody_clears_skips_steps_until_somebody_does(
    handle: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    overflow(handle, optimizer)
    optimizer.step()
    for _ in range(2):
        backward(handle, pull((weight, 1.0)), optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is True
    assert weight.tolist() == [1.0]
    assert len(caplog.messages) == 3
    # It is not the scale's fault.
    assert handle._default_scaler.loss_scale() == SCALE / 2
    optimizer.zero_grad(set_to_none=False)
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_a_loss_that_is_not_finite_is_no_overflow(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)) + INF, optimizer)
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_a_large_finite_sum_is_no_overflow(handle: Any, device: torch.device) -> None:
    handle._default_scaler._loss_scale = 1.0
    weight = param([1.0] * 4, device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 2e38)), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is False


def test_endless_overflow_keeps_a_positive_scale(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(200):
            optimizer.zero_grad()
            overflow(handle, optimizer)
            optimizer.step()
    assert handle._default_scaler.loss_scale() == 2.0**-126
    assert weight.tolist() == [1.0]


def test_fifty_skipped_steps_in_a_row_warn_once(handle: Any, device: torch.device) -> None:
    weight = param([1.0, 1.0], device)
    optimizer = sgd([weight])

    def skip(times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            overflow(handle, optimizer)
            overflow(handle, optimizer)
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        skip(49)
        optimizer.zero_grad()
        backward(handle, pull((weight, 0.0)), optimizer)
        optimizer.step()
        skip(49)
        assert caught == []
        skip(30)
        assert len(caught) == 1
    assert caught[0].category is RuntimeWarning
    assert caught[0].filename == __file__
    assert "amp: SGD has skipped 50 steps in a row" in str(caught[0].message)
    assert "The worst: group 0, parameter 0 [2]: 2 inf, 0 NaN." in str(caught[0].message)


# What it says.


def test_the_message_names_the_worst_parameters(
    handle: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, device=device) for name in "abc"})
    model.forward = lambda x: sum(layer(x).float().sum() for layer in model.values())
    optimizer = sgd(model.parameters())
    model(torch.ones(1, 2, device=device))
    b, c = model["b"], model["c"]
    b_weight = (b.weight, [[NAN, INF], [INF, 1.0]])
    caplog.set_level(logging.WARNING, "apex_mp.amp")
    backward(
        handle,
        pull(b_weight, (b.bias, [INF, 1.0]), (c.weight, INF), (c.bias, INF)),
        optimizer,
    )
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("apex_mp.amp", "WARNING")
    ]
    assert caplog.messages[0].splitlines() == [
        "Gradient overflow, skipping update; the loss scale goes from 65536.0 to 32768.0",
        "  c.weight [2, 2]: 4 inf, 0 NaN",
        "  b.weight [2, 2]: 2 inf, 1 NaN",
        "  c.bias [2]: 2 inf, 0 NaN",
        "  and 1 more parameters",
    ]


def test_without_a_model_the_message_names_group_and_index(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    handle: Any = amp.init(loss_scale=8.0, device_type=device.type)
    first, second, named = (param([1.0], device) for _ in range(3))
    optimizer = sgd([first])
    optimizer.add_param_group({"params": [first.new_zeros(1).requires_grad_(), second]})
    backward(handle, pull((second, NAN)), optimizer)
    with_names = sgd([("head.bias", named)])
    backward(handle, pull((named, NAN)), with_names)
    assert [message.splitlines() for message in caplog.messages] == [
        [
            "Gradient overflow, skipping update; the loss scale stays 8.0",
            "  group 1, parameter 1 [1]: 0 inf, 1 NaN",
        ],
        [
            "Gradient overflow, skipping update; the loss scale stays 8.0",
            "  head.bias [1]: 0 inf, 1 NaN",
        ],
    ]


def test_gradients_in_low_precision_are_remarked_on_once(
    handle: Any,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "_warned_of_low_precision", False)
    weight = param([1.0], device, F16)
    optimizer = sgd([weight])
    for _ in range(2):
        backward(handle, pull((weight, 2.0**-10)), optimizer)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("Incoming grads are not fp32 (not master grads).")


@pytest.mark.parametrize("make", [sgd, PlainSgd, FusedAdam], ids=["SGD", "PlainSgd", "FusedAdam"])
def test_an_optimizer_whose_loss_was_never_scaled_skipped_nothing(
    make: Any, device: torch.device
) -> None:
    optimizer = make([param([1.0], device)])
    assert amp.step_was_skipped(optimizer) is False
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is False


def test_a_skipped_step_of_an_fp16_optimizer_is_told(device: torch.device) -> None:
    weight = param([1.0], device, F16)
    optimizer = FP16_Optimizer(sgd([weight]), dynamic_loss_scale=True, verbose=False)
    for value in (INF, 2.0**-20):
        optimizer.backward(pull((weight, value)))
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is (value == INF)
        optimizer.zero_grad()


def test_only_optimizers_can_be_asked() -> None:
    with pytest.raises(TypeError, match="optimizer is a int; it must be an optimizer"):
        amp.step_was_skipped(3)


# Closures.


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make", [sgd, PlainSgd, FusedAdam], ids=["SGD", "PlainSgd", "FusedAdam"])
def test_a_step_takes_a_closure_before_and_after_an_overflow(
    make: Any, by_name: bool, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = make([weight])
    calls = []

    def closure() -> Any:
        calls.append(weight.item())
        return 7.0

    for value, loss in ((1.0, 7.0), (INF, None), (1.0, 7.0)):
        optimizer.zero_grad()
        backward(handle, pull((weight, value)), optimizer)
        before = weight.item(), len(calls)
        result = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert result == loss
        assert len(calls) == before[1] + (loss is not None)  # Not on a skipped step.
        assert (weight.item() != before[0]) is (loss is not None)


def closure_with_scale_loss(
    handle: Any, optimizer: Any, loss: Callable[[], Tensor], scales: list[float]
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        scales.append(handle._default_scaler.loss_scale())
        with handle.scale_loss(value, optimizer) as scaled_loss:
            scaled_loss.backward()
        return value.detach()

    return closure


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_closure_that_overflows_is_called_with_a_smaller_scale(
    steps_before: int, by_name: bool, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    scales: list[float] = []
    closure = closure_with_scale_loss(
        handle, optimizer, lambda: pull((weight, 2.0**112 + 0.0)), scales
    )
    for _ in range(steps_before):  # In the first step, scale_loss is new to the optimizer.
        backward(handle, pull((weight, 0.0)), optimizer)
        optimizer.step()
    handle._default_scaler._loss_scale = 2.0**18
    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss.item() == 2.0**112
    assert scales == [2.0**18, 2.0**17, 2.0**16, 2.0**15]
    assert weight.tolist() == [-(2.0**111)]
    assert amp.step_was_skipped(optimizer) is False


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_finds_the_minimum_through_overflows(
    line_search: Any, handle: Any, device: torch.device
) -> None:
    weight = param([4.0, -3.0], device)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, line_search_fn=line_search)
    handle._default_scaler._loss_scale = 2.0**127
    handle._default_scaler._unskipped = 0
    scales: list[float] = []
    closure = closure_with_scale_loss(
        handle, optimizer, lambda: (weight - 1.0).square().sum(), scales
    )
    for _ in range(5):
        optimizer.step(closure)
    assert scales[0] == 2.0**127
    assert scales[-1] < 2.0**127
    assert torch.allclose(weight, torch.ones_like(weight), atol=1e-3)
    assert amp.step_was_skipped(optimizer) is False


def test_a_step_whose_closure_never_stops_overflowing_is_abandoned(device: torch.device) -> None:
    handle: Any = amp.init(loss_scale=128.0, device_type=device.type)
    weight = param([4.0, -3.0], device)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=3)
    scales: list[float] = []
    loss = {"value": lambda: (weight - 1.0).square().sum()}
    closure = closure_with_scale_loss(handle, optimizer, lambda: loss["value"](), scales)
    optimizer.step(closure)
    before = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    left = [2]

    def overflow_later() -> Tensor:
        left[0] -= 1
        factor = 1.0 if left[0] >= 0 else INF
        return ((weight - 2.0).square() * factor).sum()

    loss["value"] = overflow_later
    assert optimizer.step(closure) is None
    assert left[0] < 0
    assert torch.equal(weight, before[0])
    assert str(optimizer.state_dict()) == str(before[1])
    assert amp.step_was_skipped(optimizer) is True
    assert torch.is_autocast_enabled(device.type)
    loss["value"] = lambda: (weight - 1.0).square().sum()
    assert optimizer.step(closure) is not None
    assert amp.step_was_skipped(optimizer) is False


def test_a_closure_runs_with_casts(handle: Any, device: torch.device) -> None:
    handle._default_scaler._loss_scale = 1024.0
    layer = nn.Linear(2, 2, device=device)
    optimizer = sgd(layer.parameters())
    dtypes = []

    def closure() -> Tensor:
        output = layer(torch.ones(1, 2, device=device))
        dtypes.append(output.dtype)
        backward(handle, output.float().sum(), optimizer)
        dtypes.append(layer(torch.ones(1, 2, device=device)).dtype)
        return output

    optimizer.step(closure)
    overflow(handle, optimizer)
    optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step(closure)
    assert dtypes == [F16] * 4
    assert torch.is_autocast_enabled(device.type)


def test_a_first_step_whose_closure_never_stops_overflowing_is_undone_and_says_so(
    device: torch.device,
) -> None:
    handle: Any = amp.init(loss_scale=128.0, device_type=device.type)
    weight = param([4.0, -3.0], device)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=3)
    count = iter([1.0, INF])
    closure = closure_with_scale_loss(
        handle, optimizer, lambda: ((weight - 1.0).square() * next(count)).sum(), []
    )
    with pytest.raises(RuntimeError, match="the step was undone"):
        optimizer.step(closure)
    assert weight.tolist() == [4.0, -3.0]
    assert torch.is_autocast_enabled(device.type)
    optimizer.step(
        closure_with_scale_loss(handle, optimizer, lambda: (weight - 1.0).square().sum(), [])
    )
    assert weight.tolist() != [4.0, -3.0]


def test_what_a_closure_raises_comes_through(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)), optimizer)

    def closure() -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    assert torch.is_autocast_enabled(device.type)
    optimizer.step()
    assert weight.tolist() == [0.5]


# Schedulers and introspection.


@pytest.mark.parametrize("first", [INF, 1.0])
@pytest.mark.parametrize("built", ["before", "after", "both"])
def test_schedulers_step_without_a_warning(
    built: str, first: float, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    make = functools.partial(lr_scheduler.StepLR, optimizer, step_size=1, gamma=0.5)
    schedulers = [make()] if built in ("before", "both") else []
    for step, value in enumerate((first, 1.0, INF, 1.0)):
        optimizer.zero_grad()
        backward(handle, pull((weight, value)), optimizer)
        if step == 0 and built in ("after", "both"):
            schedulers.append(make())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # The ini file lets torch's pass.
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 * 0.5 ** (4 * len(schedulers))
    skips = 1 + (first == INF)
    assert handle._default_scaler.loss_scale() == SCALE * 0.5**skips


def test_a_scheduler_on_an_optimizer_inside_another_is_told_of_skipped_steps(
    handle: Any, device: torch.device
) -> None:
    optimizer = Larc(sgd([param([1.0], device)]))
    scheduler = lr_scheduler.StepLR(optimizer.optim, step_size=1)
    overflow(handle, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert amp.step_was_skipped(optimizer)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < scheduler.base_lrs[0]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("make", [sgd, FusedAdam, PlainSgd], ids=["SGD", "FusedAdam", "PlainSgd"])
def test_step_stays_a_method_with_its_name_and_signature(
    make: Any, scheduled: bool, handle: Any, device: torch.device
) -> None:
    optimizer = make([param([1.0], device)])
    before = inspect.signature(optimizer.step), optimizer.step.__doc__
    if scheduled and make is not PlainSgd:
        lr_scheduler.StepLR(optimizer, step_size=1)
    overflow(handle, optimizer)
    assert inspect.ismethod(optimizer.step)
    assert optimizer.step.__self__ is optimizer
    assert optimizer.step.__func__.__name__ == optimizer.step.__name__ == "step"
    assert (inspect.signature(optimizer.step), optimizer.step.__doc__) == before


def test_arguments_of_step_get_there(handle: Any, device: torch.device) -> None:
    seen = []

    class Odd(PlainSgd):
        def step(self, factor: float, *more: Any, times: int = 1) -> Any:
            seen.append((factor, *more, times))
            return "done"

    optimizer = Odd([param([1.0], device)])
    backward(handle, pull((optimizer.param_groups[0]["params"][0], 1.0)), optimizer)
    assert optimizer.step(0.5, "a", times=2) == "done"
    assert seen == [(0.5, "a", 2)]


def test_the_legacy_call_of_fused_adam_gets_through(handle: Any, device: torch.device) -> None:
    weight, out = param([1.0], device), param([0.0], device, F16)
    optimizer = FusedAdam([weight], lr=0.5)
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.step(grads=[torch.full((1,), 8.0, device=device)], output_params=[out], scale=8.0)
    assert out.tolist() == [0.5]


def test_a_step_borrowed_from_another_object_is_called_on_that(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    inner, outer = sgd([weight]), PlainSgd([weight], lr=100.0)
    outer.step = inner.step
    backward(handle, pull((weight, 1.0)), outer)
    outer.step()
    assert weight.tolist() == [0.5]


def test_hooks_run_once_for_each_real_step(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    backward(handle, pull((weight, 1.0)), optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    assert calls == ["pre", "post"]
    overflow(handle, optimizer)
    optimizer.step()
    assert calls == ["pre", "post"]


def test_grad_scaler_may_step_the_optimizer_afterwards(handle: Any, device: torch.device) -> None:
    for make in (sgd, FusedAdam):
        weight = param([1.0], device)
        optimizer = make([weight], lr=0.5)
        backward(handle, pull((weight, 1.0)), optimizer)
        optimizer.step()
        stepped = weight.item()
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        for value in (INF, 1.0):
            optimizer.zero_grad()
            scaler.scale(pull((weight, value))).backward()
            scaler.step(optimizer)
            scaler.update()
            assert (weight.item() == stepped) is (value == INF)
        assert weight.item() == 0.0


# Copies.


def copied(optimizer: Any, way: str) -> Any:
    return copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "make", [torch.optim.Adam, FusedAdam, PlainSgd], ids=["Adam", "FusedAdam", "PlainSgd"]
)
def test_a_copy_made_during_training_is_an_optimizer_of_its_own(
    make: Any, way: str, handle: Any, device: torch.device
) -> None:
    optimizer = make([param([1.0], device)])
    overflow(handle, optimizer)
    other = copied(optimizer, way)
    its = other.param_groups[0]["params"][0]
    other.zero_grad()
    backward(handle, pull((its, 1.0)), other)
    other.step()
    assert its.item() != 1.0
    assert amp.step_was_skipped(other) is False
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is True
    overflow(handle, other)
    other.step()
    assert amp.step_was_skipped(other) is True
    backward(handle, pull((optimizer.param_groups[0]["params"][0], 1.0)), optimizer)


def test_an_optimizer_and_its_parameters_are_freed(handle: Any, device: torch.device) -> None:
    optimizer = sgd([param([1.0], device)])
    overflow(handle, optimizer)
    optimizer.step()
    gone = weakref.ref(optimizer), weakref.ref(optimizer.param_groups[0]["params"][0])
    del optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# Switching off.


@pytest.mark.parametrize("own", [False, True])
def test_afterwards_the_optimizer_is_as_before(
    own: bool, handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    if own:
        lr_scheduler.StepLR(optimizer, step_size=1)
    before = dict(vars(optimizer))
    backward(handle, pull((weight, 1.0)), optimizer)
    assert vars(optimizer) != before
    handle._deactivate()
    assert vars(optimizer) == before
    assert ("step" in vars(optimizer)) is own
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_afterwards_closures_are_left_alone(handle: Any, device: torch.device) -> None:
    handle._deactivate()
    optimizer = sgd([param([1.0], device)])
    before = dict(vars(optimizer))
    optimizer.step(lambda: 1.0)
    assert vars(optimizer) == before


def test_an_overflow_is_skipped_even_if_casts_are_switched_off_before_the_step(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    before = dict(vars(optimizer))
    overflow(handle, optimizer)
    handle._deactivate()
    optimizer.step()
    assert weight.tolist() == [1.0]
    assert vars(optimizer) == before
    optimizer.zero_grad()
    pull((weight, 1.0)).backward()
    optimizer.step()
    assert weight.tolist() == [0.5]


def test_an_overflow_survives_another_init(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    overflow(handle, optimizer)
    other: Any = amp.init(device_type=device.type)
    backward(other, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [1.0]
    assert amp.step_was_skipped(optimizer) is True
    overflow(other, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is True


def test_a_scheduler_built_on_top_survives(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)), optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1)
    on_top = optimizer.step
    handle._deactivate()
    assert optimizer.step is on_top
    assert not hasattr(optimizer, "_amp_step_guard")
    optimizer.step()
    scheduler.step()
    assert weight.tolist() == [0.5]
    other: Any = amp.init(device_type=device.type)
    overflow(other, optimizer)
    optimizer.step()
    scheduler.step()
    assert weight.tolist() == [0.5]


def test_without_casts_the_loss_is_as_it_is(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    loss = pull((weight, 1.0))
    with handle._disable_casts(), handle.scale_loss(loss, sgd([weight])) as scaled_loss:
        assert scaled_loss is loss
    disabled: Any = amp.init(enabled=False)
    with disabled.scale_loss(loss, sgd([weight])) as scaled_loss:
        assert scaled_loss is loss


# Checkpoints of the handle.


def test_the_scale_of_a_handle_is_saved_and_loaded(handle: Any, device: torch.device) -> None:
    optimizer = sgd([param([1.0], device)])
    overflow(handle, optimizer)
    backward(handle, pull((optimizer.param_groups[0]["params"][0], 1.0)), optimizer)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other: Any = amp.init(device_type=device.type)
    other.load_state_dict(state)
    assert other._default_scaler.value == handle._default_scaler.value
    assert other._default_scaler._unskipped == 1
    with pytest.raises(ValueError, match="they must be"):
        other.load_state_dict({**state, "loss_scaler1": {}})
    disabled: Any = amp.init(enabled=False)
    disabled.load_state_dict(state)
    assert disabled.state_dict() == {}


# Delayed unscaling, which amp.scale_loss offers.


def delayed(scaler: Any, loss: Tensor, optimizer: Any, **delay: bool) -> None:
    with scaling.scaled_backward(loss, [optimizer], scaler, **delay) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("make", [sgd, FusedAdam, torch.optim.SparseAdam])
def test_gradients_left_scaled_add_up_even_if_the_scale_changes(
    make: Any, handle: Any, device: torch.device
) -> None:
    scaler = handle._default_scaler
    layer = nn.Embedding(2, 1, sparse=make is torch.optim.SparseAdam, device=device)
    rows = torch.tensor([0, 1, 1], device=device)
    optimizer = make(layer.parameters())
    delayed(scaler, layer(rows).sum(), optimizer)  # Unscaled gradients are there already.
    for count, scale in ((1, 8.0), (2, 2.0), (3, 1024.0)):
        scaler._loss_scale = scale
        delayed(scaler, layer(rows).sum(), optimizer, delay_unscale=True)
        scaled = layer.weight.grad.to_dense().flatten().tolist()
        assert scaled == [scale * (count + 1), scale * 2 * (count + 1)]
    scaler._loss_scale = 4.0
    delayed(scaler, layer(rows).sum(), optimizer)
    assert layer.weight.grad.to_dense().flatten().tolist() == [5.0, 10.0]
    optimizer.step()


def test_a_step_with_gradients_left_scaled_is_refused(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"still scaled by 65536\.0"):
            optimizer.step()
    assert weight.tolist() == [1.0]
    delayed(scaler, pull((weight, 1.0)), optimizer)
    optimizer.step()
    assert weight.tolist() == [0.0]
    delayed(scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    optimizer.step()  # There is nothing to step with any more.
    pull((weight, 1.0)).backward()
    optimizer.step()
    assert weight.tolist() == [-0.5]
    optimizer.zero_grad()
    backward(handle, pull((weight, 1.0)), optimizer)
    assert_grads(grads(weight), 1.0)


def test_gradients_left_scaled_are_refused_after_casts_are_switched_off(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    delayed(handle._default_scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    handle._deactivate()
    with pytest.raises(RuntimeError, match="still scaled"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert "step" not in vars(optimizer)


def test_an_overflow_left_scaled_is_found_by_the_last_block(
    handle: Any, device: torch.device
) -> None:
    weight, other = param([1.0], device), param([1.0], device)
    optimizer = sgd([weight, other])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, INF)), optimizer, delay_unscale=True)
    assert scaler.loss_scale() == SCALE
    delayed(scaler, pull((other, 1.0)), optimizer)
    assert scaler.loss_scale() == SCALE / 2
    optimizer.step()
    assert_grads([weight, other], 1.0, 1.0)


def test_an_overflow_lowers_the_scale_of_each_loss_that_was_left_scaled(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    first, second = LossScaler(), LossScaler()
    delayed(first, pull((weight, INF)), optimizer, delay_unscale=True)
    delayed(second, pull((weight, 1.0)), optimizer)
    assert first.loss_scale() == second.loss_scale() == SCALE / 2


def test_gradients_of_one_optimizer_are_left_scaled_without_the_others(
    handle: Any, device: torch.device
) -> None:
    first, second = param([1.0], device), param([1.0], device)
    pair = [sgd([first]), sgd([second])]
    scaler = handle._default_scaler
    delayed(scaler, pull((second, 3.0)), pair[1])
    delayed(scaler, pull((first, 1.0)), pair[0], delay_unscale=True)
    with scaling.scaled_backward(pull((first, 1.0), (second, 4.0)), pair, scaler) as scaled_loss:
        scaled_loss.backward()
    assert_grads(grads(first, second), 2.0, 7.0)


def test_a_block_that_raises_keeps_gradients_left_scaled(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, 1.0)), optimizer, delay_unscale=True)
    scaler._loss_scale = 4.0
    for delay in (False, True):
        with (
            pytest.raises(KeyError),
            scaling.scaled_backward(pull((weight, 1.0)), [optimizer], scaler, delay_unscale=delay),
        ):
            raise KeyError
    delayed(scaler, pull((weight, 1.0)), optimizer)
    assert_grads(grads(weight), 2.0)


@pytest.mark.parametrize("step_between", [False, True])
def test_an_overflow_whose_check_is_delayed_skips_one_step_and_lowers_the_scale_later(
    step_between: bool, handle: Any, device: torch.device
) -> None:
    weight, other = param([1.0], device), param([1.0], device)
    optimizer = sgd([weight, other])
    scaler = handle._default_scaler
    delayed(scaler, pull((weight, INF)), optimizer, delay_overflow_check=True)
    assert scaler.loss_scale() == SCALE
    if step_between:
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is True
        optimizer.zero_grad()
    delayed(scaler, pull((other, 1.0)), optimizer)
    assert scaler.loss_scale() == SCALE / 2
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is not step_between
    assert_grads([weight, other], 1.0, 0.5 if step_between else 1.0)


# Masters, which amp.initialize gives to an optimizer.


@pytest.fixture
def with_master(device: torch.device) -> tuple[nn.Parameter, nn.Parameter, Any]:
    model, master = param([1.0], device, F16), param([1.0], device)
    optimizer = sgd([master])
    optimizer._amp_model_of = {master: model}
    return model, master, optimizer


def test_the_master_gets_the_unscaled_gradient(handle: Any, with_master: Any) -> None:
    model, master, optimizer = with_master
    handle._default_scaler._loss_scale = 2.0**14
    tiny = 2.0**-30  # Nothing at all in float16.
    for count in (1, 2):
        backward(handle, pull((model, tiny)), optimizer)
        assert_grads([master.grad], count * tiny)
    kept = master.grad
    backward(handle, pull((model, 0.0)) * 0.0, optimizer)
    assert master.grad is kept


def test_whoever_clears_the_model_clears_its_masters(handle: Any, with_master: Any) -> None:
    model, master, optimizer = with_master
    handle._default_scaler._loss_scale = 8.0
    for delay in (False, True):
        backward(handle, pull((model, 1.0)), optimizer)
        model.grad = None
        if delay:
            delayed(handle._default_scaler, pull((model, 2.0)), optimizer, delay_unscale=True)
        backward(handle, pull((model, 4.0)), optimizer)
        assert_grads([master.grad], 4.0 + 2.0 * delay)
        model.grad = None


def test_gradients_of_a_model_with_masters_may_be_left_scaled(
    handle: Any, with_master: Any
) -> None:
    model, master, optimizer = with_master
    scaler = handle._default_scaler
    scaler._loss_scale = 8.0
    backward(handle, pull((model, 1.0)), optimizer)
    for scale in (8.0, 16.0):
        scaler._loss_scale = scale
        delayed(scaler, pull((model, 1.0)), optimizer, delay_unscale=True)
        with pytest.raises(RuntimeError, match="still scaled"):
            optimizer.step()
    with pytest.raises(KeyError), scaling.scaled_backward(pull((model, 1.0)), [optimizer], scaler):
        raise KeyError
    delayed(scaler, pull((model, 1.0)), optimizer)
    assert_grads([master.grad], 4.0)
    optimizer.step()
    assert_grads([master], 1.0 - 2.0)


def test_a_block_that_raises_leaves_masters_as_they_were(handle: Any, with_master: Any) -> None:
    model, master, optimizer = with_master
    handle._default_scaler._loss_scale = 8.0
    backward(handle, pull((model, 1.0)), optimizer)
    kept = model.grad, master.grad
    with pytest.raises(KeyError), handle.scale_loss(pull((model, 1.0)), optimizer):
        raise KeyError
    assert model.grad is kept[0]
    assert master.grad is kept[1]
    assert_grads([master.grad], 1.0)


def test_sparse_gradients_reach_the_master(handle: Any, device: torch.device) -> None:
    layer = nn.Embedding(3, 1, sparse=True, device=device, dtype=F16)
    master = param(layer.weight.detach(), device)
    optimizer = sgd([master])
    optimizer._amp_model_of = {master: layer.weight}
    handle._default_scaler._loss_scale = 8.0
    for count in (1.0, 2.0):
        backward(handle, layer(torch.tensor([0, 2, 2], device=device)).sum(), optimizer)
        assert master.grad.dtype is F32
        assert master.grad.to_dense().flatten().tolist() == [count, 0.0, 2 * count]


# Numbers.


def train(optimizer: Any, weights: list[Tensor], backward: Callable[[Tensor], None]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        x = torch.randn(4, 3, generator=generator).to(weights[0].device)
        hidden = (x.unsqueeze(-1) * weights[0]).sum(1)
        loss = ((hidden * weights[1]) - x[:, :2]).square().sum()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.AdamW, functools.partial(sgd, lr=0.01)])
def test_training_outside_casts_has_the_bits_of_training_without_amp(
    make: Any, device: torch.device
) -> None:
    torch.manual_seed(2)
    start = [torch.randn(3, 2).to(device), torch.randn(2).to(device)]
    plain = [each.clone().requires_grad_() for each in start]
    train(make(plain), plain, lambda loss: loss.backward())
    ours = [each.clone().requires_grad_() for each in start]
    handle: Any = amp.init(device_type=device.type)
    optimizer = make(ours)
    train(optimizer, ours, lambda loss: backward(handle, loss, optimizer))
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_penalty_inside_the_block_is_scaled_once(
    handle: Any, device: torch.device
) -> None:
    weight = param([3.0], device)
    optimizer = sgd([weight])
    x = torch.tensor([2.0], device=device, requires_grad=True)
    with handle.scale_loss(torch.zeros((), device=device), optimizer) as zero:
        (slope,) = torch.autograd.grad((weight * x.square()).sum(), x, create_graph=True)
        (slope.square().sum() * SCALE + zero).backward(create_graph=True)
    # (2 w x)^2 has the derivative 8 w x^2.
    assert_grads([weight.grad.detach()], 96.0)


def test_one_guard_stands_before_an_optimizer(handle: Any, device: torch.device) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    backward(handle, pull((weight, 1.0)), optimizer)
    guard, step = guard_of(optimizer), optimizer.step
    backward(handle, pull((weight, 1.0)), optimizer)
    assert guard_of(optimizer) is guard
    assert optimizer.step == step


def test_a_step_inside_the_block_is_refused_and_changes_nothing(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    sentence = r"inside a scale_loss block.*call it after the block"
    with handle.scale_loss(weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match=sentence):
            optimizer.step()
    assert weight.item() == 1.0
    assert_grads([weight.grad], 1.0)


def test_a_closure_whose_loss_is_not_finite_is_not_called_until_the_scale_is_gone(
    handle: Any, device: torch.device
) -> None:
    weight = param([1.0], device)
    optimizer = sgd([weight])
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * float("nan")).sum()
        losses.append(loss)
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    with handle.scale_loss(weight.sum(), optimizer):  # The guard is before the step from here on.
        pass
    assert optimizer.step(closure) is None
    assert len(losses) == 1
    assert handle._default_scaler.loss_scale() == 2.0**15
    assert weight.item() == 1.0
