"""How a GradScaler clips and steps: optimizers of this package, torch's fused ones, and others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp._grad_scaler.iteration import FLAGS, Clip, Iteration
from apex_mp.amp._stages import Stage
from apex_mp.core import readback, tensors
from apex_mp.core.tensors import params_of
from apex_mp.grads.found_inf import one_flag
from apex_mp.grads.grad_slots import GradSlots
from apex_mp.optimizers._fused import FusedOptimizer
from apex_mp.step import step_log
from apex_mp.step.scaled_step import ScaledStep, takes_scaled_step
from apex_mp.step.step_call import unscaled_dtypes

_MOMENTUM = "momentum_buffer"


def clip(
    scaler: Any,
    optimizer: Any,
    iteration: Iteration,
    scale: Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor | None:
    """Measure scaled gradients; leave the clip to a fused step, or unscale and clip.

    Returns:
        The norm of the unscaled gradients; None if gradients must be unscaled before.
    """
    grads = None if takes_scaled_step(optimizer) else GradSlots(optimizer.param_groups).read()
    if grads is not None and grads.others:
        return None
    if norm_type != 2.0:
        raise ValueError(
            f"GradScaler.clip_grad_norm_: norm_type is {norm_type}; only the l2 norm is measured "
            "while gradients are scaled. Call scaler.unscale_(optimizer) before"
        )
    scale = iteration.scale(scale)
    if grads is not None:
        dtypes = grads.dtypes()
        norm = scaler._measure(iteration, grads, scale).norm(scale.device) / scale
        clip = Clip(norm, max_norm, scale)
    else:
        step = _scaled_step(optimizer, scale, max_norm)
        found = optimizer.check_gradients(step)
        dtypes = found.dtypes
        if dtypes:
            scaler._note_dtypes(dtypes)
            iteration[FLAGS] = {found.found_inf.device: found.found_inf}
        norm = found.norm
        if norm.device != scale.device:
            norm = tensors.copy_async(norm, scale.device)
        clip = Clip(norm, max_norm, scale, found.found_inf, step.scale)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"GradScaler.clip_grad_norm_: the norm of the gradients is {norm.item()}, so they "
            "cannot be clipped; with error_if_nonfinite=False the step is skipped"
        )
    if step_log.listeners:
        iteration.noted = norm, clip.divisor.reciprocal()
    if grads is None or is_fused(optimizer):
        iteration.clip_in_step(clip)
    else:
        scaler._unscale(optimizer, iteration, scale, clip)
    wide: Tensor = norm.clone() if torch.float64 in dtypes else norm.float()
    return wide


def _scaled_step(optimizer: Any, scale: Tensor, clip_to: float | None) -> ScaledStep:
    more = optimizer.__dict__.get("grad_scale")  # The user's own, as torch allows.
    return ScaledStep(
        scale=scale if more is None else scale * more,
        check=True,
        clip_to=clip_to,
        unscale=unscaled_dtypes(optimizer),
        wait=False,
    )


def step(
    scaler: Any, optimizer: Any, iteration: Iteration, scale: Tensor, *args: Any, **kwargs: Any
) -> float | None:
    """Step an optimizer, and submit what became of it to `iteration.outcomes`.

    Returns:
        What `optimizer.step` returned, or None.
    """
    way = _step_other
    if takes_scaled_step(optimizer):
        way = _step_ours
    elif is_fused(optimizer):
        way = _step_fused
    return way(scaler, optimizer, iteration, scale, *args, **kwargs)


def _step_ours(
    scaler: Any, optimizer: Any, iteration: Iteration, scale: Tensor, *args: Any, **kwargs: Any
) -> float | None:
    """Step an optimizer of this package, which checks gradients in its own passes."""
    clip, is_unscaled = iteration.clip, iteration.stage is Stage.UNSCALED
    if is_unscaled:
        step = ScaledStep(found_inf=one_flag(iteration[FLAGS], scale.device))
    else:
        step = _scaled_step(optimizer, scale, None if clip is None else clip.max_norm)
    if clip is not None:  # Gradients that a hook edits are clipped as they were measured.
        step.clip_norm, step.found_inf = clip.norm, clip.found_inf
    optimizer.scaled_step = step
    try:
        value: float | None = optimizer.step(*args, **kwargs)
    finally:
        optimizer.__dict__.pop("scaled_step", None)  # A Ctrl-C may come where it is hidden.
        optimizer.__dict__.pop("grad_scale", None)  # It is used up, as by torch's.
        result = step.result
        if result is None:  # A function around the step leaves it out, or has raised.
            if not iteration[FLAGS]:
                scaler._check_inf_per_device(optimizer)
        elif step.check and result.grad_dtypes:
            flag = result.flag()
            iteration[FLAGS] = {flag.device: flag}
            iteration.steps = optimizer._own_masters.counts.steps
    if result is None or is_unscaled:
        iteration.record.submit_flags(iteration[FLAGS], iteration.measured)
    else:
        scaler._note_dtypes(result.grad_dtypes)
        iteration.record.submit(result)
    return value


def _step_fused(
    scaler: Any, optimizer: Any, iteration: Iteration, scale: Tensor, *args: Any, **kwargs: Any
) -> float | None:
    """Step a fused optimizer of torch, which divides by `grad_scale` and skips by `found_inf`.

    torch's own scaler sets both.
    """
    factors = [] if iteration.clip is None else [iteration.clip.divisor]
    if scale is not scaler._scale:
        factors.append(scale / scaler._scale)
    try:
        with (
            _wait_for_amp_tensors(optimizer, scale.device),
            _removing_new_momentum(optimizer, iteration),
        ):
            for factor in factors:
                optimizer.grad_scale = factor * getattr(optimizer, "grad_scale", 1)
            value = torch.amp.GradScaler.step(scaler, optimizer, *args, **kwargs)
    finally:
        # torch removes both, but not if the step raises an error.
        for name in ("grad_scale", "found_inf"):
            with contextlib.suppress(AttributeError):
                delattr(optimizer, name)
    iteration.record.submit_flags(iteration[FLAGS], iteration.measured)
    return value


def _step_other(
    scaler: Any, optimizer: Any, iteration: Iteration, scale: Tensor, *args: Any, **kwargs: Any
) -> float | None:
    """Step an optimizer that knows of no scale."""
    if iteration.stage is not Stage.UNSCALED:
        scaler.unscale_(optimizer)
    if not iteration[FLAGS]:
        raise AssertionError(
            "No inf checks were recorded for this optimizer. No parameter of this "
            f"{type(optimizer).__name__} has a gradient: it must own parameters that the scaled "
            "loss depends on, and zero_grad() must come before backward()."
        )
    value: float | None = scaler._maybe_opt_step(optimizer, iteration, *args, **kwargs)
    return value


def is_fused(optimizer: Any) -> bool:
    """Return whether an optimizer unscales and skips in its own step: ours, torch's fused ones."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def looks_at_found_inf(optimizer: Any) -> bool:
    """Return whether a step of the optimizer changes nothing if its found_inf is 1."""
    return is_fused(optimizer) and next(_without_momentum(optimizer), None) is None


