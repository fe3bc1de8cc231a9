"""The table of a GradScaler's iteration, and gradients that wait for their step over an update."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from grad_scaler_cases import OF_TORCH, OURS, new_scaler
from torch import nn
from torch.amp.grad_scaler import OptState

from apex_mp.amp import GradScaler
from apex_mp.amp._grad_scaler.iteration import Iteration
from apex_mp.amp._stages import TABLE, Event, Refused, Stage
from apex_mp.core import readback

PAGE = Path(__file__).parents[2] / "docs" / "how_it_works.md"
OF_SCALE_LOSS = {Stage.IN_BLOCK, Stage.LEFT_SCALED}
MAKES = {**OURS, **OF_TORCH}
each_optimizer = pytest.mark.parametrize("make", MAKES.values(), ids=[*MAKES])


def printed() -> str:
    """Return the table as a page shows it."""
    lines = ["| stage | gradients are | " + " | ".join(f"`{each.value}`" for each in Event) + " |"]
    lines.append("|" + "---|" * (2 + len(Event)))
    for stage in Stage:
        cells = []
        for event in Event:
            following = TABLE.get((stage, event), stage)
            refused = isinstance(following, Refused)
            cells.append("refused" if refused else "" if following is stage else following.name)
        lines.append(f"| {stage.name} | {stage.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_page_shows_the_table() -> None:
    print(printed())
    assert printed() in PAGE.read_text()


def test_every_refusal_names_the_optimizer_or_the_method() -> None:
    for (_, event), following in TABLE.items():
        if isinstance(following, Refused):
            sentence = following.text.format(call=event.value, owner="Adam", scale=8.0)
            assert "Adam" in sentence or f"{event.value.split('.')[-1]}" in sentence


@pytest.mark.every_case
@pytest.mark.parametrize("event", [each for each in Event if each is not Event.BLOCK])
@pytest.mark.parametrize("stage", [each for each in Stage if each not in OF_SCALE_LOSS])
def test_an_iteration_follows_the_table(stage: Stage, event: Event) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    iteration = Iteration(optimizer)
    iteration._versions.record(optimizer.param_groups[0]["params"])
    iteration.enter(stage)
    following = TABLE.get((stage, event), stage)
    if isinstance(following, Refused):
        with pytest.raises(RuntimeError) as caught:
            iteration.after(event)
        assert str(caught.value) == following.text.format(call=event.value, owner="SGD")
        following = stage
    else:
        iteration.enter(iteration.after(event))
    assert iteration.stage is following
    of_torch = {Stage.UNSCALED, Stage.MIXED}, {Stage.STEPPED}
    names = (OptState.UNSCALED, OptState.STEPPED)
    expected = [name for stages, name in zip(of_torch, names, strict=True) if following in stages]
    assert iteration["stage"] is (expected or [OptState.READY])[0]


def test_what_a_subclass_writes_into_the_dict_of_torch_counts(device: torch.device) -> None:
    """As Composer's scaler, which makes an optimizer READY once more."""
    model = nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = new_scaler(device)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.scale(model(torch.ones(2, 2, device=device)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    assert model.bias.grad.item() == 2.0 / 1024.0
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer)


# --- Gradients that wait for their step over an update.


def loss_of(model: nn.Module, factor: float) -> torch.Tensor:
    weight = next(model.parameters())
    loss: torch.Tensor = (model(torch.ones(2, 4, device=weight.device)) * factor).pow(2).mean()
    return loss


def train(scaler: Any, make: Any, way: str, device: torch.device) -> nn.Module:
    """Step one optimizer twice, the other once, with gradients of the first iteration."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4).to(device) for _ in range(2)]
    optimizers = [make(model.parameters()) for model in models]

    def iteration(factor: float, waiting: bool) -> None:
        losses = [loss_of(model, factor) for model in models]
        for optimizer in optimizers if waiting else optimizers[:1]:
            optimizer.zero_grad()
        scaler.scale(sum(losses) if waiting else losses[0]).backward()

    for number, waiting in enumerate([True, True, False, False]):
        iteration(1.0 + number, waiting)
        scaler.step(optimizers[0])
        if number in (0, 3):
            if way == "clip_grad_norm_":
                scaler.clip_grad_norm_(optimizers[1], 0.1)
            elif way == "unscale_":
                scaler.unscale_(optimizers[1])
                torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
            scaler.step(optimizers[1])
        scaler.update()
    return models[1]


@pytest.mark.every_case
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", ["step", "clip_grad_norm_", "unscale_"])
@each_optimizer
def test_gradients_that_wait_are_divided_by_their_own_scale(
    make: Any, way: str, device: torch.device
) -> None:
    """The scale doubles in each of the two updates that they wait for."""
    scaled = train(new_scaler(device, init_scale=8.0, growth_interval=1), make, way, device)
    expected = train(new_scaler(device, init_scale=8.0, growth_interval=100), make, way, device)
    for param, wanted in zip(scaled.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, wanted)


def sane_program(rng: random.Random, count: int) -> list[tuple[str, Any, float]]:
    """Return calls in a right order: what is stepped, unscaled or clipped is cleared after it."""
    program: list[tuple[str, Any, float]] = [("backward", range(count), 1.0)]
    program += [("step", which, 0.0) for which in range(count)] + [("update", None, 0.0)]
    stages = ["used"] * count
    for _ in range(rng.randint(8, 60)):
        call = rng.choices(
            ["zero", "backward", "clip_grad_norm_", "unscale_", "step", "update"],
            [2, 8, 2, 1, 6, 6],
        )[0]
        value, which = rng.choice([0.5, 1.0, 2.0]), rng.randrange(count)
        if call == "backward":
            reached = rng.sample(range(count), rng.randint(1, count))
            reached = [each for each in reached if stages[each] in ("clean", "scaled")]
            if reached:
                program.append((call, reached, value))
                stages = ["scaled" if n in reached else stage for n, stage in enumerate(stages)]
        elif call == "update" and "stepped" in stages:
            program.append((call, None, value))
            stages = [stage if stage in ("clean", "scaled") else "used" for stage in stages]
        else:
            before, after = {
                "zero": (("used", "scaled"), "clean"),
                "clip_grad_norm_": (("scaled",), "clipped"),
                "unscale_": (("scaled",), "unscaled"),
                "step": (("scaled", "clipped", "unscaled"), "stepped"),
                "update": ((), ""),
            }[call]
            if stages[which] in before:
                program.append((call, which, value))
                stages[which] = after
    return program


def carry_out(
    program: list[tuple[str, Any, float]], makes: list[Any], interval: int, device: torch.device
) -> tuple[list[nn.Module], int]:
    """Return the models, and how many calls there were before the first warning of two scales."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 2).to(device) for _ in makes]
    optimizers = [make(model.parameters()) for make, model in zip(makes, models, strict=True)]
    scaler = new_scaler(device, init_scale=8.0, growth_interval=interval)
    for number, (call, which, value) in enumerate(program):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if call == "backward":
                scaler.scale(sum(loss_of(models[each], value) for each in which)).backward()
            elif call == "zero":
                optimizers[which].zero_grad(set_to_none=value > 0.5)
            elif call == "update":
                scaler.update()
            else:
                arguments = (0.1,) if call == "clip_grad_norm_" else ()
                getattr(scaler, call)(optimizers[which], *arguments)
            readback.wait()
        if any("sums of two scales" in str(each.message) for each in caught):
            return models, number
    return models, len(program)


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(40))
def test_weights_do_not_depend_on_a_scale_that_changes(seed: int, device: torch.device) -> None:
    """Up to a warning, several optimizers train as with one scale: powers of 2 change no digit."""
    rng = random.Random(seed)
    makes = rng.sample([*OURS.values(), *OF_TORCH.values()], rng.choice([2, 3]))
    program = sane_program(rng, len(makes))
    _, end = carry_out(program, makes, 1, device)
    scaled, _ = carry_out(program[:end], makes, 1, device)
    expected, _ = carry_out(program[:end], makes, 10**6, device)
    for model, wanted in zip(scaled, expected, strict=True):
        for pair in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(*pair)


