"""Gradients in two processes of models in DistributedDataParallel: its arguments, and how models
are used that torch alone would learn a wrong graph from.

Gradients are exact: a process has `rank + 1`.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from apex_mp import parallel

ARGUMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "delay_allreduce": {"delay_allreduce": True},
    "gradient_average": {"gradient_average": False},
    "gradient_predivide_factor": {"gradient_predivide_factor": 4.0},
    "gradient_predivide_factor, no average": {
        "gradient_predivide_factor": 4.0,
        "gradient_average": False,
    },
    "gradient_average_split_factor": {
        "gradient_average_split_factor": 4.0,
        "gradient_average": False,
    },
    "allreduce_always_fp32": {"allreduce_always_fp32": True},
    "retain_allreduce_buffers": {"retain_allreduce_buffers": True},
}


def backward(model: Any, value: float, dtype: torch.dtype = torch.float32) -> None:
    model(torch.full((1, 2), value, dtype=dtype)).sum().backward()


def weight(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False, dtype=dtype)


def gradient_with(options: dict[str, Any], rank: int) -> float:
    module = weight()
    backward(parallel.DistributedDataParallel(module, **options), rank + 1.0)
    return module.weight.grad[0, 0].item()  # type: ignore[index]


def large_half_gradient_with(options: dict[str, Any], _: int) -> float:
    """Of 40000 in both, whose sum is too large for float16."""
    module = weight(torch.float16)
    backward(parallel.DistributedDataParallel(module, **options), 40000.0, torch.float16)
    return module.weight.grad[0, 0].item()  # type: ignore[index]


def gradient_of_a_copy(options: dict[str, Any], rank: int) -> float:
    model = pickle.loads(pickle.dumps(parallel.DistributedDataParallel(weight(), **options)))
    backward(model, rank + 1.0)
    model.zero_grad()
    backward(model, rank + 1.0)  # From the first, torch has learnt the graph.
    grad: float = model.module.weight.grad[0, 0].item()
    return grad


def switched_between_forward_and_backward(rank: int) -> list[float]:
    module = weight()
    model = parallel.DistributedDataParallel(module)
    grads: list[float] = []
    for switch in (model.disable_allreduce, model.enable_allreduce) * 2:
        loss = model(torch.full((1, 2), rank + 1.0)).sum()
        switch()
        loss.backward()
        grads.append(module.weight.grad[0, 0].item())  # type: ignore[index]
    return grads


def two_backwards_of_one_forward(rank: int) -> list[float]:
    """Where they stay here both are right; so is the next one, which does not."""
    module = weight()
    model = parallel.DistributedDataParallel(module)
    model.disable_allreduce()
    loss = model(torch.full((1, 2), rank + 1.0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    grads = [module.weight.grad[0, 0].item()]  # type: ignore[index]
    model.enable_allreduce()
    backward(model, rank + 1.0)
    return [*grads, module.weight.grad[0, 0].item()]  # type: ignore[index]


# How models are used that torch alone would learn a wrong graph from, or none. Each gives the
# gradients of its steps, of which a process alone has `rank + 1`.


@dataclasses.dataclass
class Output:
    logits: Tensor


class InDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = weight()

    def forward(self, x: Tensor) -> Output:
        return Output(self.inner(x))


def grads_of_steps(module: nn.Linear, step: Callable[[int], None], steps: int = 4) -> list[float]:
    grads: list[float] = []
    for number in range(steps):
        module.zero_grad()
        step(number)
        grads.append(module.weight.grad[0, 0].item())  # type: ignore[index]
    return grads


def output_in_a_dataclass(rank: int) -> list[float]:
    net = InDataclass()
    model = parallel.DistributedDataParallel(net)
    x = torch.full((1, 2), rank + 1.0)
    return grads_of_steps(net.inner, lambda _: model(x).logits.sum().backward())


def frozen_where_backward_passes_through_first(rank: int) -> list[float]:
    """The discriminator of a GAN, while the generator is trained."""
    module = weight()
    model = parallel.DistributedDataParallel(module)

    def step(_: int) -> None:
        module.requires_grad_(False)
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        module.requires_grad_(True)
        backward(model, rank + 1.0)

    return grads_of_steps(module, step)


def unfrozen_later(rank: int) -> list[float]:
    net = nn.Sequential(weight(), nn.Linear(1, 1, bias=False))
    nn.init.ones_(net[1].weight)  # type: ignore[arg-type]
    net[0].requires_grad_(False)
    model = parallel.DistributedDataParallel(net)
    backward(model, rank + 1.0)
    net[0].requires_grad_(True)
    return grads_of_steps(net[0], lambda _: backward(model, rank + 1.0))  # type: ignore[arg-type]


def frozen_for_a_while(rank: int) -> list[float]:
    net = nn.Sequential(weight(), nn.Linear(1, 1))
    nn.init.ones_(net[1].weight)  # type: ignore[arg-type]
    model = parallel.DistributedDataParallel(net)
    for trained in (True, False, False):
        net[0].requires_grad_(trained)
        backward(model, rank + 1.0)
    net[0].requires_grad_(True)
    return grads_of_steps(net[0], lambda _: backward(model, rank + 1.0))  # type: ignore[arg-type]


def gradient_of_the_input_too(rank: int) -> list[float]:
    """A gradient penalty: torch.autograd.grad between forward and backward."""
    module = weight()
    model = parallel.DistributedDataParallel(module)

    def step(_: int) -> None:
        loss = model(torch.full((1, 2), rank + 1.0)).sum()
        x = torch.ones(1, 2, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (loss + 0.0 * grad.sum()).backward()

    return grads_of_steps(module, step)


def users_hook_after_no_sync(rank: int) -> list[float]:
    module = weight()
    model = parallel.DistributedDataParallel(module)
    model.register_comm_hook(None, allreduce_hook)

    def step(_: int) -> None:
        with model.no_sync():
            backward(model, 0.0)
        backward(model, rank + 1.0)

    return grads_of_steps(module, step)


USES = (
    output_in_a_dataclass,
    frozen_where_backward_passes_through_first,
    unfrozen_later,
    frozen_for_a_while,
    gradient_of_the_input_too,
    users_hook_after_no_sync,
)


def probes(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in ARGUMENTS.items():
        found["gradient", name] = gradient_with(options, rank)
        found["large", name] = large_half_gradient_with(options, rank)
        found["copy", name] = gradient_of_a_copy(options, rank)
    for probe in (switched_between_forward_and_backward, two_backwards_of_one_forward, *USES):
        found[probe.__name__] = probe(rank)
    return found
