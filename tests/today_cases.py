"""Optimizers of today's training on 16-bit weights, and what float64 makes of their steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fp16_cases import BF16, F16, F32, F64
from torch import Tensor, nn

from apex_mp.optimizers import FusedAdam, FusedSGD

BETAS, EPS, DECAY, MOMENTUM, MAX_NORM = (0.5, 0.75), 2.0**-10, 2.0**-2, 0.5, 0.75
# Of an Adam and of an SGD; eps and betas are such that even float16 moments do not vanish.
ADAM: dict[str, Any] = {"lr": 2.0**-5, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
SGD: dict[str, Any] = {"lr": 2.0**-5, "momentum": MOMENTUM}
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float16": (F16, F16, F16),
    "bfloat16": (BF16, BF16, BF16),
    "mixed": (F16, BF16, F32),
    "float32": (F32, F32, F32),
}


class Kind(NamedTuple):
    """An optimizer with options.

    Attributes:
        name: For the printed program.
        rule: A key of MOMENTS.
        make: Gets parameters, and True, "float32" or False for the masters.
        is_ours: Has masters, computes in float32, and takes float16 gradients in any scaler.
        narrow: Whether it keeps moments in bfloat16.
        max_norm: To which it clips the gradients of each group, or None.
    """

    name: str
    rule: str
    make: Callable[..., Any]
    is_ours: bool = True
    narrow: bool = False
    max_norm: float | None = None

    def __repr__(self) -> str:
        return self.name


def has_bug_of_torch(kind: Kind, params: list[nn.Parameter], optimizer: Any) -> bool:
    """Return whether torch's fused SGD fails: some parameters only have momentum."""
    buffers = [optimizer.state.get(param, {}).get("momentum_buffer") for param in params]
    return kind.name == "SGD fused" and len({buffer is None for buffer in buffers}) > 1


def of_torch(name: str, cls: Any, options: dict[str, Any], **more: Any) -> Kind:
    rule = "sgd" if options is SGD else "adam"
    return Kind(name, rule, lambda params, _: cls(params, **options, **more), is_ours=False)


FUSED_ADAM = Kind(
    "FusedAdam", "adam", lambda params, masters: FusedAdam(params, **ADAM, master_weights=masters)
)
FUSED_SGD = Kind(
    "FusedSGD", "sgd", lambda params, masters: FusedSGD(params, **SGD, master_weights=masters)
)
NARROW = Kind(
    "FusedAdam, bfloat16 moments",
    "adam",
    lambda params, masters: FusedAdam(params, **ADAM, master_weights=masters, moment_dtype=BF16),
    narrow=True,
)
CLIPPING = Kind(
    "FusedAdam that clips",
    "adam",
    lambda params, masters: FusedAdam(
        params, **ADAM, master_weights=masters, max_grad_norm=MAX_NORM
    ),
    max_norm=MAX_NORM,
)
OURS = [FUSED_ADAM, FUSED_SGD, NARROW, CLIPPING]
OF_TORCH_FUSED = [
    of_torch("SGD fused", torch.optim.SGD, SGD, fused=True),
    of_torch("AdamW fused", torch.optim.AdamW, ADAM, fused=True),
]
OF_TORCH_OTHER = [
    of_torch("SGD", torch.optim.SGD, SGD, foreach=False),
    of_torch("AdamW foreach", torch.optim.AdamW, ADAM, foreach=True),
]


def exact(tensor: Tensor) -> Tensor:
    """Return values as float64: -0.0 equals 0.0."""
    return tensor.detach().to(F64).clone()


def has_masters(kind: Kind, masters: bool | str, param: Tensor) -> bool:
    return kind.is_ours and bool(masters) and param.dtype != F32


