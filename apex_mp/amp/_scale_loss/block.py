"""A `with scale_loss(...)` block: scales the loss, unscales gradients, decides on the overflow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp._grad_scaler.stepping import looks_at_found_inf
from apex_mp.amp._scale_loss.loss_grads import LossGrads, Unscaling, named_grads
from apex_mp.amp._scale_loss.step_guard import Block, StepGuard, guard_of
from apex_mp.amp._stages import Event
from apex_mp.amp.casts.casting import is_low
from apex_mp.core import readback
from apex_mp.core.log import logger
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.grads import local_gradients
from apex_mp.grads.found_inf import FoundInf
from apex_mp.grads.grad_slots import GradSlots
from apex_mp.grads.in_host_memory import refuse_offloaded
from apex_mp.grads.nonfinite import Overflow, locate_nonfinite
from apex_mp.masters import parallel_masters
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.scale import device_scale
from apex_mp.scale.amp_scaler import LossScaler

_LOG = logger("apex_mp.amp")
_LOW = frozenset(LOW_PRECISION)
_warned_of_low_precision = False


@contextlib.contextmanager
def scaled_backward(
    loss: Tensor,
    optimizers: Sequence[Any],
    scaler: LossScaler,
    *,
    names: Callable[[], Mapping[int, str]] = dict,
    announce: Callable[[Overflow], None] | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
    expect_float32: bool = True,
) -> Iterator[Tensor]:
    """Yield `loss` times the scale; when the block ends, unscale the gradients it has added.

    Gradients from before the block are unscaled: they are set aside and added again, so that each
    loss has its own scale. Parameters that the loss does not reach keep theirs. If the block
    raises, all gradients are restored, except those that were left scaled.
    """
    _check(loss, optimizers)
    parallel_masters.add_scale(scaler, lambda owner: owner, optimizers)
    readback.poll()
    with _open_blocks(optimizers) as guards:
        grads = LossGrads(optimizers, [guard.scaled_by for guard in guards])
        # Whether gradients overflow is decided when all processes have added theirs.
        has_unsynced = functools.partial(local_gradients.has_unsynced_grads, grads.slots.sources)
        was_unsynced = has_unsynced()
        if delay_unscale or was_unsynced:
            scale = scaler.loss_scale()
            grads.scale_by(scale, only_scaled=False)
            for guard in guards:
                guard.scaled_by = scale
                guard.scalers[id(scaler)] = scaler
            yield _wide(loss) * scale
            if was_unsynced and not delay_unscale:
                _check_unswitched(was_unsynced, has_unsynced())
            return
        device = None if delay_overflow_check else _common_device(optimizers, grads)
        founds = [FoundInf() for _ in optimizers]
        if device is None:
            scale = scaler.loss_scale()
            grads.scale_by(scale, only_scaled=True)
            for guard in guards:
                guard.scaled_by = None if guard.scaled_by is None else scale
            unscaling = Unscaling(scale, founds)
        else:
            unscaling = Unscaling(scaler.on(device).scale.clone(), founds)
        grads.stash()
        try:
            # The gradients for which the last step was skipped may still be there.
            if device is not None or any(guard.step_was_skipped for guard in guards):
                grads.check_stashed(unscaling)
            with _clearing(optimizers, grads):
                yield _wide(loss) * unscaling.scale
            _check_unswitched(was_unsynced, has_unsynced())
            if expect_float32:
                _warn_of_low_precision(grads.slots)
            if not scaler._has_floor and not _LOW.isdisjoint(grads.slots.read().dtypes()):
                scaler.note_16_bit_gradients()
            grads.unscale(unscaling)
        except BaseException:
            grads.restore()
            raise
        earlier = {key: each for guard in guards for key, each in guard.scalers.items()}
        earlier.pop(id(scaler), None)
        for guard in guards:
            guard.scaled_by = None
            guard.scalers.clear()
    announce = announce or _warn
    decision = _OverflowDecision(optimizers, guards, scaler, [*earlier.values()], names, announce)
    if device is not None:
        decision.submit(unscaling, device)
    else:
        decision.apply(unscaling, update_scale=not delay_overflow_check)


def _common_device(optimizers: Sequence[Any], grads: LossGrads) -> torch.device | None:
    """Return the device on which the overflow decision stays; None if the host must know it."""
    if not all(map(looks_at_found_inf, optimizers)):
        return None
    pairs = [*grads.slots.pairs()]
    if not pairs or grads.is_scaled:
        return None
    device = pairs[0][0].device
    if device.type not in device_scale.DEVICE_TYPES:
        return None
    is_common = all(source.device == param.device == device for source, param in pairs)
    return device if is_common else None


@dataclasses.dataclass(frozen=True)
class _OverflowDecision:
    """Decides after a block on the next scale, and whether steps are skipped."""

    optimizers: Sequence[Any]
    guards: Sequence[StepGuard]
    scaler: LossScaler
    earlier: Sequence[LossScaler]  # of losses whose gradients had been left scaled
    names: Callable[[], Mapping[int, str]]
    announce: Callable[[Overflow], None]

    def apply(self, found: Unscaling, *, update_scale: bool) -> None:
        overflowed = bool(found.found_inf)
        for scaler in self.earlier:
            scaler.note_overflow(overflowed)
            if update_scale:
                scaler.update_scale()
        self.scaler.note_overflow(overflowed)
        backs_off = update_scale and self.scaler.update_scale()
        self._note_scale(found.scale)
        if not (overflowed or any(found.found_in_sums) or backs_off):
            return
        overflow = self._overflow(float(found.scale), self.scaler.loss_scale())
        for guard, found_in_sum in zip(self.guards, found.found_in_sums, strict=True):
            if overflowed or found_in_sum:
                guard.overflowed(overflow)
        if backs_off or any(found.found_in_sums):
            self.announce(overflow)

    def submit(self, found: Unscaling, device: torch.device) -> None:
        on_device, found_inf = self.scaler.on(device), found.found_inf.on(device)
        on_device.update(found_inf)
        either = [torch.maximum(found_inf, each.on(device)) for each in found.found_in_sums]
        for guard, found_one in zip(self.guards, either, strict=True):
            guard.may_have_overflowed(found_one)
        self._note_scale(found.scale)
        either_of_all = torch.stack(either).amax()
        readback.submit(
            [either_of_all, torch.as_tensor(found.scale), on_device.scale], self._on_readback
        )

    def _note_scale(self, scale: float | Tensor) -> None:
        for guard in self.guards:
            guard.scaler, guard.scale = self.scaler, scale

    def _on_readback(self, numbers: list[float]) -> None:
        found, before, after = numbers
        self.scaler.note_overflow(bool(found), is_counted=True)
        if found:
            # Gradients that were cleared since are not in the report.
            overflow = self._overflow(before, after)
            for guard in self.guards:
                guard.last_overflow = overflow
            self.announce(overflow)

    def _overflow(self, before: float, after: float) -> Overflow:
        named = named_grads(self.optimizers, self.names())
        return Overflow(locate_nonfinite(named), before, after)


def _wide(loss: Tensor) -> Tensor:
    return loss if loss.dtype is torch.float64 else loss.float()


def _check(loss: Any, optimizers: Sequence[Any]) -> None:
    if not torch.is_tensor(loss) or not loss.is_floating_point():
        kind = loss.dtype if torch.is_tensor(loss) else type(loss).__name__
        raise TypeError(f"scale_loss: loss is a {kind}; it must be a floating tensor")
    for optimizer in optimizers:
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                "scale_loss was given an FP16_Optimizer, which scales the loss itself; call "
                "optimizer.backward(loss), or give scale_loss the optimizer inside"
            )
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"scale_loss: optimizer is a {type(optimizer).__name__}; it must be an optimizer"
            )
        refuse_offloaded("scale_loss", optimizer)


def _with_masters(optimizers: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the optimizers to which amp.initialize gave masters, and these."""
    pairs = []
    for optimizer in optimizers:
        masters = getattr(optimizer, "_amp_masters", None)
        if masters is not None:
            masters.check_linked(type(optimizer).__name__)
            pairs.append((optimizer, masters))
    return pairs


