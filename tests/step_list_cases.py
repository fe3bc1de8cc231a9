"""Sample calls of `step_lists`, a row for each rule, and what float64 makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import reference
import torch
from op_cases import (
    BF16,
    F16,
    F32,
    F64,
    MIXED,
    Dtypes,
    ListCase,
    fill_positive,
    make_list,
)
from tolerances import TOLERANCES, assert_near, assert_same_bits
from torch import Tensor

from apex_mp.multi_tensor_apply._steps import step_lists

LR, SCALE = 0.01, 2.0

# Dtypes of params, grads and copies; state is as wide as the math.
STEP_DTYPES: list[tuple[Dtypes, Dtypes, Dtypes]] = [
    ((F32,), (F32,), (None,)),
    ((F32,), (F32,), (F16,)),
    ((F32,), (F16,), (F16,)),  # fp32 masters of an fp16 model
    ((F32,), (BF16,), (BF16,)),  # fp32 masters of a bf16 model
    ((F64,), (F64,), (None,)),
    ((F64,), (F64,), (F32,)),
    ((F16,), (F16,), (None,)),  # an fp16 model without masters
    ((BF16,), (BF16,), (None,)),
    ((F32,), (F64,), (BF16,)),
    (MIXED, MIXED[::-1], (None,)),
    (MIXED, (F16, BF16, F16, F64), MIXED[::-1]),
]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One of csrc/math/rules.h.

    Attributes:
        reference: Makes the float64 model of a parameter from it, its tensors and its numbers.
        tensors: What fills each tensor of the state.
        numbers: The names of its numbers.
        options: No default among them, so that each has an effect.
    """

    name: str
    reference: Callable[..., Any]
    tensors: dict[str, Callable[[Tensor], Tensor]]
    numbers: tuple[str, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.name


def _sgd(param: Tensor, momentum_buffer: Tensor, fresh: Tensor) -> reference.Sgd:
    return reference.Sgd(param, None if fresh else momentum_buffer)


_BETAS = {"betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
ADAM = Rule(
    "adam",
    reference.Adam,
    {"exp_avg": Tensor.normal_, "exp_avg_sq": fill_positive},
    ("step",),
    {**_BETAS, "adam_w_mode": True, "bias_correction": True, "eps_inside_sqrt": False},
)
SGD = Rule(
    "sgd",
    _sgd,
    {"momentum_buffer": Tensor.normal_},
    ("fresh",),
    {
        **{"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
        **{"nesterov": False, "wd_after_momentum": False},
    },
)
ADAGRAD = Rule(
    "adagrad",
    reference.Adagrad,
    {"sum": fill_positive},
    (),
    {"eps": 1e-3, "weight_decay": 0.1, "adagrad_w_mode": True},
)
NOVOGRAD = Rule(
    "novograd",
    reference.NovoGrad,
    {"exp_avg": Tensor.normal_},
    ("step", "exp_avg_sq"),
    {
        **_BETAS,
        **{"bias_correction": True, "reg_inside_moment": False, "grad_averaging": True},
        **{"norm_type": 2, "init_zero": True},
    },
)
LAMB = Rule(
    "lamb",
    reference.LAMB,
    {"exp_avg": Tensor.normal_, "exp_avg_sq": fill_positive},
    ("step",),
    {
        **_BETAS,
        **{"adam_w_mode": True, "bias_correction": True},
        **{"grad_averaging": True, "use_nvlamb": False},
    },
)
RULES = [ADAM, SGD, ADAGRAD, NOVOGRAD, LAMB]


def sample(
    rule: Rule,
    case: ListCase,
    dtypes: tuple[Dtypes, Dtypes, Dtypes],
    device: torch.device,
    state_dtypes: Dtypes | None = None,
) -> dict[str, Any]:
    """Return the arguments of a call.

    Args:
        rule: Whose step it is.
        case: Shapes, and how tensors lie.
        dtypes: Of params, grads and copies.
        device: Of all tensors.
        state_dtypes: Of the state [None: those of the math].
    """
    params, grads, copies = dtypes
    wide = [F64 if dtype == F64 else F32 for dtype in params]
    count = len(case.shapes)
    numbers = {name: torch.arange(count, dtype=F32, device=device) for name in rule.numbers}
    if rule is SGD:
        numbers["fresh"] = (numbers["fresh"] % 7 == 1).float()  # others in each launch
    return {
        "rule": rule.name,
        "caller": "a_function",
        "params": make_list(case, params, device),
        "grads": make_list(case, grads, device, position=1),
        "tensors": {
            name: make_list(case, state_dtypes or wide, device, position=3 + i, fill=fill)
            for i, (name, fill) in enumerate(rule.tensors.items())
        },
        "numbers": {name: [*vector.unbind()] for name, vector in numbers.items()},
        "options": {**rule.options, "lr": LR},
        "copies": None if None in copies else make_list(case, copies, device, position=2),
        "scale": SCALE,
        "found_inf": torch.zeros((), device=device),
    }


def copy_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the same call with clones of all tensors, strides kept."""

    def clone(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return argument.detach().clone()
        if isinstance(argument, list):
            return [clone(each) for each in argument]
        if isinstance(argument, dict):
            return {name: clone(each) for name, each in argument.items()}
        return argument

    return {name: clone(argument) for name, argument in call.items()}


def lists_of(call: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return all lists of tensors of a call by their names."""
    lists = {name: call[name] for name in ("params", "grads", "copies") if call[name] is not None}
    return lists | call["tensors"] | call["numbers"]


def assert_same_call(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare every bit of all lists."""
    for name, tensors in lists_of(expected).items():
        for ours, theirs in zip(lists_of(actual)[name], tensors, strict=True):
            assert_same_bits(ours, theirs)


def assert_steps(rule: Rule, call: dict[str, Any]) -> None:
    """Take the step, and compare all that it wrote with float64."""
    models = []
    for i, param in enumerate(call["params"]):
        state = {name: listed[i].clone() for name, listed in call["tensors"].items()}
        state |= {name: listed[i].clone() for name, listed in call["numbers"].items()}
        models.append(rule.reference(param, **state))
        options = {name: value for name, value in call["options"].items() if name != "lr"}
        models[-1].update(call["grads"][i], lr=LR, inv_scale=1 / SCALE, **options)
    grads = [grad.clone() for grad in call["grads"]]
    step_lists(**call)
    for before, after in zip(grads, call["grads"], strict=True):
        assert_same_bits(after, before)
    for i, model in enumerate(models):
        param = call["params"][i]
        # NovoGrad takes the norm of a gradient in float32, unless that is float64.
        bounds = TOLERANCES[F32] if rule is NOVOGRAD and param.dtype == F64 else None
        assert_near(param, model.param, bounds)
        for name, listed in call["tensors"].items():
            assert_near(listed[i], getattr(model, name), bounds)
        for name, listed in call["numbers"].items():
            wanted = 0.0 if rule is SGD else float(getattr(model, name))
            assert_near(listed[i].double().cpu(), torch.tensor(wanted, dtype=F64), TOLERANCES[F32])
        if call["copies"] is not None:
            _assert_is_copy(call["copies"][i], param, call["grads"][i], model.param)


def _assert_is_copy(copy: Tensor, param: Tensor, grad: Tensor, exact: Tensor) -> None:
    """Demand the parameter itself, rounded, where a parameter is as wide as the math."""
    dtype = reference.math_dtype(param, grad)
    if param.dtype == dtype or copy.dtype == param.dtype:
        assert_same_bits(copy, param.to(copy.dtype))
    assert_near(copy, exact, TOLERANCES[dtype if copy.dtype == F64 else copy.dtype])
