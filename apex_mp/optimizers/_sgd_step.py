"""One step of FusedSGD: which parameters have gradients, their norms, and calls of the operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apex_mp import _ops, device_scale, tensors
from apex_mp import grads as _grads
from apex_mp._step_request import StepRequest
from apex_mp.optimizers import _device_part
from apex_mp.optimizers._several_devices import Outcome, refuse_capture

BUFFER = "momentum_buffer"

Groups: TypeAlias = Sequence[dict[str, Any]]
# One that the host knows, or a 0-dim float64 tensor on a device that the host does not wait for.
Number: TypeAlias = float | Tensor


@dataclasses.dataclass(frozen=True)
class Row:
    """A parameter that has a gradient.

    Attributes:
        param: The parameter, or a master.
        grad: Its gradient, which lies in memory as it does.
        writes_grad: Whether a step that is not skipped unscales the gradient in place.
        original: The caller's gradient: `grad` itself, or where `grad` is written back to.
        scaled: Whether the loss scale has scaled the gradient.
        copy: Where the new parameter is also written.
        group: Number of the parameter group.
        index: Number in the group.
        device: Where all of it is.
    """

    param: Tensor
    grad: Tensor
    writes_grad: bool
    original: Tensor
    scaled: bool
    copy: Tensor | None
    group: int
    index: int
    device: torch.device


def read(
    request: StepRequest, groups: Groups, state: Mapping[Any, Mapping[str, Any]]
) -> tuple[list[Row], list[tuple[int, int]]]:
    """Return the parameters that have gradients, and group and index of the others.

    All that the operator would refuse is refused here, before it has been called for any group.

    Raises:
        RuntimeError: A gradient, a copy or a momentum buffer does not fit its parameter.
    """
    rows: list[Row] = []
    without_grad: list[tuple[int, int]] = []
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            grad, scaled = _gradient(request, param, number, index)
            if grad is None:
                without_grad.append((number, index))
                continue
            row = Row(
                param,
                _grads.lie_as(grad, param),
                scaled and grad.dtype in request.unscale,
                grad,
                scaled,
                None if request.copies is None else request.copies[number][index],
                number,
                index,
                _device_part.device_of(param),
            )
            if row.writes_grad and _is_expanded(grad):
                raise RuntimeError(
                    f"FusedSGD: elements of a gradient with strides {[*grad.stride()]} share "
                    "memory, so it cannot be unscaled in place; clone() it or construct the "
                    "optimizer with unscale_grads=False"
                )
            _check(row, state.get(param, {}).get(BUFFER) if group["momentum"] else None)
            rows.append(row)
    if request.unscale:
        _separate_shared_grads(rows)
    return rows, without_grad


def _is_expanded(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _separate_shared_grads(rows: list[Row]) -> None:
    """Let only the first of the rows that share a gradient write it; the others read a copy.

    Raises:
        RuntimeError: Gradients overlap otherwise.
    """
    writers = [
        (str(row.device), row.grad.data_ptr(), number)
        for number, row in enumerate(rows)
        if row.writes_grad and row.grad.numel()
    ]
    last = ("", 0, 0)
    for device, begin, number in sorted(writers):
        row = rows[number]
        end = begin + row.grad.nbytes
        if device != last[0] or begin >= last[2]:
            last = (device, begin, end)
        elif (device, begin, end) == last:
            rows[number] = dataclasses.replace(row, grad=row.grad.clone(), writes_grad=False)
        else:
            raise RuntimeError(
                "FusedSGD: two gradients overlap in memory without being the same, so they cannot "
                "be unscaled in place; clone() one of them or construct the optimizer with "
                "unscale_grads=False"
            )


def _gradient(
    request: StepRequest, param: Tensor, number: int, index: int
) -> tuple[Tensor | None, bool]:
    if request.grads is not None:
        return request.grads[number][index], True
    if request.grads_of is None:
        return param.grad, True
    source = request.grads_of[number][index]
    return (param.grad, False) if source is None else (source.grad, True)


def _check(row: Row, buffer: Any) -> None:
    param = row.param
    if tensors.is_usual(param) and all(
        peer is None or _is_usual_peer(peer, param) for peer in (row.grad, row.copy, buffer)
    ):
        return
    place = f"[{row.group}][{row.index}]"
    _refuse("params" + place, tensors.not_steppable(param))
    peers = {"grads": row.grad, "output_params": row.copy, BUFFER + "s": buffer}
    for name, peer in peers.items():
        if not torch.is_tensor(peer):
            continue
        if peer.device != param.device:
            raise RuntimeError(
                f"FusedSGD: {name}{place} is on {peer.device}, params{place} on {param.device}; "
                "they must be on one device"
            )
        _refuse(name + place, tensors.not_readable(peer))
        if peer.stride() == param.stride() and peer.shape == param.shape:
            continue
        laid_anew = peer is buffer and peer.shape == param.shape
        flat = peer.is_contiguous() and param.is_contiguous() and peer.numel() == param.numel()
        if not (laid_anew or (flat and peer is not buffer)):
            raise RuntimeError(
                f"FusedSGD: {name}{place} has sizes {[*peer.shape]} and strides "
                f"{[*peer.stride()]}, params{place} has {[*param.shape]} and "
                f"{[*param.stride()]}; they must lie in memory in the same order"
            )


def _is_usual_peer(peer: Any, param: Tensor) -> bool:
    return tensors.is_usual(peer) and peer.shape == param.shape and peer.device == param.device


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise RuntimeError(f"FusedSGD: {name} {reason}")


def host_waits_for(device: torch.device) -> bool:
    """Whether the host waits for a device anyway, as for the CPU, or leaves it alone."""
    return device.type not in device_scale.DEVICE_TYPES


def home_of(rows: Sequence[Row]) -> torch.device:
    """The device that numbers of a step are on: one that the host leaves alone, if there is one.

    Raises:
        RuntimeError: There are several devices, and one is capturing a CUDA graph.
    """
    devices = [*dict.fromkeys(row.device for row in rows)]
    refuse_capture("FusedSGD", devices)
    left_alone = [device for device in devices if not host_waits_for(device)]
    return [*left_alone, *devices, torch.device("cpu")][0]


def number_on(home: torch.device, value: float | Tensor) -> Number:
    """Return a number as the host knows it, or where it need not wait for it."""
    if not isinstance(value, Tensor):
        return value
    if host_waits_for(value.device):
        return float(value)
    return device_scale.bring(value.detach().reshape(()).double(), home)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a look at all gradients has found; float64 vectors where numbers of a step are.

    Attributes:
        found_inf: One element; not 0: there is inf or NaN.
        norms: l2 norm of each group's unscaled gradients, and of all.
        nonfinite: For each gradient not 0 if it holds inf or NaN, in the order of `order`.
        order: Their numbers among the rows.
    """

    found_inf: Tensor
    norms: Tensor
    nonfinite: Tensor
    order: list[int]

    def told(self, skip: Tensor) -> Tensor:
        """Return all that the host may read of a step, as one vector."""
        return torch.cat([skip.double().view(1), self.norms[:-1], self.nonfinite])

    def reader(self) -> Callable[[Tensor], Outcome]:
        """Return what makes the outcome of a copy of `told` on the CPU."""
        order, groups = self.order, len(self.norms) - 1

        def read_outcome(told: Tensor) -> Outcome:
            found_inf, *numbers = told.tolist()
            flags = zip(order, numbers[groups:], strict=True)
            rows = sorted(row for row, flag in flags if flag)
            return Outcome(found_inf != 0.0, numbers[:groups], nonfinite_rows=rows)

        return read_outcome


