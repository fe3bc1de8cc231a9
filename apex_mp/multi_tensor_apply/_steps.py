"""The functions of amp_C that take an optimizer's step, by the rules of the fused optimizers.

All take `(chunk_size, overflow_buf, tensor_lists, ...)`; see apex_mp.multi_tensor_apply.amp_C. If
the flag is set, nothing is written. Gradients are only read; apex's LAMB and its first capturable
Adam overwrote them. State may be of any floating dtype; math is float32 (float64 for float64
parameters). A CUDA graph may capture each of them; numbers that are not tensors, such as `step`,
are then the same at each replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import extension
from apex_mp.multi_tensor_apply._arguments import (
    Lists,
    check_choice,
    check_lists,
    check_step,
    check_tensor,
    number,
    raising,
    speaking_of,
)


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


DECAY = {0: "L2", 1: "AdamW"}
ADAM_LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


def multi_tensor_sgd(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float | Tensor,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float | Tensor,
) -> None:
    """Take one SGD step: `[grads, params, momentum_buffers]` or those and `[copies]`.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is set, nothing is written.
        tensor_lists: As above; each new parameter is also written to its copy.
        weight_decay: L2 factor.
        momentum: Decay of the momentum buffers; 0 does not use them.
        dampening: The gradient enters the buffer times 1 - dampening.
        lr: Learning rate.
        nesterov: Step along gradient plus momentum times buffer.
        first_run: The buffers hold no values yet, and are set to the gradients.
        wd_after_momentum: Add the decay after momentum instead of before.
        scale: Factor on the gradients.
    """
    function = "multi_tensor_sgd"
    names = ("grads", "params", "momentum_buffers", "copies")[: max(3, len(tensor_lists))]
    check_lists(function, tensor_lists, names)
    lists, copies = tensor_lists[:3], [*tensor_lists[3:], None][0]
    options = {
        "lr": number(function, "lr", lr),
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "wd_after_momentum": wd_after_momentum,
    }
    numbers = {"fresh": _numbers(float(bool(first_run)), lists[1])}
    rest = {"copies": copies, "scale": divisor(function, "scale", scale)}
    take_step(function, "sgd", overflow_buf, lists, names[:3], numbers, options, **rest)


def multi_tensor_adagrad(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Take one Adagrad step: `[grads, params, sums]`.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is set, nothing is written.
        tensor_lists: As above; sums are those of squared gradients.
        lr: Learning rate.
        eps: Added to the denominator.
        mode: 0 adds weight decay to the gradient, 1 decays the parameter.
        weight_decay: Decay factor.
    """
    function = "multi_tensor_adagrad"
    names = ("grads", "params", "sums")
    check_lists(function, tensor_lists, names)
    check_choice(function, "mode", mode, DECAY)
    options = {
        "lr": number(function, "lr", lr),
        "eps": eps,
        "weight_decay": weight_decay,
        "adagrad_w_mode": mode == 1,
    }
    take_step(function, "adagrad", overflow_buf, tensor_lists, names, {}, options)


