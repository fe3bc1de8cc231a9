"""amp.init(): casts and a loss scale; model and optimizer of a script stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from apex_mp.amp.casts import current as _current
from apex_mp.amp.casts.registry import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from apex_mp.amp.handle import AmpHandle, NoOpHandle
from apex_mp.core.log import logger, see
from apex_mp.loss_scale import LossScale
from apex_mp.masters import parallel_masters

__all__ = [
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logger("apex_mp.amp")
_DTYPES = (torch.float16, torch.bfloat16)


def takes_enable(init: F) -> F:
    """Accept `enable=` for `enabled=`, because published scripts call `amp.init` so."""

    @functools.wraps(init)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "enable" in kwargs:
            if args or "enabled" in kwargs:
                enabled = args[0] if args else kwargs["enabled"]
                raise TypeError(
                    f"amp.init: enable is {kwargs['enable']!r} and enabled is {enabled!r}; they "
                    "are two names of one argument, so give one of them"
                )
            kwargs["enabled"] = kwargs.pop("enable")
        return init(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _knows_the_early_order(init: F) -> F:
    """Accept the early order of arguments too, which is known by its second argument."""

    @functools.wraps(init)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        second = args[1] if len(args) > 1 else "dynamic"
        if isinstance(second, str) and second != "dynamic":
            # In that order any string that is not empty counts as True.
            _LOG.warning(
                "amp.init: the second argument is %r; it is taken for enable_caching=True of the "
                'API before March 2019. A loss scale is a number or "dynamic".'
                + see("arguments-without-effect"),
                second,
            )
            second = True
        if isinstance(second, bool):
            args = (args[0], kwargs.pop("loss_scale", "dynamic"), second, *args[2:])
        return init(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


@takes_enable
@_knows_the_early_order
def init(
    enabled: bool = True,
    loss_scale: float | str | LossScale = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    dtype: torch.dtype = torch.float16,
    device_type: str | None = None,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> AmpHandle | NoOpHandle:
    """Switch casts on in the whole process, and return a handle that scales losses.

    Convolutions, matrix products and recurrent layers then run in low precision, functions that
    need range or add many numbers up in float32, and arithmetic in the widest dtype among its
    arguments: `docs/casts.md` has the lists. A second call replaces the first.

    The order of arguments of early 2019, `init(enabled, enable_caching, verbose, allow_banned)`, is
    known by a second argument that is True or False.

    Args:
        enabled: With False torch is left as it is, and the handle does nothing; `enable` is another
            name of it [True].
        loss_scale: "dynamic", a number, or a loss scale of `apex_mp.loss_scale` ["dynamic"].
        enable_caching: Cast each weight once for a call of the outermost module [True].
        verbose: Print a line for each tensor that a listed function casts [False].
        allow_banned: Cast to float32 what is refused otherwise: binary_cross_entropy [False].
        dtype: torch.float16 or torch.bfloat16 [torch.float16].
        device_type: "cuda" or "cpu"; tensors elsewhere are never cast [None: "cuda" if there is a
            GPU].
        min_loss_scale: A dynamic scale does not back off below it [None: no floor].
        max_loss_scale: A dynamic scale does not grow above it [2**24].

    Returns:
        The handle; one that does nothing if `enabled` is False.

    Raises:
        TypeError: An argument is of a wrong type, or both `enabled` and `enable` are given.
        ValueError: An argument is out of range.
    """
    check_enabled("amp.init", enabled)
    if not enabled:
        if _current.handle is not None:
            _current.handle._deactivate()
        return NoOpHandle()
    if dtype not in _DTYPES:
        raise ValueError(
            f"amp.init: dtype is {dtype!r}; it must be torch.float16 or torch.bfloat16"
        )
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'amp.init: device_type is {device_type!r}; it must be "cpu" or "cuda"')
    if device_type == "cuda" and not torch.cuda.is_available():
        _LOG.warning(
            'amp.init: device_type is "cuda", but there is no GPU: nothing will be cast'
            + see("no-gpu-nothing-is-scaled-or-cast")
        )
    handle = AmpHandle(
        loss_scale,
        bool(enable_caching),
        bool(verbose),
        allow_banned=bool(allow_banned),
        dtype=dtype,
        device_type=device_type,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
    )
    parallel_masters.follow_join()
    handle._activate()
    return handle


def check_enabled(function: str, enabled: Any) -> None:
    """Raise a TypeError for a string: it would count as True, "O2" and "False" alike."""
    if isinstance(enabled, str):
        raise TypeError(
            f"{function}: enabled is {enabled!r}; it must be True or False. A level is given to "
            "amp.initialize as opt_level="
        )
