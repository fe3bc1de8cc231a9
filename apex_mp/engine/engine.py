"""The engine: steps the parameters of groups by a rule, in one call for all tensors on a device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import forks
from apex_mp.engine.devices import DevicePlans, Groups
from apex_mp.engine.host_grads import HostGrads
from apex_mp.engine.host_steps import HostSteps
from apex_mp.masters.layout import Rule
from apex_mp.masters.store import master_dtype
from apex_mp.step.scaled_step import GradCheck, HostOutcome, Outcome, ScaledStep, StepResult

_Plan: TypeAlias = "_C.StepPlan | DevicePlans"
# For each parameter whose state a step has replaced, the state before; None: it had none.
_Before: TypeAlias = dict[Tensor, dict[str, Any] | None]


class Engine:
    """Steps by a rule, for an optimizer that it is given in each call: it keeps a plan alone.

    The optimizer has `state` and a `MasterStore`.

    Args:
        rule: The rule.
        who: The optimizer's name, for messages.
        offload: Whether masters and moments are in host memory.
        host_grads: Has gradients that are there, too; None: none are.
        processes: Those that have parts of the parameters [None].

    Attributes:
        plan: Reads and steps; None before the first step.
    """

    def __init__(
        self,
        rule: Rule,
        who: str,
        *,
        offload: bool = False,
        host_grads: HostGrads | None = None,
        processes: Any = None,
    ) -> None:
        self.rule = rule
        self.plan: _Plan | None = None
        self._who, self._offload, self._host_grads = who, offload, host_grads
        self._processes = processes
        self._has_new = False  # In this step a parameter got its first state.

    @property
    def _state_device(self) -> torch.device | None:
        return torch.device("cpu") if self._offload else None

    def step(self, optimizer: Any, groups: Groups, step: ScaledStep) -> StepResult:
        """Step all groups at once."""
        before: _Before = {}
        plan = self.plan or self._first_plan()
        try:
            plan = self._read(optimizer, groups, step, before)
            optimizer._own_masters.begin_step()
            outcome = self._run(plan, step)
        except BaseException:
            if not plan.has_run:  # Else the weights were stepped, and need their state.
                _take_back(optimizer, before)
            raise
        if plan.has_others or self._has_new:
            optimizer._own_masters.put_aside(optimizer)
            self._has_new = False
        optimizer._own_masters.end_step()
        if not (step.check or step.found_inf is not None):
            outcome = HostOutcome(False)  # What is not looked for is not found.
        if outcome.is_known and not outcome.found_inf:
            self.rule.after_step(optimizer.__dict__["state"], groups, plan.without_grad)
        result = StepResult(outcome, plan.without_grad, plan.grad_dtypes)
        if outcome.is_known:
            return result
        return dataclasses.replace(
            result, found_inf=plan.found_inf, sent=plan.outcome, read=plan.read_outcome
        )

    @torch.no_grad()
    def check_gradients(self, optimizer: Any, groups: Groups, step: ScaledStep) -> GradCheck:
        """Check and measure gradients for a step that is taken later.

        That step does not read them for this again if all is as it was; nothing changes until then.
        """
        before: _Before = {}
        try:
            plan = self._read(optimizer, groups, step, before)
            assert step.clip_to is not None
            by_global_norm = self.rule.clips_by_global_norm
            plan.check(clip_by_global_norm=by_global_norm, clip_to=step.clip_to)
        finally:
            _take_back(optimizer, before)
        return GradCheck(plan.found_inf, plan.norm, plan.grad_dtypes)

    @torch.no_grad()
    def refresh_groups(self, optimizer: Any, groups: Groups) -> None:
        """Make a captured step use the present options of the groups."""
        plan = self.plan
        if plan is not None:
            nothing = ScaledStep(grads=[[None] * len(group["params"]) for group in groups])
            self._read_by(plan, optimizer, groups, nothing, {})
            plan.refresh_groups()

    def _first_plan(self) -> _Plan:
        if self._offload:
            parts, grads = self.rule.steps_parts, self._host_grads
            host = HostSteps(self._who, self.new_plan, parts, grads)
            self.plan = DevicePlans(self._who, self.new_plan, host, self._processes)
        else:
            self.plan = self.new_plan()
        return self.plan

    def new_plan(self) -> _C.StepPlan:
        """Return a plan that steps parameters on one device."""
        layout = self.rule.layout
        plan = _C.StepPlan(
            self.rule.name,
            self._who,
            tensors=layout.tensors,
            numbers=layout.numbers + layout.unsaved_numbers,
        )
        forks.leak_in_children(plan)  # After steps on another stream its memory needs events.
        return plan

    def _read(self, optimizer: Any, groups: Groups, step: ScaledStep, before: _Before) -> _Plan:
        """Make the plan read a step; return it, or another one if it cannot take the step."""
        plan = self.plan or self._first_plan()
        self._read_by(plan, optimizer, groups, step, before)
        # Parameters were moved to several devices, or back to one.
        if not plan.can_run or self._must_agree(plan, groups, step):
            if isinstance(plan, DevicePlans):
                plan = self.new_plan()
            else:
                plan = DevicePlans(self._who, self.new_plan, processes=self._processes)
            self.plan = plan
            self._read_by(plan, optimizer, groups, step, before)
        return plan

    def _read_by(
        self, plan: _Plan, optimizer: Any, groups: Groups, step: ScaledStep, before: _Before
    ) -> None:
        plan.read(
            groups,
            optimizer.__dict__["state"],
            optimizer._own_masters.kept,
            functools.partial(self._make_state, optimizer, groups, before),
            grads=step.grads,
            grads_of=step.grads_of,
            copies=step.copies,
            scale=step.scale,
            unscale=step.unscale,
        )

    def _must_agree(self, plan: _Plan, groups: Groups, step: ScaledStep) -> bool:
        """Return whether the step needs numbers of other processes, which a plan cannot collect."""
        if isinstance(plan, DevicePlans) or not (plan.has_parts or self._processes is not None):
            return False
        norms = self._norms(step) or [None] * len(groups)
        clips = any(
            norm is None and group["max_grad_norm"]
            for norm, group in zip(norms, groups, strict=True)
        )
        return clips or (step.check and plan.has_parts)

    def _run(self, plan: _Plan, step: ScaledStep) -> Outcome:
        kwargs: dict[str, Any] = {
            "norms": self._norms(step),
            "found_inf": step.found_inf,
            "check": step.check,
            "clip_by_global_norm": step.clip_by_global_norm or self.rule.clips_by_global_norm,
            "clip_to": step.clip_to,
            "clip_norm": step.clip_norm,
            "wait": step.check and step.wait,
        }
        scale = step.loss_scale
        if isinstance(plan, DevicePlans):
            return plan.run(loss_scale=scale, **kwargs)
        on_device = None if scale is None else scale.for_step()
        return plan.run(loss_scale=on_device, **kwargs)

    def _norms(self, step: ScaledStep) -> list[float | Tensor | None] | None:
        """Return the norms to clip groups by, as far as they are known."""
        # Norms of groups do not help to clip by the norm of all.
        return None if self.rule.clips_by_global_norm else step.norms

    def _make_state(
        self, optimizer: Any, groups: Groups, before: _Before, number: int, index: int
    ) -> dict[str, Any]:
        """Complete a parameter's state and master, in the parameter's memory order.

        Returns:
            The parameter's new state.
        """
        group, states = groups[number], optimizer.__dict__["state"]
        param = group["params"][index]
        optimizer._own_masters.put_back(optimizer)
        before.setdefault(param, states.get(param))
        self._has_new |= before[param] is None
        layout = self.rule.layout_of(group)
        state = layout.completed(before[param] or {}, param, group, self._state_device)
        self.rule.note_new(state, before[param], group)
        states[param] = state
        optimizer._own_masters.keep_as(param, master_dtype(param, group), self._state_device)
        return state


# What a step creates is removed again if the step is refused.


def _take_back(optimizer: Any, before: _Before) -> None:
    """Restore states as they were before the step: None removes one."""
    for param, state in before.items():
        if state is None:
            optimizer.state.pop(param, None)
        else:
            optimizer.state[param] = state
