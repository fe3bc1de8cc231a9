"""Steps parameters that lie on several devices: a plan for each, and numbers that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C, _ops
from apex_mp._step_request import Lists
from apex_mp.device_scale import DeviceScale, bring
from apex_mp.optimizers._device_part import Groups, Norms, Part, Places, split


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a step, as `_C.StepOutcome` says it for one device."""

    found_inf: bool
    norms: list[float]
    is_known: bool = True
    # Which parameters they are is not known.
    nonfinite_rows: list[int] = dataclasses.field(default_factory=list)


class SeveralDevices:
    """Has the methods of `_C.AdamPlan`, for parameters on any devices.

    Each device has a plan of its own. What they share - whether a gradient is inf or NaN, norms to
    clip by - is added up on one of them, and copied to the others without the host waiting. It
    waits only for what a step on the CPU needs from elsewhere, and for the outcome of a check.

    Between steps it keeps no tensor but `outcome`, as a plan.

    Args:
        who: The optimizer's name, for messages.
        new_plan: Makes a plan for one device.
    """

    outcome: Tensor  # of the last step, if it was to check and the host was not to wait

    def __init__(self, who: str, new_plan: Callable[[], _C.AdamPlan]) -> None:
        self._who = who
        self._new_plan = new_plan
        self.without_grad: Places = []
        self.can_run = True
        self._plans: dict[torch.device, _C.AdamPlan] = {}
        # From `read` to `run`.
        self._parts: list[Part] = []
        self._state: dict[Any, Any] = {}
        self._scale: float | Tensor = 1.0
        self._unscale: Sequence[torch.dtype] = ()
        self._norms: Norms = []

    def read(
        self,
        param_groups: Groups,
        state: dict[Any, Any],
        *,
        grads: Lists | None,
        grads_of: Lists | None,
        copies: Lists | None,
        scale: float | Tensor,
        norms: Norms | None,
        unscale: Sequence[torch.dtype] = (),
    ) -> Places:
        """As `_C.AdamPlan.read`. `can_run` is False afterwards where one such plan can step all.

        Raises:
            RuntimeError: As there; a gradient is where this build has no kernels; one of several
                devices is capturing a CUDA graph.
        """
        lists = {"grads": grads, "grads_of": grads_of, "copies": copies}
        parts = split(self._who, param_groups, lists, self._plan_for)
        refuse_capture(self._who, [part.device for part in parts])
        try:
            self._state, self._scale, self._unscale = state, scale, unscale
            needs = [place for part in parts for place in self._read(part, norms)]
            self._parts = [part for part in parts if part.has_kernels()]
        except BaseException:
            self._forget()
            raise
        self._plans = {part.device: part.plan for part in parts}
        self._norms = norms or [None] * len(param_groups)
        self.without_grad = sorted(place for part in parts for place in part.without_grad())
        self.can_run = len(parts) > 1 or len(parts) > len(self._parts)
        return sorted(needs)

    def _plan_for(self, device: torch.device) -> _C.AdamPlan:
        """That of earlier steps, which knows its part already, or a new one."""
        return self._plans.get(device) or self._new_plan()

    def _read(self, part: Part, norms: Norms | None) -> Places:
        return part.read(self._state, self._scale, norms, self._unscale)

    def run(
        self,
        *,
        found_inf: Tensor | None,
        check: bool,
        clip_by_global_norm: bool,
        loss_scale: DeviceScale | None,
        wait: bool,
    ) -> Outcome:
        """As `_C.AdamPlan.run`."""
        try:
            outcome = self._run(found_inf, check, clip_by_global_norm, loss_scale)
        except BaseException:
            self._forget()
            raise
        self._let_go()
        if isinstance(outcome, Outcome):
            return outcome
        if wait:
            return self.read_outcome(outcome)
        self.outcome = outcome
        return Outcome(False, [], is_known=False)

    @staticmethod
    def read_outcome(told: Tensor) -> Outcome:
        """As `_C.AdamPlan.read_outcome`."""
        found_inf, *norms = told.tolist()
        return Outcome(found_inf != 0.0, norms)

    def refresh_groups(self) -> None:
        """As `_C.AdamPlan.refresh_groups`."""
        for part in self._parts:
            part.plan.refresh_groups()
        self._let_go()

    def _run(
        self,
        found_inf: Tensor | None,
        check: bool,
        clip_by_global_norm: bool,
        loss_scale: DeviceScale | None,
    ) -> Outcome | Tensor:
        """Step; return what became of it, or where the first device is to tell it."""
        skip = None if found_inf is None else as_flag(found_inf, self._who)
        if not self._parts:
            if loss_scale is not None:
                loss_scale.update(torch.zeros((), device=loss_scale.device))
            return Outcome(False, [])
        if not (check or self._clips_across_devices(clip_by_global_norm)):
            return Outcome(self._step(skip), [])
        measured = _measure(self._parts, self._scale, len(self._norms))
        self._read_norms(measured, clip_by_global_norm)
        if not check:
            return Outcome(self._step(skip), [])
        found = as_flag(measured[0], self._who)
        skip = found if skip is None else torch.maximum(found, bring(skip, found.device))
        self._step(skip)
        if loss_scale is not None:
            loss_scale.update(bring(skip, loss_scale.device))
        norms = measured[1:-1] / _number_on(found.device, self._scale)
        return torch.cat([skip.to(norms).view(1), norms])

    def _step(self, skip: Tensor | None) -> bool:
        """Step everything, unless `skip` is set; return whether the host knows that it is."""
        outcomes = [
            part.plan.run(
                found_inf=skip,
                check=False,
                clip_by_global_norm=False,
                loss_scale=None,
                wait=False,
            )
            for part in self._parts
        ]
        return any(outcome.found_inf for outcome in outcomes)

    def _clips_across_devices(self, clip_by_global_norm: bool) -> bool:
        """Whether a group is clipped by a norm that no plan can measure alone."""
        return any(
            clip_by_global_norm
            or sum(bool(part.groups[number]["params"]) for part in self._parts) > 1
            for number in self._groups_to_measure()
        )

    def _groups_to_measure(self) -> list[int]:
        groups = self._parts[0].groups
        return [
            number
            for number, norm in enumerate(self._norms)
            if norm is None and groups[number]["max_grad_norm"] > 0.0
        ]

    def _read_norms(self, measured: Tensor, clip_by_global_norm: bool) -> None:
        for part in self._parts:
            here = bring(measured, part.device)
            norms = [*self._norms]
            for number in self._groups_to_measure():
                norms[number] = here[-1 if clip_by_global_norm else number + 1]
            self._read(part, norms)

    def _let_go(self) -> None:
        self._parts, self._state, self._scale, self._unscale, self._norms = [], {}, 1.0, (), []

    def _forget(self) -> None:
        """After a refusal: a plan that has read something would keep it alive."""
        self._let_go()
        self._plans = {}


