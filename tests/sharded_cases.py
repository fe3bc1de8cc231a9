"""Training in two processes with parameters or optimizer state that torch shards."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from apex_mp import use_master_weights
from apex_mp.amp import GradScaler
from apex_mp.grads.found_inf import FoundInf
from apex_mp.grads.shards import agree
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedSGD, MasterWeights

WORLD, STEPS, BAD_STEP = 2, 6, 2


def net(inner: int = 17) -> nn.Module:
    torch.manual_seed(0)
    # Of two processes one has 9 rows of the first layer, and all of the last.
    return nn.Sequential(nn.Linear(6, inner), nn.Tanh(), nn.Linear(inner, 1))


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world: int,
    way: str = "unscale_",
    *,
    same_batch: bool = False,
) -> dict[str, Any]:
    """Take STEPS steps; in one of them the loss of the last process is inf.

    Args:
        model: The model.
        optimizer: Of its parameters.
        rank: Number of this process.
        world: Of how many.
        way: What becomes of gradients before the step. With "max_grad_norm" there is no scaler: the
            optimizer clips by itself.
        same_batch: All processes have the whole batch, not each its part.
    """
    parts, part = (1, 0) if same_batch else (world, rank)
    if way == "max_grad_norm":
        return train_without_scaler(model, optimizer, parts, part)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    moved, scales, norms = [], [], []
    for step in range(STEPS):
        x = torch.randn(8, 6, generator=generator).chunk(parts)[part].to(dtype)
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        if step == BAD_STEP and rank == world - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        norm = torch.zeros(())
        before = [full(param) for param in model.parameters()]
        with CommDebugMode() as calls:
            if way == "unscale_":
                scaler.unscale_(optimizer)
            elif way == "clip_grad_norm_":
                norm = scaler.clip_grad_norm_(optimizer, 0.2)
                assert type(norm) is Tensor
        if way == "unscale_":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        with CommDebugMode() as more_calls:
            scaler.step(optimizer)
            scaler.update()
        # One for each process group that a parameter is divided over, and otherwise none.
        assert all_reduces(calls) + all_reduces(more_calls) == is_divided(model)
        moved.append(
            any(
                not torch.equal(a, full(b)) for a, b in zip(before, model.parameters(), strict=True)
            )
        )
        scales.append(scaler.get_scale())
        norms.append(full(norm).item())
    params = [full(param) for param in model.parameters()]
    return {"moved": moved, "scales": scales, "norms": norms, "params": params}


def train_without_scaler(
    model: Any, optimizer: torch.optim.Optimizer, parts: int, part: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator).chunk(parts)[part]
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        with CommDebugMode() as calls:
            optimizer.step()
        assert all_reduces(calls) == is_divided(model)
    return {"params": [full(param) for param in model.parameters()]}


def all_reduces(calls: CommDebugMode) -> int:
    counts = calls.get_comm_counts().items()
    return sum(count for operator, count in counts if "reduce" in str(operator))


def is_divided(model: Any) -> bool:
    return any(
        not placement.is_replicate() and param.device_mesh.size(dim) > 1
        for param in model.parameters()
        if isinstance(param, DTensor)
        for dim, placement in enumerate(param.placements)
    )


def fully_sharded(dtype: torch.dtype, rank: int, world: int, **options: Any) -> dict[str, Any]:
    model: Any = net().to(dtype)
    if world > 1:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)
    return train(model, optimizer, rank, world)


FUSED: dict[str, Any] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "FusedAdam, max_grad_norm": lambda params: FusedAdam(
        params, lr=1e-2, eps=1e-3, master_weights=True, max_grad_norm=0.2
    ),
    "FusedAdam, masters": lambda params: FusedAdam(params, lr=1e-2, eps=1e-3, master_weights=True),
    "FusedAdam, split": lambda params: FusedAdam(
        params, lr=1e-2, eps=1e-3, master_weights="split", moment_dtype=torch.bfloat16
    ),
    "FusedSGD": lambda params: FusedSGD(params, lr=1e-2, momentum=0.9),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=1e-2),
}
# Optimizer, dtype, what becomes of gradients, and the mesh or how else it is sharded.
CASES = [
    *[(name, torch.float32, "unscale_", (WORLD,)) for name in FUSED if "max" not in name],
    ("FusedAdam, masters", torch.float16, "unscale_", (WORLD,)),
    ("FusedAdam, masters", torch.float16, "clip_grad_norm_", (WORLD,)),
    ("FusedAdam, masters", torch.float16, "step", (WORLD,)),
    ("FusedAdam, masters", torch.float16, "step", (WORLD, 1)),
    ("FusedAdam, masters", torch.float16, "clip_grad_norm_", (1, WORLD)),
    ("FusedAdam, masters", torch.bfloat16, "step", (WORLD,)),
    ("FusedAdam, split", torch.float16, "clip_grad_norm_", (WORLD,)),
    ("FusedAdam, split", torch.float16, "step", "TP"),
    ("FusedAdam, split", torch.bfloat16, "step", (1, WORLD)),
    ("FusedSGD", torch.float16, "step", (WORLD,)),
    ("FusedAdam", torch.float32, "step", "offload"),
    ("FusedAdam, masters", torch.float16, "step", "TP"),
    ("FusedAdam, masters", torch.float16, "clip_grad_norm_", "TP"),
    ("FusedAdam, masters", torch.float16, "clip_grad_norm_", "rows"),
    ("FusedAdam, max_grad_norm", torch.float16, "step", (WORLD,)),
    ("FusedAdam, max_grad_norm", torch.bfloat16, "max_grad_norm", (WORLD,)),
    ("FusedAdam, max_grad_norm", torch.bfloat16, "max_grad_norm", (1, WORLD)),
    ("FusedAdam, max_grad_norm", torch.float32, "max_grad_norm", "TP"),
    ("FusedAdam, max_grad_norm", torch.float32, "max_grad_norm", "rows"),
]


def sharded(model: Any, how: Any) -> Any:
    """Shard a model by FSDP2 over a mesh, in one dimension or as HSDP, or by rows and columns."""
    if how in ("TP", "rows"):
        mesh = init_device_mesh("cpu", (WORLD,))
        rows = RowwiseParallel(input_layouts=Replicate())
        # Sizes must be divisible. With "rows" the last layer stays plain.
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()} if how == "TP" else {"0": rows}
        return parallelize_module(model, mesh, plan)
    options: dict[str, Any] = {}
    if how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    else:
        names = ("replicate", "shard")[-len(how) :]
        options["mesh"] = init_device_mesh("cpu", how, mesh_dim_names=names)
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def fused(case: int, rank: int, world: int) -> dict[str, Any]:
    name, dtype, way, how = CASES[case]
    model: Any = net(16 if how == "TP" else 17).to(dtype)
    if world > 1:
        sharded(model, how)
    optimizer = FUSED[name](model.parameters())
    same_batch = how in ("TP", "rows")
    found = train(model, optimizer, rank, world, way, same_batch=same_batch)
    states = [optimizer.state[param] for param in model.parameters()]
    found["kinds"] = {
        type(value).__name__
        for state, param in zip(states, model.parameters(), strict=True)
        for key, value in state.items()
        if key != "step" and isinstance(value, Tensor)
        if isinstance(param, DTensor)
    }
    return found


def zero(rank: int, world: int) -> dict[str, Any]:
    model: Any = net()
    if world == 1:
        return train(model, FusedAdam(model.parameters(), lr=1e-2, eps=1e-3), rank, world)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAdam, lr=1e-2, eps=1e-3)
    return train(model, optimizer, rank, world)


ZERO_THAT_CLIPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FusedLAMB": (FusedLAMB, {"max_grad_norm": 1.0}),
    "FusedAdam": (FusedAdam, {"max_grad_norm": 0.5, "eps": 0.1}),
    "FusedAdam, not clipped": (FusedAdam, {"eps": 0.1}),
}


def zero_that_clips(name: str) -> list[Tensor]:
    """Return weights after steps by parts of the parameters in each process, and by one for all."""
    cls, options = ZERO_THAT_CLIPS[name]
    found = []
    for is_zero in (True, False):
        model = net()
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, "weight_decay": 0.1}]
        optimizer = (
            ZeroRedundancyOptimizer(groups, cls, lr=1e-2, **options)
            if is_zero
            else cls(groups, lr=1e-2, **options)
        )
        for number in range(4):
            for param in model.parameters():
                param.grad = torch.full_like(param, 10.0 ** (number % 2 - 1))
            optimizer.step()
        found.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    return found


EXPERTS = ("of its own mesh", "plain", "copies")


def norm_of_experts(kind: str, rank: int) -> tuple[float, float]:
    """Return the norm that a clip finds, and that of a sharded layer and one of each process."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ep", "edp"))
    dense = sharded(net(), (WORLD,))
    torch.manual_seed(0 if kind == "copies" else rank)
    expert = nn.Linear(6, 6)
    if kind == "of its own mesh":
        fully_shard(expert, mesh=mesh["edp"])
    optimizer = FusedAdam([*dense.parameters(), *expert.parameters()])
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for number, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = torch.full_like(param, 8.0 * (number + 1))
    own = sum(full(param.grad / 8).square().sum() for param in expert.parameters())
    whole = sum(full(param.grad / 8).square().sum() for param in dense.parameters())
    experts = 1 if kind == "copies" else WORLD
    return scaler.clip_grad_norm_(optimizer, 1.0).item(), float(whole + experts * own) ** 0.5


