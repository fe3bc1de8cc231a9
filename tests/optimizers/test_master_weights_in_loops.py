"""MasterWeights under scalers, in checkpoints and copies, over shards, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from master_weights_cases import (
    BF16,
    F16,
    check,
    give_grads,
    in_float32,
    new_params,
)
from tolerances import assert_same_bits
from torch import Tensor, nn

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam, MasterWeights


class Model(nn.Module):
    """A small network, a frozen layer, and a part in float32."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.frozen, self.b = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.frozen.requires_grad_(False)
        self.to(device, dtype)
        self.scale = nn.Parameter(torch.ones((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.a(x.to(self.a.weight.dtype)))))
        return self.b(hidden).float() * self.scale


def test_muon_and_adamw_share_a_scaler(device: torch.device) -> None:
    model = Model(F16, device)
    matrices = [model.a.weight, model.b.weight]
    muon = MasterWeights(matrices, torch.optim.Muon, lr=0.01)
    adamw = MasterWeights([model.a.bias, model.b.bias], torch.optim.AdamW, lr=0.01)
    scaler = GradScaler(device.type, init_scale=2.0**12)
    losses = []
    for _ in range(8):
        torch.manual_seed(0)
        loss = model(torch.randn(5, 8, device=device)).square().mean()
        losses.append(loss.item())
        muon.zero_grad()
        adamw.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in (muon, adamw):
            scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < 0.8 * losses[0]


def test_names_of_the_optimizers_own_are_left_to_it(device: torch.device) -> None:
    class Named(torch.optim.SGD):
        """Uses names that a mixin might use."""

        def step(self, closure: Any = None) -> None:
            self._grads, self._masters, self._name = [], {}, "mine"
            self._write(0.5)
            super().step(closure)

        def _write(self, lr: float) -> None:
            self.param_groups[0]["lr"] = lr

    params = new_params(None, BF16, device)
    twins = in_float32(params)
    optimizer, twin = MasterWeights(params, Named, lr=0.1), Named(twins, lr=0.1)
    for step in range(2):
        give_grads(params, twins, step)
        optimizer.step()
        twin.step()
    check(optimizer, params, twins)


@pytest.mark.parametrize("every", [1, 5])
def test_a_write_through_data_counts_in_any_step(every: int, device: torch.device) -> None:
    params = [nn.Parameter(torch.tensor([1.0, -1.0], dtype=BF16, device=device))]
    twins = in_float32(params)
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.125)
    twin = torch.optim.SGD(twins, lr=0.125)
    for number in range(1, 20):
        for each in (*params, *twins):
            each.grad = torch.ones_like(each)
        optimizer.step()
        twin.step()
        check(optimizer, params, twins)
        if number % every == 0:
            for each in (*params, *twins):
                each.data.clamp_(-0.25, 0.25)


def test_hooks_of_the_graph_survive_a_step(device: torch.device) -> None:
    param = nn.Parameter(torch.ones(3, dtype=BF16, device=device))
    accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
    calls: list[int] = []
    accumulator.register_hook(lambda *_: calls.append(1))  # As DistributedDataParallel does.
    optimizer = MasterWeights([param], torch.optim.SGD, lr=0.1)
    for _ in range(3):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 3


def test_what_the_optimizer_does_to_its_parameters_counts(device: torch.device) -> None:
    class Replacing(torch.optim.SGD):
        """Puts other data into parameters, as SAM does, and clears gradients."""

        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param.data = param.data.clone()
            super().step(closure)
            self.zero_grad()

    params = new_params(None, BF16, device)
    twins = in_float32(params)
    optimizer, twin = MasterWeights(params, Replacing, lr=0.1), Replacing(twins, lr=0.1)
    for step in range(3):
        give_grads(params, twins, step)
        optimizer.step()
        twin.step()
        check(optimizer, params, twins)
        assert all(param.grad is None for param in params)


def test_what_raises_in_the_step_leaves_weights_in_their_dtype(device: torch.device) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert self.param_groups[0]["params"][0].dtype == torch.float32
            raise KeyboardInterrupt

    params = new_params(None, F16, device)
    before = [param.detach().clone() for param in params]
    optimizer = MasterWeights(params, Broken, lr=0.1)
    give_grads(params, in_float32(params), 0)
    grads = [param.grad for param in params]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    for param, expected, grad in zip(params, before, grads, strict=True):
        assert param.grad is grad
        assert_same_bits(param.detach(), expected)


