"""Random programs, written by hypothesis: each way trains beside the same optimizer in float32.

Gradients and scales are powers of two, so that mixed precision rounds nothing: masters must equal
the weights of float32 to the bit, whatever is copied, saved, refused, interrupted, frozen or run in
another thread in between. RANDOM_PROGRAMS=2000 tries others than the same 200.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fp16_cases import F16, F32, INF, NAN, BackwardError, pull, raise_in_backward
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interrupts import run_until
from torch.nn import Parameter
from way_runs import Run
from ways import WAYS, Twin, Way

from apex_mp import AveragedMasters
from apex_mp.amp import _amp_state
from apex_mp.amp.casts import current as _current
from apex_mp.loss_scale import DynamicLossScale

# A Ctrl-C inside a generator is reported when the generator is deleted.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning"
)

# The same programs each time, so that CI is red for a reason.
_COUNT = os.environ.get("RANDOM_PROGRAMS")
SETTINGS = settings(
    max_examples=int(_COUNT or 200),
    derandomize=_COUNT is None,
    stateful_step_count=20,
    deadline=None,
    database=None,
)
RULE = DynamicLossScale(2.0**10, growth_interval=4, max_scale=2.0**10)  # Sums fit float16.
CHOSEN = [
    way
    for way in WAYS
    if way.has("torch's interface") and way.has("bounds and hysteresis")
    if way.store != "host" and "narrow" not in way.inner  # Files have moments in float32.
]

values = st.sampled_from([0.25, -0.5, 1.0])
which = st.sampled_from([(0,), (1, 2), (0, 1, 2)])


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def write_one(param: Any) -> None:
    param.view(-1)[0] = 1.25


def clamp(param: Any) -> None:
    param.clamp_(-1.0, 1.0)


def halve_data(param: Any) -> None:
    param.data.mul_(0.5)


def mask_data(param: Any) -> None:
    param.data.mul_(torch.arange(param.numel()).reshape(param.shape) % 2)


def swap_in_and_back(param: Any) -> None:
    kept = param.detach().clone()
    param.copy_(kept * 3)
    param.copy_(kept)


WRITES: tuple[Callable[[Any], None], ...] = (write_one, clamp, halve_data, mask_data)
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": through_a_file,
}


class Program(RuleBasedStateMachine):
    """A run of a way, and its twin.

    Attributes:
        losses: The number of backward calls since the last step.
        overflowed: A gradient was inf since the last step.
        has_looked: Gradients were read since the last step.
        saved: What was saved, and the twin at that time.
        left: Runs that were left for a copy, with their twins.
    """

    run_: Run
    twin: Twin

    @initialize(way=st.sampled_from(CHOSEN))
    def start(self, way: Way) -> None:
        self.run_ = way.start(torch.device("cpu"), RULE)
        self.twin = Twin(self.run_)
        self.losses, self.overflowed, self.has_looked = 0, False, False
        self.saved: Any = None
        self.left: list[tuple[Run, Twin]] = []
        self.pool = ThreadPoolExecutor(1)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.shutdown()
        if _current.handle is not None:
            _current.handle._deactivate()
        vars(_amp_state).update(vars(type(_amp_state)()))

    @property
    def way(self) -> Way:
        return self.run_.way

    @property
    def can_go_back(self) -> bool:
        """Whether another backward is no mistake."""
        refused = self.has_looked and self.way.api == "GradScaler"
        return self.losses < 3 and not refused  # OptimWrapper has three scales.

    def loss(self, names: tuple[int, ...], value: float) -> Any:
        params = [self.run_.params[name] for name in names]
        return pull(*((param, value) for param in params if param.requires_grad))

    def trained(self, names: tuple[int, ...]) -> list[int]:
        return [name for name in names if self.run_.params[name].requires_grad]

    # Gradients and steps

    @precondition(lambda self: self.can_go_back)
    @rule(names=which, value=values, in_thread=st.booleans())
    def backward(self, names: tuple[int, ...], value: float, in_thread: bool) -> None:
        if not self.trained(names):
            return
        loss = self.loss(names, value)
        if in_thread:
            self.pool.submit(self.run_.backward, loss).result()
        else:
            self.run_.backward(loss)
        self.losses += 1
        for name in self.trained(names):
            param = self.twin.params[name]
            grad = torch.full_like(param, value)
            param.grad = grad if param.grad is None else param.grad + grad

    @precondition(lambda self: self.can_go_back)
    @rule(names=which, bad=st.sampled_from([INF, NAN]))
    def overflow(self, names: tuple[int, ...], bad: float) -> None:
        if self.trained(names):
            self.backward(names, bad, in_thread=False)
            self.overflowed = True

    @precondition(lambda self: self.can_go_back)
    @rule(names=which)
    def failing_backward(self, names: tuple[int, ...]) -> None:
        if self.trained(names):
            with pytest.raises(BackwardError):
                self.run_.backward(raise_in_backward(self.loss(names, 1.0)))
            self.losses += 1

    @precondition(lambda self: not self.overflowed and not self.has_looked)
    @rule(to_none=st.booleans(), in_both=st.booleans())
    def zero_grad(self, to_none: bool, in_both: bool) -> None:
        self.run_.optimizer.zero_grad(set_to_none=to_none)
        if in_both:
            self.run_.model.zero_grad(set_to_none=to_none)
        self.twin.optimizer.zero_grad(set_to_none=to_none)

    @rule()
    def look(self) -> None:
        """Read the unscaled gradients."""
        grads = [param.grad for param in self.twin.params]
        if self.overflowed or not self.losses or all(grad is None for grad in grads):
            return
        for param, grad in zip(self.run_.unscaled(), grads, strict=True):
            assert (param.grad is None) == (grad is None)
            assert grad is None or torch.equal(param.grad.float(), grad)
        self.has_looked = True

    @precondition(lambda self: self.losses and not self.has_looked)
    @rule()
    def clip(self) -> None:
        """Measure the norm, which is below the limit."""
        grads = [param.grad for param in self.twin.params if param.grad is not None]
        if not grads:
            return
        norm = torch.as_tensor(self.run_.clip(1e9))
        if self.overflowed:
            assert norm == -1 or not norm.isfinite()
        else:
            wanted = torch.stack([grad.norm() for grad in grads]).norm()
            torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0.0)
        self.has_looked = True

    @rule(to_none=st.booleans())
    def step(self, to_none: bool) -> None:
        if not self.losses or all(param.grad is None for param in self.twin.params):
            return
        self.run_.step()
        assert self.run_.skipped is self.overflowed
        if not self.overflowed:
            self.twin.optimizer.step()
        self.losses, self.overflowed, self.has_looked = 0, False, False
        self.zero_grad(to_none, in_both=False)

    @precondition(lambda self: self.can_go_back and not self.overflowed)
    @rule(names=which, value=values, to_none=st.booleans())
    def train(self, names: tuple[int, ...], value: float, to_none: bool) -> None:
        """Else few programs take a step with new gradients."""
        self.backward(names, value, in_thread=False)
        self.step(to_none)

    # What else happens, between iterations

    def clear(self) -> None:
        self.zero_grad(to_none=True, in_both=True)

    @precondition(lambda self: not self.losses)
    @rule(lr=st.sampled_from([2.0**-6, 2.0**-7]))
    def change_lr(self, lr: float) -> None:
        for each in (self.run_, self.twin):
            each.optimizer.param_groups[0]["lr"] = lr

    @precondition(lambda self: not self.losses)
    @rule(name=st.integers(0, 2))
    def freeze_or_thaw(self, name: int) -> None:
        self.clear()
        param = self.run_.params[name]
        param.requires_grad_(not param.requires_grad)

    @precondition(lambda self: not self.losses)
    @rule(write=st.sampled_from([*WRITES, swap_in_and_back]), names=which)
    def write_weights(self, write: Callable[[Any], None], names: tuple[int, ...]) -> None:
        params, masters = self.run_.params, self.run_.masters()
        with torch.no_grad():
            for name in names:
                write(params[name])
                if self.way.store in ("own", "O2") and masters[name] is not params[name]:
                    write(masters[name])
            for param, master in zip(self.twin.params, self.run_.masters(), strict=True):
                param.copy_(master)

    @precondition(lambda self: not self.losses and self.way.api == "GradScaler")
    @rule()
    def average(self) -> None:
        """An average over masters starts as they are, and moves with them."""
        run = self.run_
        averaged = AveragedMasters(run.model, run.optimizer, avg_fn=lambda old, new, _: new)
        averaged.update_parameters(run.model)
        for param, wanted in zip(averaged.module.parameters(), self.twin.params, strict=True):
            assert torch.equal(param.float(), wanted)

    @precondition(lambda self: not self.losses and len(self.twin.params) == 3)
    @rule()
    def add_group(self) -> None:
        self.saved = None
        self.grow()
        self.twin.params.append(Parameter(self.run_.params[-1].detach().float().clone()))
        self.twin.optimizer.add_param_group({"params": self.twin.params[-1:]})

    def grow(self) -> None:
        """Add a parameter to the model, and a group of it."""
        dtype = F32 if self.way.store in ("none", "O2") else F16
        self.run_.model.d = Parameter(torch.tensor([3.0, -0.25], dtype=dtype))
        self.run_.optimizer.add_param_group({"params": [self.run_.model.d]})
        self.run_.params.append(self.run_.model.d)

    # Copies and files

    @precondition(lambda self: not self.losses and self.way.has("copies"))
    @rule(by=st.sampled_from([*COPIES]))
    def go_on_with_a_copy(self, by: str) -> None:
        if getattr(getattr(self.run_, "scaler", None), "_per_optimizer_states", None):
            return  # Refused before update(), which a Ctrl-C may have left out.
        self.clear()
        self.left.append((self.run_, copy.deepcopy(self.twin)))
        self.run_ = self.run_.copied(COPIES[by])

    @precondition(lambda self: not self.losses and self.left)
    @rule()
    def go_back_to_the_original(self) -> None:
        self.clear()
        self.left.append((self.run_, self.twin))
        self.run_, self.twin = self.left.pop(0)
        self.saved = None

    @precondition(lambda self: not self.losses and not self.way.has("copies"))
    @rule(by=st.sampled_from([*COPIES]))
    def copies_are_refused(self, by: str) -> None:
        with pytest.raises(RuntimeError, match="should be serialized using state_dict"):
            COPIES[by]((self.run_.model, self.run_.optimizer))

    @precondition(lambda self: not self.losses)
    @rule()
    def save(self) -> None:
        self.clear()
        flags = [param.requires_grad for param in self.run_.params]
        self.saved = self.run_.save(), copy.deepcopy(vars(self.twin)), flags

    @precondition(lambda self: not self.losses and self.saved is not None)
    @rule(anew=st.booleans(), otherwise=st.booleans())
    def load(self, anew: bool, otherwise: bool) -> None:
        """Go on from what was saved, in new objects maybe with masters of another sort."""
        self.clear()
        saved, twin, flags = copy.deepcopy(self.saved)
        if anew:
            other = {"whole": "split", "split": "whole"}.get(self.way.store, self.way.store)
            way = dataclasses.replace(self.way, store=other if otherwise else self.way.store)
            self.run_ = way.start(torch.device("cpu"), RULE)
            self.left = []
            if len(flags) > 3:
                self.grow()
        for param, flag in zip(self.run_.params, flags, strict=True):
            param.requires_grad_(flag)
        self.run_.load(saved)
        vars(self.twin).update(twin)

    @precondition(lambda self: not self.losses)
    @rule()
    def refused_load(self) -> None:
        state = copy.deepcopy(self.run_.optimizer.state_dict())
        self.run_.inner_state(state)["param_groups"].append({"params": [99]})
        with pytest.raises((KeyError, ValueError)):
            self.run_.optimizer.load_state_dict(state)

    @precondition(lambda self: not self.losses and self.way.has("whole steps or none"))
    @rule(at=st.integers(0, 400), names=which, value=values)
    def interrupt(self, at: int, names: tuple[int, ...], value: float) -> None:
        """A Ctrl-C in the package: the step is whole or was not taken, and training goes on."""
        self.clear()
        if not self.trained(names):
            return

        def iterate() -> None:
            self.run_.backward(self.loss(names, value))
            self.run_.step()

        before = [param.detach().clone() for param in self.run_.params]
        run_until(at, iterate)
        if not all(map(torch.equal, before, self.run_.params)):
            for name in self.trained(names):
                self.twin.params[name].grad = torch.full_like(self.twin.params[name], value)
            self.twin.optimizer.step()
        if hasattr(self.run_, "scaler"):
            with contextlib.suppress(AssertionError):  # Perhaps nothing was measured yet.
                self.run_.scaler.update()
        self.clear()

    # What must be so

    @invariant()
    def it_is_the_twin(self) -> None:
        if hasattr(self, "twin"):
            self.twin.assert_is(self.run_)

    @invariant()
    def what_was_left_stays_as_it_was(self) -> None:
        for run, twin in getattr(self, "left", ()):
            twin.assert_is(run)


TestProgram = Program.TestCase
TestProgram.settings = SETTINGS
