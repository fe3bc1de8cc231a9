"""The compiled module fused_adam_cuda of apex: one Adam step of one tensor."""

from __future__ import annotations

from torch import Tensor

from apex_mp.multi_tensor_apply._arguments import (
    check_choice,
    check_lists,
    check_step,
    check_tensor,
    number,
    speaking_of,
)
from apex_mp.multi_tensor_apply._steps import step_lists, steps_before

__all__ = [
    "adam",
]


def adam(
    p: Tensor,
    out_p: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    step: int,
    eps_mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take one AdamW step, with the formula of `apex_mp.optimizers.FusedAdam`.

    Args:
        p: The parameter or its master; written.
        out_p: The new parameter is also written here, rounded to its dtype; not if this is an empty
            tensor or `p` itself.
        exp_avg: First moment; written.
        exp_avg_sq: Second moment, likewise.
        grad: The gradient times `scale`.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        scale: The loss scale, which the gradient is divided by.
        step: This step's number, from 1.
        eps_mode: 0 adds eps under the square root, 1 outside.
        bias_correction: Not 0: correct the moments' start at zero.
        weight_decay: Decay factor, on the parameter itself.

    Raises:
        RuntimeError: Sizes differ, or a dtype or device is not supported.
        TypeError: An argument is not a tensor or number where one is needed.
        ValueError: A number is out of range.
    """
    names = ("p", "exp_avg", "exp_avg_sq", "grad")
    function = "fused_adam_cuda.adam"
    check_lists(function, [[p], [exp_avg], [exp_avg_sq], [grad]], names)
    check_tensor(function, "out_p", out_p)
    check_step(function, step)
    check_choice(function, "eps_mode", eps_mode, {0: "under the root", 1: "outside"})
    if scale == 0:
        raise ValueError(f"{function}: scale is {scale}; it must not be 0")
    copies = None
    if out_p.numel() > 0 and out_p.data_ptr() != p.data_ptr():
        check_lists(function, [[p], [out_p]], ("p", "out_p"))
        copies = [out_p]
    options = {
        "lr": number(function, "lr", lr),
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "adam_w_mode": True,
        "bias_correction": bool(bias_correction),
        "eps_inside_sqrt": eps_mode == 0,
    }
    with speaking_of(function, params="p", grads="grad", output_params="out_p"):
        step_lists(
            "adam",
            function,
            [p],
            [grad],
            tensors={"exp_avg": [exp_avg], "exp_avg_sq": [exp_avg_sq]},
            numbers={"step": steps_before(step, [p])},
            options=options,
            copies=copies,
            scale=scale,
        )