def sum_in_parts(rank: int) -> list[Tensor]:
    """Return weights after steps with gradients that are sums of two, and with the whole sums."""
    mesh = init_device_mesh("cpu", (WORLD,))
    found = []
    for is_partial in (True, False):
        for make in (
            lambda p: FusedAdam(p, lr=0.1, master_weights=True),
            lambda p: MasterWeights(p, torch.optim.AdamW, lr=0.1, foreach=False),
        ):
            param = nn.Parameter(DTensor.from_local(torch.ones(4).half(), mesh, [Replicate()]))
            optimizer, scaler = make([param]), GradScaler("cpu", init_scale=8.0)
            for clip in (False, True):
                scaler.scale(torch.ones(()))
                part = torch.arange(4.0).half() * (rank + 1)
                grad = DTensor.from_local(part, mesh, [Partial()])
                param.grad = grad if is_partial else grad.redistribute(placements=[Replicate()])
                if clip:
                    scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
            found.append(full(param))
    return found


def zero_in_buckets() -> tuple[Tensor, Tensor, str]:
    """Return weights with masters inside ZeRO, without buckets and in them; and what is refused."""
    weights = []
    for view in (False, True):
        model = net().bfloat16()
        with use_master_weights():
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=view
            )
            for number in range(5):
                for param in model.parameters():
                    param.grad = torch.full_like(param, 1.0 + number)
                optimizer.step()
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    try:
        MasterWeights(optimizer)
    except ValueError as error:
        return *weights, str(error)
    return *weights, "nothing"


