"""The table of the fused optimizers: what each is made of, and the float64 reference of a step."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import reference
import torch
from tolerances import TOLERANCES, TRAJECTORY_TOLERANCES, assert_near
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

# Odd sizes; a scalar, none, and more than a chunk: 16,384 numbers.
SHAPES = ((5,), (4, 3), (), (1,), (0, 3), (16_387,), (3, 11_003))
SMALL = ((5,), (4, 3), (), (7, 9))
Options = dict[str, Any]


class Wrong(NamedTuple):
    """Options that are refused with a sentence that begins so, behind the name of the class.

    `in_files` and `in_steps`: whether options of a checkpoint, and of a group before a step, are
    refused too; a step may have other words.
    """

    options: Options
    error: type[Exception]
    sentence: str
    in_files: bool = True
    in_steps: bool | str = True


@dataclasses.dataclass(frozen=True)
class Subject:
    """A fused optimizer.

    Attributes:
        fused: The class.
        reference: Steps one parameter in float64; its fields are `param` and the names of state.
        kind: What messages call such an optimizer.
        options: No default among them, so that each has an effect; a float32 holds lr.
        modes: Options that choose another formula.
        tensors: Names of the state that has the parameter's shape.
        numbers: Names of the state that is one number.
        signature: Names and defaults of the arguments by position, behind the parameters.
        of_apex: The options that a group of apex's checkpoint has.
        kept: Arguments, none of them a default, that are attributes and go with a copy.
        twins: Classes of torch with the same state and formula, and the options that choose it.
        wrong: Options that are refused, beside those of `WRONG`.
        for_sparse: The advice to who has sparse gradients.
        not_of_torch: Options of torch's group that are refused if they are set.
    """

    fused: type[Any]
    reference: type[Any]
    kind: str
    options: Options
    modes: tuple[Options, ...]
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    signature: str
    of_apex: tuple[str, ...]
    kept: Options = dataclasses.field(default_factory=lambda: {"unscale_grads": False})
    twins: tuple[tuple[type[Any], Options], ...] = ()
    wrong: tuple[Wrong, ...] = ()
    for_sparse: str = ", please consider SparseAdam instead"
    not_of_torch: Options = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fused.__name__

    @property
    def of_a_user(self) -> Subject:
        """A subclass, whose messages have the name of the public class."""
        return dataclasses.replace(self, fused=type("Mine", (self.fused,), {}))

    def make(self, params: Any, **options: Any) -> Any:
        return self.fused(params, **(self.options | options))

    def in_two_groups(self, params: list[Parameter], **options: Any) -> Any:
        """Return an optimizer whose second group has half the lr and no decay."""
        options = self.options | options
        own = {"lr": options["lr"] / 2, "weight_decay": 0.0}
        half = len(params) // 2
        return self.fused([{"params": params[:half]}, {"params": params[half:], **own}], **options)


def torch_options(subject: Subject, options: Options, twin: type[Any], own: Options) -> Any:
    """Return a group's options for a class of torch, None if it lacks one that has an effect."""
    defaults = inspect.signature(subject.fused).parameters
    known = inspect.signature(twin).parameters
    lacks = {name for name in options if name not in known}
    if any(options[name] != own.get(name, defaults[name].default) for name in lacks):
        return None
    return {name: value for name, value in options.items() if name in known}


def each_of(*names: str, values: Iterable[tuple[Any, ...]]) -> tuple[Options, ...]:
    """Return options of these names for each tuple of values."""
    return tuple(dict(zip(names, each, strict=True)) for each in values)


def mode_name(mode: Options) -> str:
    """Return options as the name of a case."""
    return ", ".join(f"{name} {value}" for name, value in mode.items()) or "plain"


BOTH = (False, True)
LR = 2.0**-5
MOMENTS = ("exp_avg", "exp_avg_sq")
ADAPTIVE: Options = {"lr": LR, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.1}
ADAM_MODES = (
    {},
    *each_of(
        "adam_w_mode", "bias_correction", "eps_inside_sqrt", values=itertools.product(*[BOTH] * 3)
    ),
    {"betas": (0.0, 0.99)},
    # A small lr: the moment is m + (g - m), whose rounding a small second moment multiplies.
    {"betas": (0.0, 0.0), "weight_decay": 0.0, "lr": 2.0**-10},
    {"lr": 0.125, "adam_w_mode": False},
    {"eps": 1e-8, "betas": (0.9, 0.999), "lr": 2.0**-10},
)
LAMB_MODES = (
    {},
    *each_of(
        *("adam_w_mode", "weight_decay", "use_nvlamb", "grad_averaging", "bias_correction"),
        values=(
            (False, 0.1, False, True, True),
            (False, 0.1, False, False, False),
            (True, 0.0, False, True, True),
            (True, 0.0, True, True, False),
            (True, 0.1, True, False, True),
        ),
    ),
    {"max_grad_norm": 0.5},
)
OF_ADAM = ("lr", "bias_correction", "betas", "eps", "weight_decay")
OF_LAMB = (*OF_ADAM, "grad_averaging", "max_grad_norm")
ADAMW = (torch.optim.AdamW, {})