def _without_momentum(optimizer: Any) -> Iterator[Tensor]:
    """Yield parameters whose first step, by torch's SGD, makes momentum before it reads found_inf.

    A step that is skipped leaves that momentum without values.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for param in group["params"] if group["momentum"] else ():
            has_momentum = optimizer.state.get(param, {}).get(_MOMENTUM) is not None
            if param.requires_grad and not has_momentum:
                yield param


@contextlib.contextmanager
def _removing_new_momentum(optimizer: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """Remove momentum without values that a skipped first step has made; there the host waits."""
    new = [param for param in _without_momentum(optimizer) if param.grad is not None]
    if not new or readback.is_capturing():
        yield
        return
    yield
    if any(found.item() for found in state["found_inf_per_device"].values()):
        for param in new:
            optimizer.state.pop(param, None)


@contextlib.contextmanager
def _wait_for_amp_tensors(optimizer: Any, device: torch.device) -> Iterator[None]:
    """Move `grad_scale` and `found_inf` to the CPU for torch's fused optimizers that step there.

    torch copies both with non_blocking=True, and a step on the CPU may read them before they
    arrive.
    """
    if (
        device.type == "cpu"
        or isinstance(optimizer, FusedOptimizer)
        or not any(param.is_cpu for param in params_of(optimizer))
    ):
        yield
        return

    def move_to_cpu(optimizer: Any, args: Any, kwargs: Any) -> None:
        for name in ("grad_scale", "found_inf"):
            value = getattr(optimizer, name, None)
            setattr(optimizer, name, None if value is None else value.cpu())

    hook = optimizer.register_step_pre_hook(move_to_cpu)
    try:
        yield
    finally:
        hook.remove()