class Expected:
    """One parameter in float64, whose master is the weight that was written last.

    Args:
        param: The parameter.
        kind: Of its optimizer.

    Attributes:
        value: The master; the weight where there is none.
        moments: Zeros before the first step.
        step: How many steps were taken.
        grad: The sum of unscaled gradients, or None.
        last: The weight after the last step; NaN where its dtype has changed since.
    """

    def __init__(self, param: Tensor, kind: Kind) -> None:
        self.value = exact(param)
        self.moments = tuple(torch.zeros_like(self.value) for _ in MOMENTS[kind.rule])
        self.step = 0
        self.grad: Tensor | None = None
        self.last = exact(param)
        self.kind = kind

    def copy(self) -> Expected:
        return copy.deepcopy(self)

    def start(self, param: Tensor, optimizer: Any, masters: bool | str) -> Tensor:
        """Return what the next step starts from: a master, unless it does not round to its weight.

        Raises:
            AssertionError: The optimizer says otherwise.
        """
        weight = exact(param)
        if not has_masters(self.kind, masters, param):
            return weight
        master = exact(optimizer.master(param))
        if masters is True:  # A remainder beside another weight is some master of it.
            assert_rounded(weight, master, param.dtype)
            expected = torch.where(weight == self.last, self.value, master)
        else:
            rounds = is_rounded(weight, self.value, param.dtype)
            expected = torch.where(rounds, self.value, weight)
        assert bool((master == expected).all()), f"{master.tolist()}: {expected.tolist()}"
        return master

    def rebase(self, param: Tensor, optimizer: Any, masters: bool | str) -> None:
        """Go on from what the next step starts from, as a file does."""
        self.value, self.last = self.start(param, optimizer, masters), exact(param)

    def expected_change(self, lr: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the step adds beside weight decay, and the moments after it."""
        grad = self.grad
        assert grad is not None
        step = self.step + 1
        if self.kind.rule == "sgd":
            buffer = MOMENTUM * self.moments[0] + grad
            return -lr * buffer, (buffer,)
        first, second = self.moments
        first = BETAS[0] * first + (1 - BETAS[0]) * grad
        second = BETAS[1] * second + (1 - BETAS[1]) * grad**2
        denominator = (second / (1 - BETAS[1] ** step)).sqrt() + EPS
        return -lr * first / (1 - BETAS[0] ** step) / denominator, (first, second)

    def check_step(
        self, start: Tensor, param: nn.Parameter, optimizer: Any, masters: bool | str
    ) -> None:
        """Compare a step with the rule, then go on from what it computed, so errors do not add up.

        Args:
            start: What `start` returned before the step.
            param: The parameter after the step.
            optimizer: The optimizer that stepped it.
            masters: What the optimizer was made with.

        Raises:
            AssertionError: The step differs from the rule by more than rounding.
        """
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        change, moments = self.expected_change(group["lr"])
        actual = moments_of(optimizer, param, self.kind)
        in_32_bits = self.kind.is_ours or param.dtype == F32
        # Of a moment, and of the step; some roundings each.
        near = 2.0**-18 if in_32_bits else 2.0**-6 if param.dtype == BF16 else 2.0**-8
        near_moment = 2.0**-8 if self.kind.narrow else near
        smallest = 0.0 if in_32_bits else torch.finfo(param.dtype).smallest_normal
        for found, wanted in zip(actual, moments, strict=True):
            assert_near(found, wanted, near_moment * (wanted.abs() + self._size()) + smallest)
        weight = exact(param)
        value = exact(optimizer.master(param)) if self.kind.is_ours else weight
        if has_masters(self.kind, masters, param):
            unit = 2.0**-23
            assert_rounded(weight, value, param.dtype)
        else:
            unit = torch.finfo(param.dtype).eps
        kept = 1.0 - group["lr"] * group["weight_decay"] if self.kind.rule == "adam" else 1.0
        near_change = near * (change.abs() + group["lr"])
        wanted = start * kept + change
        error = (value - wanted).abs() - unit * (start.abs() + wanted.abs()) - near_change
        message = f"{value.tolist()} after a step of {change.tolist()} from {start.tolist()}"
        assert bool((error <= 0).all()), message
        self.value, self.moments, self.last = value, actual, weight
        self.step += 1

    def _size(self) -> Tensor:
        assert self.grad is not None
        return self.grad.abs() + self.grad**2


def assert_near(found: Tensor, wanted: Tensor, tolerance: Tensor) -> None:
    assert bool(((found - wanted).abs() <= tolerance).all()), f"{found.tolist()}: {wanted.tolist()}"


def assert_rounded(weight: Tensor, master: Tensor, dtype: torch.dtype) -> None:
    assert bool(is_rounded(weight, master, dtype).all()), f"{weight.tolist()}: {master.tolist()}"


def is_rounded(weight: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where a weight is a nearest number of its dtype to a master; ties go both ways."""
    return (weight - master).abs() <= (master.to(dtype).to(F64) - master).abs()


def moments_of(optimizer: Any, param: nn.Parameter, kind: Kind) -> tuple[Tensor, ...]:
    """Return moments in float64; zeros before the first step."""
    state = optimizer.state.get(param, {})
    found = [state.get(name) for name in MOMENTS[kind.rule]]
    return tuple(exact(torch.zeros_like(param) if each is None else each) for each in found)