def measure(rows: Sequence[Row], groups: int, scale: Number, home: torch.device) -> Measured:
    """Look at all gradients, reading them once; the host waits for nothing.

    Args:
        rows: From `read`.
        groups: How many parameter groups there are.
        scale: The loss scale.
        home: Where the results go.
    """
    # Gradients that count to one norm lie next to each other.
    places = sorted(range(len(rows)), key=lambda i: (rows[i].group, rows[i].scaled))
    devices = dict.fromkeys(rows[place].device for place in places)
    parts, order = [], []
    for device in devices:
        here = [place for place in places if rows[place].device == device]
        found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        sum_sq = torch.zeros(len(here), dtype=torch.float64, device=device)
        _ops.check_([rows[place].grad for place in here], range(len(here)), found_inf, sum_sq)
        norms = _norms([rows[place] for place in here], sum_sq.sqrt(), groups)
        part = torch.cat([found_inf.double(), norms, (~sum_sq.isfinite()).double()])
        parts.append(device_scale.bring(part, home))
        order += here
    ends = 1 + 2 * groups
    head = torch.zeros(1, ends, dtype=torch.float64, device=home)
    heads = torch.cat([head, *(part[:ends].view(1, ends) for part in parts)])
    flags = torch.cat([head[0, :0], *(part[ends:] for part in parts)])
    plain, scaled = torch.linalg.vector_norm(heads[:, 1:].view(-1, groups, 2), dim=0).unbind(-1)
    of_groups = torch.hypot(scaled / scale, plain)
    of_all = torch.linalg.vector_norm(of_groups).view(1)
    return Measured(heads[:, 0].sum().view(1), torch.cat([of_groups, of_all]), flags, order)


