"""What apex changed in the summer of 2019: arguments of amp.init, and the first loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apex_mp import amp, optimizers
from apex_mp.amp.amp import takes_enable


class FP16_Optimizer(optimizers.FP16_Optimizer):
    """`apex_mp.optimizers.FP16_Optimizer` whose dynamic loss scale starts at 2**32."""

    _DYNAMIC_DEFAULTS: Mapping[str, Any] = {}


@takes_enable
def init(
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    **options: Any,
) -> amp.AmpHandle | amp.NoOpHandle:
    """Call `apex_mp.amp.init` with the arguments in the order of early 2019.

    Args:
        enabled: As of `apex_mp.amp.init`; `enable` is its other name.
        enable_caching: As of `apex_mp.amp.init`.
        verbose: As of `apex_mp.amp.init`.
        allow_banned: As of `apex_mp.amp.init`.
        **options: Further arguments of `apex_mp.amp.init`, by name.

    Raises:
        TypeError: `enable_caching` is neither True nor False, for example a loss scale.
    """
    if enable_caching is not None and not (
        isinstance(enable_caching, int) and enable_caching in (False, True)
    ):
        raise TypeError(
            f"amp.init: enable_caching, the second argument as of 2019-03, is {enable_caching!r}; "
            "it must be True or False. If it is meant as the loss scale, say "
            f"loss_scale={enable_caching!r}, or have apex as of 2019-08, where that came second"
        )
    return amp.init(
        enabled,
        enable_caching=enable_caching,
        verbose=verbose,
        allow_banned=allow_banned,
        **options,
    )
