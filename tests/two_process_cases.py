"""Training in two processes, each with half of every batch; or in one, with all of it.

`WAYS` are the ways to train that old scripts have: who scales the loss, who sends gradients. Each
builds a `Trainer`. `train` takes the same steps with each, and one gradient of one process is
infinite in one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import ddp_cases
import torch
from ddp_cases import weight
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from apex_mp import amp, fp16_utils, optimizers, parallel, use_master_weights
from apex_mp.optimizers import FusedAdam, FusedSGD, MasterWeights

WORLD, STEPS, BATCH = 2, 8, 8
BAD_STEP = 3
SGD = {"lr": 0.2, "momentum": 0.5}
# An epsilon that leaves small gradients small: 1e-8 would make their signs of their roundings.
ADAM = {"lr": 0.05, "eps": 1e-2}
# The scale starts where the gradients of these losses do not overflow by themselves.
SCALE = {"init_scale": 2.0**10, "scale_window": 2}


@dataclasses.dataclass
class Trainer:
    """What a script does with a loss.

    Attributes:
        model: What is called.
        optimizer: Takes the steps; its groups have the float32 parameters.
        backward: Gets gradients out of a loss.
        scale: Returns the loss scale, or those of several losses.
    """

    model: Any
    optimizer: Any
    backward: Callable[[Tensor], None]
    scale: Callable[[], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def ours(model: nn.Module) -> nn.Module:
    return parallel.DistributedDataParallel(model)


def torchs(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def no_reduction(model: nn.Module) -> nn.Module:
    return model


def with_handle(model: nn.Module, wrap: Any) -> Trainer:
    handle: Any = amp.init(device_type="cpu")
    handle._default_scaler = amp.scaler.LossScaler(**SCALE)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def backward(loss: Tensor) -> None:
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    return Trainer(wrapped, optimizer, backward, lambda: handle._default_scaler.loss_scale())


def with_handle_and_reducer(model: nn.Module, _: Any) -> Trainer:
    trainer = with_handle(model, no_reduction)
    handle: Any = amp.casts.current.handle
    reducer = parallel.Reducer(model)

    def backward(loss: Tensor) -> None:
        with handle.scale_loss(loss, trainer.optimizer) as scaled_loss:
            scaled_loss.backward()
            reducer.reduce()

    return dataclasses.replace(trainer, backward=backward)


def with_wrapped_optimizer(model: nn.Module, wrap: Any) -> Trainer:
    """Two losses of two calls; or, where gradients are accumulated, two batches."""
    handle: Any = amp.init(device_type="cpu")
    wrapped = wrap(model)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), **SGD), num_loss=2)
    for index in range(2):
        optimizer._loss_scaler[index] = amp.scaler.LossScaler(**SCALE)

    def backward(loss: Tensor) -> None:
        with optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()

    def scale() -> tuple[float, ...]:
        return tuple(each.loss_scale() for each in optimizer._loss_scaler)

    return Trainer(wrapped, optimizer, backward, scale)


def with_fp16_optimizer(face: Any, make: Any) -> Callable[[nn.Module, Any], Trainer]:
    def build(model: nn.Module, wrap: Any) -> Trainer:
        model.half()
        wrapped = wrap(model)
        optimizer = face(
            make(model.parameters()),
            dynamic_loss_scale=True,
            dynamic_loss_args=SCALE,
            verbose=False,
        )

        def backward(loss: Tensor) -> None:
            optimizer.backward(loss)

        return Trainer(wrapped, optimizer, backward, lambda: optimizer.loss_scale)

    return build


def with_fp16_optimizer_and_reducer(model: nn.Module, _: Any) -> Trainer:
    build = with_fp16_optimizer(
        fp16_utils.FP16_Optimizer, lambda params: torch.optim.SGD(params, **SGD)
    )
    trainer = build(model, no_reduction)
    reducer = parallel.Reducer(model)

    def backward(loss: Tensor) -> None:
        trainer.optimizer.backward(loss, update_master_grads=False)
        reducer.reduce()
        trainer.optimizer.update_master_grads()

    return dataclasses.replace(trainer, backward=backward)


def with_larc(model: nn.Module, wrap: Any) -> Trainer:
    build = with_fp16_optimizer(
        fp16_utils.FP16_Optimizer,
        lambda params: parallel.LARC.LARC(torch.optim.SGD(params, **SGD), trust_coefficient=0.1),
    )
    return build(model, wrap)


def with_initialize(level: str, make: Any) -> Callable[[nn.Module, Any], Trainer]:
    def build(model: nn.Module, wrap: Any) -> Trainer:
        optimizer = make(model.parameters())
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic"
        )
        amp._amp_state.loss_scalers[0] = amp.scaler.LossScaler(**SCALE)
        wrapped = wrap(model)

        def backward(loss: Tensor) -> None:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

        def scale() -> float:
            return amp._amp_state.loss_scalers[0].loss_scale()

        return Trainer(wrapped, optimizer, backward, scale)

    return build


class Scaled:
    """An optimizer that is stepped by a GradScaler, which is updated in each step."""

    def __init__(self, inner: Any, scaler: Any) -> None:
        self.inner, self.scaler, self.param_groups = inner, scaler, inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.scaler.step(self.inner)
        self.scaler.update()


def with_grad_scaler(model: nn.Module, wrap: Any) -> Trainer:
    wrapped = wrap(model)
    interval = SCALE["scale_window"]
    scaler: Any = amp.GradScaler("cpu", SCALE["init_scale"], growth_interval=interval)
    optimizer = Scaled(FusedSGD(model.parameters(), **SGD), scaler)
    return Trainer(wrapped, optimizer, lambda loss: scaler.scale(loss).backward(), scaler.get_scale)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **SGD)


# name: how a model is trained, and who makes it parallel.
WAYS: dict[str, tuple[Callable[[nn.Module, Any], Trainer], Callable[[nn.Module], nn.Module]]] = {
    "amp handle": (with_handle, ours),
    "amp handle, torch's DDP": (with_handle, torchs),
    "amp handle, wrapped optimizer": (with_wrapped_optimizer, ours),
    "fp16_utils.FP16_Optimizer": (with_fp16_optimizer(fp16_utils.FP16_Optimizer, sgd), ours),
    "fp16_utils.FP16_Optimizer, torch's DDP": (
        with_fp16_optimizer(fp16_utils.FP16_Optimizer, sgd),
        torchs,
    ),
    "fp16_utils.FP16_Optimizer of FusedSGD": (
        with_fp16_optimizer(fp16_utils.FP16_Optimizer, lambda params: FusedSGD(params, **SGD)),
        ours,
    ),
    "optimizers.FP16_Optimizer": (
        with_fp16_optimizer(optimizers.FP16_Optimizer, lambda params: FusedAdam(params, **ADAM)),
        ours,
    ),
    "LARC in FP16_Optimizer": (with_larc, ours),
    "initialize O1": (with_initialize("O1", sgd), ours),
    "initialize O2": (with_initialize("O2", sgd), ours),
    "initialize O2, torch's DDP": (with_initialize("O2", sgd), torchs),
    "initialize O2 of FusedAdam": (
        with_initialize("O2", lambda params: FusedAdam(params, **ADAM)),
        ours,
    ),
    "GradScaler, torch's DDP": (with_grad_scaler, torchs),
    "amp handle, Reducer": (with_handle_and_reducer, no_reduction),
    "fp16_utils.FP16_Optimizer, Reducer": (with_fp16_optimizer_and_reducer, no_reduction),
}

# How a script keeps gradients to itself until the last of several batches. Of `no_sync` the forward
# counts: backward, in its block of scale_loss, may come after it.
FORWARD_ALONE = "no_sync of the forward"
ACCUMULATIONS = ("no_sync", "disable_allreduce", FORWARD_ALONE)


@contextlib.contextmanager
def keeping(model: Any, how: str) -> Iterator[None]:
    if how != "disable_allreduce":
        with model.no_sync():
            yield
    else:
        model.disable_allreduce()
        yield
        model.enable_allreduce()


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(steps, BATCH, 6, generator=generator)
    return [*zip(x, x[:, :, :3].argmax(dim=2), strict=True)]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), y)


def train(way: str, rank: int, world: int, accumulation: str | None = None) -> dict[str, Any]:
    """Train; return what can be compared.

    Args:
        way: A key of WAYS.
        rank: Which rows of each batch are ours: those of `rank::world`.
        world: Number of processes.
        accumulation: None: a step for each batch. Else for each two halves of one.
    """
    build, wrap = WAYS[way]
    torch.manual_seed(11 + rank)  # Parameters of rank 0 are to be everybody's.
    trainer = build(Net(), wrap)
    found: dict[str, Any] = {"scales": [], "moved": [], "rounded": [], "start": values(trainer)}
    halves = 1 if accumulation is None else 2
    for step, (x, y) in enumerate(batches()):
        trainer.optimizer.zero_grad()
        for half in range(halves):
            rows = slice(half * BATCH // halves, (half + 1) * BATCH // halves)
            loss_is_bad = step == BAD_STEP and rank == 0 and half == 0
            is_last = half == halves - 1
            with contextlib.ExitStack() as stack:
                if not is_last:
                    stack.enter_context(keeping(trainer.model, accumulation))
                loss = loss_of(trainer.model, x[rows][rank::world], y[rows][rank::world])
                if accumulation == FORWARD_ALONE:
                    stack.close()
                trainer.backward(loss / halves * (float("inf") if loss_is_bad else 1.0))
        if step == 0:
            found["grads"] = [param.grad.clone() for param in params(trainer)]
        before = values(trainer)
        trainer.optimizer.step()
        found["moved"].append(not all(map(torch.equal, before, values(trainer))))
        found["scales"].append(trainer.scale())
        weights = [*trainer.model.parameters()]
        rounded = [
            value.to(weight.dtype) for value, weight in zip(values(trainer), weights, strict=True)
        ]
        found["rounded"].append(all(map(torch.equal, weights, rounded)))
    found["end"] = values(trainer)
    if amp.casts.current.handle is not None:
        amp.casts.current.handle._deactivate()
    return found


def params(trainer: Trainer) -> list[Any]:
    """The float32 parameters that are stepped."""
    return [param for group in trainer.optimizer.param_groups for param in group["params"]]


def values(trainer: Trainer) -> list[Tensor]:
    return [param.detach().clone() for param in params(trainer)]


def runs() -> list[tuple[str, str | None]]:
    """Every way, with every accumulation that goes with it."""
    accumulating = [
        (way, how)
        for way, (_, wrap) in WAYS.items()
        for how in ACCUMULATIONS
        if wrap is ours or (wrap is torchs and how != "disable_allreduce")
    ]
    return [(way, None) for way in WAYS] + accumulating


# Ways in whose `join()` a process with fewer batches ends with what the other one has.
JOINING = [
    "amp handle",
    "amp handle, torch's DDP",
    "amp handle, wrapped optimizer",
    "fp16_utils.FP16_Optimizer",
    "fp16_utils.FP16_Optimizer, torch's DDP",
    "optimizers.FP16_Optimizer",
    "initialize O1",
    "initialize O2",
    "initialize O2, torch's DDP",
    "GradScaler, torch's DDP",
]


def joined(way: str, rank: int) -> dict[str, Any]:
    """What each process has before and after the end of `join()`."""
    build, wrap = WAYS[way]
    torch.manual_seed(11 + rank)
    trainer = build(Net(), wrap)
    with trainer.model.join():
        for x, y in batches((2, 5)[rank]):
            trainer.optimizer.zero_grad()
            trainer.backward(loss_of(trainer.model, x[rank::WORLD], y[rank::WORLD]))
            trainer.optimizer.step()
        before = values(trainer), trainer.scale()
    if amp.casts.current.handle is not None:
        amp.casts.current.handle._deactivate()
    model = [param.detach().clone() for param in trainer.model.parameters()]
    return {"before": before, "after": (values(trainer), trainer.scale()), "model": model}


KEPT: dict[str, Callable[[Any], Any]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, master_weights=True),
    "FusedAdam, whole": lambda params: FusedAdam(params, lr=0.01, master_weights="float32"),
    "MasterWeights": lambda params: MasterWeights(params, torch.optim.AdamW, lr=0.01),
    "MasterWeights, split": lambda params: MasterWeights(
        params, torch.optim.AdamW, lr=0.01, master_weights="split"
    ),
}


def kept_masters(rank: int) -> dict[str, list[list[Tensor]]]:
    """Masters beside an optimizer: before the end of `join()`, and after it.

    The first process has no batch, so that it has no masters either.
    """
    found = {}
    for name, make in KEPT.items():
        torch.manual_seed(11)
        model = nn.parallel.DistributedDataParallel(Net().bfloat16())
        optimizer = make(model.parameters())

        def masters(model: Any = model, optimizer: Any = optimizer) -> list[Tensor]:
            return [optimizer._own_masters.whole_of(param) for param in model.parameters()]

        with model.join():
            for x, y in batches((0, 3)[rank]):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
            found[name] = [masters()]
        found[name].append(masters())
    return found


def originals_of_own_seed(rank: int) -> list[Tensor]:
    """Weights and masters of a model that was float32 when its optimizer was made, by seed."""
    torch.manual_seed(11 + rank)
    with use_master_weights():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        model = nn.parallel.DistributedDataParallel(net.bfloat16())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    store: Any = optimizer
    masters = [store._own_masters.whole_of(param) for param in model.parameters()]
    return [*(param.detach().float() for param in model.parameters()), *masters]


def masters_in_one_process_only(rank: int) -> str:
    module = weight(torch.float16)
    optimizer = None
    if rank == 0:
        optimizer = fp16_utils.FP16_Optimizer(sgd(module.parameters()), verbose=False)
    try:
        parallel.DistributedDataParallel(module)
    except RuntimeError as error:
        return str(error)
    return f"{optimizer} was not missed"


def overflow_in_one_shard(rank: int) -> list[Any]:
    """Whether a step of a DTensor was skipped, for an overflow in one process and then none."""
    mesh = init_device_mesh("cpu", (WORLD,))
    param = nn.Parameter(distribute_tensor(torch.ones(WORLD, 2), mesh, [Shard(0)]))
    optimizer, handle = torch.optim.SGD([param], lr=0.5), amp.init(loss_scale=4.0)
    found: list[Any] = []
    for first in (float("inf"), 4.0):
        grad = torch.full((WORLD, 2), 4.0)
        grad[0] = first
        with handle.scale_loss(torch.zeros((), requires_grad=True), optimizer):
            param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()
        found += [amp.step_was_skipped(optimizer), param.to_local().tolist()]  # type: ignore[attr-defined]
    handle._deactivate()
    return found


def averages_of_a_model(rank: int) -> dict[str, list[Tensor]]:
    torch.manual_seed(rank)
    net = Net()
    reducer = parallel.Reducer(net)
    net(torch.randn(4, 6)).sum().backward()
    theirs = [param.grad.clone() for param in net.parameters()]  # type: ignore[union-attr]
    for grad in theirs:
        dist.all_reduce(grad)
        grad /= WORLD
    reducer.reduce()
    params = [param.detach() for param in net.parameters()]
    return {"ours": [param.grad for param in net.parameters()], "torch's": theirs, "params": params}  # type: ignore[misc]


def probes(rank: int) -> dict[str, Any]:
    found = ddp_cases.probes(rank)
    for probe in (
        overflow_in_one_shard,
        averages_of_a_model,
        masters_in_one_process_only,
        kept_masters,
        originals_of_own_seed,
    ):
        found[probe.__name__] = probe(rank)
    for way in JOINING:
        found["joined", way] = joined(way, rank)
    return found


def work(rank: int, folder: str) -> None:
    """Be one of the processes: train in every way, and save what was found."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    found: dict[Any, Any] = {}
    for way, how in runs():
        try:
            found[way, how] = train(way, rank, WORLD, how)
        except Exception as error:  # The other tests are to say what they have to say.
            raise RuntimeError(f"{way}, {how}") from error
    found["probes"] = probes(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # An exit with gloo's threads about aborts now and then.