@pytest.mark.parametrize("keep_grads", [False, True])
def test_float32_gradients_are_freed_or_kept(keep_grads: bool, device: torch.device) -> None:
    params = new_params(None, F16, device)
    twins = in_float32(params)
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1, keep_grads=keep_grads)
    addresses: list[set[int]] = []
    optimizer.register_step_pre_hook(
        lambda *_: addresses.append({param.grad.data_ptr() for param in params})
    )
    twin = torch.optim.SGD(twins, lr=0.1)
    for step in range(3):
        give_grads(params, twins, step)
        optimizer.step()
        twin.step()
    check(optimizer, params, twins)
    kept = optimizer._float32_grads.kept
    assert (kept is None) == (not keep_grads)
    if kept is not None:
        assert addresses[0] == addresses[1] == {grad.data_ptr() for grad in kept.values()}


def test_a_compiled_step_of_the_optimizer_runs_compiled(device: torch.device) -> None:
    traced: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        traced.append(module)
        return module.forward

    class Compiled(torch.optim.SGD):
        step = torch.compile(torch.optim.SGD.step, backend=backend)

    params = new_params(None, BF16, device)
    twins = in_float32(params)
    optimizer = MasterWeights(params, Compiled, lr=0.1, momentum=0.9)
    twin = Compiled(twins, lr=0.1, momentum=0.9)  # In torch 2.11 it rounds otherwise than SGD.
    for step in range(3):
        give_grads(params, twins, step)
        optimizer.step()
        assert traced
        twin.step()
    check(optimizer, params, twins)


def test_sharded_parameters_get_sharded_masters(device: torch.device, one_process: None) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device, F16)
    twin = copy.deepcopy(model)
    fully_shard(model, mesh=torch.distributed.init_device_mesh(device.type, (1,)))
    results = []
    for each in (model, twin):
        optimizer = MasterWeights(each.parameters(), torch.optim.AdamW, lr=0.01)
        scaler = GradScaler(device.type, init_scale=2.0**10)
        for step in range(4):
            torch.manual_seed(step)
            loss = each(torch.randn(5, 8, device=device, dtype=F16)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.clip_grad_norm_(optimizer, 0.05)
            scaler.step(optimizer)
            assert scaler.step_was_skipped(optimizer) == (step == 1)
            scaler.update()
        results.append([getattr(p, "full_tensor", lambda p=p: p)() for p in each.parameters()])
        saved = get_optimizer_state_dict(each, optimizer)["state"]["0.weight"]
        assert isinstance(saved["master_param"], DTensor) == (each is model)
    for one, other in zip(*results, strict=True):
        assert_same_bits(one.detach(), other.detach())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True, dtype=BF16)


def test_what_cannot_be_stepped_is_named(device: torch.device) -> None:
    model = Sparse().to(device)
    optimizer = MasterWeights(model.named_parameters(), torch.optim.SGD, lr=0.1)
    model.table(torch.tensor([1], device=device)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the gradient of table\.weight is sparse"):
        optimizer.step()


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((FusedAdam,), {}, "FusedAdam keeps masters by itself"),
        ((dict,), {}, "optimizer_class is <class 'dict'>; it must be a class of optimizers"),
        ((), {}, "optimizer_class is None"),
        ((torch.optim.SGD,), {"master_weights": False}, "master_weights is False; it must be"),
        ((torch.optim.SGD,), {"keep_grads": 1}, "keep_grads is 1; it must be True or False"),
    ],
)
def test_wrong_arguments_get_a_sentence(args: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        MasterWeights([nn.Parameter(torch.ones(2))], *args, **options)


def test_an_optimizer_gets_masters_in_place() -> None:
    params = [nn.Parameter(torch.ones(2, dtype=F16))]
    given = torch.optim.SGD(params, lr=2.0**-12)
    assert MasterWeights(given) is given
    for _ in range(2):
        params[0].grad = torch.ones_like(params[0])
        given.step()  # Each update alone is lost in float16.
    assert params[0][0] == 1.0 - 2.0**-11
    assert MasterWeights(given) is given
    with pytest.raises(TypeError, match="MasterWeights cannot be subclassed"):
        type("Mine", (MasterWeights,), {})(params, torch.optim.SGD)
    with pytest.raises(TypeError, match="give an optimizer alone"):
        MasterWeights(torch.optim.SGD(params, lr=0.1), lr=0.1)
    watched = torch.optim.SGD(params, lr=0.1)
    torch.optim.lr_scheduler.StepLR(watched, 1)
    with pytest.raises(TypeError, match="the step of this SGD was replaced"):
        MasterWeights(watched)


def test_a_closure_is_refused_inside_a_scaler() -> None:
    params = [nn.Parameter(torch.ones(2, dtype=F16))]
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1)
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(RuntimeError, match="no closure can be given inside a GradScaler"):
        optimizer.step(lambda: 0.0)
