"""The cases of PyTorch's own tests of its GradScaler, written anew for ours, one test a case.

`CASES` lists them by the names that they have in PyTorch's test_cuda.py, test_cuda_multigpu.py and
test_torch.py. A loop that scales is compared with the same loop in float32 without a scaler, whose
step is left out where the other overflows.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from grad_scaler_cases import OURS, new_scaler
from torch import nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

Optimizer: TypeAlias = torch.optim.Optimizer
SKIPPED = 2  # the iteration whose gradients overflow, of four
ADAMS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
each_adam = pytest.mark.parametrize("adam", ADAMS.values(), ids=[*ADAMS])
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
}
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=[*MAKERS])


def batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randn(4, 2, 8, 8, generator=generator).to(device)
    return [(inputs, targets) for inputs, targets in pairs]


def models(device: torch.device) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    return model, copy.deepcopy(model)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def overflow(model: Any) -> None:
    model[1].weight.grad.fill_(math.inf)


def compare(
    plain: Callable[..., None],
    scaled: Callable[..., Any],
    device: torch.device,
    *,
    make: Callable[[Any], Optimizer] = MAKERS["SGD"],
    rtol: float = 1e-5,
    atol: float = 1e-6,
    taken: int = 3,
    skipped: int = 1,
) -> None:
    """Run both loops, with the scaler on and off, and compare gradients, weights and states.

    Args:
        plain: Called with model, optimizer, batches, and whether to leave a step out.
        scaled: Called with model, optimizer, batches and scaler; returns the scaler to go on with.
    """
    for enabled in (True, False):
        reference, model = models(device)
        expected, optimizer = make(reference.parameters()), make(model.parameters())
        scaler = GradScaler(device.type, init_scale=128.0, growth_interval=1, enabled=enabled)
        plain(reference, expected, batches(device), enabled)
        scaler = scaled(model, optimizer, batches(device), scaler) or scaler
        factor = 2.0**taken * 0.5**skipped
        assert scaler.get_scale() == (128.0 * factor if enabled else 1.0)
        for wanted, param in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, rtol=rtol, atol=atol)
            torch.testing.assert_close(param.grad, wanted.grad, rtol=rtol, atol=atol)
            state, wanted_state = optimizer.state[param], expected.state[wanted]
            for key, value in wanted_state.items():
                torch.testing.assert_close(state[key], value, rtol=rtol, atol=atol)


def plain_loop(model: Any, optimizer: Any, data: Any, leave_out: bool) -> None:
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if not (leave_out and number == SKIPPED):
            optimizer.step()


def test_scale_multiplies_nested_outputs_wherever_they_are(device: torch.device) -> None:
    scaler = GradScaler(device.type, init_scale=2.0)
    here, there = torch.full((1,), 4.0, device=device), torch.full((1,), 4.0)
    outputs = (here.clone(), (there.clone(), here.clone()), [there, (here, there)])
    scaled = scaler.scale(outputs)
    assert [type(one) for one in scaled] == [torch.Tensor, tuple, list]
    flat = [scaled[0], *scaled[1], scaled[2][0], *scaled[2][1]]
    assert [one.item() for one in flat] == [8.0] * 6
    assert [one.device.type for one in flat[:2]] == [device.type, "cpu"]
    assert scaler._scale.device.type == device.type


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_unscale_multiplies_gradients_of_any_layout_and_finds_inf_and_nan(
    bad: float | None, dtype: torch.dtype, device: torch.device
) -> None:
    def gradient(layout: str) -> torch.Tensor:
        grad = torch.full((20, 20), 4.0, dtype=dtype, device=device)
        return {"dense": grad, "transposed": grad.t(), "with gaps": grad[:, :5]}[layout]

    for layouts in (
        ("dense", "dense"),
        ("dense", "transposed"),
        ("dense", "with gaps"),
        ("with gaps", "with gaps"),
    ):
        params = []
        for layout in layouts:
            grad = gradient(layout)
            params.append(Parameter(torch.zeros_like(grad)))
            params[-1].grad = grad
        if bad is not None:
            params[-1].grad[2, 2] = bad
        scaler = new_scaler(device, init_scale=4.0)
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert sum(each.item() for each in found.values()) == (bad is not None)
        assert set(params[0].grad.flatten().tolist()) == {1.0}


def test_update_grows_after_the_interval_and_backs_off_at_an_overflow(
    device: torch.device,
) -> None:
    weight = Parameter(torch.ones(1, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = new_scaler(device, init_scale=4.0, backoff_factor=0.25, growth_interval=2)
    seen = []
    for value in (1.0, 1.0, math.inf):
        scaler.scale(torch.zeros((), device=device))
        weight.grad = torch.full((1,), value, device=device)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert seen == [(4.0, 1), (8.0, 0), (2.0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_sparse_gradients_are_unscaled_and_checked(
    bad: float | None, dtype: torch.dtype, device: torch.device
) -> None:
    weight = Parameter(torch.zeros(2, 3, dtype=dtype, device=device))
    values = torch.tensor([16.0, 32.0, 64.0 if bad is None else bad], dtype=dtype, device=device)
    weight.grad = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values, (2, 3), device=device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = new_scaler(device, init_scale=4.0)
    scaler.unscale_(optimizer)
    (found,) = scaler._found_inf_per_device(optimizer).values()
    assert found.item() == (bad is not None)
    if bad is None:
        assert weight.grad.to_dense().tolist() == [[0.0, 0.0, 4.0], [8.0, 0.0, 16.0]]


def test_float16_values_that_overflow_only_when_coalesced_are_an_overflow(
    device: torch.device,
) -> None:
    weight = Parameter(torch.zeros(2, 3, dtype=torch.float16, device=device))
    values = torch.tensor([64000.0, 32.0, 64000.0], dtype=torch.float16, device=device)
    weight.grad = torch.sparse_coo_tensor([[0, 1, 0], [2, 0, 2]], values, (2, 3), device=device)
    scaler = new_scaler(device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize("used", [False, True], ids=["before a loss", "after a loss"])
def test_a_state_dict_replaces_every_number(used: bool, device: torch.device) -> None:
    source = GradScaler(
        device.type, init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2
    )
    target = GradScaler(
        device.type, init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1
    )
    target._init_growth_tracker = 7
    if used:
        target.scale(torch.full((1,), 4.0, device=device))
    target.load_state_dict(source.state_dict())
    assert target.get_scale() == 3.0
    assert target.get_growth_factor() == 4.0
    assert target.get_backoff_factor() == 0.5
    assert target.get_growth_interval() == 2
    assert target._get_growth_tracker() == 0
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        target.load_state_dict({})


# What the two loops of autocast differ by: a forward in float16.
_AUTOCAST = {"rtol": 1e-2, "atol": 1e-2}


def autocast_loop(pickled: bool) -> Callable[..., Any]:
    def scaled(model: Any, optimizer: Any, data: Any, scaler: Any) -> Any:
        device = data[0][0].device
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16, enabled=scaler.is_enabled()):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if number == SKIPPED and scaler.is_enabled():
                overflow(model)
            scaler.step(optimizer)
            scaler.update()
            if pickled:
                scaler = pickle.loads(pickle.dumps(scaler))
        return scaler

    return scaled


@pytest.mark.parametrize("pickled", [False, True])
@each_maker
def test_autocast_trains_as_float32_does(make: Any, pickled: bool, device: torch.device) -> None:
    compare(plain_loop, autocast_loop(pickled), device, make=small_steps(make), **_AUTOCAST)


@pytest.mark.parametrize("pickled", [False, True])
def test_autocast_with_foreach(pickled: bool, device: torch.device) -> None:
    def make(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.01, foreach=True)

    compare(plain_loop, autocast_loop(pickled), device, make=make, **_AUTOCAST)


@pytest.mark.parametrize("pickled", [False, True])
def test_autocast_with_fused(pickled: bool, device: torch.device) -> None:
    def make(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.01, fused=True)

    compare(plain_loop, autocast_loop(pickled), device, make=make, **_AUTOCAST)


def small_steps(make: Any) -> Callable[[Any], Optimizer]:
    def smaller(params: Any) -> Optimizer:
        optimizer = make(params)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
            group["eps"] = 0.1  # Else Adam makes a large step of the sign of a small difference.
        return optimizer

    return smaller


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("unscale", [False, True], ids=["step alone", "unscale_"])
@each_adam
def test_a_fused_optimizer_equals_one_that_is_not(
    adam: Any, unscale: bool, amsgrad: bool, device: torch.device
) -> None:
    reference, model = models(device)
    scaler = GradScaler(device.type, init_scale=128.0)
    expected = adam(reference.parameters(), lr=0.1, amsgrad=amsgrad, fused=False)
    optimizer = adam(model.parameters(), lr=0.1, amsgrad=amsgrad, fused=True)
    for batch in batches(device):
        for each, its in ((expected, reference), (optimizer, model)):
            each.zero_grad()
            with torch.autocast(device.type, torch.float16):
                loss = loss_of(its, batch)
            scaler.scale(loss).backward()
            if unscale and each is optimizer:
                scaler.unscale_(each)
            scaler.step(each)
        scaler.update()
        for wanted, param in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(param.grad, wanted.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}, None], ids=["", "foreach", "fused", "ours"]
)
@each_adam
def test_gradients_that_are_broken_after_unscale_reach_the_weights(
    adam: Any, options: dict[str, bool] | None, device: torch.device
) -> None:
    # What is known of them was found by unscale_.
    model, _ = models(device)
    optimizer = (
        FusedAdam(model.parameters()) if options is None else adam(model.parameters(), **options)
    )
    scaler = GradScaler(device.type, init_scale=128.0)
    for batch in batches(device):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        for number, param in enumerate(model.parameters()):
            param.grad.fill_(math.inf if number % 2 else math.nan)
        scaler.step(optimizer)
        scaler.update()
    assert not any(param.isfinite().all() for param in model.parameters())


@each_maker
def test_the_scale_does_not_grow_beyond_float32(make: Any, device: torch.device) -> None:
    weight = Parameter(torch.ones(1, device=device))
    optimizer = make([weight])
    scaler = GradScaler(device.type, init_scale=1e38, growth_factor=2.0**4, growth_interval=1)
    scaler.scale((weight * 1e-30).sum()).backward()
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == torch.tensor(1e38).item()


MAX_NORM = 0.2


def clipped_loop(model: Any, optimizer: Any, data: Any, leave_out: bool) -> None:
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if leave_out and number == SKIPPED:
            continue
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


@each_maker
def test_scaled_gradients_may_be_clipped_by_a_scaled_norm(make: Any, device: torch.device) -> None:
    def scaled(model: Any, optimizer: Any, data: Any, scaler: Any) -> None:
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            clip_grad_norm_(model.parameters(), MAX_NORM * scaler.get_scale())
            if number == SKIPPED and scaler.is_enabled():
                overflow(model)
            scaler.step(optimizer)
            scaler.update()

    compare(clipped_loop, scaled, device, make=make)


@pytest.mark.parametrize("way", ["torch", "ours", "folded"])
@each_maker
def test_unscaled_gradients_are_clipped(make: Any, way: str, device: torch.device) -> None:
    def scaled(model: Any, optimizer: Any, data: Any, scaler: Any) -> None:
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if number == SKIPPED and scaler.is_enabled():
                overflow(model)
            if way != "folded":
                scaler.unscale_(optimizer)
            if way == "torch":
                clip_grad_norm_(model.parameters(), MAX_NORM)
            else:
                scaler.clip_grad_norm_(optimizer, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()

    compare(clipped_loop, scaled, device, make=make)


@each_maker
def test_a_gradient_penalty_is_scaled(make: Any, device: torch.device) -> None:
    def penalised(model: Any, batch: Any, scaler: Any = None) -> torch.Tensor:
        loss = loss_of(model, batch)
        outputs = loss if scaler is None else scaler.scale(loss)
        grads = torch.autograd.grad(outputs, [*model.parameters()], create_graph=True)
        factor = 1.0 if scaler is None else 1.0 / scaler.get_scale()
        return loss + torch.stack([(grad * factor).square().sum() for grad in grads]).sum().sqrt()

    def plain(model: Any, optimizer: Any, data: Any, leave_out: bool) -> None:
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            penalised(model, batch).backward()
            if not (leave_out and number == SKIPPED):
                optimizer.step()

    def scaled(model: Any, optimizer: Any, data: Any, scaler: Any) -> None:
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(penalised(model, batch, scaler)).backward()
            if number == SKIPPED and scaler.is_enabled():
                overflow(model)
            scaler.step(optimizer)
            scaler.update()

    compare(plain, scaled, device, make=make)


@each_maker
def test_gradients_accumulate_over_iterations(make: Any, device: torch.device) -> None:
    def loop(model: Any, optimizer: Any, data: Any, scaler: Any) -> None:
        for number, batch in enumerate(data):
            loss = loss_of(model, batch) / 2
            (loss if scaler is None else scaler.scale(loss)).backward()
            if number % 2:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                if number != 3:
                    optimizer.zero_grad()

    def plain(model: Any, optimizer: Any, data: Any, leave_out: bool) -> None:
        loop(model, optimizer, data, None)

    compare(plain, loop, device, make=make, taken=2, skipped=0)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("spread", [False, True], ids=["one device", "the CPU too"])
@each_maker
def test_two_models_two_optimizers_and_two_losses(
    make: Any, spread: bool, enabled: bool, device: torch.device
) -> None:
    devices = [device, torch.device("cpu") if spread else device]
    pairs = [models(each) for each in devices]
    optimizers = [[make(model.parameters()) for model in pair] for pair in pairs]
    scaler = GradScaler(device.type, init_scale=128.0, growth_interval=1, enabled=enabled)
    for number, (inputs, targets) in enumerate(batches(device)):
        for side in (0, 1):  # the reference, and ours
            for pair in optimizers:
                pair[side].zero_grad()
            first = pairs[0][side](inputs)
            second = pairs[1][side](inputs.to(devices[1]))
            losses = [
                nn.functional.mse_loss(a * first + b * second.to(device), targets)
                for a, b in ((0.3, 0.7), (0.6, -0.4))
            ]
            if side == 0:
                torch.stack(losses).sum().backward()
                optimizers[0][0].step()
                if not (enabled and number == SKIPPED):
                    optimizers[1][0].step()
                continue
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            if enabled and number == SKIPPED:
                overflow(pairs[1][1])
            scaler.unscale_(optimizers[0][1])
            scaler.step(optimizers[0][1])
            scaler.step(optimizers[1][1])
            scaler.update()
            if enabled:
                assert scaler.step_was_skipped(optimizers[1][1]) == (number == SKIPPED)
                assert not scaler.step_was_skipped(optimizers[0][1])
    assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    for reference, model in pairs:
        for wanted, param in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_asks_for_the_scaler_gets_it(device: torch.device) -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True
        seen: Any = None

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            assert not hasattr(self, "grad_scale")
            assert not hasattr(self, "found_inf")
            self.seen = grad_scaler

    class New(torch.optim.SGD):
        _step_supports_amp_scaling = True
        seen: Any = None

        def step(self, closure: Any = None) -> None:
            self.seen = (self.grad_scale.item(), self.found_inf.item())

    weight = Parameter(torch.ones(3, device=device))
    old, new = Old([weight]), New([weight])
    scaler = GradScaler(device.type, init_scale=2.0)
    scaler.scale(weight.sum()).backward()
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        scaler.step(old)
    scaler.step(new)
    assert old.seen is scaler
    assert new.seen == (2.0, 0.0)


def test_devices_are_keys_by_value(device: torch.device) -> None:
    # What found_inf is kept by.
    same = [torch.device("cpu"), torch.device("cpu"), torch.empty(1, device="cpu").device]
    assert len(dict.fromkeys(same)) == 1
    assert (
        len({torch.device("cuda:0"): 0, torch.device("cuda:0"): 1, torch.device("cuda:1"): 2}) == 2
    )


def test_a_cuda_scaler_without_cuda_is_disabled_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    with pytest.warns(
        UserWarning, match="GradScaler is enabled, but CUDA is not available"
    ) as said:
        scaler = GradScaler()
    (one,) = said
    assert one.filename == __file__
    assert 'On the CPU use GradScaler("cpu")' in str(one.message)
    assert not scaler.is_enabled()
    weight = Parameter(torch.ones(3))
    weight.sum().backward()
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    assert weight.tolist() == [0.0] * 3


@pytest.mark.cuda_only
def test_the_forward_and_backward_of_a_scaled_loss_are_captured(device: torch.device) -> None:
    weight = Parameter(torch.full((4,), 2.0, device=device))
    optimizer = FusedAdam([weight], lr=0.1)
    factor = torch.ones((), device=device)
    scaler = GradScaler("cuda", init_scale=4.0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        scaler.scale((weight * factor).sum()).backward()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.scale((weight * factor).sum()).backward()
    scales, skipped = [], []
    for value in (1.0, math.inf, 1.0, math.nan):
        factor.fill_(value)
        graph.replay()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.step_was_skipped(optimizer))
        scales.append(scaler.get_scale())
    assert skipped == [False, True, False, True]
    assert scales == [4.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("make", [*OURS.values(), MAKERS["SGD"]], ids=[*OURS, "SGD"])
@pytest.mark.filterwarnings("ignore:GradScaler.*no float32 masters:RuntimeWarning")
def test_float16_gradients_are_not_refused(make: Any, device: torch.device) -> None:
    weight = Parameter(torch.full((4,), 0.5, dtype=torch.float16, device=device))
    weight.grad = torch.full_like(weight, 1024.0)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        new_scaler(device, torch.amp.GradScaler).unscale_(make([weight]))
    optimizer = make([weight])
    scaler = new_scaler(device)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0] * 4
    scaler.step(optimizer)
    assert max(weight.tolist()) < 0.5


# By the names in PyTorch; float16 gradients, which it refuses in `_unscale_grads_`, have no case.
CASES: dict[str, Any] = {
    "test_grad_scaling_scale": test_scale_multiplies_nested_outputs_wherever_they_are,
    "test_grad_scaling_device_as_key": test_devices_are_keys_by_value,
    "test_grad_scaling_unscale": (
        test_unscale_multiplies_gradients_of_any_layout_and_finds_inf_and_nan
    ),
    "test_grad_scaling_unscale_sparse": test_sparse_gradients_are_unscaled_and_checked,
    "test_grad_scaling_unscale_sparse, uncoalesced float16": (
        test_float16_values_that_overflow_only_when_coalesced_are_an_overflow
    ),
    "test_grad_scaling_update_scale": (
        test_update_grows_after_the_interval_and_backs_off_at_an_overflow
    ),
    "test_grad_scaling_state_dict": test_a_state_dict_replaces_every_number,
    "test_grad_scaling_autocast": test_autocast_trains_as_float32_does,
    "test_grad_scaling_autocast_foreach": test_autocast_with_foreach,
    "test_grad_scaling_autocast_fused": test_autocast_with_fused,
    "test_grad_scaling_autocast_fused_optimizers": test_a_fused_optimizer_equals_one_that_is_not,
    "test_params_invalidated_with_grads_invalidated_between_unscale_and_step": (
        test_gradients_that_are_broken_after_unscale_reach_the_weights
    ),
    "test_grad_scale_will_not_overflow": test_the_scale_does_not_grow_beyond_float32,
    "test_grad_scaling_clipping": test_scaled_gradients_may_be_clipped_by_a_scaled_norm,
    "test_grad_scaling_clipping_separate_unscale": test_unscaled_gradients_are_clipped,
    "test_grad_scaling_penalty": test_a_gradient_penalty_is_scaled,
    "test_grad_scaling_accumulation": test_gradients_accumulate_over_iterations,
    "test_grad_scaling_multiple": test_two_models_two_optimizers_and_two_losses,
    "test_grad_scaling_multigpu": test_two_models_two_optimizers_and_two_losses,
    "test_grad_scaler_pass_itself": test_an_optimizer_that_asks_for_the_scaler_gets_it,
    "test_grad_scaler_deprecated_warning": (
        test_a_cuda_scaler_without_cuda_is_disabled_with_a_warning
    ),
    "test_graph_grad_scaling": test_the_forward_and_backward_of_a_scaled_loss_are_captured,
    "refuses float16 gradients": test_float16_gradients_are_not_refused,
}