def without_gradients(rank: int) -> list[bool]:
    """Whether each step moved this process's part, where only the first has gradients."""
    model = sharded(net(), (WORLD,))
    moved = []
    for clip in (0.0, 1.0):
        scaler, optimizer = GradScaler("cpu"), FusedAdam(model.parameters(), max_grad_norm=clip)
        for scaled in (False, True):
            optimizer.zero_grad()
            scaler.scale(torch.ones(()))
            for param in model.parameters():
                param.grad = torch.ones_like(param) if rank == 0 else None
            before = model[0].weight.to_local().clone()
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            moved.append(not torch.equal(before, model[0].weight.to_local()))
    return moved


def hooks_of_one_process(rank: int) -> list[Any]:
    """Step with a hook that edits or drops a gradient in rank 1 after a clip, or makes it inf."""
    found: list[Any] = []
    for edit in ("edit", "drop", "inf"):
        model = sharded(net(), (WORLD,))
        optimizer, scaler = FusedSGD(model.parameters(), lr=1.0), GradScaler("cpu", 256.0)
        weight = model[0].weight

        def hook(*_: Any, edit: str = edit, weight: Any = weight) -> None:
            if rank == 1 and edit == "drop":
                weight.grad = None
            elif rank == 1:
                weight.grad.to_local().mul_(2.0 if edit == "edit" else float("inf"))

        optimizer.register_step_pre_hook(hook)
        before = weight.to_local().clone()
        for param in model.parameters():
            param.grad = torch.full_like(param, 256.0)
        scaler.scale(torch.ones(()))
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            found.append(str(error))
            continue
        scaler.update()
        found.append(((before - weight.to_local()) * norm).max().item())
    return found