def multi_tensor_novograd(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Take one NovoGrad step: `[grads, params, exp_avgs]`.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is set, nothing is written.
        tensor_lists: As above.
        grad_norms: float32 vector, the second moment of each tensor as a norm; written. Before the
            first step it holds 0, or the norms of the first gradients.
        lr: Learning rate.
        beta1: Decay of the gradients' moment.
        beta2: Decay of the norms.
        eps: Added to the norm.
        step: This step's number, from 1.
        bias_correction: Not 0: correct the moments' start at zero.
        weight_decay: Decay factor.
        grad_averaging: Not 0: multiply gradients by 1 - beta1 on their way into the moment.
        mode: 0 divides by the norm, and decays, before the moment is taken, 1 after it.
        norm_type: 2 for the l2 norm, 0 for the maximum norm.
    """
    function = "multi_tensor_novograd"
    names = ("grads", "params", "exp_avgs")
    check_lists(function, tensor_lists, names)
    check_step(function, step)
    check_choice(function, "mode", mode, {0: "inside the moment", 1: "outside"})
    check_choice(function, "norm_type", norm_type, {0: "maximum norm", 2: "l2 norm"})
    check_tensor(function, "grad_norms", grad_norms)
    params = tensor_lists[1]
    if grad_norms.shape != (len(params),):
        raise RuntimeError(
            f"{function}: grad_norms has shape {[*grad_norms.shape]}; it must be a vector with one "
            f"element for each of the {len(params)} tensors"
        )
    options = {
        "lr": number(function, "lr", lr),
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bool(bias_correction),
        "reg_inside_moment": mode == 0,
        "grad_averaging": bool(grad_averaging),
        "norm_type": norm_type,
        "init_zero": True,  # The caller has decided what the norms begin with.
    }
    numbers = {"steps": steps_before(step, params), "grad_norms": grad_norms.detach().unbind()}
    take_step(function, "novograd", overflow_buf, tensor_lists, names, numbers, options)


def multi_tensor_lamb(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: float | Tensor,
    max_grad_norm: float | None = None,
    use_nvlamb: bool | None = False,
) -> None:
    """Take one LAMB step: `[grads, params, exp_avgs, exp_avg_sqs]`.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is set, nothing is written.
        tensor_lists: As above.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        step: This step's number, from 1.
        bias_correction: Not 0: correct the moments' start at zero.
        weight_decay: Decay factor.
        grad_averaging: Not 0: multiply gradients by 1 - beta1 on their way into the moment.
        mode: 0 adds weight decay to the gradient, 1 decays the parameter.
        global_grad_norm: l2 norm of all gradients of the step, those of other calls included.
        max_grad_norm: Gradients are clipped to this norm; 0 does not clip. None: the signature of
            2019, which had one argument less: `global_grad_norm` is the maximum, and the norm is
            that of this call's gradients; the host waits for a maximum that is a tensor [None].
        use_nvlamb: Multiply the update by the ratio of the norms without weight decay too [False].
    """
    function = "multi_tensor_lamb"
    check_lists(function, tensor_lists, ADAM_LISTS)
    check_step(function, step)
    check_choice(function, "mode", mode, DECAY)
    norm: Tensor | None = number(function, "global_grad_norm", global_grad_norm)
    if max_grad_norm is None:
        max_grad_norm, norm = float(global_grad_norm), None
    options = {
        "lr": number(function, "lr", lr),
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bool(bias_correction),
        "adam_w_mode": mode == 1,
        "grad_averaging": bool(grad_averaging),
        "use_nvlamb": bool(use_nvlamb),
        "max_grad_norm": max_grad_norm,
    }
    numbers = {"steps": steps_before(step, tensor_lists[1])}
    take_step(function, "lamb", overflow_buf, tensor_lists, ADAM_LISTS, numbers, options, norm=norm)


def steps_before(step: float | Tensor, params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the step counts before step number `step`, as a rule takes them."""
    return _numbers(step - 1, params)


def _numbers(value: float | Tensor, params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a number for each parameter, on the device of the first."""
    vector = torch.empty(len(params), dtype=torch.float32, device=params[0].device)
    return (vector.copy_(value) if isinstance(value, Tensor) else vector.fill_(value)).unbind()


def divisor(function: str, name: str, factor: float | Tensor) -> Tensor:
    """Return 1 / `factor`, by which gradients are divided."""
    return number(function, name, factor).double().reciprocal()


def take_step(
    function: str,
    rule: str,
    overflow_buf: Tensor,
    lists: Lists,
    names: Sequence[str],
    numbers: Mapping[str, Sequence[Tensor]],
    options: Mapping[str, Any],
    **rest: Any,
) -> None:
    """Take the step of a rule over lists that were checked."""
    grads, params, *state = lists
    with (
        speaking_of(function, output_params="copies"),
        raising(function, overflow_buf) as found_inf,
    ):
        step_lists(
            rule,
            function,
            params,
            grads,
            tensors=dict(zip(names[2:], state, strict=True)),
            numbers=numbers,
            options=options,
            found_inf=found_inf,
            **rest,
        )


# As for FusedOptimizer.step: a traced step would break the graph anyway.
@torch._disable_dynamo  # type: ignore[attr-defined]
def step_lists(
    rule: str,
    caller: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    tensors: Mapping[str, Sequence[Tensor]],
    numbers: Mapping[str, Sequence[Tensor]],
    options: Mapping[str, Any],
    copies: Sequence[Tensor] | None = None,
    scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
    norm: float | Tensor | None = None,
) -> None:
    """Take one step with every parameter; the host waits for nothing.

    Lists hold one tensor for each parameter, on the same device and with the same layout. A CUDA
    graph may capture the step; numbers that are not tensors are then the same at each replay.

    Args:
        rule: `kName` of one of csrc/math/rules.h.
        caller: The function's name, for messages.
        params: Parameters of any floating dtypes; written.
        grads: Gradients of any floating dtypes; only read.
        tensors: The tensors of the rule's state, a list for each name, in the rule's order;
            written. Math is in float64 for float64 parameters, else in float32; state of another
            dtype is rounded to it.
        numbers: The numbers of the rule's state, likewise, each of one float32 element; written.
        options: The rule's options and `lr`; `max_grad_norm` may be left out.
        copies: Where each new parameter is also written, rounded to the copy's dtype [None].
        scale: Gradients are divided by it [1].
        found_inf: One element; if it is not 0 nothing changes [None].
        norm: The l2 norm, before unscaling, by which `max_grad_norm` clips [None: it is measured].

    Raises:
        RuntimeError: Tensors do not fit each other, or are on a device without kernels.
        TypeError: An option is no number, or a tensor is a wrapper without memory of its own.
        ValueError: An option is out of range, or a parameter stands twice.
    """

    def refuse(group: int, index: int) -> dict[str, Any]:
        raise RuntimeError(
            f"{caller}: the state of params[{index}] lies in memory in another order than it; make "
            "all of them contiguous()"
        )

    plan = _C.StepPlan(rule, caller, tensors=[*tensors], numbers=[*numbers], once=True)
    group = {"max_grad_norm": 0.0, **options, "params": [*params]}
    with torch.no_grad(), _as_wide_as_the_math(params, tensors) as wide:
        state: dict[Tensor, dict[str, Tensor]] = {param: {} for param in params}
        for name, listed in {**wide, **numbers}.items():
            for param, tensor in zip(params, listed, strict=True):
                state[param][name] = tensor
        plan.read(
            [group],
            state,
            {},
            refuse,
            grads=[[*grads]],
            grads_of=None,
            copies=None if copies is None else [[*copies]],
            scale=scale,
            origins=[(-1, index, index) for index in range(len(params))],  # of no group
        )
        if not plan.can_run:
            raise RuntimeError(_cannot_run(caller, params))
        plan.run(
            norms=None if norm is None else [norm],
            found_inf=found_inf,
            check=False,
            clip_to=None,
            clip_norm=None,
            clip_by_global_norm=False,
            loss_scale=None,
            wait=False,
        )


@contextlib.contextmanager
def _as_wide_as_the_math(
    params: Sequence[Tensor], tensors: Mapping[str, Sequence[Tensor]]
) -> Iterator[dict[str, list[Tensor]]]:
    """Yield the state in the dtype of the math, and round it back afterwards."""
    dtypes = [torch.float64 if p.dtype == torch.float64 else torch.float32 for p in params]
    wide = {
        name: [
            tensor if tensor.dtype is dtype else tensor.to(dtype)
            for tensor, dtype in zip(listed, dtypes, strict=True)
        ]
        for name, listed in tensors.items()
    }
    yield wide
    for name, listed in tensors.items():
        for tensor, stepped in zip(listed, wide[name], strict=True):
            if stepped is not tensor:
                tensor.copy_(stepped)


def _cannot_run(caller: str, params: Sequence[Tensor]) -> str:
    device = params[0].device
    for index, param in enumerate(params):
        if param.device != device:
            return (
                f"{caller}: params[{index}] is on {param.device}, params[0] on {device}; they must "
                "be on one device"
            )
    return f"{caller}: params[0] {extension.no_kernels(device)}"
