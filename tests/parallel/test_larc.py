"""LARC around every optimizer, and inside everything that takes one."""

from __future__ import annotations

import copy
import math
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.optimizers import FusedAdam, FusedSGD
from apex_mp.parallel.LARC import LARC

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

BAD_STEP, STEPS = 3, 20
INNER: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9, weight_decay=1e-3),
    "FusedSGD": lambda params: FusedSGD(params, lr=1.0, momentum=0.9, weight_decay=1e-3),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.05, weight_decay=1e-3),
}
inner = pytest.mark.parametrize("make", INNER.values(), ids=INNER.keys())


def larc(optimizer: Any) -> LARC:
    return LARC(optimizer, trust_coefficient=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def fp16(face: Any, optimizer: Any) -> Any:
    return face(
        optimizer,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**10},
        verbose=False,
    )


# How a loss gets to the optimizer: the model, the optimizer, what takes a loss.
Parts = tuple[nn.Module, Any, Callable[[Tensor], Any]]


def in_fp16_optimizer(make: Any, face: Any) -> Parts:
    net = model().half()
    optimizer = fp16(face, larc(make(net.parameters())))
    return net, optimizer, optimizer.backward


def around_fp16_optimizer(make: Any, face: Any) -> Parts:
    net = model().half()
    optimizer: Any = larc(fp16(face, make(net.parameters())))
    return net, optimizer, optimizer.backward


def scaled(net: nn.Module, optimizer: Any, scale_loss: Any) -> Parts:
    def backward(loss: Tensor) -> None:
        with scale_loss(loss) as scaled_loss:
            scaled_loss.backward()

    return net, optimizer, backward


def in_initialize(make: Any, level: str) -> Parts:
    net = model()
    net, optimizer = amp.initialize(
        net, larc(make(net.parameters())), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    return scaled(net, optimizer, lambda loss: amp.scale_loss(loss, optimizer))


def around_initialize(make: Any, level: str) -> Parts:
    net = model()
    net, optimizer = amp.initialize(
        net, make(net.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    optimizer = larc(optimizer)
    return scaled(net, optimizer, lambda loss: amp.scale_loss(loss, optimizer))


def with_handle(make: Any, _: Any) -> Parts:
    handle: Any = amp.init(device_type="cpu")
    net = model()
    optimizer = larc(make(net.parameters()))
    return scaled(net, optimizer, lambda loss: handle.scale_loss(loss, optimizer))


def in_wrapper(make: Any, _: Any) -> Parts:
    handle: Any = amp.init(device_type="cpu")
    net = model()
    optimizer = handle.wrap_optimizer(larc(make(net.parameters())))
    return scaled(net, optimizer, optimizer.scale_loss)


def around_wrapper(make: Any, _: Any) -> Parts:
    handle: Any = amp.init(device_type="cpu")
    net = model()
    optimizer: Any = larc(handle.wrap_optimizer(make(net.parameters())))
    return scaled(net, optimizer, optimizer.scale_loss)


def with_grad_scaler(make: Any, _: Any) -> Parts:
    net = model()
    optimizer: Any = larc(make(net.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    steps = types.SimpleNamespace(zero_grad=optimizer.zero_grad, step=step)
    return net, steps, lambda loss: scaler.scale(loss).backward()


PLACES: dict[str, tuple[Callable[[Any, Any], Parts], Any]] = {
    "in fp16_utils.FP16_Optimizer": (in_fp16_optimizer, fp16_utils.FP16_Optimizer),
    "in optimizers.FP16_Optimizer": (in_fp16_optimizer, optimizers.FP16_Optimizer),
    "around fp16_utils.FP16_Optimizer": (around_fp16_optimizer, fp16_utils.FP16_Optimizer),
    "around optimizers.FP16_Optimizer": (around_fp16_optimizer, optimizers.FP16_Optimizer),
    **{f"in initialize {level}": (in_initialize, level) for level in ("O1", "O2", "O3")},
    **{f"around initialize {level}": (around_initialize, level) for level in ("O1", "O2", "O3")},
    "with a handle": (with_handle, None),
    "in OptimWrapper": (in_wrapper, None),
    "around OptimWrapper": (around_wrapper, None),
    "with GradScaler": (with_grad_scaler, None),
}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Fused.* that have no float32 masters")
        yield


def train(parts: Parts, bad_step: int | None = BAD_STEP) -> tuple[list[float], list[Tensor]]:
    net, optimizer, backward = parts
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator)
    y = x[:, :3].argmax(dim=1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        output = net(x.to(next(net.parameters()).dtype))
        loss = nn.functional.cross_entropy(output.float(), y)
        backward(loss * (float("inf") if step == bad_step else 1.0))
        before = [param.detach().clone() for param in net.parameters()]
        optimizer.step()
        moved = not all(map(torch.equal, before, net.parameters()))
        assert moved == (step != bad_step)
        losses.append(loss.item())
    return losses, [param.detach().float() for param in net.parameters()]


def train_plain(make: Any) -> list[float]:
    """In float32, leaving out the step that is skipped."""
    net = model()
    optimizer = larc(make(net.parameters()))

    def backward(loss: Tensor) -> None:
        loss.backward()
        if not loss.isfinite():
            optimizer.zero_grad()

    return train((net, optimizer, backward))[0]


@inner
@pytest.mark.parametrize("place", PLACES)
def test_it_trains_wherever_it_stands_and_an_overflow_skips_its_step(
    place: str, make: Callable[[Any], Any]
) -> None:
    build, argument = PLACES[place]
    losses, _ = train(build(make, argument))
    # fp16 rounds weights and activations to 2**-11 of themselves.
    assert losses == pytest.approx(train_plain(make), abs=5e-3)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("clip", [True, False])
def test_each_gradient_is_scaled_by_its_local_rate(clip: bool) -> None:
    params = [nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.zeros(1))]
    sgd = torch.optim.SGD(params, lr=0.5, weight_decay=0.1)
    optimizer = LARC(sgd, trust_coefficient=0.02, clip=clip, eps=0.0)
    params[0].grad, params[1].grad = torch.tensor([0.0, 2.0]), torch.ones(1)
    optimizer.step()
    rate = 0.02 * 5.0 / (2.0 + 0.1 * 5.0)
    factor = min(rate / 0.5, 1.0) if clip else rate
    wanted = [3.0 - 0.5 * factor * 0.3, 4.0 - 0.5 * factor * 2.4]
    assert params[0].tolist() == pytest.approx(wanted)
    assert params[1].tolist() == [-0.5]  # of no norm: as it is
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_what_the_optimizer_has_is_there() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = larc(torch.optim.SGD([weight], lr=1.0, momentum=0.5))
    weight.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"][0]["momentum_buffer"].shape == (2,)
    assert optimizer.defaults["momentum"] == 0.5
    assert repr(optimizer) == repr(optimizer.optim)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.25})
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25]
    other = larc(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=3.0, momentum=0.5))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 1.0
    other.state.clear()
    assert not other.optim.state
    weight.grad = torch.ones(2)
    optimizer.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_steps_its_own_parameters_though_a_scheduler_was_there(
    copied: Callable[[Any], Any],
) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = larc(torch.optim.SGD([weight], lr=1.0))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = copied(optimizer)
    (its,) = other.param_groups[0]["params"]
    its.grad = torch.ones(2)
    other.step()
    assert not torch.equal(its, torch.ones(2))


