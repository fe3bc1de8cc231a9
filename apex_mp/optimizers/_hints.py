"""Warnings of 16-bit parameters without masters: updates are lost, or eps is 0 in float16."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import readback, tensors
from apex_mp.core.log import counted, warn
from apex_mp.grads.in_host_memory import grad_here
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.masters.store import has_master

_HALF_OF_THE_SMALLEST = 2.0**-25  # Below it a number is 0 in float16.
_NAMED = 3
_ELEMENTS_LOOKED_AT = 1 << 20


class LostUpdates:
    """Looks at the first steps of one optimizer, until one was taken.

    Args:
        optimizer: The optimizer; a weak reference is kept.
        who: The beginning of the warning.
        advice: Its end: how to get masters.
        named: Returns the optimizer's parameters and their names.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        who: str,
        advice: str,
        named: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._who, self._advice, self._named = who, advice, named
        self._is_done = False

    def before_step(self) -> LostUpdateCounter | None:
        """Return a counter for the next step; None if it needs none."""
        optimizer = self._optimizer()
        if self._is_done or optimizer is None:
            return None
        moving = [group for group in optimizer.param_groups if not _stands_still(group)]
        without_master = {
            id(param)
            for group in moving
            for param in group["params"]
            if param.dtype in LOW_PRECISION
            and param.requires_grad
            and not has_master(param, group, optimizer)
        }
        named = [(name, p) for name, p in self._named() if id(p) in without_master]
        self._is_done = not named and len(moving) == len(optimizer.param_groups)
        return LostUpdateCounter(named) if named else None

    def after_step(self, counter: LostUpdateCounter | None, found_inf: bool | Tensor) -> None:
        """Warn once, after the first step that was not skipped.

        Args:
            counter: What `before_step` returned.
            found_inf: Whether the step was skipped; a tensor that is not 0 then, if the host is not
                to wait.
        """
        if counter is None or readback.is_capturing():
            return
        counts = counter.counts()
        on_host = not isinstance(found_inf, Tensor) or found_inf.is_cpu
        if on_host and counts.is_cpu:
            self._warn(counter, [float(found_inf), *counts.tolist()])
            return
        found = torch.as_tensor(found_inf, device=counts.device).double().view(1)
        readback.submit_tensor(
            torch.cat([tensors.copy_async(found, counts.device), counts]),
            lambda numbers: self._warn(counter, numbers.tolist()),
        )

    def _warn(self, counter: LostUpdateCounter, numbers: Sequence[float]) -> None:
        found_inf, unchanged, total = numbers
        if found_inf or self._is_done:
            return
        self._is_done = True
        message = counter.message(self._who, int(unchanged), int(total), self._advice)
        warn(message, "updates-are-lost")


class LostUpdateCounter:
    """Counts the weights that a step does not change although their gradient is not zero.

    Args:
        named: Its 16-bit parameters without masters, and their names. The first ones are watched,
            about a million elements together.
    """

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._dtypes = sorted({f"{param.dtype}".removeprefix("torch.") for _, param in named})
        self._before: list[tuple[Tensor, Tensor]] = []
        elements = 0
        for _, param in named:
            if elements < _ELEMENTS_LOOKED_AT and grad_here(param) is not None:
                before = tensors.local_part(param).detach().clone()
                self._before.append((param, before))
                elements += before.numel()

    @torch.no_grad()
    def counts(self) -> Tensor:
        """Return how many weights did not change, and how many have a gradient that is not zero."""
        unchanged = [torch.zeros(2, dtype=torch.float64)]
        for param, before in self._before:
            if param.grad is None:
                continue
            grad, after = (tensors.local_part(each) for each in (param.grad, param))
            if tensors.not_readable(grad) is not None:
                continue
            moves = grad != 0
            pair = torch.stack([(moves & (after == before)).sum(), moves.sum()])
            unchanged.append(pair.double())
        scalar_device = unchanged[-1].device
        self._before.clear()
        return torch.stack([tensors.copy_async(each, scalar_device) for each in unchanged]).sum(0)

    def message(self, who: str, unchanged: int, total: int, advice: str) -> str:
        names = ", ".join(self._names[:_NAMED]) + (", ..." if len(self._names) > _NAMED else "")
        dtypes = " and ".join(self._dtypes)
        lost = f"{unchanged:,} of {total:,}" if unchanged else f"none of {total:,} yet"
        found = f": {lost} in the first step" if total else ""
        steps = counted(len(self._names), "parameter")
        return (
            f"{who} steps {steps} of {dtypes} that have no float32 masters: {names}. An update of "
            f"less than half the distance between two such numbers is lost{found}. {advice}"
        )


def _stands_still(group: dict[str, Any]) -> bool:
    """Return whether a group's learning rate is 0, as in a warm-up; one on a GPU is not read."""
    lr = group.get("lr")
    return isinstance(lr, (int, float)) and lr == 0.0


def warn_of_eps(caller: str, optimizer: Any) -> None:
    """Warn of an optimizer that adds eps to float16 numbers and divides by them, if eps is 0 there.

    Args:
        caller: The class or function, for the message.
        optimizer: Any object with param_groups. Fused optimizers, ours and torch's, and those in
            MasterWeights divide in float32.
    """
    inner = getattr(optimizer, "optim", optimizer)  # LARC has it there.
    if hasattr(inner, "_own_masters"):  # FusedOptimizer, MasterWeights
        return
    for group in optimizer.param_groups:
        eps, is_fused = group.get("eps"), group.get("fused")
        is_zero = isinstance(eps, float) and 0.0 < eps < _HALF_OF_THE_SMALLEST
        if is_zero and not is_fused and any(p.dtype == torch.float16 for p in group["params"]):
            name = type(optimizer).__name__
            warn(
                f"{caller}: {name} steps parameters of float16 with eps={eps:g}, which is 0 in "
                "float16, so that it divides by 0 and weights become NaN. Use FusedAdam or another "
                "fused optimizer, which compute in float32, or eps=1e-4; "
                "apex_mp.optimizers.MasterWeights(optimizer), opt_level O2 and FP16_Optimizer step "
                "float32 masters",
                "nan-from-the-first-step",
            )
            return
