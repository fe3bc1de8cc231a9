"""Runs of one, two and four processes that save and load sharded checkpoints of each other."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apex_mp.amp import GradScaler
from apex_mp.core import tensors
from apex_mp.optimizers import FusedAdam

BEFORE, AFTER = 5, 20
WORLDS = (4, 2, 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)).half()


class Run(Stateful):
    """What a training script saves: model, optimizer with masters, loss scale, step."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.steps = rank, world, 0
        self.model: Any = net()
        if world > 1:
            # Four are two copies of two parts.
            names = ("replicate", "shard") if world == 4 else ("shard",)
            mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-2, eps=1e-3, master_weights=True)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = self.scaler.state_dict()
        return {"model": model, "optimizer": optimizer, "scaler": scaler, "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        self.scaler.load_state_dict(saved["scaler"])
        self.steps = saved["steps"]

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.steps)
            x = torch.randn(8, 6, generator=generator).chunk(self.world)[self.rank]
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(x.half()).float().square().mean()).backward()
            self.scaler.clip_grad_norm_(self.optimizer, 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.steps += 1
        return self

    def numbers(self) -> dict[str, Any]:
        """All that a step changes."""
        states = [self.optimizer.state.get(param, {}) for param in self.model.parameters()]
        names = ("exp_avg", "exp_avg_sq")
        kept = self.optimizer._own_masters.kept
        return {
            "weights": flat(self.model.parameters()),
            **{name: flat(state[name] for state in states if name in state) for name in names},
            "masters": flat(
                self.optimizer.master(param) for param in self.model.parameters() if param in kept
            ),
            "counts": [float(state["step"]) for state in states if state],
            "scale": self.scaler.state_dict(),
        }


def flat(values: Any) -> Tensor:
    rows = [tensors.whole(value).detach().flatten().float() for value in values]
    return torch.cat([torch.empty(0), *rows])


def save_and_go_on(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Save a new run, and one after BEFORE steps; take AFTER more."""
    run = Run(rank, world)
    before = run.numbers()
    dcp.save({"run": run}, checkpoint_id=f"{folder}/new{world}")
    found = {"before": before, "asked": run.numbers()}
    run.train(BEFORE)
    dcp.save({"run": run}, checkpoint_id=f"{folder}/{world}")
    if world == 1:
        parts = {"model": run.model, "optimizer": run.optimizer, "scaler": run.scaler}
        file = {name: part.state_dict() for name, part in parts.items()}
        torch.save(file, f"{folder}/file1.pt")
    else:
        # Not the group of the training, which goes on meanwhile.
        saving = dcp.async_save(
            {"run": run},
            checkpoint_id=f"{folder}/async{world}",
            process_group=dist.new_group(backend="gloo"),
        )
    found["after"] = run.train(AFTER).numbers()
    if world > 1:
        saving.result()
    return found


def load_and_go_on(rank: int, world: int, path: str) -> dict[str, Any]:
    """Load into a run that has taken steps of its own."""
    run = Run(rank, world).train(2)
    dcp.load({"run": run}, checkpoint_id=path)
    return run.train(BEFORE + AFTER - run.steps).numbers()


def from_one_process(rank: int, world: int, path: str) -> dict[str, Any]:
    """Go on from a file of an optimizer that was never sharded."""
    saved = torch.load(path)
    model = net()
    model.load_state_dict(saved["model"])
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    optimizer.load_state_dict(saved["optimizer"])
    whole_model, whole_state = copy.deepcopy(get_state_dict(model, optimizer))
    run = Run(rank, world)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=whole_model,
        optim_state_dict=whole_state,
        options=StateDictOptions(full_state_dict=True),
    )
    run.scaler.load_state_dict(saved["scaler"])
    run.steps = BEFORE
    return run.train(AFTER).numbers()


def work(rank: int, world: int, folder: str, what: str) -> None:
    """Be one of the processes; leave what was found in a file."""
    store = f"file://{folder}/store{what}{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found: dict[str, Any] = {}
    if what == "save":
        found = save_and_go_on(rank, world, folder)
    else:
        for name in [*map(str, WORLDS), "new4", "new1", "async4"]:
            found[name] = load_and_go_on(rank, world, f"{folder}/{name}")
        if world > 1:
            found["file1"] = from_one_process(rank, world, f"{folder}/file1.pt")
    torch.save(found, f"{folder}/{what}{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