def overflow_of_another(rank: int) -> list[Any]:
    """Scale and skips of two optimizers, of which one has gradients, with inf, in rank 0 only."""
    found = []
    for make in (
        lambda params: MasterWeights(params, torch.optim.AdamW, lr=1e-3),
        lambda params: FusedAdam(params, lr=1e-3, master_weights=True),
    ):
        models = [sharded(net().half(), (WORLD,)) for _ in range(2)]
        optimizers = [make([*model.parameters()]) for model in models]
        scaler = GradScaler("cpu", init_scale=256.0)
        scaler.scale(torch.ones(()))
        for param in models[0].parameters():
            param.grad = torch.ones_like(param)
        for param in models[1].parameters() if rank == 0 else ():
            param.grad = torch.full_like(param, float("inf"))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        found += [scaler.get_scale(), scaler.step_was_skipped(optimizers[1])]
    return found


def agreed(rank: int) -> list[Any]:
    """Return what `agree` makes of numbers that differ, where one process lacks a gradient."""
    mesh = init_device_mesh("cpu", (WORLD,))
    params = [
        torch.ones(3),
        *[DTensor.from_local(torch.ones(2), mesh, [how]) for how in (Shard(0), Replicate())],
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)]),
    ]
    said: list[Any] = []
    for bad in (None, 0, 1):
        rows = [0, 1, 2, 3] if rank == 0 else [0, 2, 3]
        found, other = FoundInf(), FoundInf()
        grads = [torch.full((2,), 10.0**row * (1 + rank * (row % 2))) for row in rows]
        if bad == rank:
            grads[-1][0] = torch.inf
        found.check(grads, rows, len(params))
        agree(params, [found, other], sums=True, scale=1.0)
        said.append([bool(found), bool(other), *found.norms])
    return said


def misfits(rank: int) -> list[str]:
    """Return what is said of processes with other loss scales or an other order of parameters."""
    said = []
    for what in ("loss scale", "order"):
        model = sharded(net().half(), (WORLD,))
        params = [*model.parameters()]
        if what == "order" and rank == 1:
            params.reverse()
        optimizer = FusedAdam(params, master_weights=True)
        scaler = GradScaler("cpu", init_scale=2.0**8)
        if what == "loss scale":
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0 ** (8 + rank)})
        scaler.scale(model(torch.ones(4, 6).half()).float().mean()).backward()
        before = [full(param) for param in model.parameters()]
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            said.append(str(error))
        assert all(map(torch.equal, before, map(full, model.parameters())))
    return said


def misfit_of_the_last(rank: int, folder: str) -> None:
    """Be one of four processes, of which the last has another loss scale; leave what is said."""
    store = f"file://{folder}/store"
    wait = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4, timeout=wait)
    model = sharded(net(), (2, 2))
    optimizer = FusedAdam(model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0 if rank == 3 else 4.0)
    scaler.scale(model(torch.ones(4, 6)).mean()).backward()
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        with open(f"{folder}/{rank}.txt", "w") as file:
            file.write(str(error))
    dist.destroy_process_group()


def work(rank: int, folder: str) -> None:
    """Be one of the processes; leave what was found in a file."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = {
        "fp16": fully_sharded(torch.float16, rank, WORLD),
        "fp32 fused": fully_sharded(torch.float32, rank, WORLD, fused=True),
        "zero": zero(rank, WORLD),
        "fused": [fused(case, rank, WORLD) for case in range(len(CASES))],
        "misfits": misfits(rank),
        "agreed": agreed(rank),
        "without gradients": without_gradients(rank),
        "zero that clips": {name: zero_that_clips(name) for name in ZERO_THAT_CLIPS},
        "experts": {kind: norm_of_experts(kind, rank) for kind in EXPERTS},
        "sum in parts": sum_in_parts(rank),
        "zero in buckets": zero_in_buckets(),
        "overflow of another": overflow_of_another(rank),
        "hooks": hooks_of_one_process(rank),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
