"""The step plan inside FP16_Optimizer: scales, masters, looks, overflows, replacements."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from fp16_cases import INF, everything
from fp16_cases import assert_same as assert_same_tensors
from fused_adam_cases import BF16, F16, F32, F64
from plan_cases import fresh_grad, parameter, params_of
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.optim import optimizer as torch_optimizer

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam

SHAPES = ((5,), (4, 3), (2, 3, 4, 5), (), (29, 23), (0, 3))
DTYPES = (F16, F32, BF16, F16, F32, F16)
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


@dataclasses.dataclass
class Fp16Run:
    """A wrapped optimizer whose every step is compared with the masters' step in float64.

    Attributes:
        model: The model's parameters of each group.
        scale: What a backward by hand multiplies gradients with; None: FP16_Optimizer.backward.
        clip, limit: As the optimizers have them.
        edit: Called between backward and step.
    """

    model: list[list[Parameter]]
    clip: str = "group"
    limit: float = 0.0
    edit: Callable[[Any], object] = lambda optimizer: None
    factor: float = 1.0
    missing: Callable[[int, int], bool] = lambda step, index: False
    steps_taken: int = 0

    def __post_init__(self) -> None:
        groups = [{"params": [*group]} for group in self.model]
        self.inner = FusedAdam(groups, max_grad_norm=self.limit, **OPTIONS)
        self.optimizer = FP16_Optimizer(
            self.inner, static_loss_scale=256.0, verbose=False, clip=self.clip
        )

    @property
    def params(self) -> list[Parameter]:
        return [param for group in self.model for param in group]

    def give(self) -> list[Tensor | None]:
        """Run backward; return the unscaled gradients as the model has rounded them."""
        pairs = [
            (param, fresh_grad(param, self.steps_taken, index))
            for index, param in enumerate(self.params)
            if not self.missing(self.steps_taken, index)
        ]
        self.steps_taken += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.backward(sum((p.double() * g.double()).sum() for p, g in pairs))
        given = {id(param): grad for param, grad in pairs}
        return [given.get(id(param)) for param in self.params]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            grads = self.give()
            self.edit(self.optimizer)
            expected = self.predict(grads)
            self.optimizer.step()
            for master, model, wanted in zip(
                params_of(self.optimizer), self.params, expected, strict=True
            ):
                assert_near(master.detach(), wanted.param, TRAJECTORY_TOLERANCES[F32])
                assert_same_bits(model.detach(), master.detach().to(model.dtype))
                assert int(self.optimizer.state.get(master, {}).get("step", 0)) == wanted.step

    def predict(self, grads: list[Tensor | None]) -> list[reference.Adam]:
        counts = [len(group) for group in self.model]
        parts = torch.arange(len(grads)).split(counts)
        lists = [[grads[i] for i in part.tolist()] for part in parts]
        norms = [
            reference.l2_norm([g * self.factor for g in one if g is not None]) for one in lists
        ]
        if self.clip == "global":
            norms = [sum(norm**2 for norm in norms) ** 0.5] * len(norms)
        expected = []
        groups = self.optimizer.param_groups
        for group, group_grads, norm in zip(groups, lists, norms, strict=True):
            divisor = max(1.0, (norm + 1e-6) / self.limit) if self.limit else 1.0
            for master, grad in zip(group["params"], group_grads, strict=True):
                state = self.optimizer.state.get(master) or {}
                zeros = torch.zeros_like(master, dtype=F64)
                moments = [state.get(key, zeros) for key in ("exp_avg", "exp_avg_sq")]
                model = reference.Adam(master, *moments, step=float(state.get("step", 0)))
                if grad is not None:
                    model.update(
                        grad,
                        lr=group["lr"],
                        inv_scale=self.factor / divisor,
                        betas=(0.9, 0.999),
                        eps=1e-8,
                        weight_decay=0.1,
                        adam_w_mode=True,
                        bias_correction=True,
                        eps_inside_sqrt=False,
                    )
                expected.append(model)
        return expected

    def renewed(self) -> Fp16Run:
        """Return another of the same state, whose plan has seen nothing."""
        model = [
            [Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in group]
            for group in self.model
        ]
        other = dataclasses.replace(self, model=model)
        for params, group in zip(model, self.optimizer.param_groups, strict=True):
            for param, own in zip(params, group["params"], strict=True):
                if param.dtype == F32:
                    param.data.copy_(own.detach())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def everything(self) -> list[Tensor]:
        return everything(self.optimizer, *self.params)


def make_run(**options: Any) -> Fp16Run:
    model = [
        [parameter(*shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
        for _ in range(2)
    ]
    return Fp16Run(model, **options)


@pytest.mark.parametrize("limit", [0.0, 0.3])
@pytest.mark.parametrize("clip", ["group", "global"])
def test_mixed_groups_are_stepped_and_clipped_as_in_float64(clip: str, limit: float) -> None:
    run = make_run(clip=clip, limit=limit)
    run.train(3)
    run.missing = lambda step, index: (step + index) % 3 == 0
    run.train(4)


def look(optimizer: Any) -> None:
    for param in params_of(optimizer):
        assert param.grad is None or param.grad.dtype == F32


def look_at_one(optimizer: Any) -> None:
    assert params_of(optimizer)[0].grad is not None


def halve(optimizer: Any) -> None:
    for param in params_of(optimizer):
        if param.grad is not None:
            param.grad.mul_(0.5)


def replace_by_half(optimizer: Any) -> None:
    for param in params_of(optimizer):
        if param.grad is not None:
            param.grad = param.grad * 0.5


EDITS: dict[str, tuple[Callable[[Any], None], float]] = {
    "look at all": (look, 1.0),
    "look at one": (look_at_one, 1.0),
    "write": (halve, 0.5),
    "replace": (replace_by_half, 0.5),
}


@pytest.mark.parametrize("limit", [0.0, 0.3])
@pytest.mark.parametrize(("edit", "factor"), EDITS.values(), ids=EDITS)
def test_a_warm_plan_steps_with_the_gradients_that_were_read(
    edit: Callable[[Any], None], factor: float, limit: float
) -> None:
    run = make_run(limit=limit, clip="global")
    run.train(2)
    before = run.edit
    run.edit, run.factor = edit, factor
    run.train(2)
    run.edit, run.factor = before, 1.0
    run.train(2)


@pytest.mark.parametrize("hook", ["none", "outer", "inner", "all"])
@pytest.mark.parametrize("steps_before", [0, 2], ids=["first step", "warm"])
@pytest.mark.parametrize("index", [0, 1, 10], ids=["fp16", "fp32", "second group"])
def test_an_overflow_changes_nothing_and_the_next_step_is_right(
    index: int, steps_before: int, hook: str
) -> None:
    run = make_run(limit=0.3)
    calls: list[int] = []

    def note(*_: object) -> None:
        calls.append(1)

    register = {
        "outer": run.optimizer.register_step_pre_hook,
        "inner": run.inner.register_step_pre_hook,
        "all": torch_optimizer.register_optimizer_step_pre_hook,
    }.get(hook)
    handle = register(note) if register else None
    try:
        run.train(steps_before)
        run.give()
        run.params[index].grad.view(-1)[-1] = INF
        before, known = run.everything(), {*run.optimizer.state}
        run.optimizer.step()
        assert run.optimizer.overflow
        assert_same_tensors(run.everything(), before)
        new = [run.optimizer.state[param] for param in {*run.optimizer.state} - known]
        assert not any(value.any() for state in new for value in state.values())
        assert len(calls) == (steps_before if handle else 0)
        run.train(2)
    finally:
        if handle is not None:
            handle.remove()


def change_the_lr(run: Fp16Run) -> None:
    run.optimizer.param_groups[1]["lr"] = 0.5


def reverse_a_group(run: Fp16Run) -> None:
    run.optimizer.param_groups[0]["params"].reverse()
    run.model[0].reverse()


def move_the_data(run: Fp16Run) -> None:
    for param in [*run.params, *params_of(run.optimizer)]:
        param.data = param.data.clone()


def add_a_group(run: Fp16Run) -> None:
    run.model.append([parameter(6, dtype=F16), parameter(7)])
    run.optimizer.add_param_group({"params": [*run.model[-1]]})


def load_its_own_state(run: Fp16Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def load_after_some_steps(run: Fp16Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    own = [param.detach().clone() for param in run.params]
    run.train(2)
    run.optimizer.load_state_dict(saved)
    for param, value in zip(run.params, own, strict=True):
        if param.dtype == F32:
            param.data.copy_(value)


def clear_the_state(run: Fp16Run) -> None:
    run.optimizer.state.clear()


def reorder_the_state(run: Fp16Run) -> None:
    state = run.optimizer.state
    for param in [*state][::2]:
        state[param] = state.pop(param)


def write_the_masters(run: Fp16Run) -> None:
    with torch.no_grad():
        for param in params_of(run.optimizer):
            param.mul_(0.5)
    run.missing = lambda step, index: index % 2 == 0


def patch_the_step(run: Fp16Run) -> None:
    step = run.inner.step
    run.inner.step = lambda *args, **kwargs: step(*args, **kwargs)


def patch_the_step_with_wraps(run: Fp16Run) -> None:
    step = run.inner.step
    run.inner.step = functools.wraps(step)(lambda *args, **kwargs: step(*args, **kwargs))


def attach_a_scheduler(run: Fp16Run) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    run.train(1)
    run.edit = lambda optimizer: scheduler.step()


def swap_the_tensors(run: Fp16Run) -> None:
    run.optimizer.zero_grad(set_to_none=True)
    for param in run.params:
        torch.utils.swap_tensors(param, Parameter(param.detach().clone()))


def convert_with_swapping(run: Fp16Run) -> None:
    run.optimizer.zero_grad(set_to_none=True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        ParameterList(run.params)._apply(torch.clone)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES: tuple[Callable[[Fp16Run], None], ...] = (
    change_the_lr,
    reverse_a_group,
    move_the_data,
    add_a_group,
    load_its_own_state,
    load_after_some_steps,
    clear_the_state,
    reorder_the_state,
    write_the_masters,
    patch_the_step,
    patch_the_step_with_wraps,
    attach_a_scheduler,
    swap_the_tensors,
    convert_with_swapping,
)


@pytest.mark.parametrize("limit", [0.0, 0.3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_steps_after_a_change_are_those_of_masters_in_float64(
    change: Callable[[Fp16Run], None], limit: float
) -> None:
    run = make_run(limit=limit)
    run.train(2)
    change(run)
    run.train(3)
