"""Random programs of today's training on 16-bit weights, written by hypothesis.

Each is compared with float64 step by step, by the rule of today_cases.Expected: masters go on from
what others wrote, skipped steps change nothing, and nothing else does either. RANDOM_PROGRAMS=2000
tries others than the same 300.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from interrupts import run_until
from today_cases import (
    CLIPPING,
    FUSED_ADAM,
    OF_TORCH_FUSED,
    OF_TORCH_OTHER,
    Kind,
    exact,
    has_bug_of_torch,
    is_rounded,
    moments_of,
)
from today_programs import Steps, Weights, grads, name_sets
from torch import nn

from apex_mp import AveragedMasters, amp

# A Ctrl-C inside a generator is reported when the generator is deleted.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

_COUNT = os.environ.get("RANDOM_PROGRAMS")
SETTINGS = settings(
    max_examples=max(int(_COUNT or 300) // 3, 1),  # Three machines.
    derandomize=_COUNT is None,
    stateful_step_count=20,
    deadline=None,
    database=None,
)


# --- Ways to write weights: each gets a parameter.


def write_number(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.view(-1)[0] = 1.25


def clamp(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.clamp_(-1.0, 1.0)


def mask(param: nn.Parameter) -> None:
    param.data.mul_(torch.arange(param.numel()).reshape(param.shape) % 2)


def replace(param: nn.Parameter) -> None:
    param.data = param.detach() * 0.5


def copy_into_data(param: nn.Parameter) -> None:
    param.data.copy_(param.detach() + 0.125)


def write_vector(param: nn.Parameter) -> None:
    vector = nn.utils.parameters_to_vector([param])
    nn.utils.vector_to_parameters(vector * 0.75, [param])


def swap_in_and_back(param: nn.Parameter) -> None:
    kept = param.detach().clone()
    with torch.no_grad():
        param.copy_(kept * 3)
        param.copy_(kept)


WAYS_TO_WRITE = [
    write_number,
    clamp,
    mask,
    replace,
    copy_into_data,
    write_vector,
    swap_in_and_back,
]


class Program(Steps):
    """What else happens to a training."""

    # --- What else happens to weights, groups and optimizers.

    @rule(name=st.sampled_from("abcd"), write=st.sampled_from(WAYS_TO_WRITE))
    def write(self, name: str, write: Callable[[nn.Parameter], None]) -> None:
        if name not in self.owners:
            return
        write(getattr(self.model, name))

    @precondition(lambda self: self.is_clear)
    @rule(dtype=st.sampled_from([F16, BF16, F32]))
    def change_dtype(self, dtype: torch.dtype) -> None:
        if not all(kind.is_ours for kind in self.of_kind):
            return
        if not all(self.can_train(kind, (dtype,)) for kind in self.of_kind):
            return
        self.clear()
        self.model.to(dtype)
        for name, expected in self.expected.items():
            param, optimizer = getattr(self.model, name), self.optimizers[self.owners[name]]
            expected.last = torch.full_like(expected.last, torch.nan)
            if param not in optimizer._own_masters.kept:
                expected.value = exact(param)

    @precondition(lambda self: "d" not in self.owners)
    @rule(dtype=st.sampled_from([F16, BF16, F32]), data=st.data(), in_group=st.booleans())
    def add_parameter(self, dtype: torch.dtype, data: Any, in_group: bool) -> None:
        """In a new group of the first optimizer, or in an optimizer of its own."""
        param = nn.Parameter(torch.tensor([3.0, -0.25], dtype=dtype))
        if not self.can_train(self.of_kind[0], (dtype,)):
            return
        self.model.d = param
        if in_group:
            self.optimizers[0].add_param_group({"params": [param]})
            self.own("d", 0)
        else:
            self.new_optimizer(data, ["d"])

    @precondition(lambda self: self.are_ready)
    @rule(name=st.sampled_from("abc"))
    def freeze_or_thaw(self, name: str) -> None:
        param = getattr(self.model, name)
        param.requires_grad_(not param.requires_grad)
        param.grad = self.expected[name].grad = None

    @rule(lr=st.sampled_from([2.0**-4, 2.0**-5]), last=st.booleans())
    def change_lr(self, lr: float, last: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[-1 if last else 0]["lr"] = lr

    @rule()
    def average(self) -> None:
        """An average over masters starts as they are, and moves with them."""
        ours = [number for number, kind in enumerate(self.of_kind) if kind.is_ours]
        if len(ours) < len(self.optimizers):
            return
        averaged = AveragedMasters(self.model, self.optimizers, avg_fn=lambda old, new, _: new)
        averaged.update_parameters(self.model)
        for name, value in averaged.module.named_parameters():
            assert bool((exact(value) == self.start_of(name)).all()), name

    @precondition(lambda self: self.is_clear)
    @rule(at=st.integers(0, 400), names=name_sets, grad=grads)
    def interrupt(self, at: int, names: Any, grad: float) -> None:
        """A Ctrl-C in the package: each parameter was stepped or was not, and training goes on."""
        pulled = self.can_pull(names)
        starts = {name: self.start_of(name) for name in pulled}
        before = {name: exact(getattr(self.model, name)) for name in pulled}
        run_until(at, lambda: self.iterate(pulled, grad))
        for optimizer in self.optimizers:  # torch's scaler leaves it, if step() has just begun.
            vars(optimizer).pop("grad_scale", None)
        for name in pulled:
            scale = self.scale if self.scaler_of else 1.0
            scaled = torch.full_like(getattr(self.model, name), grad * scale)
            self.expected[name].grad = exact(scaled) / scale  # Small ones are rounded.
        for number in range(len(self.optimizers)):
            self.clip_groups(number)
        for name in pulled:
            expected, number = self.expected[name], self.owners[name]
            param, optimizer = getattr(self.model, name), self.optimizers[number]
            moments = moments_of(optimizer, param, expected.kind)
            # A step with gradients of 0 may change no more than the count.
            steps = optimizer.state.get(param, {}).get("step", expected.step)
            is_stepped = int(steps) != expected.step or not all(
                map(torch.equal, moments, expected.moments)
            )
            now = exact(param)
            # A step that was prepared may have rounded a tie to the other side.
            is_same = (now == before[name]) | is_rounded(now, expected.value, param.dtype)
            if is_stepped or not bool(is_same.all()):
                expected.check_step(starts[name], param, optimizer, self.of_masters[number])
        self.clear()
        if self.scaler_of is not None:
            with contextlib.suppress(AssertionError):  # Perhaps nothing was measured yet.
                self.scaler.update()
            assert self.scaler.get_scale() in (self.scale, self.scale * 2)
            state = self.scaler.state_dict()
            self.scale, self.clean = state["scale"], state["_growth_tracker"]

    def iterate(self, names: list[str], grad: float) -> None:
        """Take steps by themselves: nothing is compared."""
        if not names:
            return
        self.scaled(self.losses(names, grad)).backward()
        has_stepped = False
        for number in {self.owners[name] for name in names}:
            optimizer = self.optimizers[number]
            params = [getattr(self.model, name) for name in names if self.owners[name] == number]
            if has_bug_of_torch(self.of_kind[number], params, optimizer):
                continue
            if self.scaler_of is None:
                optimizer.step()
                continue
            if self.scaler_of is amp.GradScaler:
                self.scaler.clip_grad_norm_(optimizer, 64.0)
            self.scaler.step(optimizer)
            has_stepped = True
        if has_stepped:
            self.scaler.update()

    # --- Copies and checkpoints.

    @precondition(lambda self: self.is_clear)
    @rule(way=st.sampled_from(["deepcopy", "pickle", "torch.save"]))
    def go_on_with_a_copy(self, way: str) -> None:
        if self.scaler_of is not None and self.scaler._per_optimizer_states:
            return  # Torch refuses a copy before update(), which a Ctrl-C may have left out.
        if self.scaler_of is torch.amp.GradScaler and {*self.of_kind} & {*OF_TORCH_FUSED}:
            return  # A copy of torch's fused optimizers no longer says that it unscales.
        self.clear()
        whole = (self.model, self.optimizers, self.scaler if self.scaler_of else None)
        if way == "deepcopy":
            self.model, self.optimizers, self.scaler = copy.deepcopy(whole)
        elif way == "pickle":
            self.model, self.optimizers, self.scaler = pickle.loads(pickle.dumps(whole))
        else:
            file = io.BytesIO()
            torch.save(whole, file)
            file.seek(0)
            self.model, self.optimizers, self.scaler = torch.load(file, weights_only=False)
        for expected in self.expected.values():
            expected.grad = None

    def rebase(self) -> None:
        for name in self.owners:
            number = self.owners[name]
            param, optimizer = getattr(self.model, name), self.optimizers[number]
            self.expected[name].rebase(param, optimizer, self.of_masters[number])

    @precondition(lambda self: self.is_clear)
    @rule()
    def save(self) -> None:
        self.clear()
        live, self.expected = self.expected, copy.deepcopy(self.expected)
        self.rebase()
        states = [
            self.model.state_dict(),
            [optimizer.state_dict() for optimizer in self.optimizers],
            self.scaler.state_dict() if self.scaler_of else None,
        ]
        self.saved = copy.deepcopy(
            (states, self.expected, self.owners, self.dtypes_now(), self.scale, self.clean)
        )
        self.expected = (
            live  # A file has no masters of float32 parameters; the optimizer keeps them.
        )

    def dtypes_now(self) -> dict[str, torch.dtype]:
        return {name: getattr(self.model, name).dtype for name in self.owners}

    @precondition(lambda self: self.is_clear and self.saved is not None)
    @rule(model_first=st.booleans(), parts=st.sampled_from(["all", "weights"]))
    def load(self, model_first: bool, parts: str) -> None:
        states, expected, owners, dtypes, scale, clean = copy.deepcopy(self.saved)
        if owners != self.owners or dtypes != self.dtypes_now():
            return
        if parts == "weights":
            self.model.load_state_dict(states[0])
            return
        for is_model in (model_first, not model_first):
            if is_model:
                self.model.load_state_dict(states[0])
            else:
                for optimizer, state in zip(self.optimizers, states[1], strict=True):
                    optimizer.load_state_dict(state)
        if self.scaler_of:
            self.scaler.load_state_dict(states[2])
        self.expected, self.scale, self.clean = expected, scale, clean
        for each in self.expected.values():
            each.grad = None

    @precondition(lambda self: self.is_clear)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        """In new objects, maybe with masters of another sort."""
        self.clear()
        self.rebase()
        states = copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])
        weights = copy.deepcopy(self.model.state_dict())
        scale = self.scaler.state_dict() if self.scaler_of else None
        with_grad = {name: getattr(self.model, name).requires_grad for name in self.owners}
        dtypes = [getattr(self.model, name).dtype for name in self.owners]
        self.model = Weights(tuple(dtypes[:3]))
        if "d" in self.owners:
            self.model.d = nn.Parameter(torch.zeros(2, dtype=dtypes[3]))
        for name, flag in with_grad.items():
            getattr(self.model, name).requires_grad_(flag)
        for number, kind in enumerate(self.of_kind):
            names = self.names_of(number)
            if kind.is_ours and self.of_masters[number]:
                self.of_masters[number] = data.draw(st.sampled_from(["float32", True]))
            elif kind.is_ours and data.draw(st.booleans()):
                self.of_masters[number] = True
            params = [[getattr(self.model, name) for name in names]]
            if "d" in names and len(names) > 1:
                params = [params[0][:3], params[0][3:]]
            self.optimizers[number] = kind.make(
                [{"params": group} for group in params], self.of_masters[number]
            )
        model_first = data.draw(st.booleans())
        for is_model in (model_first, not model_first):
            if is_model:
                self.model.load_state_dict(weights)
            else:
                for optimizer, state in zip(self.optimizers, states, strict=True):
                    optimizer.load_state_dict(state)
        if self.scaler_of:
            self.scaler = self.new_scaler()
            self.scaler.load_state_dict(scale)
        for name in self.owners:
            self.expected[name].grad = None


class WithoutScaler(Program):
    """bfloat16, or small gradients in float16."""


class WithScalerOfTorch(Program):
    """torch.amp.GradScaler, which unscales no float16 gradients but in a fused step."""

    scaler_of = torch.amp.GradScaler

    def can_train(self, kind: Kind, dtypes: tuple[torch.dtype, ...]) -> bool:
        if kind.name == "SGD fused":
            return False  # A skipped first step leaves uninitialised momentum.
        return super().can_train(kind, dtypes) and (F16 not in dtypes or kind not in OF_TORCH_OTHER)

    def can_unscale(self, number: int) -> bool:
        return all(getattr(self.model, name).dtype != F16 for name in self.names_of(number))


class WithOurScaler(Program):
    """apex_mp.amp.GradScaler."""

    scaler_of = amp.GradScaler

    @rule(number=st.integers(0, 1), max_norm=st.sampled_from([0.5, 64.0]))
    def clip(self, number: int, max_norm: float) -> None:
        number %= len(self.optimizers)
        if self.stages[number] != "ready" or not self.has_grads(number):
            return
        norm = self.scaler.clip_grad_norm_(self.optimizers[number], max_norm)
        self.stages[number] = "clipped"
        self.found_inf |= self.saw_inf(number)
        self.clip_expected(number, norm, max_norm)
        if self.of_kind[number] in OF_TORCH_OTHER:
            self.read_grads(number, is_clipped=True)

    @precondition(lambda self: not {"unscaled", "clipped"}.isdisjoint(self.stages))
    @rule(clears=st.booleans(), clips=st.booleans(), grad=grads)
    def forget_update(self, clears: bool, clips: bool, grad: float) -> None:
        """Leave out a step without update(), or unscale in the middle of an accumulation."""
        stage = "unscaled" if "unscaled" in self.stages else "clipped"
        number = self.stages.index(stage)
        optimizer, names = self.optimizers[number], self.can_pull(self.names_of(number))
        if not names:
            return
        if clears:
            self.clear()
        self.scaled(self.losses(names, grad)).backward()
        clip = functools.partial(self.scaler.clip_grad_norm_, max_norm=1.0)
        with pytest.raises(RuntimeError, match=r"scaler\.update\(\)"):
            (clip if clips else self.scaler.step)(optimizer)
        self.clear()
        self.update()


# --- Programs that failed.


class Chosen:
    """What is drawn inside rules, in place of hypothesis.

    Args:
        values: One after another.
    """

    def __init__(self, *values: Any) -> None:
        self._values = [*values]

    def draw(self, _: Any) -> Any:
        return self._values.pop(0)


@contextlib.contextmanager
def started(machine: type[Program], dtypes: str, *drawn: Any) -> Iterator[Program]:
    program = machine()
    try:
        program.start(data=Chosen(*drawn), dtypes=dtypes)
        yield program
    finally:
        program.teardown()


@pytest.mark.parametrize("machine", [WithoutScaler, WithScalerOfTorch, WithOurScaler])
def test_a_ctrl_c_anywhere_in_a_first_step(machine: type[Program]) -> None:
    """It once removed the state of a step that had been taken."""
    with started(machine, "mixed", FUSED_ADAM, True) as program:
        places = run_until(None, lambda: program.iterate(["a", "b", "c"], 0.75))
    inside = [at for at, place in enumerate(places) if place.startswith("engine/engine.py")]
    assert len(inside) > 50
    for at in inside:
        with started(machine, "mixed", FUSED_ADAM, True) as program:
            program.interrupt(at, ("a", "b", "c"), 0.75)
            program.train(("a", "b", "c"), 0.25, to_none=True)
            program.what_no_step_changed_stays()


def test_a_group_that_is_added_after_a_clip() -> None:
    """The step of an optimizer that clips read one norm too many, from memory of others."""
    with started(WithOurScaler, "mixed", CLIPPING, True) as program:
        program.backward(("a", "b", "c"), 0.75)
        program.clip(0, 0.5)
        program.add_parameter(F32, Chosen(), in_group=True)
        program.step(0, to_none=True)
        program.what_no_step_changed_stays()


def as_test(machine: type[Program]) -> Any:
    case = machine.TestCase
    case.settings = SETTINGS
    return case


TestWithoutScaler = as_test(WithoutScaler)
TestWithScalerOfTorch = as_test(WithScalerOfTorch)
TestWithOurScaler = as_test(WithOurScaler)