SUBJECTS = {
    "Adam": Subject(
        FusedAdam,
        reference.Adam,
        "an Adam",
        ADAPTIVE | {"maximize": True},
        ADAM_MODES,
        MOMENTS,
        ("step",),
        "lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, eps_inside_sqrt=False, "
        "weight_decay=0.0, max_grad_norm=0.0, amsgrad=False",
        OF_ADAM,
        twins=(ADAMW, (torch.optim.Adam, {"adam_w_mode": False})),
        wrong=(
            Wrong(
                {"bias_correction": (0.9, 0.99)},
                TypeError,
                r": bias_correction is \(0.9, 0.99\)",
                in_steps=False,
            ),
        ),
    ),
    "AdamW": Subject(
        FusedAdamW,
        reference.Adam,
        "an Adam",
        ADAPTIVE,
        ({}, {"maximize": True}),
        MOMENTS,
        ("step",),
        "lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, amsgrad=False",
        OF_ADAM,
        twins=(ADAMW,),
    ),
    "SGD": Subject(
        FusedSGD,
        reference.Sgd,
        "an SGD",
        {"lr": LR, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        (
            {},
            *each_of(
                *("momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum"),
                values=(
                    (momentum, dampening, decay, nesterov, after)
                    for momentum, dampening in ((0.0, 0.0), (0.9, 0.0), (0.9, 0.3))
                    for decay, after in ((0.0, False), (0.1, False), (0.1, True))
                    for nesterov in BOTH
                    if not (nesterov and (dampening or not momentum))
                ),
            ),
        ),
        ("momentum_buffer",),
        (),
        "lr=<required parameter>, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, "
        "wd_after_momentum=False, materialize_master_grads=True, set_grad_none=False",
        ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        {"unscale_grads": False, "materialize_master_grads": False, "set_grad_none": True},
        twins=((torch.optim.SGD, {}),),
        wrong=(
            Wrong({"dampening": math.nan}, ValueError, ": dampening is nan; it must be a number"),
            # In groups that are there a schedule may take the momentum to 0.
            *(
                Wrong(
                    {"nesterov": True, "momentum": momentum, "dampening": dampening},
                    ValueError,
                    f": nesterov is True, momentum {momentum} and dampening {dampening}; it needs "
                    "momentum and no dampening",
                    in_files=False,
                    in_steps=False,
                )
                for momentum, dampening in ((0.0, 0.0), (0.9, 0.1))
            ),
        ),
        for_sparse="; layers with sparse=False have dense ones",
        not_of_torch={"maximize": True},
    ),
    "Adagrad": Subject(
        FusedAdagrad,
        reference.Adagrad,
        "an Adagrad",
        {"lr": LR, "eps": 1e-3, "weight_decay": 0.1},
        ({}, {"adagrad_w_mode": True}, {"weight_decay": 0.0}),
        ("sum",),
        (),
        "lr=0.01, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False",
        ("lr", "eps", "weight_decay"),
        twins=((torch.optim.Adagrad, {}),),
        for_sparse="",
        not_of_torch={"lr_decay": 0.1, "maximize": True},
    ),
    "NovoGrad": Subject(
        FusedNovoGrad,
        reference.NovoGrad,
        "a NovoGrad",
        ADAPTIVE,
        each_of(
            *("reg_inside_moment", "norm_type", "init_zero", "grad_averaging", "bias_correction"),
            values=(
                (inside, norm_type, *others)
                for inside in BOTH
                for norm_type in (0, 2)
                for others in (
                    (False, True, True),
                    (True, True, True),
                    (False, False, False),
                    (True, False, True),
                    (True, True, False),
                )
            ),
        ),
        ("exp_avg",),
        ("step", "exp_avg_sq"),
        "lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, "
        "amsgrad=False, reg_inside_moment=False, grad_averaging=True, norm_type=2, "
        "init_zero=False, set_grad_none=True",
        (*OF_ADAM, "grad_averaging", "norm_type", "init_zero"),
        wrong=(
            Wrong(
                {"norm_type": 1},
                RuntimeError,
                r" only support l2/inf norm now\.$",
                in_steps=": norm_type is 1; it must be 0 or 2",
            ),
        ),
    ),
    "LAMB": Subject(
        FusedLAMB,
        reference.LAMB,
        "a LAMB",
        ADAPTIVE | {"max_grad_norm": 0.0},
        LAMB_MODES,
        MOMENTS,
        ("step",),
        "lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.01, "
        "amsgrad=False, adam_w_mode=True, grad_averaging=True, set_grad_none=True, "
        "max_grad_norm=1.0, use_nvlamb=False",
        OF_LAMB,
    ),
    "MixedPrecisionLamb": Subject(
        FusedMixedPrecisionLamb,
        reference.LAMB,
        "a LAMB",
        ADAPTIVE | {"max_grad_norm": 0.0},
        LAMB_MODES,
        MOMENTS,
        ("step",),
        "lr=0.001, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-06, "
        "weight_decay=0.01, amsgrad=False, adam_w_mode=True, grad_averaging=True, "
        "max_grad_norm=1.0, use_nvlamb=False, reduced_precision_dtype=None",
        (*OF_LAMB, "step"),
        {"reduced_precision_dtype": torch.float16},
    ),
}

each_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=[*SUBJECTS])
each_mode = pytest.mark.parametrize(
    ("subject", "mode"),
    [
        pytest.param(subject, mode, id=f"{name}-{mode_name(mode)}")
        for name, subject in SUBJECTS.items()
        for mode in subject.modes
    ],
)
# The masters of FusedMixedPrecisionLamb are those of FusedLAMB, asked for by another argument.
MAKERS = {
    name: functools.partial(each.fused, **each.options)
    for name, each in SUBJECTS.items()
    if name != "MixedPrecisionLamb"
}

