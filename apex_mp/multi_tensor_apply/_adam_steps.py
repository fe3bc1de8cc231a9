"""The Adam steps of amp_C; see `_steps` for what all steps have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from apex_mp.multi_tensor_apply._arguments import (
    Lists,
    check_choice,
    check_lists,
    check_step,
    number,
    speaking_of,
)
from apex_mp.multi_tensor_apply._steps import ADAM_LISTS, DECAY, divisor, steps_before, take_step


def multi_tensor_adam(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take one Adam step: `[grads, params, exp_avgs, exp_avg_sqs]`.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is set, nothing is written.
        tensor_lists: As above.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        step: This step's number, from 1.
        mode: 0 adds weight decay to the gradient, 1 decays the parameter (AdamW).
        bias_correction: Not 0: correct the moments' start at zero.
        weight_decay: Decay factor.
    """
    function = "multi_tensor_adam"
    check_lists(function, tensor_lists, ADAM_LISTS)
    check_step(function, step)
    numbers = (lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    _adam(function, overflow_buf, tensor_lists, *numbers)


def multi_tensor_adam_capturable(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: float | Tensor,
) -> None:
    """Take one Adam step whose numbers lie on the device: `[grads, params, exp_avgs, exp_avg_sqs]`.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is set, nothing is written.
        tensor_lists: As above.
        lr: As of `multi_tensor_adam`, or a tensor of one element, read on the device.
        beta1: As of `multi_tensor_adam`; likewise the others.
        beta2: As there.
        eps: As there.
        step: As there, or a tensor of one element, read on the device.
        mode: As there.
        bias_correction: As there.
        weight_decay: As there.
        inv_scale: Factor on the gradients, 1 / loss scale, or a tensor of one element.
    """
    function = "multi_tensor_adam_capturable"
    check_lists(function, tensor_lists, ADAM_LISTS)
    step = _step_number(function, step)
    numbers = (lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    scale = divisor(function, "inv_scale", inv_scale)
    _adam(function, overflow_buf, tensor_lists, *numbers, scale=scale)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: float | Tensor,
) -> None:
    """Take one Adam step with masters: `[grads, params, exp_avgs, exp_avg_sqs, master_params]`.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is set, nothing is written.
        tensor_lists: As above; masters are stepped, and rounded to params.
        lr: As of `multi_tensor_adam_capturable`; likewise the others.
        beta1: As there.
        beta2: As there.
        eps: As there.
        step: As there.
        mode: As there.
        bias_correction: As there.
        weight_decay: As there.
        inv_scale: As there.
    """
    function = "multi_tensor_adam_capturable_master"
    check_lists(function, tensor_lists, (*ADAM_LISTS, "master_params"))
    grads, params, exp_avgs, exp_avg_sqs, masters = tensor_lists
    lists = [grads, masters, exp_avgs, exp_avg_sqs]
    step = _step_number(function, step)
    numbers = (lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    scale = divisor(function, "inv_scale", inv_scale)
    with speaking_of(function, params="master_params", copies="params"):
        _adam(function, overflow_buf, lists, *numbers, copies=params, scale=scale)


def _step_number(function: str, step: int | Tensor) -> Tensor:
    if not isinstance(step, Tensor):  # The host does not look at one on a device.
        check_step(function, step)
    return number(function, "step", step)


def _adam(
    function: str,
    overflow_buf: Tensor,
    lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: float | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    **rest: Any,
) -> None:
    check_choice(function, "mode", mode, DECAY)
    options = {
        "lr": number(function, "lr", lr),
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "adam_w_mode": mode == 1,
        "bias_correction": bool(bias_correction),
        "eps_inside_sqrt": False,
    }
    numbers = {"steps": steps_before(step, lists[1])}
    take_step(function, "adam", overflow_buf, lists, ADAM_LISTS, numbers, options, **rest)