@pytest.mark.parametrize("name", ["trust_coefficient", "eps"])
def test_a_number_below_0_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"LARC: {name} is -0.5; it must be 0 or more"):
        LARC(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), **{name: -0.5})
    with pytest.raises(TypeError, match=f"LARC: {name} is '0.02'; it must be a number"):
        LARC(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), **{name: "0.02"})


@pytest.mark.parametrize("scaler_of", [amp.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("clip", [False, True], ids=["LARS", "LARC"])
def test_small_float16_gradients_lose_nothing_in_a_grad_scaler(
    scaler_of: Any, clip: bool, device: torch.device
) -> None:
    """Unscaled in float16 most of them would be 0; torch's scaler refuses to."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to(device).half()
    inner = FusedSGD(model.parameters(), 0.1, weight_decay=1e-3, master_weights=True)
    optimizer, scaler = LARC(inner, clip=clip), scaler_of(device.type, init_scale=2.0**20)
    exact = [param.detach().double() for param in model.parameters()]
    for number in range(4):
        size = math.inf if number == 2 else 1e-7
        scaler.scale(torch.zeros((), device=device))
        for param, values in zip(model.parameters(), exact, strict=True):
            grad = torch.randn(param.shape, device=device).double() * size
            param.grad = (grad * scaler.get_scale()).half()
            grad = param.grad.double() / scaler.get_scale()
            if number == 2:
                continue  # The step is skipped.
            norms = values.half().double().norm(), grad.norm()
            rate = 0.02 * norms[0] / (norms[1] + 1e-3 * norms[0] + 1e-8)
            rate = min(rate / 0.1, 1.0) if clip else rate
            values -= 0.1 * rate * (grad + 1e-3 * values.half())
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**19
    for param, values in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(inner.master(param).double(), values, rtol=2e-6, atol=1e-9)


def test_after_an_error_in_grad_scaler_the_next_step_is_right(device: torch.device) -> None:
    """torch's scaler multiplies the next scale by the `grad_scale` that it finds."""
    param = nn.Parameter(torch.ones(3, device=device))
    inner = FusedSGD([param], 0.125)
    optimizer, scaler = LARC(inner), torch.amp.GradScaler(device.type, init_scale=8.0)
    inner.param_groups[0]["momentum"] = -1.0
    scaler.scale(param.sum()).backward()
    with pytest.raises(ValueError, match="momentum is -1"):
        scaler.step(optimizer)
    scaler.update()
    inner.param_groups[0]["momentum"] = 0.0
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    # The local rate is 0.02 / 0.125, and the gradient 1.
    assert param.tolist() == pytest.approx([1.0 - 0.02] * 3)


def test_float32_gradients_are_unscaled_afterwards_as_of_other_optimizers(
    device: torch.device,
) -> None:
    param = nn.Parameter(torch.ones(3, device=device))
    optimizer = LARC(FusedSGD([param], 0.125), clip=False, trust_coefficient=0.5)
    scaler = amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert param.grad is not None
    assert param.grad.tolist() == pytest.approx([0.5] * 3)


def test_updates_that_are_lost_are_warned_of(device: torch.device) -> None:
    param = nn.Parameter(torch.ones(3, device=device).half())
    optimizer = LARC(FusedSGD([param], 1e-7))
    param.grad = torch.ones_like(param)
    with pytest.warns(RuntimeWarning, match="FusedSGD steps 1 parameter of float16 that have no"):
        optimizer.step()
