"""The base class of all fused optimizers: options, the call of a step, and the state it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import forks, tensors
from apex_mp.core.checkpoints.checkpoint_view import is_called_for_state
from apex_mp.core.masters.store import MasterStore
from apex_mp.core.step import readback
from apex_mp.core.step.scaled_step import (
    GradCheck,
    HostOutcome,
    Lists,
    Outcome,
    ScaledStep,
    StepResult,
    dropping_amp_tensors,
)
from apex_mp.core.step.skips import ParamNames
from apex_mp.optimizers import _legacy_call, _offload
from apex_mp.optimizers._lost_updates import LostUpdates
from apex_mp.optimizers._offload.plan import OffloadedPlan
from apex_mp.optimizers._saved import SavedOptimizer
from apex_mp.optimizers._several_devices import SeveralDevices
from apex_mp.optimizers._state import master_dtype

_Plan: TypeAlias = "_C.StepPlan | SeveralDevices"
# For each parameter whose state a step has replaced, the state before; None: it had none.
Before: TypeAlias = dict[Tensor, dict[str, Any] | None]


class FusedOptimizer(SavedOptimizer):
    """A fused optimizer: one that steps all tensors on a device in one call.

    A subclass defines its signature, the names of its options and of its state, and their checks:
    the attributes and methods under "Defined by each optimizer", here and in `_saved.py`.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        defaults: The options of groups that lack them.
        unscale_grads: True, False or None.
        master_weights: Whether parameters in low precision have float32 masters in their state:
            True, False, "split" or "float32", see `FusedAdam`.
        offload: Whether masters and moments are in host memory, see `FusedAdam`.
    """

    # torch.amp.GradScaler then leaves unscaling and skipping to step(): it sets self.grad_scale and
    # self.found_inf around the call.
    _step_supports_amp_scaling = True
    # FP16_Optimizer need not copy masters to the model after step(output_params=...).
    _writes_output_params = True
    unscale_grads: bool | None = None  # for optimizers pickled before the option existed
    _steps_taken = 0  # or tried
    _plan: _Plan

    # --- Defined by each optimizer.

    # Its arithmetic: `kName` of one of csrc/math/rules.h.
    _rule: str
    # Whether groups are always clipped by the norm of all.
    _clips_by_global_norm = False
    # Whether each element is stepped by itself, so that parts of tensors can be stepped.
    _steps_parts = True

    def _check_new_options(self, group: Mapping[str, Any]) -> None:
        """Check the options of a group that is added; a loaded group need not pass."""
        self._check_options(group)

    # --- Options.

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        unscale_grads: bool | None,
        master_weights: bool | str,
        offload: bool | str = False,
    ) -> None:
        _offload.check_option(self._public_name, offload)
        self.offload = offload
        self._own_masters = MasterStore()
        # Only then: without it groups have the keys of apex and torch.
        if master_weights:
            defaults = {**defaults, "master_weights": master_weights}
        self._check_new_options(defaults)
        _legacy_call.check_unscale_grads(self._public_name, unscale_grads)
        self.unscale_grads = unscale_grads
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks are the constructor's.

        Raises:
            MemoryError: With `offload` its states need more than the container's limit leaves.
            RuntimeError: A hyperparameter asks for what this optimizer does not have.
            TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
                hyperparameter is no number.
            ValueError: A hyperparameter is out of range.
        """
        if isinstance(param_group, dict):  # torch says so otherwise
            self._check_new_options({**self.defaults, **param_group})
        params, names = tensors.listed(param_group)
        number = len(self.param_groups)
        test = tensors.part_not_steppable if self._steps_parts else tensors.not_steppable
        tensors.check_params(self._public_name, number, params, test, names)
        if self.offload and params:
            _offload.check_group(self, {**self.defaults, **param_group, "params": params}, names)
        super().add_param_group(param_group)
        self._watch_gradients()

    def refresh_hyperparameters(self) -> None:
        """Make the step in a captured CUDA graph use the present options of the groups.

        Call it between replays, outside of a capture, after `param_groups` was changed, by a
        scheduler or by hand. Steps that are not replayed do not need it, nor does a tensor as `lr`.
        """
        plan: _Plan | None = self.__dict__.get("_plan")
        if plan is not None:
            nothing: Lists = [[None] * len(group["params"]) for group in self.param_groups]
            with torch.no_grad():
                self._read(plan, ScaledStep(grads=nothing), {})
                plan.refresh_groups()

    # --- The step.

    # Traced, it would be compiled anew for every value of lr, and never faster. Not by
    # torch.compiler.disable, which imports the whole of Dynamo (a second) with this module.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Any] | None = None,
        output_params: Iterable[Any] | None = None,
        scale: float | Tensor = 1.0,
        grad_norms: Iterable[float | Tensor] | None = None,
    ) -> Any:
        """Take one step with every parameter that has a gradient.

        Without arguments the gradients are each parameter's `.grad`. The other forms are the legacy
        call of `FP16_Optimizer`.

        Args:
            closure: Computes the loss again and returns it.
            grads: Gradients instead of `.grad`: a list for each group, or one flat list or
                generator over all parameters; None where there is none.
            output_params: Where each new parameter is also written in the output's dtype (fp16
                model parameters, if `params` are their fp32 masters): as `grads`.
            scale: The gradients are divided by it: the loss scale.
            grad_norms: l2 norm of each group's gradients as given, that is, of the scaled ones;
                saves the pass that `max_grad_norm` otherwise costs.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: A gradient is sparse, does not fit its parameter, or is on a device that
                this build has no kernels for; or a step on several devices is captured in a graph.
            ValueError: `grads`, `output_params` or `grad_norms` do not fit the groups, or a
                hyperparameter is out of range now.
        """
        readback.poll()  # Plain loops have nothing else that does.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with dropping_amp_tensors(self):
            step = _legacy_call.scaled_step(
                self._public_name, self, grads, output_params, scale, grad_norms
            )
            is_first = not self.__dict__["state"]
            with torch.no_grad(), self._watching_updates(step):
                step.result = self._step_by_plan(step)
                if is_first and is_called_for_state():
                    for state in self.state.values():
                        if "step" in state:
                            state["step"].zero_()
        return loss

    step.takes_scaled_step = True  # type: ignore[attr-defined]

    def _step_by_plan(self, step: ScaledStep) -> StepResult:
        """Step all groups at once."""
        before: Before = {}
        plan = self._present_plan()
        try:
            plan = self._read_by_plan(plan, step, before)
            self._steps_taken += 1
            outcome = self._run(plan, step)
        except BaseException:
            if not plan.has_run:  # Else the weights were stepped, and need their state.
                self._take_back(before)
            raise
        if plan.has_others:
            self._own_masters.put_aside(self)
        if not (step.check or step.found_inf is not None):
            outcome = HostOutcome(False)  # What is not looked for is not found.
        if outcome.found_inf:
            self._take_back(before)
        elif outcome.is_known:
            self._after_step(plan.without_grad)
        result = StepResult(outcome, plan.without_grad, plan.grad_dtypes)
        if outcome.is_known:
            return result
        undo = self._undo(before) if before else None
        return dataclasses.replace(
            result,
            found_inf=plan.found_inf,
            sent=plan.outcome,
            read=plan.read_outcome,
            undo_state=undo,
        )

    @torch.no_grad()
    def check_gradients(self, step: ScaledStep) -> GradCheck:
        """Check and measure gradients for a step that is taken later, by `take` with an equal one.

        That step does not read them for this again if all is as it was; nothing changes until then.

        Args:
            step: The step; it has `check` and `clip_to`.
        """
        before: Before = {}
        plan = self._present_plan()
        try:
            plan = self._read_by_plan(plan, step, before)
            assert step.clip_to is not None
            plan.check(clip_by_global_norm=self._clips_by_global_norm, clip_to=step.clip_to)
        finally:
            self._take_back(before)
        return GradCheck(plan.found_inf, plan.norm, plan.grad_dtypes)

    def _present_plan(self) -> _Plan:
        plan: _Plan | None = self.__dict__.get("_plan")
        if plan is None:  # also after pickle and deepcopy
            if self.offload:
                grads, cuts = self._host_grads, self._steps_parts
                plan = OffloadedPlan(self._public_name, self._new_plan, cuts, grads)
            else:
                plan = self._new_plan()
            self._plan = plan
        return plan

    def _read_by_plan(self, plan: _Plan, step: ScaledStep, before: Before) -> _Plan:
        """Make the plan read a step; return it, or another one if it cannot take the step."""
        self._read(plan, step, before)
        # Parameters were moved to several devices, or back to one.
        if not plan.can_run or self._must_agree(plan, step):
            plan = self._plan = self._other_plan(plan)
            self._read(plan, step, before)
        return plan

    @contextlib.contextmanager
    def _watching_updates(self, step: ScaledStep) -> Iterator[None]:
        """A context in which a step is taken; warn once that 16-bit parameters have no masters.

        Not if `step` does not ask for it, nor after amp.initialize, where O3 asks for this.
        """
        attributes = self.__dict__
        if not step.watch_updates or "_amp_initialized" in attributes:
            yield
            return
        lost = attributes.get("_lost_updates")
        if lost is None:
            name = self._public_name
            advice = f"{name}(..., master_weights=True) keeps masters"
            names = ParamNames(None, None)
            lost = self._lost_updates = LostUpdates(
                self, name, advice, lambda: names.params(self.param_groups)
            )
        counter = lost.before_step()
        yield
        lost.after_step(counter, False if step.found_inf is None else step.found_inf)

    def _must_agree(self, plan: _Plan, step: ScaledStep) -> bool:
        """Return whether the step needs numbers of other processes, which a plan cannot collect."""
        if isinstance(plan, SeveralDevices) or not plan.has_parts:
            return False
        norms = self._norms(step) or [None] * len(self.param_groups)
        return step.check or any(
            norm is None and group["max_grad_norm"]
            for norm, group in zip(norms, self.param_groups, strict=True)
        )

    def _run(self, plan: _Plan, step: ScaledStep) -> Outcome:
        kwargs: dict[str, Any] = {
            "norms": self._norms(step),
            "found_inf": step.found_inf,
            "check": step.check,
            "clip_by_global_norm": step.clip_by_global_norm or self._clips_by_global_norm,
            "clip_to": step.clip_to,
            "clip_norm": step.clip_norm,
            "wait": step.check and step.wait,
        }
        scale = step.loss_scale
        if isinstance(plan, SeveralDevices):
            return plan.run(loss_scale=scale, **kwargs)
        on_device = None if scale is None else scale.for_step()
        return plan.run(loss_scale=on_device, **kwargs)

    def _norms(self, step: ScaledStep) -> list[float | Tensor | None] | None:
        """Return the norms to clip groups by, as far as they are known."""
        # Norms of groups do not help to clip by the norm of all.
        return None if self._clips_by_global_norm else step.norms

    @classmethod
    def _new_plan(cls) -> _C.StepPlan:
        """Return a plan that steps parameters on one device."""
        layout = cls._state_layout
        plan = _C.StepPlan(
            cls._rule,
            cls._public_name,
            tensors=layout.tensors,
            numbers=layout.numbers + layout.unsaved_numbers,
        )
        forks.leak_in_children(plan)  # After steps on another stream its memory needs events.
        return plan

    def _other_plan(self, plan: _Plan) -> _Plan:
        if isinstance(plan, SeveralDevices):
            return self._new_plan()
        return SeveralDevices(self._public_name, self._new_plan)

    def _read(self, plan: _Plan, step: ScaledStep, before: Before) -> None:
        """Make a plan read the next step; missing state is created."""
        plan.read(
            self.param_groups,
            self.__dict__["state"],
            self._own_masters.kept,
            functools.partial(self._make_state, before),
            grads=step.grads,
            grads_of=step.grads_of,
            copies=step.copies,
            scale=step.scale,
            unscale=step.unscale,
        )

    # --- State. What a step creates is removed again if the step is skipped or refused.

    def _make_state(self, before: Before, number: int, index: int) -> dict[str, Any]:
        """Complete a parameter's state, with tensors in the parameter's memory order.

        Args:
            before: States before the running step; the parameter's is added.
            number: The number of the parameter's group.
            index: The index of the parameter in it.

        Returns:
            The parameter's new state.
        """
        group = self.param_groups[number]
        param = group["params"][index]
        self._own_masters.put_back(self)
        before.setdefault(param, self.state.get(param))
        state = self._layout(group).completed(before[param] or {}, param, group, self._state_device)
        self.state[param] = state
        self._own_masters.keep_as(param, master_dtype(param, group), self._state_device)
        return state

    def _after_step(self, without_grad: list[tuple[int, int]]) -> None:
        """Called after a step if the host knows that it was not skipped.

        Args:
            without_grad: Group and index of the parameters that were not stepped.
        """

    def _undo(self, before: Before) -> Callable[[], None]:
        """Return a function that removes the state that a step has created, if it is unused."""
        made = {param: self.state[param] for param in before}
        steps = self._steps_taken
        weak = weakref.ref(self)

        def undo() -> None:
            optimizer = weak()
            if (
                optimizer is not None
                and optimizer._steps_taken == steps
                and all(optimizer.state.get(param) is state for param, state in made.items())
            ):
                optimizer._take_back(before)

        return undo

    def _take_back(self, before: Before) -> None:
        """Restore states as they were before the step: None removes one."""
        for param, state in before.items():
            if state is None:
                self.state.pop(param, None)
            else:
                self.state[param] = state
