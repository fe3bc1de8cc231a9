"""SyncBatchNorm of two processes on the CPU: a batch norm over the batches of both."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from apex_mp.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

WORLD = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A module, how often it trains, and the shapes of what each process gives it."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    steps: int = 1
    adds: bool = False
    group_size: int = 0

    def module(self) -> SyncBatchNorm:
        torch.manual_seed(5)
        norm = SyncBatchNorm(3, **self.options)
        if norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        return norm.double() if self.dtype == torch.float64 else norm

    def inputs(self, rank: int) -> list[Tensor]:
        torch.manual_seed(100 + rank)
        made = [torch.randn(self.shapes[rank]) * (1 + rank) + rank for _ in range(3)]
        return [tensor.to(self.dtype) for tensor in made]


CASES = {
    "images": Case(((4, 3, 2, 2), (4, 3, 2, 2))),
    "batches of different sizes": Case(((5, 3, 2, 2), (2, 3, 2, 2))),
    "an empty batch": Case(((4, 3, 2), (0, 3, 2))),
    "one value each": Case(((1, 3), (1, 3))),
    "vectors": Case(((4, 3), (3, 3))),
    "channels last": Case(((4, 2, 2, 3), (2, 2, 2, 3)), {"channel_last": True}),
    "relu and a summand": Case(((4, 3, 2, 2), (2, 3, 2, 2)), {"fuse_relu": True}, adds=True),
    "no weight": Case(((4, 3), (3, 3)), {"affine": False}),
    "no running statistics": Case(((4, 3), (3, 3)), {"track_running_stats": False}),
    "cumulative statistics": Case(((4, 3), (3, 3)), {"momentum": None}, steps=3),
    "three steps": Case(((4, 3), (3, 3)), {"momentum": 0.3}, steps=3),
    "float32": Case(((4, 3, 2), (3, 3, 2)), dtype=torch.float32),
    "float16": Case(((4, 3, 2), (3, 3, 2)), dtype=torch.float16),
    "a group of both": Case(((4, 3), (3, 3)), group_size=2),
    "each alone": Case(((4, 3), (3, 3)), group_size=1),
}


def train(norm: nn.Module, case: Case, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Take the case's steps; of the last one all results."""
    x, z, grad = inputs
    for _ in range(case.steps):
        norm.zero_grad()
        x = x.detach().requires_grad_()
        out = norm(x, z) if case.adds else norm(x)
        out.backward(grad)
    assert x.grad is not None
    found = {"out": out.detach(), "grad": x.grad, **norm.state_dict()}
    grads = {f"{name}.grad": param.grad for name, param in norm.named_parameters()}
    return found | {name: value for name, value in grads.items() if value is not None}


def second_backward(rank: int) -> list[Any]:
    """Gradients that two backward passes of a forward each leave, and what a third raises."""
    module = nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(module)
    for _ in range(2):
        out = model(torch.full((1, 2), float(rank)))
        (out.sum() + out.sum()).backward(retain_graph=True)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return [module.weight.grad, str(error)]
    return [module.weight.grad, ""]


def work(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        norm = case.module()
        norm.process_group = create_syncbn_process_group(case.group_size)
        found[name] = train(norm, case, case.inputs(rank))
        with torch.no_grad():
            found[f"{name}, evaluated"] = norm.eval()(case.inputs(0)[0])
    norm = SyncBatchNorm(3)
    try:
        norm(torch.ones(1 - rank, 3))
    except ValueError as error:
        found["refusal"] = str(error)
    converted: Any = convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3)))
    found["converted"] = converted(torch.full((2, 3), float(rank))).detach()
    model = DistributedDataParallel(convert_syncbn_model(CASES["vectors"].module()))
    found["parallel"] = train(model, CASES["vectors"], CASES["vectors"].inputs(rank))
    found["second backward"] = second_backward(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # An exit with gloo's threads about aborts now and then.


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sync")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def joined(case: Case) -> list[dict[str, Any]]:
    """What one process computes that has the batches of a group, cut into those of each."""
    inputs = [case.inputs(rank) for rank in range(WORLD)]
    if case.group_size == 1:
        return [train(case.module(), case, mine) for mine in inputs]
    whole = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    results = train(case.module(), case, whole)
    sizes = [shape[0] for shape in case.shapes]
    parts = {name: results[name].split(sizes) for name in ("out", "grad")}
    return [results | {name: parts[name][rank] for name in parts} for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one_batch_norm_over_both_batches(
    name: str, found: list[dict[str, Any]]
) -> None:
    case = CASES[name]
    wanted = joined(case)
    for rank in range(WORLD):
        mine = found[rank][name]
        assert mine.keys() == wanted[rank].keys()
        for key in {*mine} - {"weight.grad", "bias.grad"}:
            torch.testing.assert_close(
                mine[key], wanted[rank][key], msg=lambda m, k=key: f"{k} {m}"
            )
    # A process has its share of these: DistributedDataParallel adds them.
    for key in ("weight.grad", "bias.grad"):
        if key in wanted[0]:
            shares = [found[rank][name][key] for rank in range(WORLD)]
            whole = [one[key] for one in wanted]
            sum_wanted = sum(whole) if case.group_size == 1 else whole[0]
            torch.testing.assert_close(sum(shares), sum_wanted)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_each_process_for_itself(name: str, found: list[dict[str, Any]]) -> None:
    case = CASES[name]
    norm = case.module()
    norm.load_state_dict(
        {key: found[1][name][key] for key in norm.state_dict()}  # of what it has learnt
    )
    with torch.no_grad():
        wanted = norm.eval()(case.inputs(0)[0])
    torch.testing.assert_close(found[1][f"{name}, evaluated"], wanted)


def test_a_converted_model_of_two_processes_runs_on_the_cpu(found: list[dict[str, Any]]) -> None:
    for rank, sign in enumerate((-1.0, 1.0)):
        torch.testing.assert_close(
            found[rank]["converted"], torch.full((2, 3), sign), atol=1e-4, rtol=0.0
        )


def test_distributed_data_parallel_takes_it_and_averages_weight_and_bias(
    found: list[dict[str, Any]],
) -> None:
    (wanted, _) = joined(CASES["vectors"])
    for rank in range(WORLD):
        mine = found[rank]["parallel"]
        for key in ("weight.grad", "bias.grad"):
            torch.testing.assert_close(mine[f"module.{key}"], wanted[key] / WORLD)
    torch.testing.assert_close(found[0]["parallel"]["grad"], wanted["grad"])


def test_a_second_backward_through_one_forward_is_refused_and_not_left_unaveraged(
    found: list[dict[str, Any]],
) -> None:
    for rank in range(WORLD):
        grad, refusal = found[rank]["second backward"]
        assert grad.tolist() == [[2.0, 2.0]]
        assert refusal.startswith(
            "DistributedDataParallel: this is a second backward through one forward"
        )
