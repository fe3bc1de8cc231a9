"""multi_tensor_sgd, in torch's own functions over lists."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_mp.multi_tensor_apply._arguments import Lists, check_lists


def multi_tensor_sgd(
    chunk_size: int,
    overflow_buf: Tensor,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Take one SGD step: `[grads, params, momentum_buffers]` or those and `[copies]`.

    There is no operator for it yet: it takes several passes of torch's foreach functions, and the
    host reads the flag, which waits for the device.

    Args:
        chunk_size: No effect.
        overflow_buf: If it is up, nothing is written.
        tensor_lists: As above; each new parameter is also written to its copy.
        weight_decay: L2 factor.
        momentum: Decay of the momentum buffers; with 0 they are left alone.
        dampening: The gradient enters the buffer times 1 - dampening.
        lr: Learning rate.
        nesterov: Step along gradient plus momentum times buffer.
        first_run: The buffers hold nothing yet, and become the gradients.
        wd_after_momentum: Add the decay after momentum instead of before.
        scale: Factor on the gradients.
    """
    names = ("grads", "params", "momentum_buffers", "copies")[: max(3, len(tensor_lists))]
    check_lists("multi_tensor_sgd", tensor_lists, names)
    if overflow_buf.item():
        return
    params = tensor_lists[1]
    with torch.no_grad():
        wide = [param.detach().float() if _narrow(param) else param.detach() for param in params]
        update = [
            grad.detach().to(param.dtype) * scale
            for grad, param in zip(tensor_lists[0], wide, strict=True)
        ]
        if weight_decay and not wd_after_momentum:
            torch._foreach_add_(update, wide, alpha=weight_decay)
        if momentum:
            for moving, buffer in zip(update, tensor_lists[2], strict=True):
                if first_run:
                    buffer.copy_(moving)
                else:
                    buffer.mul_(momentum).add_(moving, alpha=1 - dampening)
                if nesterov:
                    moving.add_(buffer, alpha=momentum)
                else:
                    moving.copy_(buffer)
        if weight_decay and wd_after_momentum:
            torch._foreach_add_(update, wide, alpha=weight_decay)
        torch._foreach_add_(wide, update, alpha=-lr)
        for targets in (params, *tensor_lists[3:]):
            for target, new in zip(targets, wide, strict=True):
                if target.data_ptr() != new.data_ptr():
                    target.copy_(new)


def _narrow(param: Tensor) -> bool:
    return param.dtype in (torch.float16, torch.bfloat16)
