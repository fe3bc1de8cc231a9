"""Step parameters on several devices, or in several processes, with norms and checks of all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core.grads import shards
from apex_mp.core.grads.found_inf import FoundInf
from apex_mp.core.step.device_scale import DeviceScale
from apex_mp.core.step.scaled_step import UNKNOWN, HostOutcome, Lists
from apex_mp.core.tensors import copy_async
from apex_mp.optimizers._device_part import Groups, Norms, Part, Places, split


class SeveralDevices:
    """Has the methods of `_C.StepPlan`, for parameters on any devices.

    Each device has a plan of its own. The numbers that they share (whether a gradient is inf or
    NaN, and norms to clip by) are summed on one device and copied to the others without the host
    waiting. The host waits only for numbers that a step on the CPU needs from a GPU, and for the
    outcome of a check. Processes that hold parts of DTensors sum the same numbers.

    Like a plan, it keeps no parameter, gradient or state between steps, but what was found.

    Args:
        who: The optimizer's name, for messages.
        new_plan: Makes a plan for one device.
    """

    # The outcome of the last step, if that checked and the host did not wait.
    outcome: Tensor
    # Of the last step or check.
    found_inf: Tensor
    norm: Tensor
    read_outcome: Callable[[Tensor], HostOutcome]

    def __init__(self, who: str, new_plan: Callable[[], _C.StepPlan]) -> None:
        self._who = who
        self._new_plan = new_plan
        self.without_grad: Places = []
        self.can_run = True
        self.has_run = False
        self.has_parts = False
        self.has_others = False
        self.grad_dtypes: set[torch.dtype] = set()
        self._plans: dict[torch.device, _C.StepPlan] = {}
        # The gradients and their scale, and what `check` has found in them.
        self._checked: tuple[_C.GradVersions, Places, float | Tensor, _Measured] | None = None
        # Set by `read`, used by `run`.
        self._parts: list[Part] = []
        self._scale: float | Tensor = 1.0

    def read(
        self,
        param_groups: Groups,
        state: dict[Any, Any],
        masters: dict[Any, Any],
        make_state: Callable[[int, int], dict[str, Any]],
        *,
        grads: Lists | None,
        grads_of: Lists | None,
        copies: Lists | None,
        scale: float | Tensor,
        unscale: Sequence[torch.dtype],
    ) -> None:
        """As `_C.StepPlan.read`; afterwards `can_run` is False if one plan can step everything.

        Raises:
            RuntimeError: As there; or a gradient is on a device without kernels, or one of several
                devices is capturing a CUDA graph.
        """
        self.has_run = False
        self._count_others(param_groups, state, masters)
        lists = {"grads": grads, "grads_of": grads_of, "copies": copies}
        parts = split(self._who, param_groups, lists, self._plan_for)
        refuse_capture(self._who, [part.device for part in parts])
        made: list[tuple[int, int]] = []

        def make(number: int, index: int) -> dict[str, Any]:
            made.append((number, index))
            return make_state(number, index)

        try:
            for part in parts:
                part.read(state, masters, make, scale, unscale)
            for number, index in sorted(made):  # In the order of parameters, as with one plan.
                param = param_groups[number]["params"][index]
                state[param] = state.pop(param)
            self._parts = [part for part in parts if part.has_kernels()]
        except BaseException:
            self._forget()
            raise
        self._plans = {part.device: part.plan for part in parts}
        self._scale = scale
        self.has_parts = any(part.plan.has_parts for part in parts)
        self.grad_dtypes = set().union(*(part.plan.grad_dtypes for part in parts))
        if self.has_parts:  # Another process may have a gradient.
            groups = [group for part in parts for group in part.groups]
            self.grad_dtypes |= {param.dtype for group in groups for param in group["params"]}
        self.without_grad = sorted(place for part in parts for place in part.without_grad())
        self.can_run = len(parts) > 1 or len(parts) > len(self._parts) or self.has_parts

    def _count_others(
        self, param_groups: Groups, state: dict[Any, Any], masters: dict[Any, Any]
    ) -> None:
        # Each plan takes what is on other devices for such.
        params = sum(len(group["params"]) for group in param_groups)
        self.has_others = max(len(state), len(masters)) > params

    def _plan_for(self, device: torch.device) -> _C.StepPlan:
        """Return the plan of earlier steps, which knows its part already, or a new one."""
        return self._plans.get(device) or self._new_plan()

    def check(self, *, clip_by_global_norm: bool, clip_to: float) -> None:
        """As `_C.StepPlan.check`; how the step clips does not change what is measured."""
        try:
            if not self._parts:
                self.found_inf = torch.zeros((), device="cpu")
                self.norm = torch.zeros((), dtype=torch.float64, device="cpu")
                return
            versions, measured = self._grad_versions(), self._measure()
            self._checked = versions, self.without_grad, self._scale, measured
            self.found_inf = as_flag(measured.found_inf, self._who)
            self.norm = self._unscaled(measured.of_all)
        finally:
            self._let_go()

    def _grad_versions(self) -> _C.GradVersions:
        versions = _C.GradVersions()
        versions.record(self._params())
        return versions

    def _params(self) -> list[Tensor]:
        return [param for part in self._parts for group in part.groups for param in group["params"]]

    def _unscaled(self, norm: Tensor) -> Tensor:
        unscaled: Tensor = norm / _number_on(norm.device, self._scale)
        return unscaled

    def _measure(self) -> _Measured:
        return _measure(self._parts, self._scale, len(self._parts[0].groups))

    def _checked_or_measured(self, *, is_agreed: bool) -> _Measured:
        """Return what `check` has found in these gradients, or measure them.

        With `is_agreed` the step clips by what `check` has found. Gradients that a hook has edited
        since are clipped so, too: to measure them is a collective, which this process alone may
        want.

        Raises:
            RuntimeError: A hook has made inf or NaN, which the other processes do not know.
        """
        checked, self._checked = self._checked, None
        if checked is not None:
            versions, without_grad, scale, measured = checked
            has_same_places = without_grad == self.without_grad
            is_same = has_same_places and scale is self._scale
            if is_same and not versions.changed(self._params()):
                return measured
            if is_agreed and self.has_parts:
                found = FoundInf()
                found.check([p.grad for p in self._params() if p.grad is not None])
                if found and not measured.found_inf:
                    raise RuntimeError(
                        f"{self._who}: in this process gradients got inf or NaN after "
                        "scaler.clip_grad_norm_(optimizer), by a step hook or an edit, which the "
                        "other processes do not know; edit gradients before it"
                    )
                named = measured.nonfinite if has_same_places else measured.nonfinite[:0]
                return dataclasses.replace(measured, nonfinite=named)
        return self._measure()

    def run(
        self,
        *,
        norms: Norms | None,
        found_inf: Tensor | None,
        check: bool,
        clip_by_global_norm: bool,
        clip_to: float | None,
        clip_norm: Tensor | None,
        loss_scale: DeviceScale | None,
        wait: bool,
    ) -> HostOutcome:
        """As `_C.StepPlan.run`."""
        try:
            outcome = self._run(
                norms, found_inf, check, clip_by_global_norm, clip_to, clip_norm, loss_scale
            )
        except BaseException:
            self.has_run = any(part.plan.has_run for part in self._parts)
            self._forget()
            raise
        self.has_run = True  # Perhaps it was skipped.
        self._let_go()
        if outcome is not None:
            return outcome
        return self.read_outcome(self.outcome) if wait else UNKNOWN

    def refresh_groups(self) -> None:
        """As `_C.StepPlan.refresh_groups`."""
        for part in self._parts:
            part.plan.refresh_groups()
        self._let_go()

    def _run(
        self,
        norms: Norms | None,
        found_inf: Tensor | None,
        check: bool,
        clip_by_global_norm: bool,
        clip_to: float | None,
        clip_norm: Tensor | None,
        loss_scale: DeviceScale | None,
    ) -> HostOutcome | None:
        """Step; return the outcome, or None if the host does not know it."""
        skip = None if found_inf is None else as_flag(found_inf, self._who)
        if not self._parts:
            if loss_scale is not None:
                loss_scale.update(torch.zeros((), device=loss_scale.device))
            return HostOutcome(False)
        groups = self._parts[0].groups
        norms = norms or [None] * len(groups)
        missing = [
            number
            for number, norm in enumerate(norms)
            if norm is None and groups[number]["max_grad_norm"] > 0.0
        ]
        if not (check or self._must_measure(missing, clip_by_global_norm)):
            return self._step_given(norms, skip)
        measured = self._checked_or_measured(is_agreed=clip_norm is not None)
        for number in missing:
            norms[number] = measured.of_all if clip_by_global_norm else measured.of_groups[number]
        if not check:
            return self._step_given(norms, skip)
        found = as_flag(measured.found_inf, self._who)
        skip = found if skip is None else torch.maximum(found, copy_async(skip, found.device))
        if clip_to is not None and clip_norm is None:
            clip_norm = self._unscaled(measured.of_all)
        self.found_inf = skip
        norms_of_groups = self._unscaled(measured.of_groups)
        self.outcome = torch.cat([skip.double().view(1), norms_of_groups, measured.nonfinite])
        order = self._order() if len(measured.nonfinite) else []
        self.read_outcome = functools.partial(_read_outcome, len(groups), order)
        self._step(norms, skip, clip_to, clip_norm)
        if loss_scale is not None:
            loss_scale.update(copy_async(skip, loss_scale.device))
        return None

    def _step_given(self, norms: Norms, skip: Tensor | None) -> HostOutcome:
        """Step everything, unless `skip`, which the caller has given, is set."""
        if skip is not None:
            self.found_inf, self.outcome = skip, skip.double().view(1)
            self.read_outcome = functools.partial(_read_outcome, 0, [])
        return self._step(norms, skip)

    def _step(
        self,
        norms: Norms,
        skip: Tensor | None,
        clip_to: float | None = None,
        clip_norm: Tensor | None = None,
    ) -> HostOutcome:
        """Step everything, unless `skip` is set; return what the host knows of the outcome."""
        outcomes = [
            part.plan.run(
                norms=[_number_on(part.device, norm) for norm in norms],
                found_inf=skip,
                check=False,
                clip_by_global_norm=False,
                clip_to=clip_to,
                clip_norm=_number_on(part.device, clip_norm),
                loss_scale=None,
                wait=False,
            )
            for part in self._parts
        ]
        found_inf = any(outcome.found_inf for outcome in outcomes)
        is_known = skip is None or all(outcome.is_known for outcome in outcomes)
        return HostOutcome(found_inf, is_known=is_known or found_inf)

    def _must_measure(self, missing: list[int], clip_by_global_norm: bool) -> bool:
        """Return whether a group is clipped by a norm that no plan can measure alone."""
        return any(
            clip_by_global_norm
            or self.has_parts
            or sum(bool(part.groups[number]["params"]) for part in self._parts) > 1
            for number in missing
        )

    def _order(self) -> list[int]:
        """Return for each gradient, in the order of `_measure`, its number among all gradients."""
        places = [place for part in self._parts for place in part.places_with_grad()]
        number_of = {place: number for number, place in enumerate(sorted(places))}
        return [number_of[place] for place in places]

    def _let_go(self) -> None:
        for part in self._parts:
            part.plan.clear()
        self._parts, self._scale = [], 1.0

    def _forget(self) -> None:
        """Drop the plans after a refusal: what they have read would be kept alive."""
        self._let_go()
        self._plans = {}


def refuse_capture(who: str, devices: Sequence[torch.device]) -> None:
    """Raise a RuntimeError if there are several devices, and one is capturing a CUDA graph."""
    if len(devices) == 1:
        return
    # A replay would step one device only; the others would be stepped now and never again.
    for device in devices:
        if is_capturing(device):
            raise RuntimeError(
                f"{who}: {device} is capturing a CUDA graph, but the parameters lie on "
                f"{len(devices)} devices, whose step cannot be captured; make a {who} for each "
                "device"
            )


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def as_flag(found_inf: float | Tensor, who: str) -> Tensor:
    """Return found_inf as a 0-dim tensor, which no plan refuses after others have stepped."""
    if not isinstance(found_inf, Tensor):  # GradScaler's sum over no gradients is the number 0.
        return torch.tensor(float(found_inf != 0), dtype=torch.float32, device="cpu")
    if found_inf.numel() != 1:
        raise ValueError(
            f"{who}: found_inf is a tensor of {found_inf.numel()} elements; it must have 1"
        )
    return (found_inf != 0).reshape(()).float()


def _read_outcome(groups: int, order: list[int], values: Tensor) -> HostOutcome:
    """Return what a copy of `SeveralDevices.outcome` on the CPU says."""
    found_inf, *numbers = values.tolist()
    flags = zip(order, numbers[groups:], strict=True)
    rows = sorted(number for number, flag in flags if flag)
    return HostOutcome(found_inf != 0.0, numbers[:groups], nonfinite_rows=rows)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What one pass over all gradients has found: float64 on the first part's device.

    Norms are those of scaled gradients; unscaled ones count times the scale, because a plan expects
    that of a given norm (csrc/math/step_scalars.h).

    Attributes:
        found_inf: One number, not 0 if there is inf or NaN.
        of_groups: l2 norm of each group's gradients.
        of_all: l2 norm of all gradients.
        nonfinite: For each gradient, not 0 if it holds inf or NaN; in the order of parts.
    """

    found_inf: Tensor
    of_groups: Tensor
    of_all: Tensor
    nonfinite: Tensor


