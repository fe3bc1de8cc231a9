"""What the tests of optimizers that are a rule of the engine share: one row each, and one check."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import reference
import torch
from tolerances import TOLERANCES, assert_near
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdagrad, FusedLAMB, FusedNovoGrad

# Odd sizes; a scalar, none, and more than a chunk: 16,384 numbers.
SHAPES = ((5,), (4, 3), (), (1,), (0, 3), (16_387,), (3, 11_003))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A fused optimizer.

    Attributes:
        fused: The class.
        reference: Steps one parameter in float64; its fields are `param` and the names of state.
        options: No default among them, so that each has an effect.
        modes: Options that choose another formula.
    """

    fused: type[Any]
    reference: type[Any]
    options: dict[str, Any]
    modes: tuple[dict[str, Any], ...]


SUBJECTS = {
    "Adagrad": Subject(
        FusedAdagrad,
        reference.Adagrad,
        {"lr": 0.03, "eps": 1e-3, "weight_decay": 0.1},
        ({}, {"adagrad_w_mode": True}, {"weight_decay": 0.0}),
    ),
    "NovoGrad": Subject(
        FusedNovoGrad,
        reference.NovoGrad,
        {"lr": 0.03, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.1},
        tuple(
            {
                "reg_inside_moment": inside,
                "norm_type": norm_type,
                "init_zero": init_zero,
                "grad_averaging": averaging,
                "bias_correction": correction,
            }
            for inside in (False, True)
            for norm_type in (0, 2)
            for init_zero, averaging, correction in (
                (False, True, True),
                (True, True, True),
                (False, False, False),
                (True, False, True),
                (True, True, False),
            )
        ),
    ),
    "LAMB": Subject(
        FusedLAMB,
        reference.LAMB,
        {"lr": 0.03, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.0},
        (
            {},
            *(
                {
                    "adam_w_mode": decoupled,
                    "weight_decay": weight_decay,
                    "use_nvlamb": nvlamb,
                    "grad_averaging": averaging,
                    "bias_correction": correction,
                }
                for decoupled, weight_decay, nvlamb, averaging, correction in (
                    (False, 0.1, False, True, True),
                    (False, 0.1, False, False, False),
                    (True, 0.0, False, True, True),
                    (True, 0.0, True, True, False),
                    (True, 0.1, True, False, True),
                )
            ),
            {"max_grad_norm": 0.5},
        ),
    ),
}
each_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=[*SUBJECTS])
SMALL = ((5,), (4, 3), (), (7, 9))  # shapes
NOT_OF_THE_FORMULA = {"params", "lr", "max_grad_norm", "amsgrad"}


def mode_name(mode: dict[str, Any]) -> str:
    """Return the options of a mode as the name of a case."""
    return ", ".join(f"{name} {value}" for name, value in mode.items()) or "plain"


def reference_of(optimizer: Any, made: type[Any], param: Parameter) -> Any:
    """Return the float64 copy of a parameter and its state, zeros where it has none."""
    layout = optimizer._rule.layout
    state = optimizer.state.get(param, {})
    zeros = dict.fromkeys(layout.tensors, torch.zeros_like(param, dtype=torch.float64))
    zeros |= dict.fromkeys(layout.numbers, torch.zeros((), device=param.device))
    return made(param, **{name: state.get(name, zero).clone() for name, zero in zeros.items()})


def references_after_step(
    optimizer: Any, made: type[Any], grads: Iterable[Tensor | None], scale: float = 1.0
) -> dict[Parameter, Any]:
    """Return what the step that the optimizer is about to take must make, in float64.

    Args:
        optimizer: Before the step; nothing in it is written.
        made: The class of `tests/reference.py`.
        grads: A gradient for each parameter of all groups, or None.
        scale: The gradients are divided by it.
    """
    all_grads = [*grads]
    left = iter(all_grads)
    result = {}
    for group in optimizer.param_groups:
        pairs = [(param, next(left)) for param in group["params"]]
        clipped = all_grads if optimizer._rule.clips_by_global_norm else [grad for _, grad in pairs]
        norm = reference.l2_norm([grad for grad in clipped if grad is not None]) / scale
        max_norm = group["max_grad_norm"]
        clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        options = {name: group[name] for name in group if name not in NOT_OF_THE_FORMULA}
        for param, grad in pairs:
            result[param] = reference_of(optimizer, made, param)
            if grad is not None:
                result[param].update(grad, lr=float(group["lr"]), inv_scale=clip / scale, **options)
    return result


def assert_stepped(
    optimizer: Any, expected: dict[Parameter, Any], *, in_float32: bool = False
) -> None:
    """Compare parameters and state with their references, and check the dtypes of the state.

    With `in_float32` float64 parameters have the bounds of float32.
    """
    layout = optimizer._rule.layout
    for param, wanted in expected.items():
        wide = param.dtype == torch.float64
        bounds = TOLERANCES[torch.float32] if wide and in_float32 else None
        assert_near(param.detach(), wanted.param, bounds)
        state = optimizer.state.get(param, {})
        for name in (*layout.tensors, *layout.numbers) if state else ():
            assert state[name].dtype == (
                torch.float64 if wide and name in layout.tensors else torch.float32
            )
            assert_near(state[name], getattr(wanted, name), bounds)


def make_params(
    device: torch.device, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES
) -> list[Parameter]:
    """Return the same parameters at every call."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [Parameter(value.to(device, dtype)) for value in values]


def copy_master(optimizer: Any, param: Tensor, other: Any, twin: Tensor) -> None:
    """Give another optimizer a copy of a parameter's master, if there is one."""
    kept = optimizer._own_masters.kept
    if param in kept:
        other._own_masters.kept[twin] = kept[param].clone()
