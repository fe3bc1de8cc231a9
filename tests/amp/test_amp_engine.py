"""Casts and the rest of torch: backward, checkpoints, torch.compile, TorchScript, torch.fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tolerances import assert_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex_mp import amp

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
X = torch.ones(2, 3)

# Backward.


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def assert_near_half(found: Tensor, expected: Tensor) -> None:
    """Each number went through some twenty roundings to half, of operands of its tensor's size."""
    bound = 20 * 2.0**-11 * float(expected.detach().abs().max())
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.0, atol=bound)


def grads_of(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters()]
    assert all(grad is not None and grad.dtype is F32 for grad in grads)
    return [grad for grad in grads if grad is not None]


def test_a_gradient_penalty_is_that_of_float32() -> None:
    """Double backward."""
    data = torch.randn(4, 3)

    def penalize(model: nn.Module) -> list[Tensor]:
        x = data.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        (grad.norm(dim=1) - 1).square().mean().backward()
        weight = next(model.parameters())
        assert weight.grad is not None
        return [weight.grad]

    expected = penalize(network())
    amp.init(device_type="cpu")
    for one, other in zip(penalize(network()), expected, strict=True):
        assert_near_half(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_again_what_it_computed(reentrant: bool) -> None:
    results = []
    for checkpointed in (False, True):
        amp.init(device_type="cpu")
        model, x = network(), torch.ones(2, 3, requires_grad=True)

        class Outer(nn.Module):
            def __init__(self, model: nn.Module, checkpointed: bool) -> None:
                super().__init__()
                self.model, self.checkpointed = model, checkpointed

            def forward(self, x: Tensor) -> Tensor:
                if self.checkpointed:
                    return checkpoint(self.model, x, use_reentrant=reentrant)
                return self.model(x)

        out = Outer(model, checkpointed)(x)
        (out.float().square().sum() * 2.0**10).backward()
        results.append([out, x.grad, *grads_of(model)])
    for one, other in zip(*results, strict=True):
        assert_same_bits(one.detach(), other.detach())


# torch.compile.


class Compiled(nn.Module):
    """What we wrap, what torch casts, and what is promoted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.norm = nn.Conv2d(1, 2, 3), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(F.relu(self.conv(x)).flatten(1))
        x = self.norm(x) + torch.mv(self.linear.weight.t(), x[0])[:4]
        with torch.autocast("cpu", enabled=False):
            x = x.float() * 2
        return F.log_softmax(torch.cat([x, x.half()]), 1).exp().sum(1)


IMAGES = torch.ones(2, 1, 4, 4)


def results_of(call: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    out = call(IMAGES)
    (out * out.detach()).sum().backward()
    return [out, *grads_of(model)]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["compile", "init"])
def test_a_compiled_model_computes_what_it_computes_without(first: str) -> None:
    torch._dynamo.reset()
    model = Compiled()
    uncast = model(IMAGES).detach()
    if first == "compile":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(IMAGES)
    handle = amp.init(device_type="cpu")
    if first == "init":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = results_of(model, model)
    for _ in range(2):
        for one, other in zip(results_of(compiled, model), expected, strict=True):
            assert one.dtype is other.dtype
            assert_near_half(one, other)
    handle._deactivate()
    assert_same_bits(compiled(IMAGES).detach(), uncast)


# Tracers.


def scripted_function(x: Tensor) -> Tensor:
    return F.softmax(torch.exp(x), 1).sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("verbose", [False, True])
def test_torchscript_compiles_after_init_and_gets_what_torch_casts(verbose: bool) -> None:
    before = scripted_function(X)
    handle = amp.init(device_type="cpu", verbose=verbose)
    softmax = F.softmax
    assert torch.equal(torch.jit.script(scripted_function)(X), before)
    for module in (nn.LSTM(3, 4), nn.LayerNorm(3), nn.MultiheadAttention(4, 2), nn.Softmax(1)):
        torch.jit.script(module)
    assert torch.jit.script(nn.Linear(3, 2))(X).dtype is F16
    assert F.softmax is softmax
    handle._deactivate()


def test_functional_transforms_cast() -> None:
    amp.init(device_type="cpu")
    layer = nn.Linear(3, 3)

    def loss(params: Any, x: Tensor) -> Tensor:
        return F.softmax(torch.func.functional_call(layer, params, (x,)), -1)[..., 0].sum()

    params = dict(layer.named_parameters())
    grads = torch.func.grad(loss)(params, X)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, X)
    for name, param in params.items():
        assert grads[name].dtype is F32
        assert_near_half(each[name].sum(0), grads[name])
        assert grads[name].shape == param.shape