def _measure(parts: list[Part], scale: float | Tensor, groups: int) -> _Measured:
    scalar_device = parts[0].device
    found = [copy_async(_look_at(part, scale, groups), scalar_device) for part in parts]
    ends = 1 + 2 * groups
    heads = torch.stack([one[:ends] for one in found])
    plain, scaled = torch.linalg.vector_norm(heads[:, 1:].view(-1, groups, 2), dim=0).unbind(-1)
    of_groups = torch.hypot(scaled, plain * _number_on(scalar_device, scale))
    nonfinite = torch.cat([one[ends:] for one in found])
    return _Measured(heads[:, 0].sum(), of_groups, torch.linalg.vector_norm(of_groups), nonfinite)


def _look_at(part: Part, scale: float | Tensor, groups: int) -> Tensor:
    """Return whether there is inf or NaN; groups' norms of unscaled and scaled gradients; flags."""
    gradients = part.plan.gradients
    found, here = FoundInf(), _C.DeviceGrads(part.device)
    for row, (grad, _, _) in enumerate(gradients):
        here.insert(row, grad)
    found.check_each(part.device, here)
    kinds = [2 * number + scaled for _, number, scaled in gradients]
    rows: Sequence[int] = range(len(gradients))
    if part.plan.has_parts:
        rows = part.rows_with_grad()
        params = [param for group in part.groups for param in group["params"]]
        shards.agree(params, [found], {part.device: rows}, scale=scale)
        # Another process may have a gradient for a row without one here; that is scaled.
        known = dict(zip(rows, kinds, strict=True))
        groups_of = [number for number, group in enumerate(part.groups) for _ in group["params"]]
        kinds = [known.get(row, 2 * number + 1) for row, number in enumerate(groups_of)]
    roots = found.sum_sq[part.device].sqrt()
    # Sorted by norm: split() below needs the members of each next to each other.
    order = sorted(range(len(kinds)), key=kinds.__getitem__)
    sizes = [kinds.count(kind) for kind in range(2 * groups)]
    ordered = roots[order] if order != [*range(len(order))] else roots
    norms = torch.stack(torch._foreach_norm(torch.split(ordered, sizes)))
    found_inf = found.on(part.device).double().view(1)
    return torch.cat([found_inf, norms, (~shards.gathered(roots, rows).isfinite()).double()])


def _number_on(device: torch.device, value: Any) -> Any:
    return copy_async(value, device).reshape(()) if isinstance(value, Tensor) else value
