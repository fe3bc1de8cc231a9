"""Several models, losses and optimizers: what an overflow of one of them skips, at every level.

As in apex's own tests of 2019, inf is written into the gradient of one model in the block of one
loss. The optimizers of that block skip their step, others go on, and only the scale of that loss
backs off. All numbers are small multiples of powers of two, so that weights are equal to those of a
float32 program that leaves the same steps out, to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex_mp import amp

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

STEPS, BAD_STEP, SCALE = 4, 1, 2.0**16
X = torch.ones(4)


class Model(nn.Module):
    def __init__(self, unique: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(unique + torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).mean(0)


@dataclasses.dataclass(frozen=True)
class Program:
    """Who belongs to whom, by number.

    Attributes:
        losses: The models whose outputs each loss adds up.
        optimizers: The models of each optimizer.
        blocks: The optimizers that the block of each loss is given.
    """

    losses: tuple[tuple[int, ...], ...]
    optimizers: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]


PROGRAMS = {
    "two models, one optimizer": Program(((0,), (1,)), ((0, 1),), ((0,), (0,))),
    "a shared model, one optimizer": Program(((0, 2), (1, 2)), ((0, 1, 2),), ((0,), (0,))),
    "two optimizers": Program(((0,), (1,)), ((0,), (1,)), ((0,), (1,))),
    "a shared model, two optimizers": Program(((0, 1), (2, 1)), ((0, 1), (2,)), ((0,), (0, 1))),
}
# Each loss of each program, and each model in it.
PLACES = [
    (name, loss, model)
    for name, program in PROGRAMS.items()
    for loss, models in enumerate(program.losses)
    for model in models
]


def models_of(program: Program) -> list[Model]:
    return [Model(number + 1) for number in sorted({*itertools.chain(*program.losses)})]


def optimizers_of(program: Program, models: list[Any]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(
            [{"params": models[number].parameters(), "lr": 0.25 * 2**number} for number in numbers],
            lr=0.5,
            momentum=0.5,
        )
        for numbers in program.optimizers
    ]


def loss_of(models: list[Any], numbers: tuple[int, ...]) -> Tensor:
    # A quarter: 2**16 does not fit float16, into which the gradient of an output is cast.
    return torch.stack([models[number](X).float() for number in numbers]).sum() / 4.0


def expected(program: Program, bad_loss: int | None) -> list[Tensor]:
    """Train in float32, and leave out the steps that are to be skipped."""
    models = models_of(program)
    optimizers = optimizers_of(program, models)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for numbers in program.losses:
            loss_of(models, numbers).backward()
        for number, optimizer in enumerate(optimizers):
            is_bad = step == BAD_STEP and bad_loss is not None
            if not (is_bad and number in program.blocks[bad_loss or 0]):
                optimizer.step()
    return [model.weight.detach() for model in models]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("own_scales", [True, False])
@pytest.mark.parametrize(("name", "bad_loss", "bad_model"), [*PLACES, (*PLACES[0][:1], None, None)])
def test_the_optimizers_of_the_block_skip_and_others_go_on(
    name: str, bad_loss: int | None, bad_model: int | None, own_scales: bool, level: str
) -> None:
    program = PROGRAMS[name]
    models: list[Any] = list(models_of(program))
    optimizers = optimizers_of(program, models)
    models, optimizers = amp.initialize(
        models,
        optimizers,
        opt_level=level,
        loss_scale="dynamic",
        num_losses=len(program.losses) if own_scales else 1,
        verbosity=0,
    )
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss_id, (numbers, block) in enumerate(
            zip(program.losses, program.blocks, strict=True)
        ):
            loss = loss_of(models, numbers)
            of_block = [optimizers[number] for number in block]
            with amp.scale_loss(loss, of_block, loss_id=loss_id * own_scales) as scaled_loss:
                scaled_loss.backward()
                if step == BAD_STEP and loss_id == bad_loss:
                    models[bad_model].weight.grad[0] = torch.inf
        for optimizer in optimizers:
            optimizer.step()
    masters = {id(each): each for each in itertools.chain(*map(amp.master_params, optimizers))}
    wanted = expected(program, bad_loss)
    for model, weight in zip(models, wanted, strict=True):
        assert torch.equal(model.weight.detach().float(), weight)
    for master, weight in zip(masters.values(), wanted, strict=True):
        assert torch.equal(master.detach().float(), weight)
    scales = [state["loss_scale"] for state in amp.state_dict().values()]
    if own_scales:
        assert scales == [SCALE / 2 if number == bad_loss else SCALE for number in (0, 1)]
    else:
        assert scales == [SCALE if bad_loss is None else SCALE / 2]