@pytest.mark.parametrize("host_knows", [True, False])
def test_what_was_added_to_zeros_and_waits_is_not_taken_for_gradients_of_the_next_scale(
    host_knows: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host does not know that gradients were 0 before an update."""
    if not host_knows:
        monkeypatch.setattr(Iteration, "_are_zero", lambda _: False)
    first, second = 0, 1
    program: list[tuple[str, Any, float]] = [
        *sane_program(random.Random(), 2)[:4],
        ("zero", second, 0.0),
        *[("backward", [first], 1.0), ("step", first, 0.0), ("update", None, 0.0)],
        *[("backward", [first, second], 1.0), ("step", first, 0.0), ("update", None, 0.0)],
    ]
    step = ("step", second, 0.0)
    summed = [*program, ("backward", [first, second], 1.0), step]
    _, end = carry_out(summed, [OF_TORCH["SGD"]] * 2, 1, device)
    assert end == len(summed) - 1  # There it warns.
    _, end = carry_out([*program, step], [OF_TORCH["SGD"]] * 2, 1, device)
    assert end == len(program) + (device.type == "cpu" and host_knows)


def test_a_parameter_that_was_replaced_is_freed_though_its_gradient_has_waited(
    device: torch.device,
) -> None:
    models = [nn.Linear(4, 2).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = new_scaler(device, init_scale=8.0)
    for stepped in (optimizers, optimizers[:1], optimizers):
        scaler.scale(sum(loss_of(model, 1.0) for model in models)).backward()
        for optimizer in stepped:
            scaler.step(optimizer)
        scaler.update()
    alive = weakref.ref(models[1].weight)
    new = models[1].weight = nn.Parameter(torch.ones(2, 4, device=device))
    optimizers[1].param_groups[0]["params"][0] = new
    gc.collect()
    assert alive() is None


@each_optimizer
def test_gradients_that_were_replaced_have_the_present_scale(
    make: Any, device: torch.device
) -> None:
    model = nn.Linear(4, 4).to(device)
    twin = copy.deepcopy(model)
    optimizer, expected = make(model.parameters()), make(twin.parameters())
    other = torch.optim.SGD([nn.Parameter(torch.ones(1, device=device))], lr=0.1)
    scaler = new_scaler(device, init_scale=8.0, growth_interval=1)
    (watched,) = other.param_groups[0]["params"]
    for waits in (False, True, False):
        for each in (model, twin):
            each.zero_grad()
        scaler.scale(loss_of(model, 1.0) + watched.sum()).backward()
        if waits:
            for param in model.parameters():  # As of another loss, scaled by hand.
                assert param.grad is not None
                param.grad = param.grad.clone()
        scaler.step(other)
        if not waits:
            loss_of(twin, 1.0).backward()
            scaler.step(optimizer)
            expected.step()
        scaler.update()
    for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, wanted)


# --- What the constructor, `step` and `load_state_dict` are given.


@pytest.mark.parametrize("device", ["gpu", "CPU", "mps", "xpu", None, 3])
def test_another_device_is_refused(device: Any) -> None:
    wish = r'GradScaler: device is .*; it must be "cuda" or "cpu"'
    with pytest.raises(ValueError, match=wish):
        GradScaler(device)
    assert not GradScaler(device, enabled=False).is_enabled()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_may_be_an_object_and_have_an_index(device: Any) -> None:
    assert repr(GradScaler(device)).startswith("GradScaler('cpu', scale=65536.0")


@pytest.mark.parametrize("processes", [1, 2])
def test_what_fsdp1_has_divided_is_refused_by_name(
    processes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    weight = nn.Parameter(torch.ones(2, device=device))
    weight._fsdp_flattened = True  # type: ignore[attr-defined]
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), new_scaler(device)
    weight.grad = torch.ones_like(weight)
    if processes == 1:
        scaler.step(optimizer)
        return
    with pytest.raises(RuntimeError, match="SGD steps parameters of a FullyShardedDataParallel"):
        scaler.step(optimizer)


@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
def test_the_first_loss_that_was_not_scaled_gets_the_sentence_of_later_ones(
    call: str, device: torch.device
) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler(device.type)
    weight.sum().backward()
    arguments = (1.0,) if call == "clip_grad_norm_" else ()
    with pytest.raises(AssertionError) as caught:
        getattr(scaler, call)(optimizer, *arguments)
    assert str(caught.value).endswith(
        f"GradScaler.{call}: scaler.scale(loss) was not called before, but the gradients of SGD "
        "are divided by the scale, 65536. Call scaler.scale(loss).backward() in each iteration, "
        "and scaler.update() once at its end"
    )
    assert f"Attempted {call} but _scale is None" in str(caught.value)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            {"loss_scale": 8.0, "unskipped": 3},
            ValueError,
            r"keys \['scale', 'growth_factor', 'backoff_factor', 'growth_interval', "
            r"'_growth_tracker'\] are missing; the dict has \['loss_scale', 'unskipped'\]",
        ),
        ({"scale": 8.0}, ValueError, r"keys \['growth_factor', .*'_growth_tracker'\] are missing"),
        ([1], TypeError, r"GradScaler\.load_state_dict: .* is a list"),
    ],
)
def test_the_state_of_something_else_is_named(
    state: Any, error: type[Exception], message: str, device: torch.device
) -> None:
    scaler = new_scaler(device, min_scale=2.0)
    before = scaler.state_dict()
    with pytest.raises(error, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
