"""Steps of parameters on several devices, in several processes, or with state in host memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from apex_mp import _C
from apex_mp.core import extension, readback
from apex_mp.core.tensors import Lists, copy_async
from apex_mp.engine.host_steps import HostSteps, Norms, Request
from apex_mp.grads import shards
from apex_mp.grads.found_inf import FoundInf
from apex_mp.grads.grad_slots import Grads, GradSlots
from apex_mp.grads.measured import measure
from apex_mp.saved.dcp import caller_of
from apex_mp.scale.device_scale import DeviceScale
from apex_mp.step.scaled_step import UNKNOWN, HostOutcome

ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def zero_group() -> Any:
    """Return the processes among which ZeroRedundancyOptimizer divides parameters, or None.

    It makes the optimizer inside, which gets no word of it.
    """
    frame = caller_of(ZERO)
    group = None if frame is None else getattr(frame.f_locals.get("self"), "process_group", None)
    return group if group is not None and dist.get_world_size(group) > 1 else None


def whole_norms(norms: Tensor, processes: Any) -> Tensor:
    """Return the norms of the parts in all processes, on any device, by one collective."""
    on_gpu = dist.get_backend(processes) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    squares = norms.square().to(device)
    dist.all_reduce(squares, group=processes)
    return squares.sqrt()


Groups: TypeAlias = list[dict[str, Any]]
Places: TypeAlias = list[tuple[int, int]]


def device_of(param: Tensor) -> torch.device:
    """Return the device whose plan steps a parameter."""
    return param.device


class DevicePlans:
    """Has the methods of `_C.StepPlan`, for parameters on any devices.

    Each device has a plan of its own, which reads its parameters. What all measure in gradients is
    added on one device, and over processes that hold parts of DTensors; what follows from it is
    given to the step of each. The host waits only for numbers that a step on the CPU needs from a
    GPU, and for the outcome of a check.

    Like a plan, it keeps no parameter, gradient or state between steps, but what was found.

    Args:
        who: The optimizer's name, for messages.
        new_plan: Makes a plan for one device.
        host: Steps parameters on the CPU whose state is in host memory [None: each is where its
            state is].
        processes: Those among which ZeroRedundancyOptimizer has divided the parameters [None].
    """

    # The outcome of the last step, if that checked and the host did not wait.
    outcome: Tensor
    # Of the last step or check.
    found_inf: Tensor
    norm: Tensor
    read_outcome: Callable[[Tensor], HostOutcome]

    def __init__(
        self,
        who: str,
        new_plan: Callable[[], _C.StepPlan],
        host: HostSteps | None = None,
        processes: Any = None,
    ) -> None:
        self._who, self._new_plan = who, new_plan
        self._host, self._processes = host, processes
        self.without_grad: Places = []
        self.can_run = True
        self.has_run = self.has_parts = self.has_others = False
        self.grad_dtypes: set[torch.dtype] = set()
        self._plans: dict[torch.device, _C.StepPlan] = {}
        self._slots = GradSlots([])
        self._taken: tuple[Request, Grads] | None = None  # by `read`, for `run`
        # The gradients, and what `check` has found in them.
        self._checked: tuple[_C.GradVersions, Places, _Found] | None = None

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
        """As `_C.StepPlan.read`; afterwards `can_run` is False if one plan can step everything."""
        self._slots = GradSlots(param_groups)
        request = Request(
            param_groups, state, masters, make_state, grads, grads_of, copies, scale, unscale
        )
        self.has_run = False
        try:
            self._taken = request, self._read(request)
        except BaseException:
            self._forget()
            raise

    def _read(self, request: Request) -> Grads:
        on_host = {} if self._host is None else self._host.take_gradients(request)
        by_device: dict[torch.device, list[int]] = {}
        for number, param in enumerate(self._slots.params):
            if number not in on_host:
                by_device.setdefault(device_of(param), []).append(number)
        refuse_capture(self._who, [*by_device])
        # The CPU comes last: its step keeps the host busy.
        devices = sorted(by_device, key=lambda device: device.type == "cpu")
        known = self._plans
        plans = {device: known.get(device) or self._new_plan() for device in devices}
        self._plans = plans
        for device, plan in plans.items():
            self._read_by(plan, request, by_device[device])
        self.without_grad = sorted(place for plan in plans.values() for place in plan.without_grad)
        self.has_parts = any(plan.has_parts for plan in plans.values())
        for device in [device for device, plan in plans.items() if not plan.can_run]:
            self._refuse_without_kernels(device, by_device[device])
            del plans[device]
        self.can_run = not (self._is_alone() and len(devices) == len(plans) == 1)
        if not plans:  # The options of groups are checked all the same.
            cpu = torch.device("cpu")
            plans[cpu] = known.get(cpu) or self._new_plan()
            self._read_by(plans[cpu], request, [])
        self.has_others = any(plan.has_others for plan in plans.values())
        plain = {device: plan.gradients for device, plan in plans.items()}
        for number, grad in on_host.items():
            plain.setdefault(grad.device, _C.DeviceGrads(grad.device)).insert(number, grad)
        grads = Grads(self._slots, plain, [], self.has_parts)
        self.grad_dtypes = grads.dtypes()
        if self.has_parts:  # Another process may have a gradient.
            self.grad_dtypes |= {param.dtype for param in self._slots.params}
        if self._host is not None:
            self._host.refuse_devices(request, grads)
        return grads

    def _read_by(self, plan: _C.StepPlan, request: Request, only: list[int]) -> None:
        plan.read(
            request.param_groups,
            request.state,
            request.masters,
            None if self._host is not None else request.make_state,
            grads=request.grads,
            grads_of=request.grads_of,
            copies=request.copies,
            scale=request.scale,
            unscale=request.unscale,
            only=only,
        )

    def _refuse_without_kernels(self, device: torch.device, numbers: Iterable[int]) -> None:
        """Raise a RuntimeError if a parameter has a gradient; without one it may be anywhere."""
        places = self._places()
        for place in (places[number] for number in numbers):
            if place not in self.without_grad:
                reason = extension.no_kernels(device)
                raise RuntimeError(f"{self._who}: params[{place[0]}][{place[1]}] {reason}")

    def _places(self) -> Places:
        return [(n, i) for n, params in enumerate(self._slots.groups) for i in range(len(params))]

    def check(self, *, clip_by_global_norm: bool, clip_to: float) -> None:
        """As `_C.StepPlan.check`; how the step clips does not change what is measured."""
        try:
            assert self._taken is not None
            request, grads = self._taken
            versions, found = _C.GradVersions(), self._measure(request, grads)
            versions.record(self._slots.params)
            self._checked = versions, self.without_grad, found
            self.found_inf = as_flag(found.found_inf, self._who)
            self.norm = found.unscaled(found.of_all)
        finally:
            self._let_go()

    def _measure(self, request: Request, grads: Grads) -> _Found:
        """Measure all gradients; the host does not wait."""
        measured = measure(grads, request.scale)
        device = next(iter(measured.found.flags))
        norms = measured.found.sums_on(device).sqrt()
        plain = request.plain_numbers()
        if plain:
            factor = _number_on(device, request.scale)
            norms = torch.where(shards.mask(plain, len(norms), device), norms * factor, norms)
        sizes = [len(params) for params in self._slots.groups]
        of_groups = torch.stack(torch._foreach_norm(torch.split(norms, sizes)))
        if self._processes is not None:
            of_groups = whole_norms(of_groups, self._processes)
        of_all = torch.linalg.vector_norm(of_groups)
        nonfinite = ~norms.isfinite()
        return _Found(request.scale, measured.found.on(device), of_groups, of_all, nonfinite)

    def _checked_or_measured(self, request: Request, grads: Grads, *, is_agreed: bool) -> _Found:
        """Return what `check` has found in these gradients, or measure them.

        With `is_agreed` the step clips by what `check` has found. Gradients that a hook has edited
        since are clipped so, too: to measure them is a collective, which this process alone may
        want.
        """
        checked, self._checked = self._checked, None
        if checked is not None:
            versions, without_grad, found = checked
            is_same = without_grad == self.without_grad and found.scale is request.scale
            if is_same and not versions.changed(self._slots.params):
                return found
            if is_agreed and self.has_parts:
                now = FoundInf()
                now.check([p.grad for p in self._slots.params if p.grad is not None])
                if now and not found.found_inf:
                    raise RuntimeError(
                        f"{self._who}: in this process gradients got inf or NaN after "
                        "scaler.clip_grad_norm_(optimizer), by a step hook or an edit, which the "
                        "other processes do not know; edit gradients before it"
                    )
                return found
        return self._measure(request, grads)

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
            assert self._taken is not None
            request, grads = self._taken
            if self._host is not None:
                self._host.read(request, grads)
            skip = None if found_inf is None else as_flag(found_inf, self._who)
            norms = norms or [None] * len(self._slots.groups)
            groups = request.param_groups
            missing = [
                number
                for number, norm in enumerate(norms)
                if norm is None and groups[number]["max_grad_norm"] > 0.0
            ]
            if check or self._must_measure(missing, clip_by_global_norm):
                found = self._checked_or_measured(request, grads, is_agreed=clip_norm is not None)
                for number in missing:
                    norms[number] = found.of_all if clip_by_global_norm else found.of_groups[number]
            if not check:
                outcome = self._step_given(norms, skip)
            else:
                if clip_to is not None and clip_norm is None:
                    clip_norm = found.unscaled(found.of_all)
                outcome = self._step_checked(norms, skip, found, clip_to, clip_norm, wait)
                if loss_scale is not None:
                    loss_scale.update(copy_async(self.found_inf, loss_scale.device))
        except BaseException:
            self.has_run = self._has_begun()
            self._forget()
            raise
        self.has_run = True  # Perhaps it was skipped.
        self._let_go()
        return outcome

    def _is_alone(self) -> bool:
        """Whether each plan measures and steps whole parameters by itself."""
        return not self.has_parts and self._host is None and self._processes is None

    def _has_begun(self) -> bool:
        if self._host is not None:
            return self._host.has_begun
        return any(plan.has_run for plan in self._plans.values())

    def _must_measure(self, missing: list[int], clip_by_global_norm: bool) -> bool:
        """Return whether a group is clipped by a norm that no plan can measure alone."""
        needs_all = clip_by_global_norm or not self._is_alone()
        return any(needs_all or len({*map(device_of, self._slots.groups[n])}) > 1 for n in missing)

    def _step_given(self, norms: Norms, skip: Tensor | None) -> HostOutcome:
        """Step everything, unless `skip`, which the caller has given, is set."""
        if skip is not None:
            self.found_inf, self.outcome = skip, skip.double().view(1)
            self.read_outcome = functools.partial(_read_outcome, 0, [])
        return self._update(norms, skip)

    def _step_checked(
        self,
        norms: Norms,
        skip: Tensor | None,
        found: _Found,
        clip_to: float | None,
        clip_norm: Tensor | None,
        wait: bool,
    ) -> HostOutcome:
        """Step everything, unless `skip` is set or there is inf or NaN in gradients."""
        flag = as_flag(found.found_inf, self._who)
        if skip is not None:
            flag = torch.maximum(flag, copy_async(skip, flag.device))
        self.found_inf = flag
        norms_of_groups = found.unscaled(found.of_groups)
        self.outcome = torch.cat([flag.double().view(1), norms_of_groups, found.nonfinite.double()])
        without = {*self.without_grad}
        rows = [number for number, place in enumerate(self._places()) if place not in without]
        self.read_outcome = functools.partial(_read_outcome, len(norms), rows)
        # With `host` now: the GPU has not yet been given copies to wait for.
        outcome = UNKNOWN if self._host is None else self.read_outcome(self.outcome)
        self._update(norms, flag, clip_to, clip_norm)
        return self.read_outcome(self.outcome) if wait and not outcome.is_known else outcome

    def _update(
        self,
        norms: Norms,
        skip: Tensor | None,
        clip_to: float | None = None,
        clip_norm: Tensor | None = None,
    ) -> HostOutcome:
        """Step everything, unless `skip` is set; return what the host knows of the outcome."""
        if self._host is not None:
            return HostOutcome(self._host.step(norms, skip, clip_to, clip_norm))
        outcomes = [
            plan.run(
                norms=[_number_on(device, norm) for norm in norms],
                found_inf=skip,
                check=False,
                clip_by_global_norm=False,
                clip_to=clip_to,
                clip_norm=_number_on(device, clip_norm),
                loss_scale=None,
                wait=False,
            )
            for device, plan in self._plans.items()
        ]
        found_inf = any(outcome.found_inf for outcome in outcomes)
        is_known = skip is None or all(outcome.is_known for outcome in outcomes)
        return HostOutcome(found_inf, is_known=is_known or found_inf)

    def refresh_groups(self) -> None:
        """As `_C.StepPlan.refresh_groups`; with `host` no graph holds a step."""
        for plan in self._plans.values() if self._host is None else ():
            plan.refresh_groups()
        self._let_go()

    def _let_go(self) -> None:
        for plan in self._plans.values():
            plan.clear()
        if self._host is not None:
            self._host.clear()
        self._taken = None
        self._slots = GradSlots([])

    def _forget(self) -> None:
        """Drop the plans after a refusal: what they have read would be kept alive."""
        self._let_go()
        self._plans = {}


@dataclasses.dataclass(frozen=True)
class _Found:
    """What one pass over all gradients has found, on one device.

    Norms are those of scaled gradients; unscaled ones count times the scale, because a plan expects
    that of a given norm (csrc/math/step_scalars.h).

    Attributes:
        scale: The loss scale.
        found_inf: One number, not 0 if there is inf or NaN.
        of_groups: l2 norm of each group's gradients, float64.
        of_all: l2 norm of all gradients.
        nonfinite: Whether the gradient of each parameter holds inf or NaN.
    """

    scale: float | Tensor
    found_inf: Tensor
    of_groups: Tensor
    of_all: Tensor
    nonfinite: Tensor

    def unscaled(self, norm: Tensor) -> Tensor:
        """Return a norm of unscaled gradients."""
        unscaled: Tensor = norm / _number_on(norm.device, self.scale)
        return unscaled


def refuse_capture(who: str, devices: Sequence[torch.device]) -> None:
    """Raise a RuntimeError if there are several devices, and one is capturing a CUDA graph."""
    if len(devices) == 1:
        return
    # A replay would step one device only; the others would be stepped now and never again.
    for device in devices:
        if readback.is_capturing_on(device):
            raise RuntimeError(
                f"{who}: {device} is capturing a CUDA graph, but the parameters lie on "
                f"{len(devices)} devices, whose step cannot be captured; make a {who} for each "
                "device"
            )


def as_flag(found_inf: float | Tensor, who: str) -> Tensor:
    """Return found_inf as a 0-dim tensor, which no plan refuses after others have stepped."""
    if not isinstance(found_inf, Tensor):  # GradScaler's sum over no gradients is the number 0.
        return torch.tensor(float(found_inf != 0), dtype=torch.float32, device="cpu")
    if found_inf.numel() != 1:
        raise ValueError(
            f"{who}: found_inf is a tensor of {found_inf.numel()} elements; it must have 1"
        )
    return (found_inf != 0).reshape(()).float()


def _read_outcome(groups: int, with_grad: list[int], values: Tensor) -> HostOutcome:
    """Return what a copy of `DevicePlans.outcome` on the CPU says."""
    found_inf, *numbers = values.tolist()
    flags = numbers[groups:]
    rows = [row for row, number in enumerate(with_grad) if flags[number]]
    return HostOutcome(found_inf != 0.0, numbers[:groups], nonfinite_rows=rows)


def _number_on(device: torch.device, value: Any) -> Any:
    return copy_async(value, device).reshape(()) if isinstance(value, Tensor) else value
