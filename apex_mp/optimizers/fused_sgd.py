"""FusedSGD: stochastic gradient descent with momentum, one call for all tensors on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import required

from apex_mp.core import options
from apex_mp.masters.layout import Rule, StateLayout
from apex_mp.optimizers._fused import FusedOptimizer

BUFFER = "momentum_buffer"
IS_FRESH = "is_fresh"  # float32: not 0 if the buffer holds nothing yet
_WITHOUT_MOMENTUM = StateLayout("an SGD", tensors=())


class _Rule(Rule):
    # A step whose outcome the host does not know yet may be skipped. A buffer of zeros is then as
    # good as none, except with dampening, which does not apply to a parameter's first gradient. So
    # such a buffer has a flag beside it, by which the device knows the first gradient.

    def layout_of(self, group: Mapping[str, Any]) -> StateLayout:
        return self.layout if group["momentum"] else _WITHOUT_MOMENTUM

    def note_new(self, state: dict[str, Any], before: Any, group: Mapping[str, Any]) -> None:
        is_new = BUFFER in state and not torch.is_tensor((before or {}).get(BUFFER))
        if is_new and group["dampening"]:
            state[IS_FRESH] = torch.ones((), device=state[BUFFER].device)

    def after_step(
        self,
        states: dict[Any, dict[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        without_grad: Sequence[tuple[int, int]],
    ) -> None:
        if not any(group["dampening"] for group in groups):
            return
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                if group["momentum"] and (number, index) not in without_grad:
                    states.get(param, {}).pop(IS_FRESH, None)

    def tidy(self, states: dict[Any, dict[str, Any]]) -> None:
        """Remove buffers that hold nothing yet."""
        for param, state in [*states.items()]:
            flag = state.pop(IS_FRESH, None)
            if flag is not None and flag.item():
                del state[BUFFER]
                if not state:
                    del states[param]


class FusedSGD(FusedOptimizer):
    """SGD with momentum (Sutskever et al. 2013), one fused pass over all tensors.

        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9, master_weights=True)

    Equals `torch.optim.SGD` within rounding, and its `state_dict` can be loaded by that and the
    other way round. Parameters may be float16, bfloat16, float32 or float64 on CPU or CUDA, also on
    several devices; gradients of any of these dtypes. Momentum buffers and math are float32, for
    float64 parameters float64. Inside `torch.amp.GradScaler` the unscaling is part of the same
    pass, and float16 gradients are allowed unless `scaler.unscale_` is called;
    `apex_mp.amp.GradScaler` allows them there too.
    A step can be captured in a CUDA graph if all parameters are on one device, after one step
    outside of the capture (two with dampening, because the first is not dampened); see
    `refresh_hyperparameters`.

    Args:
        params: Parameters, (name, parameter) pairs, or parameter groups.
        lr: Learning rate, a float or a tensor of one element; needed here or in every group.
        momentum: Decay of the momentum buffers, not negative; 0 keeps none [0].
        dampening: Dampening of the momentum; not applied to a parameter's first gradient [0].
        weight_decay: Decay factor, not negative [0].
        nesterov: Step along the gradient plus momentum times buffer; needs momentum and no
            dampening [False].
        wd_after_momentum: Decay the weights themselves instead of adding L2 to the gradient
            [False].
        materialize_master_grads: No effect: a master's gradient is materialized when it is read
            [True].
        set_grad_none: No effect: `zero_grad()` sets gradients to None, as torch does [False].
        max_grad_norm: Clip each group's gradients to this l2 norm; 0 does not clip [0].
        master_weights: As of `FusedAdam` [False].
        unscale_grads: Inside `torch.amp.GradScaler`, whether a step that is not skipped unscales
            `.grad` in place, as torch's fused optimizers do. None unscales all but float16
            gradients, in which small numbers would underflow [None].
        offload: As of `FusedAdam` [False].

    Raises:
        MemoryError: `offload` is set, and the state takes more than the container's limit leaves.
        TypeError: The operators cannot step a parameter: its dtype, layout or class; or a
            hyperparameter is no number.
        ValueError: A hyperparameter is out of range, or a group has no lr.
    """

    _public_name = "FusedSGD"
    _in_torch = torch.optim.SGD
    _rule = _Rule("sgd", StateLayout("an SGD", tensors=(BUFFER,), unsaved_numbers=(IS_FRESH,)))
    _pickled = ("materialize_master_grads", "set_grad_none", "unscale_grads", "offload")

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        max_grad_norm: float = 0.0,
        master_weights: bool | Literal["split", "float32"] = False,
        unscale_grads: bool | None = None,
        offload: bool | Literal["gradients"] = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "max_grad_norm": max_grad_norm,
        }
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults, unscale_grads, master_weights, offload)

    @property
    def wd_after_momentum(self) -> bool:
        """Whether weight decay is added after the momentum; apex's name."""
        return bool(self.defaults["wd_after_momentum"])

    def _check_options(self, group: Mapping[str, Any]) -> None:
        if group["lr"] is required:  # torch refuses a group that has none either
            group = {**group, "lr": 0.0}
        super()._check_options(group)
        options.check_number("FusedSGD", "dampening", group["dampening"])

    def _check_new_options(self, group: Mapping[str, Any]) -> None:
        """Check nesterov too; in existing groups a scheduler may set the momentum to 0 at times."""
        self._check_options(group)
        if group["nesterov"] and not (group["momentum"] > 0.0 and group["dampening"] == 0.0):
            raise ValueError(
                f"FusedSGD: nesterov is True, momentum {group['momentum']} and dampening "
                f"{group['dampening']}; it needs momentum and no dampening"
            )

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        if group.get("maximize"):
            raise ValueError(
                f"FusedSGD.load_state_dict: param_groups[{number}] has maximize=True, which "
                "FusedSGD does not have; negate the loss instead"
            )

    def _adapt_state(self, where: str, state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        if state.get(BUFFER) is not None or BUFFER not in state:
            return super()._adapt_state(where, state, param)
        # No buffer: torch saves this for a parameter without a gradient or without momentum.
        rest = {key: value for key, value in state.items() if key != BUFFER}
        return _WITHOUT_MOMENTUM.loaded(where, rest, param, self._state_device)