TWO_BETAS = "it must be two numbers in \\[0, 1\\)$"
WRONG = (
    # A schedule may go below 0, and past its end.
    Wrong({"lr": -0.1}, ValueError, r": lr is -0\.1; it must be 0 or more", in_steps=False),
    Wrong({"lr": math.nan}, ValueError, ": lr is nan; it must be 0 or more", in_steps=False),
    Wrong({"lr": torch.ones(2)}, ValueError, ": lr is a tensor of 2 elements; it must have 1"),
    Wrong({"lr": "low"}, TypeError, ": lr is 'low'; it must be a number$"),
    Wrong({"eps": None}, TypeError, ": eps is None; it must be a number$"),
    *(
        Wrong({name: value}, ValueError, f": {name} is {value}; it must be 0 or more")
        for name in ("eps", "weight_decay", "max_grad_norm", "momentum")
        for value in (-1.0, math.nan)
    ),
    Wrong({"betas": 0.9}, TypeError, ": betas is 0.9; " + TWO_BETAS),
    Wrong({"betas": (0.9, "0.99")}, TypeError, ": one of betas is '0.99'; it must be a number"),
    *(
        Wrong({"betas": betas}, ValueError, ": betas is .*; " + TWO_BETAS, True, in_steps)
        for betas, in_steps in (
            ((1.0, 0.9), ": one of betas is 1.0; it must be in"),
            ((0.9, -0.1), ": one of betas is -0.1; it must be in"),
            ((0.9, 0.9, 0.9), True),
            ((0.9,), True),
        )
    ),
    Wrong({"betas": (0.9, math.nan)}, ValueError, ": one of betas is nan; it must be "),
    Wrong({"amsgrad": True}, RuntimeError, r" does not support the AMSGrad variant\.$"),
)
each_wrong = pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        pytest.param(subject, wrong, id=f"{name}-{mode_name(wrong.options)}")
        for name, subject in SUBJECTS.items()
        for wrong in (*WRONG, *subject.wrong)
        if {*wrong.options} <= {*inspect.signature(subject.fused).parameters}
    ],
)

each_twin = pytest.mark.parametrize(
    ("subject", "twin", "options", "theirs"),
    [
        pytest.param(subject, twin, options, theirs, id=f"{twin.__name__}-{mode_name(mode)}")
        for subject in SUBJECTS.values()
        for twin, own in subject.twins
        for mode in subject.modes
        for options in [subject.options | own | mode]
        for theirs in [torch_options(subject, options, twin, own)]
        if theirs is not None
    ],
)

