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
from apex_mp.core.grads.found_inf import FoundInf, clip_divisor
from apex_mp.core.grads.marks import is_mark
from apex_mp.core.step.scaled_step import UNKNOWN, HostOutcome, Lists
from apex_mp.optimizers._device_part import Groups, Norms, Part
from apex_mp.optimizers._offload.buckets import Buckets
from apex_mp.optimizers._offload.gradients import HostGrads
from apex_mp.optimizers._offload.pieces import Items, States
from apex_mp.optimizers._several_devices import SeveralDevices, is_capturing

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
        host_grads: Has gradients that have left the GPU already; None: none have.
    """

    def __init__(
        self,
        who: str,
        new_plan: Callable[[], _C.StepPlan],
        steps_parts: bool,
        host_grads: HostGrads | None,
    ) -> None:
        super().__init__(who, functools.partial(_new_reader, who))
        self._buckets = Buckets(who, new_plan, steps_parts)
        self._host_grads = host_grads
        self._options = new_plan()
        self._request: _Request | None = None
        self._items: Items | None = None
        self._host_scale = 1.0
        self._checks = False
        self._checked_outcome = UNKNOWN
        forks.leak_in_children(self)

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
        """As `_C.StepPlan.read`; states are read and made by `run`, before anything is written.

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
        # The readers have options of their own, so the groups' are read here, without parameters.
        options = [{**group, "params": []} for group in param_groups]
        self._options.read(
            options, {}, {}, make_state, grads=None, grads_of=None, copies=None, scale=1.0
        )
        own = grads_of
        if self._host_grads is not None and grads is None:
            groups, own = self._with_host_grads(self._host_grads, groups, grads_of)
        super().read(
            groups,
            {},
            {},
            make_state,
            grads=grads,
            grads_of=own,
            copies=copies if own is grads_of else None,
            scale=scale,
            unscale=unscale,
        )
        self._count_others(param_groups, state, masters)
        self.can_run = True
        self._request = _Request(
            param_groups, state, masters, make_state, grads, grads_of, copies, unscale
        )
        try:
            self._refuse_devices(self._request)
        except BaseException:
            self._forget()
            raise

    def _with_host_grads(
        self, host_grads: HostGrads, groups: Groups, grads_of: Lists | None
    ) -> tuple[Groups, Lists]:
        """Return groups and `grads_of` with tensors that have the gradients that are here."""
        host_grads.finish()
        changed, lists = [], []
        for number, group in enumerate(groups):
            sources = grads_of[number] if grads_of is not None else group["params"]
            params, holders = [], []
            for index, (param, source) in enumerate(zip(group["params"], sources, strict=True)):
                grad = host_grads.of((number, index), param if source is None else source)
                holder = param if grad is None else grad.detach()
                if grad is not None:
                    holder.grad = grad
                params.append(holder)
                holders.append(None if source is None else source if grad is None else holder)
            changed.append({**group, "params": params})
            lists.append(holders)
        return changed, lists

    def _refuse_devices(self, request: _Request) -> None:
        places = [place for part in self._parts for place in part.places_with_grad()]
        place_on = {request.param(place).device: place for place in reversed(places)}
        for device, (number, index) in place_on.items():
            if not transfers.is_offloadable(device):
                raise RuntimeError(
                    f"{self._who}: params[{number}][{index}] is on {device}, and offload is set; "
                    "it must be on a GPU. Move the model back, or make an optimizer without offload"
                )
            if is_capturing(device):
                raise RuntimeError(
                    f"{self._who}: {device} is capturing a CUDA graph, and with offload the CPU "
                    "takes the step, which a graph cannot hold; capture forward and backward alone"
                    " (offload must be True for that)"
                )

    @property
    def has_run(self) -> bool:
        """Whether the last step, or a part of it, was taken."""
        return self._buckets.has_begun

    @has_run.setter
    def has_run(self, _: bool) -> None:
        """Ignore what the base class sets; the buckets know it, also after a Ctrl-C."""

    def _read_buckets(self) -> None:
        """Read and check what the CPU steps; missing states are made."""
        request = self._request
        assert request is not None
        (self._host_scale,) = _on_host([self._scale])
        groups = [
            {name: _host_option(value) for name, value in group.items()}
            for group in request.param_groups
        ]
        try:
            items = self._items = request.items(self._parts)
            states = States(groups, request.state, request.masters, request.make_state)
            self._buckets.read(items, states, self._host_scale)
        except BaseException:
            self._forget()
            raise

    def _must_measure(self, missing: list[int], clip_by_global_norm: bool) -> bool:
        return bool(missing)

    def run(self, *, check: bool, **kwargs: Any) -> HostOutcome:
        """As `_C.StepPlan.run`; the host knows the outcome."""
        self._checks = check
        self._read_buckets()
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
        request, items = self._request, self._items
        assert request is not None
        assert items is not None
        if request.unscale:
            divisor = torch.tensor(self._host_scale, dtype=torch.float64)
            if clip_to is not None and clip_norm is not None:
                # As `clipped_scale` of csrc/math/step_scalars.h rounds it.
                excess = clip_divisor(clip_norm.cpu(), clip_to)
                divisor = torch.where(excess > 1, excess.float() * divisor.float(), divisor)
            grads = request.to_unscale(items.places)
            FoundInf().unscale_others(grads, 1.0 / float(divisor))

    def _let_go(self) -> None:
        super()._let_go()
        self._request = self._items = None
        self._buckets.clear()

    def refresh_groups(self) -> None:
        """Nothing: no graph holds a step."""
        self._let_go()


@dataclasses.dataclass(frozen=True)
class _Request:
    """What a step was asked for; see `_C.StepPlan.read`."""

    param_groups: Groups
    state: dict[Any, Any]
    masters: dict[Any, Any]
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
        rows = [
            (place, grad, scaled)
            for part in parts
            for place, (grad, _, scaled) in zip(
                part.places_with_grad(), part.plan.gradients, strict=True
            )
        ]
        if len(parts) > 1:
            rows.sort(key=lambda row: row[0])
        places = [place for place, _, _ in rows]
        params = [self.param(place) for place in places]
        grads = [
            match_strides(grad, param) for (_, grad, _), param in zip(rows, params, strict=True)
        ]
        return Items(
            places,
            [begins[number] + index for number, index in places],
            params,
            grads,
            [is_mark(self.source(place)) for place in places],
            [scaled for _, _, scaled in rows],
            [self.copy(place) for place in places],
        )

    def source(self, place: tuple[int, int]) -> Tensor | None:
        """Return the gradient that a parameter is stepped with, as it is there."""
        number, index = place
        if self.grads is not None:
            return self.grads[number][index]
        given = None if self.grads_of is None else self.grads_of[number][index]
        return (self.param(place) if given is None else given).grad

    def to_unscale(self, places: Iterable[tuple[int, int]]) -> list[Tensor]:
        """Return the gradients that the step leaves unscaled, each once."""
        found: dict[int, Tensor] = {}
        for number, index in places:
            is_own = self.grads is None and self.grads_of is not None
            if is_own and self.grads_of[number][index] is None:  # type: ignore[index]
                continue  # It is not scaled.
            grad = self.source((number, index))
            if grad is not None and not is_mark(grad) and grad.dtype in self.unscale:
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
