"""accelerate in two processes over gloo: when one has an inf, both skip the same step."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from accelerate import Accelerator
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.cpu_only

WORLD, STEPS, BAD_STEP, BAD_RANK = 2, 6, 2, 1


def train(accelerator: Any, optimizer_class: Any, *, half: bool, clip: bool) -> dict[str, Any]:
    """Train with this process's half of each batch; the loss of one rank is inf once."""
    trained = tasks.model()
    options = {"master_weights": True} if half else {}
    trained = trained.half() if half else trained
    accelerator._optimizers.clear()
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    attach_scaler(accelerator, scaler)
    optimizer = optimizer_class(trained.parameters(), tasks.LR, **options)
    wrapped, optimizer, scheduler = accelerator.prepare(
        trained, optimizer, StepLR(optimizer, 1, gamma=0.5)
    )
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    rank = accelerator.process_index
    found: dict[str, Any] = {"skipped": [], "rates": [], "scales": [], "own_losses": []}
    for step, batch in enumerate(tasks.batches(STEPS)):
        loss = tasks.loss_of(wrapped, tuple(each[rank::WORLD] for each in batch))
        found["own_losses"].append(loss.item())
        accelerator.backward(loss * (math.inf if (step, rank) == (BAD_STEP, BAD_RANK) else 1.0))
        if clip:
            accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found["skipped"].append(accelerator.optimizer_step_was_skipped)
        found["rates"].append(scheduler.get_last_lr()[0])
        found["scales"].append(scaler.get_scale())
    found["weights"] = [param.detach() for param in trained.parameters()]
    return found


RUNS = {
    "half, fused": (FusedAdam, {"half": True, "clip": False}),
    "half, fused, clipped": (FusedAdam, {"half": True, "clip": True}),
    "float32, fused, clipped": (FusedAdam, {"half": False, "clip": True}),
    "float32, torch's, clipped": (torch.optim.AdamW, {"half": False, "clip": True}),
}


def work(rank: int, folder: str) -> None:
    """Be one of the processes: train in every way, and save what was found."""
    # What torchrun sets for accelerate; the processes find each other by a file.
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    accelerator = Accelerator(cpu=True)
    found = {name: train(accelerator, make, **options) for name, (make, options) in RUNS.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # An exit with gloo's threads about aborts now and then.


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(WORLD)]


each_run = pytest.mark.parametrize("run", RUNS)


@each_run
def test_both_ranks_skip_the_step_in_which_one_has_an_inf(
    run: str, found: list[dict[str, Any]]
) -> None:
    for rank in range(WORLD):
        of_rank = found[rank][run]
        assert of_rank["skipped"] == [step == BAD_STEP for step in range(STEPS)]
        rates = of_rank["rates"]
        assert [before == after for before, after in itertools.pairwise(rates)] == [
            step == BAD_STEP for step in range(1, STEPS)
        ]
        scales = of_rank["scales"]
        assert scales[BAD_STEP] == scales[BAD_STEP - 1] / 2


@each_run
def test_both_ranks_end_with_the_same_scales_and_the_same_bits(
    run: str, found: list[dict[str, Any]]
) -> None:
    mine, other = (found[rank][run] for rank in range(WORLD))
    assert mine["scales"] == other["scales"]
    assert mine["own_losses"] != other["own_losses"]  # They have had other data.
    assert all(map(torch.equal, mine["weights"], other["weights"]))
    start = tasks.model().parameters()
    assert not any(
        torch.equal(a.to(b.dtype), b) for a, b in zip(start, mine["weights"], strict=True)
    )
