"""LARC (You, Gitman and Ginsburg 2017): a learning rate for each tensor, around any optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.options import check_number
from apex_mp.core.tensors import Lists, copy_async, params_of
from apex_mp.grads.in_host_memory import refuse_offloaded
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.saved.dcp import with_checkpoint_view
from apex_mp.step.delegating import ForwardingOptimizer
from apex_mp.step.scaled_step import ScaledStep, dropping_amp_tensors, take, takes_scaled_step


class LARC(ForwardingOptimizer):
    """Scale each gradient so that the step has a fixed ratio to its parameter's norm.

    The local rate is `trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)`. Weight decay is
    added here, and set to 0 in the inner optimizer during the step. Everything else is as of the
    inner optimizer: schedulers take either, FP16_Optimizer may be outside or inside, and
    `amp.initialize` takes this one.

    Args:
        optimizer: The optimizer whose groups and step are used.
        trust_coefficient: Ratio of step and parameter [0.02].
        clip: Let the group's learning rate be the upper bound (LARC) instead of a factor (LARS)
            [True].
        eps: Added to the denominator [1e-8].

    Raises:
        TypeError: `optimizer` is not an optimizer, or a hyperparameter is no number.
        ValueError: `trust_coefficient` or `eps` is below 0.
    """

    _inner_name = "optim"

    def __init__(
        self,
        optimizer: Any,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"LARC: optimizer is a {type(optimizer).__name__}; it must be an optimizer"
            )
        refuse_offloaded("LARC", optimizer)
        for name, value in (("trust_coefficient", trust_coefficient), ("eps", eps)):
            check_number("LARC", name, value, at_least=0.0)
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, and step the inner optimizer.

        A fused optimizer of this package gets 16-bit gradients as float32 copies (4 bytes a
        parameter during the step), in which small ones keep their values. Otherwise `.grad` is
        overwritten.

        Args:
            closure: Called once, before that; its result is returned [None].

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with dropping_amp_tensors(self):
            for number, group in enumerate(self.param_groups):
                _refuse_sparse_grads(number, group["params"])
            copies = self._steps_with_copies
            with torch.no_grad():
                grads = [
                    [self._scaled(param, group, copies) for param in group["params"]]
                    for group in self.param_groups
                ]
            value = self._step_without_decay(grads if copies else None)
        return value if loss is None else loss

    def _step_without_decay(self, grads: Lists | None) -> Any:
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            return self._step_inside(grads)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _step_inside(self, grads: Lists | None) -> Any:
        if grads is None:
            return self.optim.step()
        # GradScaler sets found_inf here, around the call.
        found_inf = vars(self).get("found_inf")
        return take(self.optim, ScaledStep(grads=grads, found_inf=found_inf, warns=True))

    def _scaled(self, param: Tensor, group: dict[str, Any], copies: bool) -> Tensor | None:
        """Return a gradient times its local rate; None if there is none.

        With `copies` it is a new tensor, float32 at least and unscaled; else `.grad`, overwritten.
        """
        grad = param.grad
        if grad is None:
            return None
        dense = tensors.writable(grad)
        if dense is not grad:
            grad = param.grad = dense
        if copies:
            loss_scale = vars(self).get("grad_scale")  # GradScaler sets it around the call.
            unscaled = grad.to(torch.promote_types(grad.dtype, torch.float32))
            if loss_scale is not None:
                unscaled = unscaled / copy_async(loss_scale, grad.device)
            return self._with_rate(param, unscaled, group)
        return grad.copy_(self._with_rate(param, grad, group))

    def _with_rate(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        param_norm, grad_norm = _norm(param), _norm(grad)
        decay = group.get("weight_decay", 0.0)
        rate = self.trust_coefficient * param_norm / (grad_norm + decay * param_norm + self.eps)
        if self.clip:
            rate = (rate / group["lr"]).clamp(max=1.0)
        known = (param_norm != 0) & (grad_norm != 0)
        return torch.where(known, (grad + decay * param) * rate, grad)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # An optimizer that scales the loss by itself raises an error here.
        getattr(self.optim, "_step_supports_amp_scaling", None)
        return self._steps_with_copies

    @property
    def _steps_with_copies(self) -> bool:
        """Whether a fused optimizer of this package is inside, and gradients have 16 bits."""
        if not takes_scaled_step(self.optim):
            return False
        params = params_of(self)
        return any(param.grad is not None and param.grad.dtype in LOW_PRECISION for param in params)

    @with_checkpoint_view
    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the optimizer inside."""
        state: dict[str, Any] = self.optim.state_dict()
        return state

    @with_checkpoint_view
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer inside."""
        self.optim.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler sets an attribute `step`, which belongs to this object only.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class _Module(ModuleType):
    """A module that can be called: old scripts use `parallel.LARC.LARC` and `parallel.LARC`."""

    def __call__(self, *args: Any, **kwargs: Any) -> LARC:
        return LARC(*args, **kwargs)


sys.modules[__name__].__class__ = _Module


def _refuse_sparse_grads(number: int, params: list[Tensor]) -> None:
    for index, param in enumerate(params):
        reason = None if param.grad is None else tensors.not_strided(param.grad)
        if reason is not None:
            raise RuntimeError(f"LARC: grads[{number}][{index}] {reason}")


def _norm(tensor: Tensor) -> Tensor:
    """Return the l2 norm, in float32 at least: that of many float16 numbers may exceed float16."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm
