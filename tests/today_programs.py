"""The part of random programs of today's training that takes steps; compared with float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fp16_cases import F32, INF, pull
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from today_cases import (
    DTYPES,
    OF_TORCH_FUSED,
    OF_TORCH_OTHER,
    OURS,
    Expected,
    Kind,
    assert_near,
    exact,
    has_bug_of_torch,
    moments_of,
)
from torch import Tensor, nn

KINDS = [*OURS, *OF_TORCH_FUSED, *OF_TORCH_OTHER]
MASTERS: list[bool | str] = ["float32", True, False]
GROWTH_INTERVAL = 4

grads = st.sampled_from([0.25, -0.5, 1.0, 0.75, 2.0**-26])  # float16 has no number below 2**-24.
name_sets = st.sampled_from([("a",), ("b", "c"), ("a", "b", "c"), ("d", "a"), ("a", "b", "c", "d")])


class Weights(nn.Module):
    """Some weights, which the losses pull at; `d` comes later."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        values = ([[1.0, 2.0], [-1.0, 0.5]], [0.5, -2.0] * 12, [4.0])
        for name, value, dtype in zip("abc", values, dtypes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=dtype)))


class Steps(RuleBasedStateMachine):
    """A model, its optimizers and a scaler; and what float64 expects of each parameter.

    Attributes:
        owners: By name of a parameter, the number of its optimizer.
        stages: Of each optimizer since the last update: "ready", "unscaled", "clipped", "stepped".
        found_inf: Whether one was found since the last update.
    """

    scaler_of: Any = None

    model: Any
    scaler: Any

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: list[Any] = []
        self.of_kind: list[Kind] = []
        self.of_masters: list[bool | str] = []
        self.expected: dict[str, Expected] = {}
        self.owners: dict[str, int] = {}
        self.stages: list[str] = []
        self.found_inf = False
        self.scale, self.clean = 2.0**6, 0
        self.saved: Any = None
        self.catching = warnings.catch_warnings()

    def can_train(self, kind: Kind, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Return whether optimizer and scaler take such parameters."""
        # On a CPU torch 2.13 steps only the last elements of 16-bit parameters by this.
        return kind.name != "SGD fused" or {*dtypes} == {F32}

    @initialize(data=st.data(), dtypes=st.sampled_from(sorted(DTYPES)))
    def start(self, data: Any, dtypes: str) -> None:
        self.catching.__enter__()
        warnings.simplefilter("ignore")  # Other tests check them.
        self.dtypes = DTYPES[dtypes]
        self.model = Weights(self.dtypes)
        if self.scaler_of is not None:
            self.scaler = self.new_scaler()
        self.new_optimizer(data, ["a", "b", "c"])

    def teardown(self) -> None:
        self.catching.__exit__(None, None, None)

    def new_scaler(self) -> Any:
        return self.scaler_of("cpu", init_scale=2.0**6, growth_interval=GROWTH_INTERVAL)

    def new_optimizer(self, data: Any, names: list[str]) -> None:
        dtypes = tuple(getattr(self.model, name).dtype for name in names)
        kinds = [kind for kind in KINDS if self.can_train(kind, dtypes)]
        kind = data.draw(st.sampled_from(kinds))
        masters = data.draw(st.sampled_from(MASTERS)) if kind.is_ours else False
        self.optimizers.append(kind.make([getattr(self.model, name) for name in names], masters))
        self.of_kind.append(kind)
        self.of_masters.append(masters)
        self.stages.append("ready")
        for name in names:
            self.own(name, len(self.optimizers) - 1)

    def own(self, name: str, number: int) -> None:
        self.owners[name] = number
        self.expected[name] = Expected(getattr(self.model, name), self.of_kind[number])

    def names_of(self, number: int) -> list[str]:
        return [name for name, owner in self.owners.items() if owner == number]

    def has_grads(self, number: int) -> bool:
        return any(self.expected[name].grad is not None for name in self.names_of(number))

    def saw_inf(self, number: int) -> bool:
        grads = [self.expected[name].grad for name in self.names_of(number)]
        return not all(grad is None or bool(grad.isfinite().all()) for grad in grads)

    @property
    def are_ready(self) -> bool:
        return all(stage == "ready" for stage in self.stages)

    @property
    def is_clear(self) -> bool:
        """No gradient waits and no stage is open: what is saved or copied is whole."""
        return self.are_ready and not any(map(self.has_grads, range(len(self.optimizers))))

    # --- Backwards.

    def losses(self, names: Any, grad: float) -> Tensor:
        return pull(*((getattr(self.model, name), grad) for name in names))

    def can_pull(self, names: Any) -> list[str]:
        return [
            name
            for name in names
            if name in self.owners and getattr(self.model, name).requires_grad
        ]

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler_of is None else self.scaler.scale(loss)

    @precondition(lambda self: self.are_ready)
    @rule(names=name_sets, grad=grads)
    def backward(self, names: Any, grad: float) -> None:
        names = self.can_pull(names)
        if not names:
            return
        self.scaled(self.losses(names, grad)).backward()
        for name in names:
            expected = self.expected[name]
            added = torch.full_like(expected.value, grad)
            total = added if expected.grad is None else expected.grad + added
            # 16 bits round sums: what is small is lost beside what is large.
            scale = self.scale if self.scaler_of else 1.0
            expected.grad = exact((total * scale).to(getattr(self.model, name).dtype)) / scale
        if self.scaler_of is None:  # What torch has clipped already, 16 bits round in each sum.
            for number in range(len(self.optimizers)):
                self.read_grads(number, is_clipped=False)

    @precondition(lambda self: self.are_ready and self.scaler_of is not None)
    @rule(names=name_sets, bad=st.sampled_from([INF, float("nan")]))
    def overflow(self, names: Any, bad: float) -> None:
        self.backward(names, bad)

    # --- Between backward and step.

    def clear(self, number: int | None = None, to_none: bool = True) -> None:
        for each in range(len(self.optimizers)) if number is None else [number]:
            self.optimizers[each].zero_grad(set_to_none=to_none)
            for name in self.names_of(each):
                expected = self.expected[name]
                if expected.grad is not None:
                    expected.grad = None if to_none else torch.zeros_like(expected.value)

    @precondition(lambda self: self.are_ready)
    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        self.clear(to_none=to_none)

    def expected_norm(self, number: int) -> float:
        found = [self.expected[name].grad for name in self.names_of(number)]
        return float(sum(grad.square().sum() for grad in found if grad is not None)) ** 0.5

    def clip_expected(self, number: int, norm: Any, max_norm: float) -> None:
        wanted = self.expected_norm(number)
        if self.saw_inf(number):
            assert not torch.as_tensor(norm).isfinite()
            return
        assert float(norm) == pytest.approx(
            wanted, rel=1e-2, abs=1e-6
        )  # torch measures in 16 bits.
        for name in self.names_of(number):
            expected = self.expected[name]
            if expected.grad is not None:
                expected.grad = expected.grad * min(1.0, max_norm / (wanted + 1e-6))

    def read_grads(self, number: int, is_clipped: bool) -> None:
        """Go on from unscaled gradients as they are, after a comparison: 16 bits round them.

        Clipping multiplies them by a number that torch may compute in bfloat16.
        """
        for name in self.names_of(number):
            expected, grad = self.expected[name], getattr(self.model, name).grad
            if expected.grad is not None and not self.saw_inf(number):
                size = expected.grad.abs()
                near = (2.0**-6 if is_clipped else torch.finfo(grad.dtype).eps) * size
                assert_near(exact(grad), expected.grad, near + 2.0**-24)
                expected.grad = exact(grad)

    def can_unscale(self, number: int) -> bool:
        return True

    @rule(number=st.integers(0, 1), max_norm=st.sampled_from([None, 0.5, 64.0]))
    def unscale(self, number: int, max_norm: float | None) -> None:
        """unscale_ and torch's clip."""
        number %= len(self.optimizers)
        if self.stages[number] != "ready" or not self.has_grads(number):
            return
        if self.scaler_of is not None:
            if not self.can_unscale(number):
                return
            self.scaler.unscale_(self.optimizers[number])
            self.stages[number] = "unscaled"
            self.found_inf |= self.saw_inf(number)
        if max_norm is not None:
            params = [getattr(self.model, name) for name in self.names_of(number)]
            norm = nn.utils.clip_grad_norm_(params, max_norm)
            self.clip_expected(number, norm, max_norm)
        self.read_grads(number, is_clipped=max_norm is not None)

    def clip_groups(self, number: int) -> None:
        """Clip expected gradients as the optimizer does in its step."""
        max_norm = self.of_kind[number].max_norm
        if max_norm is None or self.saw_inf(number):
            return
        for group in self.optimizers[number].param_groups:
            inside = [
                self.expected[name]
                for name in self.names_of(number)
                if any(getattr(self.model, name) is param for param in group["params"])
            ]
            norm = sum(float(each.grad.square().sum()) for each in inside if each.grad is not None)
            for each in inside:
                if each.grad is not None:
                    each.grad = each.grad * min(1.0, max_norm / (norm**0.5 + 1e-6))

    # --- Steps.

    @rule(number=st.integers(0, 1), to_none=st.booleans())
    def step(self, number: int, to_none: bool) -> None:
        number %= len(self.optimizers)
        if self.stages[number] == "stepped" or not self.has_grads(number):
            return
        optimizer, masters = self.optimizers[number], self.of_masters[number]
        names = [name for name in self.names_of(number) if self.expected[name].grad is not None]
        params = [getattr(self.model, name) for name in names]
        if has_bug_of_torch(self.of_kind[number], params, optimizer):
            self.clear(number)
            return
        self.clip_groups(number)
        starts = {name: self.start_of(name) for name in names}
        if self.scaler_of is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.stages[number] = "stepped"
            self.found_inf |= self.saw_inf(number)
        if not self.saw_inf(number):
            for name in names:
                param = getattr(self.model, name)
                self.expected[name].check_step(starts[name], param, optimizer, masters)
        self.clear(number, to_none)

    @precondition(lambda self: self.scaler_of is not None and not self.are_ready)
    @rule()
    def update(self) -> None:
        """The scale's rule is torch's."""
        self.scaler.update()
        if self.found_inf:
            self.scale, self.clean = self.scale / 2, 0
        else:
            self.clean += 1
            if self.clean == GROWTH_INTERVAL:
                self.scale, self.clean = self.scale * 2, 0
        self.stages, self.found_inf = ["ready"] * len(self.stages), False
        self.clear()  # What was not stepped has the scale of before.

    @precondition(lambda self: self.are_ready)
    @rule(names=name_sets, grad=grads, to_none=st.booleans())
    def train(self, names: Any, grad: float, to_none: bool) -> None:
        """One iteration; without this rule few programs take steps."""
        self.backward(names, grad)
        for number in range(len(self.optimizers)):
            self.step(number, to_none)
        if self.scaler_of is not None and not self.are_ready:
            self.update()

    # --- What holds after each rule.

    def start_of(self, name: str) -> Tensor:
        number = self.owners[name]
        return self.expected[name].start(
            getattr(self.model, name), self.optimizers[number], self.of_masters[number]
        )

    @invariant()
    def what_no_step_changed_stays(self) -> None:
        for name, expected in self.expected.items():
            number, param = self.owners[name], getattr(self.model, name)
            optimizer, kind = self.optimizers[number], self.of_kind[number]
            moments = moments_of(optimizer, param, kind)
            for found, wanted in zip(moments, expected.moments, strict=True):
                assert bool((found == wanted).all()), name
            self.start_of(name)

    @invariant()
    def the_scale_is_that_of_torch(self) -> None:
        if self.scaler_of is not None and self.optimizers:
            assert self.scaler.get_scale() == self.scale
