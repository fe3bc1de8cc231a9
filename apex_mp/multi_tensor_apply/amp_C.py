"""The compiled module amp_C of apex, as functions of the operators here.

All take `(chunk_size, overflow_buf, tensor_lists, ...)`. `chunk_size` has no effect. `overflow_buf`
is a tensor of one element, an int32 in old code; it is set to 1 and never cleared. Tensors may be
on the CPU too. `scale_check_overflow` is from before that convention.

Every function raises RuntimeError if the number of lists is wrong, lists are empty or of unequal
lengths, or a tensor is not floating or on a device without kernels; TypeError for an argument that
is not a list, tensor or number where one is needed; ValueError for a number out of range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_mp.core import ops
from apex_mp.multi_tensor_apply._arguments import (
    Lists,
    check_choice,
    check_lists,
    check_tensor,
    number,
    raising,
    speaking_of,
)
from apex_mp.multi_tensor_apply._steps import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_lamb,
    multi_tensor_novograd,
    multi_tensor_sgd,
)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "scale_check_overflow",
    "update_scale_hysteresis",
]


def multi_tensor_scale(
    chunk_size: int, overflow_buf: Tensor, tensor_lists: Lists, scale: float | Tensor
) -> None:
    """Write `input * scale` to the outputs: `[inputs, outputs]`.

    inf and NaN are passed on, and set the flag. A flag that is set already changes nothing.

    Args:
        chunk_size: Ignored: the operators choose their own.
        overflow_buf: One int: the flag, set to 1 where inf or NaN is found.
        tensor_lists: Two lists of floating tensors, of equal lengths and sizes.
        scale: The factor.
    """
    check_lists("multi_tensor_scale", tensor_lists, ("inputs", "outputs"))
    factor = number("multi_tensor_scale", "scale", scale)
    with (
        speaking_of("multi_tensor_scale", src="inputs", dst="outputs", inv_scale="scale"),
        raising("multi_tensor_scale", overflow_buf) as found_inf,
    ):
        ops.unscale_(tensor_lists[0], tensor_lists[1], factor, found_inf)


def multi_tensor_axpby(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int = -1,
) -> None:
    """Write `a * x + b * y` to the outputs: `[x, y, outputs]`.

    Args:
        chunk_size: No effect.
        overflow_buf: Set if what is checked holds inf or NaN.
        tensor_lists: As above.
        a: Factor of `x`.
        b: Factor of `y`.
        arg_to_check: 0 checks `x`, 1 `y`, -1 both; before 2019-04-03 there was no such argument
            [-1].
    """
    function = "multi_tensor_axpby"
    check_lists(function, tensor_lists, ("x", "y", "outputs"))
    check_choice(function, "arg_to_check", arg_to_check, {-1: "both", 0: "x", 1: "y"})
    x, y, out = tensor_lists
    factors = number(function, "a", a), number(function, "b", b)
    with speaking_of(function, out="outputs"), raising(function, overflow_buf) as found_inf:
        ops.axpby_(x, y, out, *factors, found_inf, tested=arg_to_check)


def multi_tensor_l2norm(
    chunk_size: int, overflow_buf: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the l2 norm of all tensors of `[tensors]`, and the norm of each if asked for.

    Args:
        chunk_size: Ignored: the operators choose their own.
        overflow_buf: One int: the flag, set to 1 where inf or NaN is found.
        tensor_lists: One list of floating tensors.
        per_tensor: Return the norm of each tensor, too [None: no].

    Returns:
        Two float32 vectors: of one element, and of one for each tensor or none. A norm that is inf
        or NaN sets the flag.
    """
    check_lists("multi_tensor_l2norm", tensor_lists, ("tensors",))
    tensors = tensor_lists[0]
    with (
        speaking_of("multi_tensor_l2norm"),
        raising("multi_tensor_l2norm", overflow_buf) as found_inf,
    ):
        if per_tensor:
            norm, norms = ops.l2_norms(tensors)
        else:
            norm, norms = ops.l2_norm(tensors), torch.empty(0, device=tensors[0].device)
        found_inf.logical_or_(~norm.isfinite())
    return norm.float().reshape(1), norms.float()