def refuse_capture(who: str, devices: Sequence[torch.device]) -> None:
    """Raise a RuntimeError if there are several devices, and one is capturing a CUDA graph."""
    if len(devices) == 1:
        return
    # A replay would step one device; the others are stepped now, and never again.
    for device in devices:
        if is_capturing(device):
            raise RuntimeError(
                f"{who}: {device} is capturing a CUDA graph, but the parameters lie on "
                f"{len(devices)} devices, whose step cannot be captured; make a {who} for each "
                "device"
            )


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on a device now goes into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def as_flag(found_inf: float | Tensor, who: str) -> Tensor:
    """As every plan takes it: what one refuses must not be found when others have stepped."""
    if not isinstance(found_inf, Tensor):  # GradScaler's sum over no gradients is the number 0.
        return torch.tensor(float(found_inf != 0), dtype=torch.float32, device="cpu")
    if found_inf.numel() != 1:
        raise ValueError(
            f"{who}: found_inf is a tensor of {found_inf.numel()} elements; it must have 1"
        )
    return (found_inf != 0).reshape(()).float()


def _measure(parts: list[Part], scale: float | Tensor, groups: int) -> Tensor:
    """Look at all gradients; return numbers on the first part's device, as one float64 vector.

    The first is not 0 if there is inf or NaN. Then come the l2 norm of each group's gradients, and
    of all. They are what the norms were if the unscaled gradients were scaled too, because that is
    how a plan takes a norm that it is given (csrc/math/step_scalars.h).
    """
    home = parts[0].device
    sums = torch.stack([bring(_found_and_sums(part, groups), home) for part in parts]).sum(0)
    of_groups = sums[1:].view(groups, 2)
    scaled, plain = torch.cat([of_groups, of_groups.sum(0, keepdim=True)]).sqrt().unbind(1)
    return torch.cat([sums[:1], torch.hypot(scaled, plain * _number_on(home, scale))])


def _found_and_sums(part: Part, groups: int) -> Tensor:
    """Whether there is inf or NaN; for each group the sums of squares, of scaled and of others."""
    found_inf = torch.zeros(1, dtype=torch.float32, device=part.device)
    sum_sq = torch.zeros(2 * groups, dtype=torch.float64, device=part.device)
    grads, sums = [], []
    for grad, number, scaled in part.gradients():
        grads.append(grad)
        sums.append(2 * number + (0 if scaled else 1))
    _ops.check_(grads, sums, found_inf, sum_sq)
    return torch.cat([found_inf.double(), sum_sq])


def _number_on(device: torch.device, value: float | Tensor) -> float | Tensor:
    return bring(value, device).reshape(()) if isinstance(value, Tensor) else value
