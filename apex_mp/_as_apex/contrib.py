"""FusedAdam of apex.contrib.optimizers, after 2019-10."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from apex_mp import optimizers


class FusedAdam(optimizers.FusedAdam):
    """`apex_mp.optimizers.FusedAdam` with two old arguments more.

    Arguments as of `apex_mp.optimizers.FusedAdam`, and these:

    Args:
        use_mt: No effect: all tensors are stepped at once anyway [False].
        amp_scale_adjustment: Must be 1 [1].
        **options: Further arguments of `apex_mp.optimizers.FusedAdam`, by name.

    Raises:
        ValueError: `amp_scale_adjustment` is not 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
        **options: Any,
    ) -> None:
        if amp_scale_adjustment != 1.0:
            raise ValueError(
                f"FusedAdam: amp_scale_adjustment is {amp_scale_adjustment}; it must be 1, since "
                "amp gives this optimizer gradients that are unscaled already"
            )
        self._amp_scale_adjustment = amp_scale_adjustment
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            eps_inside_sqrt,
            weight_decay,
            max_grad_norm,
            amsgrad,
            **options,
        )
