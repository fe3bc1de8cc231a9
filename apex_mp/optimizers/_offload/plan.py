"""The plan of an optimizer whose parameters are on a GPU, and its masters and moments are not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import forks, transfers
from apex_mp.core.grads.checks import match_strides
from apex_mp.core.grads.found_inf import FoundInf, clip_divisor, inverse
from apex_mp.core.step.scaled_step import HostOutcome, Lists
from apex_mp.optimizers._device_part import Groups, Norms, Part
from apex_mp.optimizers._offload.buckets import Buckets
from apex_mp.optimizers._offload.pieces import Items
from apex_mp.optimizers._offload.watch import WeightWatch
from apex_mp.optimizers._several_devices import SeveralDevices, is_capturing
from apex_mp.optimizers._written import Written

# Gradients are read by a plan of SGD without momentum, which needs no state.
_READER_OPTIONS = {
    "lr": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "wd_after_momentum": False,
}


class OffloadedPlan(SeveralDevices):
    """Has the methods of `_C.StepPlan`, for parameters on GPUs with states in host memory.

    Gradients are checked and measured where they are, and nothing is copied for a step that is
    skipped. The host waits for that, and steps; the GPU waits for its weights.

    Args:
        who: The optimizer's name, for messages.
        new_plan: Makes a plan for parameters on the CPU.
        steps_parts: Whether parts of tensors can be stepped.
    """

    def __init__(self, who: str, new_plan: Callable[[], _C.StepPlan], steps_parts: bool) -> None:
        super().__init__(who, functools.partial(_new_reader, who))
        self._buckets = Buckets(who, new_plan, steps_parts)
        self._watch = WeightWatch()
        self._request: _Request | None = None
        self._host_scale = 1.0
        self._checks = False
        forks.leak_in_children(self)

    def read(
        self,
        param_groups: Groups,
        state: dict[Any, Any],
        make_state: Callable[[int, int], dict[str, Any]],
        *,
        grads: Lists | None,
        grads_of: Lists | None,
        copies: Lists | None,
        scale: float | Tensor,
        unscale: Sequence[torch.dtype],
    ) -> None:
        """As `_C.StepPlan.read`; states are read and made by `written`, which a step reads next.

        Raises:
            RuntimeError: As there; or a parameter is not on a GPU, or one is capturing a CUDA
                graph.
        """
        groups = [
            {
                "params": group["params"],
                "max_grad_norm": group["max_grad_norm"],
                **_READER_OPTIONS,
            }
            for group in param_groups
        ]
        super().read(
            groups,
            {},
            make_state,
            grads=grads,
            grads_of=grads_of,
            copies=copies,
            scale=scale,
            unscale=unscale,
        )
        self.can_run = True
        try:
            self._refuse_devices()
        except BaseException:
            self._forget()
            raise
        self._request = _Request(param_groups, state, make_state, grads, grads_of, copies, unscale)

    def _refuse_devices(self) -> None:
        for part in self._parts:
            if not transfers.is_offloadable(part.device):
                raise RuntimeError(
                    f"{self._who}: a parameter is on {part.device}, and the optimizer was made "
                    "with offload=True; move the model back to the GPU, or make an optimizer "
                    "without offload"
                )
            if is_capturing(part.device):
                raise RuntimeError(
                    f"{self._who}: {part.device} is capturing a CUDA graph, and with offload=True "
                    "the CPU takes the step, which a graph cannot hold; capture forward and "
                    "backward alone"
                )

    @property
    def has_run(self) -> bool:
        """Whether the last step, or a part of it, was taken."""
        return self._buckets.has_begun

    @has_run.setter
    def has_run(self, _: bool) -> None:
        """Nothing: the buckets know it, also after a Ctrl-C."""

    @property
    def written(self) -> list[Written]:
        """The weights that were written since the last step, as of `_C.StepPlan.written`."""
        request = self._request
        if request is None:
            return []
        (self._host_scale,) = _on_host([self._scale])
        groups = [
            {name: _host_option(value) for name, value in group.items()}
            for group in request.param_groups
        ]
        try:
            self._items = request.items(self._parts)
            state, make_state = request.state, request.make_state
            self._buckets.read(self._items, groups, state, make_state, self._host_scale)
        except BaseException:
            self._forget()
            raise
        return self._watch.find(self._items, state)

    @written.setter
    def written(self, _: list[Written]) -> None:
        """Nothing: what the readers of gradients find is not asked for."""

    def _must_measure(self, missing: list[int], clip_by_global_norm: bool) -> bool:
        return bool(missing)

    def run(self, *, check: bool, **kwargs: Any) -> HostOutcome:
        """As `_C.StepPlan.run`; the host knows the outcome."""
        self._checks = check
        outcome = super().run(check=check, **kwargs)
        return outcome if outcome.is_known else self._checked_outcome

    def _step(
        self,
        norms: Norms,
        skip: Tensor | None,
        clip_to: float | None = None,
        clip_norm: Tensor | None = None,
    ) -> HostOutcome:
        """Step everything, unless `skip` is set."""
        if self._checks:  # Now: the GPU has not yet been given copies to wait for.
            self._checked_outcome = self.read_outcome(self.outcome)
        found_inf, divisor, *numbers = _on_host([skip, clip_norm, *norms])
        if not found_inf:
            self._buckets.step(numbers, {"clip_to": clip_to, "clip_norm": divisor})
            self._end_step(clip_to, clip_norm)
        return HostOutcome(bool(found_inf))

    def _end_step(self, clip_to: float | None, clip_norm: Tensor | None) -> None:
        """Write what else a step writes on the GPU."""
        request = self._request
        assert request is not None
        if request.unscale:
            divisor = self._host_scale
            if clip_to is not None and clip_norm is not None:
                divisor *= float(clip_divisor(clip_norm.cpu(), clip_to))
            grads = request.to_unscale(self._items.places)
            FoundInf().unscale_others(grads, inverse(divisor))
        self._watch.note(self._items, request.state)

    def _let_go(self) -> None:
        super()._let_go()
        self._request = None
        self._buckets.clear()

    def refresh_groups(self) -> None:
        """Nothing: no graph holds a step."""
        self._let_go()


@dataclasses.dataclass(frozen=True)
class _Request:
    """What a step was asked for; see `_C.StepPlan.read`."""

    param_groups: Groups
    state: dict[Any, Any]
    make_state: Callable[[int, int], dict[str, Any]]
    grads: Lists | None
    grads_of: Lists | None
    copies: Lists | None
    unscale: Sequence[torch.dtype]

    def param(self, place: tuple[int, int]) -> Tensor:
        number, index = place
        param: Tensor = self.param_groups[number]["params"][index]
        return param

    def copy(self, place: tuple[int, int]) -> Tensor | None:
        number, index = place
        copy = None if self.copies is None else self.copies[number][index]
        return None if copy is self.param(place) else copy

    def items(self, parts: Sequence[Part]) -> Items:
        """Return what is stepped, in the order of parts."""
        begins = [0]
        for group in self.param_groups:
            begins.append(begins[-1] + len(group["params"]))
        places = [place for part in parts for place in part.places_with_grad()]
        params = [self.param(place) for place in places]
        rows = [row for part in parts for row in part.plan.gradients]
        return Items(
            places,
            [begins[number] + index for number, index in places],
            params,
            [match_strides(row[0], param) for row, param in zip(rows, params, strict=True)],
            [scaled for _, _, scaled in rows],
            [self.copy(place) for place in places],
        )

    def to_unscale(self, places: Iterable[tuple[int, int]]) -> list[Tensor]:
        """Return the gradients that the step leaves unscaled, each once."""
        found: dict[int, Tensor] = {}
        for number, index in places:
            if self.grads is not None:
                grad = self.grads[number][index]
            else:
                of = self.param((number, index))
                if self.grads_of is not None:
                    given = self.grads_of[number][index]
                    if given is None:
                        continue
                    of = given
                grad = of.grad
            if grad is not None and grad.dtype in self.unscale:
                found[grad.data_ptr()] = grad
        return [*found.values()]


def _new_reader(who: str) -> _C.StepPlan:
    return _C.StepPlan("sgd", who, tensors=("momentum_buffer",), numbers=("is_fresh",))


def _host_option(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _on_host(numbers: Sequence[float | Tensor | None]) -> list[Any]:
    """Return numbers as floats; the host waits for each device once."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    devices = {tensor.device for tensor in tensors}
    values: dict[int, float] = {}
    for device in devices:
        here = [tensor for tensor in tensors if tensor.device == device]
        together = torch.stack([tensor.detach().reshape(()).double() for tensor in here])
        values.update(zip(map(id, here), together.tolist(), strict=True))
    return [values[id(n)] if isinstance(n, Tensor) else n for n in numbers]
