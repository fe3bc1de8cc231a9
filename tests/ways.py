"""The ways to train with a loss scale, behind one interface, and what each of them lacks.

A `Way` is a row of the table: an API, the store of its masters, and an optimizer. `start` makes a
`Run` of it, with a model of three parameters. Gradients are multiples of 1/4 and scales are powers
of two, so that a scale rounds nothing: masters are those of the same optimizer over float32
parameters (`Twin`), to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fp16_cases import pull
from fused_adam_cases import without_zeros
from scale_loss_cases import Larc, PlainSgd
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter
from way_runs import APIS, RULE, Run, exact

from apex_mp import optimizers
from apex_mp.loss_scale import LossScale
from apex_mp.optimizers import MasterWeights
from apex_mp.parallel.LARC import LARC

FUSED: dict[str, functools.partial[Any]] = {
    "FusedAdam": functools.partial(optimizers.FusedAdam, lr=0.01, weight_decay=0.1),
    "FusedAdam, clipped": functools.partial(optimizers.FusedAdam, lr=0.01, max_grad_norm=0.5),
    "FusedAdam, narrow": functools.partial(
        optimizers.FusedAdam, lr=0.01, moment_dtype=torch.bfloat16
    ),
    "FusedAdamW": functools.partial(optimizers.FusedAdamW, lr=0.01),
    "FusedSGD": functools.partial(
        optimizers.FusedSGD, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "FusedAdagrad": functools.partial(optimizers.FusedAdagrad, lr=0.01, weight_decay=0.1),
    "FusedNovoGrad": functools.partial(optimizers.FusedNovoGrad, lr=0.01, weight_decay=0.1),
    "FusedLAMB": functools.partial(optimizers.FusedLAMB, lr=0.01, max_grad_norm=0.0),
}


def larc(params: Any, **options: Any) -> LARC:
    return LARC(torch.optim.SGD(params, **options))


OF_TORCH: dict[str, functools.partial[Any]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "LARC": functools.partial(larc, lr=0.01, momentum=0.9),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
}
# Not of torch: amp.init steps what has `param_groups` and `step`.
OTHERS: dict[str, Callable[..., Any]] = {
    "PlainSgd": PlainSgd,
    "Larc": lambda params: Larc(torch.optim.SGD(params, lr=0.01)),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """A row of the table.

    Attributes:
        api: A key of APIS.
        store: Where masters are: "none" (parameters are float32), "whole" or "split" (in the fused
            optimizer, or in MasterWeights), "host" (with offload), "own" (of FP16_Optimizer), "O2".
        inner: A key of FUSED, OF_TORCH or OTHERS.
    """

    api: str
    store: str
    inner: str

    def __str__(self) -> str:
        return f"{self.api}, {self.store}, {self.inner}"

    @property
    def parts(self) -> tuple[str, ...]:
        """What the cases that run by default have each of: see each_value.py."""
        kind = "fused" if self.inner in FUSED else "torch's" if self.inner in OF_TORCH else "other"
        return self.api, f"{self.api}, {self.store}, {kind}", self.inner

    def plain(self, params: Any) -> Any:
        """Make the optimizer without masters."""
        return ({**FUSED, **OF_TORCH, **OTHERS}[self.inner])(params)

    def make(self, params: Any) -> Any:
        if self.store == "host":
            return FUSED[self.inner](params, master_weights="float32", offload=True)
        if self.store not in ("whole", "split"):
            return self.plain(params)
        kind = {"whole": "float32", "split": "split"}[self.store]
        if self.inner in FUSED:
            return FUSED[self.inner](params, master_weights=kind)
        of_torch = OF_TORCH[self.inner]
        return MasterWeights(params, of_torch.func, master_weights=kind, **of_torch.keywords)

    def start(self, device: torch.device, rule: LossScale = RULE, **how: Any) -> Any:
        return APIS[self.api](self, device, rule, **how)

    def has(self, behaviour: str) -> bool:
        return not any(one.behaviour == behaviour and one.is_of(self) for one in LACKS)


_ROWS: dict[tuple[str, str], list[str]] = {
    ("GradScaler", "none"): ["FusedAdam", "FusedSGD", "FusedLAMB", "AdamW", "AdamW fused", "LARC"],
    ("GradScaler", "whole"): [*FUSED, "AdamW", "RMSprop"],
    ("GradScaler", "split"): ["FusedAdam", "FusedSGD", "AdamW", "RMSprop"],
    ("GradScaler", "host"): ["FusedAdam", "FusedSGD", "FusedLAMB"],
    ("torch's GradScaler", "none"): ["FusedAdam", "FusedSGD"],
    ("fp16_utils", "own"): [*FUSED, "AdamW", "SGD"],
    ("optimizers", "own"): ["FusedAdam", "FusedSGD", "AdamW"],
    ("amp.init", "none"): ["FusedAdam", "AdamW fused", "AdamW foreach", "Rprop", *OTHERS],
    ("OptimWrapper", "none"): ["FusedAdam", "SGD"],
    ("O1", "none"): ["FusedAdam", "FusedSGD", "AdamW", "SGD"],
    ("O2", "O2"): [*FUSED, "AdamW", "SGD", "LARC"],
}
WAYS = [Way(api, store, inner) for (api, store), inners in _ROWS.items() for inner in inners]


@dataclasses.dataclass(frozen=True)
class Lack:
    """What some ways do not have.

    Attributes:
        apis, stores, inners: Those that lack it; empty for all.
    """

    behaviour: str
    reason: str
    apis: tuple[str, ...] = ()
    inners: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    def is_of(self, way: Way) -> bool:
        fields = (way.api, self.apis), (way.inner, self.inners), (way.store, self.stores)
        return all(not names or name in names for name, names in fields)


_SCALERS = ("GradScaler", "torch's GradScaler")
_HALVES = ("fp16_utils", "optimizers")
_AMP = ("amp.init", "OptimWrapper", "O1", "O2")
_WITHOUT_HALVES = (*_SCALERS, *_AMP)

LACKS = (
    Lack("static scale", "a GradScaler's scale is dynamic", _SCALERS),
    Lack("bounds and hysteresis", "torch has none", ("torch's GradScaler",)),
    Lack("report", "torch has none", ("torch's GradScaler",)),
    Lack("report", "amp prints it, or logs it", _AMP),
    Lack("warning of skips", "torch has none", ("torch's GradScaler",)),
    Lack("copies", "`FP16_Optimizer` is saved by `state_dict` alone", _HALVES),
    Lack("closures", "torch's GradScaler refuses them", _SCALERS),
    Lack("closures", "refused, as by apex", ("OptimWrapper",)),
    Lack("no hooks in skipped steps", "a fused step learns of inf inside", _SCALERS),
    Lack(
        "whole steps or none",
        "a Ctrl-C may come between torch's step and the copy to 16-bit weights",
        ("GradScaler", *_HALVES),
        tuple(OF_TORCH),
    ),
    Lack("whole steps or none", "a Ctrl-C may come between masters and model", ("O2",)),
    Lack(
        "torch's clip",
        "torch adds up 16-bit gradients in 16 bits",
        ("GradScaler",),
        stores=("whole", "split", "host"),
    ),
    Lack("schedulers after skipped steps", "ask `scaler.step_was_skipped` first", _SCALERS),
    Lack("refused shapes", "torch loads them", _WITHOUT_HALVES, tuple(OF_TORCH)),
    Lack("refused options", "torch loads them", (), tuple(OF_TORCH)),
    Lack("torch's interface", "is no optimizer of torch", (), tuple(OTHERS)),
)


def printed() -> str:
    """Return what ways lack, as docs/works_with.md shows it."""
    kinds = {tuple(OF_TORCH): "optimizers of torch", tuple(OTHERS): "optimizers of others"}
    lines = ["| | not with | because |", "|---|---|---|"]
    for one in LACKS:
        who = ", ".join(f"`{api}`" for api in one.apis) or "any"
        who += f", masters: {', '.join(one.stores)}" if one.stores else ""
        who += f", {kinds[one.inners]}" if one.inners else ""
        lines.append(f"| {one.behaviour} | {who} | {one.reason} |")
    return "\n".join(lines)


def ways_with(*behaviours: str, one_of_each_api: bool = False) -> Any:
    """Run a test with each way that lacks none of these behaviours, or with one of each API."""
    assert {*behaviours} <= {one.behaviour for one in LACKS}
    chosen = [way for way in WAYS if all(map(way.has, behaviours))]
    if one_of_each_api:
        chosen = [*{way.api: way for way in reversed(chosen)}.values()]
    return pytest.mark.parametrize("way", chosen, ids=str)


class Twin:
    """The same optimizer over float32 parameters without a scale, which is given gradients."""

    def __init__(self, run: Run) -> None:
        self.params = [
            Parameter(master.detach().float().clone(memory_format=torch.preserve_format))
            for master in run.masters()
        ]
        self.optimizer = run.way.plain(self.params)

    def step(self, *grads: Tensor | None) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else torch.empty_like(param).copy_(grad)
        self.optimizer.step()

    def assert_is(self, run: Run, *, is_near: bool = False) -> None:
        """Demand that masters, state and rounded weights of a run are those of the twin.

        With `is_near` up to the roundings of a norm that was added up in another order.
        """
        same = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)
        same = same if is_near else assert_same_bits
        for param, master, wanted in zip(run.params, run.masters(), self.params, strict=True):
            same(master.detach(), wanted.detach())
            assert_same_bits(param.detach(), master.detach().to(param.dtype))
        states = getattr(self.optimizer, "state", {})
        for state, param in zip(run.states(), self.params, strict=True):
            wanted = without_zeros(states.get(param, {}))
            assert state.keys() == wanted.keys()
            for name, value in wanted.items():
                same(torch.as_tensor(state[name]), torch.as_tensor(value))


def grads_of(run: Run, number: int) -> list[Tensor]:
    """Return the gradients of an iteration."""
    return [exact(p.shape, 10 * number + i).to(run.device) for i, p in enumerate(run.params)]


def give(run: Run, grads: Iterable[Tensor | float | None]) -> None:
    """Run backward through a loss with these gradients; None leaves a parameter out."""
    pairs = zip(run.params, grads, strict=True)
    run.backward(pull(*((param, grad) for param, grad in pairs if grad is not None)))


def spoiled(grads: list[Tensor], value: float, where: int = -1) -> list[Tensor]:
    """Return gradients of which one number is another."""
    grads = [grad.clone() for grad in grads]
    grads[where].view(-1)[-1] = value
    return grads


def train(run: Run, twin: Twin | None, values: Iterable[float | None], first: int = 0) -> None:
    """Iterate; a value stands in a gradient, and skips the step of the twin too."""
    for number, value in enumerate(values, first):
        grads = grads_of(run, number)
        run.zero_grad()
        give(run, grads if value is None else spoiled(grads, value, number % 3))
        run.step()
        assert run.skipped == (value is not None)
        if twin is not None and value is None:
            twin.step(*grads)