multi_tensor_l2norm_mp = multi_tensor_l2norm  # It took lists of several dtypes; both do here.


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    inv_scale: float | Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norms of `multi_tensor_l2norm` times `inv_scale`; no tensor is changed.

    Args:
        chunk_size: As of `multi_tensor_l2norm`.
        overflow_buf: As of `multi_tensor_l2norm`.
        tensor_lists: As of `multi_tensor_l2norm`.
        inv_scale: One element.
        per_tensor: As of `multi_tensor_l2norm`.
    """
    norm, norms = multi_tensor_l2norm(chunk_size, overflow_buf, tensor_lists, per_tensor)
    return norm * inv_scale, norms * inv_scale


def multi_tensor_l2norm_scale(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    scale: float | Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Write `input * scale` to the outputs, `[inputs, outputs]`, and return the outputs' norms.

    Args:
        chunk_size: As for `multi_tensor_scale`; likewise the next three.
        overflow_buf: As there.
        tensor_lists: As there.
        scale: As there.
        per_tensor: As for `multi_tensor_l2norm`; so is the result.
    """
    multi_tensor_scale(chunk_size, overflow_buf, tensor_lists, scale)
    return multi_tensor_l2norm(chunk_size, overflow_buf, [tensor_lists[1]], per_tensor)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a loss scale that backs off after `hysteresis` overflows with no good step between.

    The rule is that of apex: a good step resets the count of tolerated overflows, a backoff does
    not, so that each further overflow in a row backs off. The host does not wait.

    Args:
        current_scale: The scale, one float32 element; written.
        growth_tracker: Good steps since the scale last changed, one int32 element; written.
        hysteresis_tracker: Overflows until the scale backs off, one int32 element; written.
        found_inf: One element, greater than 0 after an overflow.
        growth_factor: The scale is multiplied by this after `growth_interval` good steps, unless it
            would become inf.
        backoff_factor: The scale is multiplied by this when it backs off.
        growth_interval: See `growth_factor`.
        hysteresis: The value to which `hysteresis_tracker` is reset.

    Returns:
        `current_scale`.
    """
    is_bad = found_inf > 0
    hysteresis_tracker.sub_(is_bad.to(hysteresis_tracker.dtype))
    backs_off = is_bad & (hysteresis_tracker <= 0)
    good = growth_tracker + 1
    grown = current_scale * growth_factor
    grows = ~is_bad & (good == growth_interval)
    scale = torch.where(backs_off, current_scale * backoff_factor, current_scale)
    current_scale.copy_(torch.where(grows & grown.isfinite(), grown, scale))
    growth_tracker.copy_(torch.where(is_bad | grows, torch.zeros_like(good), good))
    hysteresis_tracker.copy_(
        torch.where(is_bad, hysteresis_tracker, torch.full_like(hysteresis_tracker, hysteresis))
    )
    return current_scale


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: float | Tensor,
    max_global_grad_norm: float,
) -> None:
    """Update the moments of LAMB (You et al. 2020), and write its updates before the trust ratio.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is not 0, nothing is done; the host waits for it.
        tensor_lists: `[gradients, parameters, first moments, second moments, updates]`; the last
            three are written.
        per_tensor_decay: The weight decay of each tensor.
        step: Steps taken before this one.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the denominator.
        global_grad_norm: l2 norm of all gradients.
        max_global_grad_norm: Gradients are clipped to this norm.
    """
    check_lists(
        "multi_tensor_lamb_stage1_cuda",
        tensor_lists,
        ("gradients", "parameters", "first moments", "second moments", "updates"),
    )
    if overflow_buf.item():
        return
    divisor = max(float(global_grad_norm) / max_global_grad_norm, 1.0)
    first, second = (1.0 - beta ** (step + 1) for beta in (beta1, beta2))
    rows = zip(*tensor_lists, per_tensor_decay.tolist(), strict=True)
    for grad, param, exp_avg, exp_avg_sq, update, decay in rows:
        scaled = grad.float() / divisor
        exp_avg.mul_(beta1).add_(scaled, alpha=1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(scaled, scaled, value=1.0 - beta2)
        direction = (exp_avg / first) / ((exp_avg_sq / second).sqrt() + epsilon)
        update.copy_(direction + decay * param.float())


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float | None = None,
    use_nvlamb: bool | None = None,
) -> None:
    """Subtract the updates of stage 1 times the learning rate and LAMB's trust ratio.

    Args:
        chunk_size: No effect.
        overflow_buf: As of stage 1.
        tensor_lists: `[parameters, updates]`; the first is written.
        per_tensor_param_norm: l2 norm of each parameter.
        per_tensor_update_norm: l2 norm of each update. The trust ratio is the quotient of both, 1
            if one of them is 0.
        lr: Learning rate.
        weight_decay: If it is 0, the trust ratio is 1; before 2020 there was no such argument
            [None: it does not matter].
        use_nvlamb: Take the trust ratio whatever the weight decay [None: no].
    """
    check_lists("multi_tensor_lamb_stage2_cuda", tensor_lists, ("parameters", "updates"))
    if overflow_buf.item():
        return
    has_ratio = use_nvlamb or weight_decay is None or weight_decay != 0.0
    norms = per_tensor_param_norm.tolist(), per_tensor_update_norm.tolist()
    for param, update, of_param, of_update in zip(*tensor_lists, *norms, strict=True):
        ratio = of_param / of_update if has_ratio and of_param and of_update else 1.0
        param.sub_((lr * ratio * update.float()).to(param.dtype))


def scale_check_overflow(
    grads: Tensor, scale: float, overflow_buf: Tensor, downscaled_grads: Tensor
) -> None:
    """Write `grads * scale` to `downscaled_grads`, as until 2019-03; inf and NaN set the flag.

    Args:
        grads: One tensor.
        scale: The factor.
        overflow_buf: A tensor of one element.
        downscaled_grads: One float32 tensor, which may be `grads`.

    Raises:
        RuntimeError: The output is not float32, or sizes differ.
    """
    for name, tensor in (("grads", grads), ("downscaled_grads", downscaled_grads)):
        check_tensor("scale_check_overflow", name, tensor)
    if downscaled_grads.dtype != torch.float32:
        raise RuntimeError(
            f"scale_check_overflow: downscaled_grads is {downscaled_grads.dtype}; "
            "it must be torch.float32 (master gradients)"
        )
    if grads.numel() != downscaled_grads.numel():
        raise RuntimeError(
            f"scale_check_overflow: grads has {grads.numel()} elements, downscaled_grads has "
            f"{downscaled_grads.numel()}; they must be as many"
        )
    with (
        speaking_of("scale_check_overflow", src="grads", dst="downscaled_grads"),
        raising("scale_check_overflow", overflow_buf) as found_inf,
    ):
        factor = number("scale_check_overflow", "scale", scale)
        ops.unscale_([grads], [downscaled_grads], factor, found_inf)
