"""FusedAdam with its arguments since August 2019, and what O3 has saved since then."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from apex_mp import amp, optimizers
from apex_mp.amp._amp_state import _amp_state
from apex_mp.multi_tensor_apply import amp_C
from apex_mp.saved.amp import MasterState


@functools.wraps(amp.initialize)
def initialize(models: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `apex_mp.amp.initialize`; `model.state_dict()` is in float32 at O3, too."""
    result = amp.initialize(models, *args, **kwargs)
    options = _amp_state.opt_properties
    if options is not None and options.enabled and options.opt_level == "O3":
        for model in models if isinstance(models, (list, tuple)) else [models]:
            MasterState({}).attach(model)
    return result


class FusedAdam(optimizers.FusedAdam):
    """`apex_mp.optimizers.FusedAdam` with `adam_w_mode` before `weight_decay`.

    Arguments as of `apex_mp.optimizers.FusedAdam`, and these:

    Args:
        set_grad_none: Whether `zero_grad()` sets gradients to None instead of zero [True].
        **options: Further arguments of `apex_mp.optimizers.FusedAdam`, by name. `unscale_grads` is
            True: under GradScaler float16 gradients are left unscaled, too.
    """

    # fairseq distinguishes this FusedAdam from the earlier one by this attribute.
    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **options: Any,
    ) -> None:
        options.setdefault("unscale_grads", True)
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            set_grad_none=set_grad_none,
            **options,
        )
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Set them to None instead of zero [None: as `set_grad_none`].
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