def _check_unswitched(was_unsynced: bool, is_unsynced: bool) -> None:
    if was_unsynced != is_unsynced:
        raise RuntimeError(
            "scale_loss: whether gradients stay in this process was changed inside the block, by "
            "disable_allreduce, enable_allreduce, no_sync or a forward; do that before the block"
        )


@contextlib.contextmanager
def _open_blocks(optimizers: Sequence[Any]) -> Iterator[list[StepGuard]]:
    """Mark optimizers as in a block: two open ones would unscale each other's gradients."""
    with_masters = _with_masters(optimizers)
    guards = [*map(guard_of, optimizers)]
    for guard in guards:
        guard.check(Event.BLOCK)
    block = Block()
    try:
        for guard, optimizer in zip(guards, optimizers, strict=True):
            guard.block = weakref.ref(block)
            guard.begin_block(optimizer)
        for optimizer, masters in with_masters:
            masters.begin_block(optimizer)
        yield guards
    finally:
        block.is_open = False  # First, and for all at once: the rest may be interrupted by Ctrl-C.
        for _, masters in with_masters:
            masters.end_block()


@contextlib.contextmanager
def _clearing(optimizers: Sequence[Any], grads: LossGrads) -> Iterator[None]:
    """Make `zero_grad` in a block clear the stashed gradients, too."""
    missing = object()
    before = [(each, vars(each).get("zero_grad", missing)) for each in optimizers]
    try:
        for each in optimizers:
            if not hasattr(each, "zero_grad"):
                continue

            def zero_grad(
                *args: Any, _zero_grad: Any = each.zero_grad, _own: Any = each, **kwargs: Any
            ) -> Any:
                grads.forget(_own)
                return _zero_grad(*args, **kwargs)

            each.zero_grad = zero_grad
        yield
    finally:
        for each, own_attribute in before:
            if own_attribute is not missing:
                each.zero_grad = own_attribute
            else:
                vars(each).pop("zero_grad", None)


def _warn_of_low_precision(slots: GradSlots) -> None:
    global _warned_of_low_precision
    if _warned_of_low_precision:
        return
    grads = (param.grad for source, param in slots.pairs() if source is param)
    if any(grad is not None and is_low(grad.dtype) for grad in grads):
        _warned_of_low_precision = True
        _LOG.warning(
            "Incoming grads are not fp32 (not master grads). Downscaling non-fp32 grads may "
            "indicate an error. When using Amp, you don't need to call .half() on your model."
        )


def _warn(overflow: Overflow) -> None:
    before, after = overflow.scale_before, overflow.scale_after
    change = f"goes from {before} to {after}" if after < before else f"stays {before}"
    overflow.log(_LOG, f"Gradient overflow, skipping update; the loss scale {change}")