def _norms(rows: Sequence[Row], of_each: Tensor, groups: int) -> Tensor:
    """Return for each group the norm of the plain gradients and of the scaled ones."""
    sizes = [0] * (2 * groups)
    for row in rows:
        sizes[2 * row.group + row.scaled] += 1
    return torch.stack(torch._foreach_norm(torch.split(of_each, sizes)))


def _clip_divisor(norm: Number, max_norm: float) -> Number:
    """What gradients of this norm are divided by: the rule of csrc/math/clip.h."""
    excess = (norm + 1e-6) / max_norm
    if isinstance(excess, Tensor):
        return torch.where(excess <= 1.0, 1.0, excess)  # A norm that is NaN stays NaN.
    return 1.0 if excess <= 1.0 else excess


def must_measure(groups: Groups, request: StepRequest) -> bool:
    """Tell whether a group is clipped by a norm that was not given."""
    norms = request.norms or [None] * len(groups)
    return any(
        group["max_grad_norm"] > 0.0 and norm is None
        for group, norm in zip(groups, norms, strict=True)
    )


def clip_divisors(
    groups: Groups,
    request: StepRequest,
    scale: Number,
    measured: Sequence[Number],
    home: torch.device,
) -> list[Number]:
    """Return what each group's gradients are divided by to clip them."""
    divisors: list[Number] = []
    for number, group in enumerate(groups):
        if not group["max_grad_norm"] > 0.0:
            divisors.append(1.0)
            continue
        given = None if request.norms is None else request.norms[number]
        if given is not None:
            norm = number_on(home, given) / scale
        else:
            norm = measured[-1 if request.clip_by_global_norm else number]
        divisors.append(_clip_divisor(norm, group["max_grad_norm"]))
    return divisors


@dataclasses.dataclass(frozen=True)
class Factors:
    """What the gradients of each group are multiplied by.

    Attributes:
        scale: The scaled ones are divided by it.
        divisors: What each group's are divided by too, so that they are clipped.
    """

    scale: Number
    divisors: Sequence[Number]

    def of(self, row: Row) -> Tensor:
        """The factor for a gradient, on the CPU or on the parameter's device."""
        divisor = self.divisors[row.group]
        return _reciprocal(divisor * self.scale if row.scaled else divisor, row.device)

    def unscale(self, device: torch.device) -> Tensor:
        """The factor that unscales a gradient and does not clip it."""
        return _reciprocal(self.scale, device)


def _reciprocal(number: Number, device: torch.device) -> Tensor:
    factor = 1.0 / number
    if isinstance(factor, Tensor):
        return device_scale.bring(factor, device)
    return torch.tensor(factor, dtype=torch.float64, device="cpu")


def take(
    rows: Sequence[Row],
    groups: Groups,
    state: Mapping[Any, Mapping[str, Any]],
    fresh: Mapping[Tensor, Tensor],
    factors: Factors,
    skip: Tensor | None,
) -> None:
    """Step all rows, unless `skip` is set.

    Args:
        rows: From `read`.
        groups: The parameter groups.
        state: Holds the momentum buffers of groups that have momentum.
        fresh: The flags of those buffers that may hold nothing yet, by parameter.
        factors: Of the gradients.
        skip: 0-dim float32 or None.
    """
    calls: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        is_fresh = bool(groups[row.group]["momentum"]) and row.param in fresh
        key = (row.device, row.group, row.scaled, row.copy is not None, is_fresh, row.writes_grad)
        calls.setdefault(key, []).append(row)
    # The CPU keeps the host busy: others begin before it.
    in_order = sorted(calls.items(), key=lambda call: call[0][0].type == "cpu")
    for (device, number, _, has_copies, is_fresh, writes_grads), here in in_order:
        group = groups[number]
        momentum = float(group["momentum"])
        _ops.sgd_(
            [row.param for row in here],
            [row.grad for row in here],
            [state[row.param][BUFFER] for row in here] if momentum else None,
            [fresh[row.param] for row in here] if is_fresh else None,
            [row.copy for row in here if row.copy is not None] if has_copies else None,
            lr=_as_number(group["lr"], device),
            inv_scale=factors.of(here[0]),
            found_inf=None if skip is None else device_scale.bring(skip, device),
            momentum=momentum,
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            wd_after_momentum=bool(group["wd_after_momentum"]),
            unscaled_grads=[row.grad for row in here] if writes_grads else None,
            unscale_factor=factors.unscale(device) if writes_grads else None,
        )
        for row in here:
            if writes_grads and row.original is not row.grad:
                row.original.copy_(row.grad)


def _as_number(value: float | Tensor, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    wide = value if value.dtype in (torch.float32, torch.float64) else value.double()
    return wide.detach() if wide.device.type == "cpu" else device_scale.bring(wide.detach(), device)