# --- The reference of a step.


def formula_of(subject: Subject, group: Options) -> Options:
    """Return the options of a group that its reference has."""
    names = inspect.signature(subject.reference.update).parameters
    options = {name: group[name] for name in names if name in group}
    return options | {"lr": float(group["lr"])}


def reference_of(optimizer: Any, subject: Subject, param: Parameter, first_step: Any = 0) -> Any:
    """Return the float64 copy of a parameter, or of its master, and of its state."""
    state = optimizer.state.get(param, {})
    names = (*subject.tensors, *subject.numbers)
    kept = {name: state[name].clone() for name in names if name in state}
    if not state and "step" in names:
        kept["step"] = torch.as_tensor(first_step).view(())
    if state.get("is_fresh"):  # A step was skipped; the buffer holds nothing yet.
        kept = {}
    return subject.reference(optimizer.master(param), **kept)


def references_after_step(
    optimizer: Any, subject: Subject, grads: Iterable[Tensor | None], scale: float = 1.0
) -> dict[Parameter, Any]:
    """Return what the step that the optimizer is about to take must make, in float64.

    Args:
        optimizer: Before the step; nothing in it is written.
        subject: Its row of the table.
        grads: A gradient for each parameter of all groups, or None.
        scale: The gradients are divided by it.
    """
    all_grads = [*grads]
    left = iter(all_grads)
    result = {}
    for group in optimizer.param_groups:
        pairs = [(param, next(left)) for param in group["params"]]
        clipped = all_grads if subject.reference is reference.LAMB else [grad for _, grad in pairs]
        norm = reference.l2_norm([grad for grad in clipped if grad is not None]) / scale
        max_norm = group["max_grad_norm"]
        clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        for param, grad in pairs:
            result[param] = reference_of(optimizer, subject, param, group.get("step", 0))
            if grad is not None:
                result[param].update(grad, inv_scale=clip / scale, **formula_of(subject, group))
    return result


def assert_stepped(
    optimizer: Any,
    subject: Subject,
    expected: dict[Parameter, Any],
    *,
    in_float32: bool = False,
) -> None:
    """Compare parameters, masters and state with their references, and check dtypes and shapes.

    With `in_float32` float64 parameters have the bounds of float32.
    """
    for param, wanted in expected.items():
        wide = param.dtype == torch.float64
        number = torch.float32 if in_float32 or not wide else torch.float64
        own = number if wide else param.dtype
        assert_near(param.detach(), wanted.param, TOLERANCES[own])
        if param in optimizer._own_masters.kept:
            assert_near(optimizer.master(param), wanted.param, TOLERANCES[torch.float32])
        state = optimizer.state.get(param, {})
        for name in (*subject.tensors, *subject.numbers) if state else ():
            like_param = name in subject.tensors
            assert state[name].shape == (param.shape if like_param else ())
            dtype = torch.float64 if wide and like_param else torch.float32
            assert state[name].dtype == dtype
            bounds = TOLERANCES[number if like_param else torch.float32]
            assert_near(state[name], getattr(wanted, name).to(param.device), bounds)


def assert_same_as_torch(optimizer: Any, subject: Subject, expected: Any) -> None:
    """Demand nearly the parameters and the state of an optimizer of torch, after many steps."""
    pairs = (
        [p for group in each.param_groups for p in group["params"]]
        for each in (optimizer, expected)
    )
    for param, wanted in zip(*pairs, strict=True):
        bounds = TRAJECTORY_TOLERANCES[param.dtype]
        assert_near(param.detach(), wanted.detach(), bounds)
        state, theirs = optimizer.state.get(param, {}), expected.state.get(wanted, {})
        names = (*subject.tensors, *subject.numbers)
        assert {*state} <= {*names, "is_fresh"}
        for name in names:
            # Each may lack a buffer, or have one of zeros, that no gradient has reached.
            both = [each.get(name, torch.zeros(())).to(param.device) for each in (state, theirs)]
            assert_near(*torch.broadcast_tensors(*both), bounds)


def step_and_compare(optimizer: Any, subject: Subject) -> None:
    """Take a step with each parameter's `.grad`, and compare it with the reference."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    expected = references_after_step(optimizer, subject, grads)
    optimizer.step()
    assert_stepped(optimizer, subject, expected)


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
