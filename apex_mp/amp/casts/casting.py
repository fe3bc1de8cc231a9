"""Casts of the arguments of a call: which tensors are cast, and to which dtype.

At each call torch.autocast says whether casts are on, and to which dtype; a handle does not. So a
user's own autocast region holds, and so does the state that a checkpoint restores to recompute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp.casts import output_buffers as _output_buffers
from apex_mp.amp.casts.switch import Switch
from apex_mp.core.log import logger
from apex_mp.core.tensors import map_tensors

Function = Callable[..., Any]

_LOG = logger("apex_mp.amp")
_SHORT_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}


class Caster:
    """Casts arguments on one device, and makes wrappers that do so before a call.

    Args:
        switch: Whether casts are on in a thread. Its device is the one whose tensors are cast.
        enable_caching: Keep the cast of a parameter for the rest of the outermost module call.
        verbose: Print a line for each tensor that is cast.

    Attributes:
        cache: The low-precision casts of parameters, by parameter.
    """

    def __init__(self, switch: Switch, *, enable_caching: bool, verbose: bool) -> None:
        self.switch = switch
        self.device_type = switch.device_type
        self.enable_caching = enable_caching
        self.verbose = verbose
        self.cache = CastCache()
        self.is_on = switch.is_on
        # Reading this flag of a tensor is five times as fast as reading its device.
        self._is_here = f"is_{switch.device_type}"

    def call_where_off(self, wrapper: Function, function: Function, args: Any, kwargs: Any) -> Any:
        """Call `function` in a thread where autocast is off; switch casts on if they are due."""
        if not torch.compiler.is_compiling() and self.switch.is_due():
            with self.switch.on_for_a_call():
                return wrapper(*args, **kwargs)
        return function(*args, **kwargs)

    # The four casts. Each takes and returns the arguments of a call.

    def to_low(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast float32 tensors to the low precision, unless the call asks for a float32 result."""
        out = kwargs.get("out")
        if isinstance(out, Tensor) and out.dtype is torch.float32:
            return args, kwargs
        dtype = torch.get_autocast_dtype(self.device_type)
        return self._cast(name, args, kwargs, torch.float32, dtype)

    def to_float(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast low-precision tensors to float32."""
        dtype = torch.get_autocast_dtype(self.device_type)
        return self._cast(name, args, kwargs, dtype, torch.float32)

    def promote(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast low-precision tensors to float32 if there are float32 tensors too."""
        dtypes = {tensor.dtype for tensor in self._tensors((args, kwargs))}
        return self.to_float(name, args, kwargs) if torch.float32 in dtypes else (args, kwargs)

    def match_first(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast the other tensors to the dtype of the first argument, which is written."""
        low = torch.get_autocast_dtype(self.device_type)
        target = args[0].dtype
        if target not in (low, torch.float32):
            return args, kwargs
        source = torch.float32 if target is low else low
        others, kwargs = self._cast(name, args[1:], kwargs, source, target)
        return (args[0], *others), kwargs

    def has_low(self, args: Any, kwargs: Any) -> bool:
        """Return whether an argument is a tensor in the low precision of autocast."""
        low = torch.get_autocast_dtype(self.device_type)
        return any(tensor.dtype is low for tensor in self._tensors((args, kwargs)))

    def _tensors(self, value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            if getattr(value, self._is_here):
                yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from self._tensors(item)
        elif isinstance(value, dict):
            for item in value.values():
                yield from self._tensors(item)

    def _cast(
        self, name: str, args: Any, kwargs: Any, source: torch.dtype, target: torch.dtype
    ) -> tuple[Any, Any]:
        verbose = self.verbose and not torch.compiler.is_compiling()

        def cast(tensor: Tensor) -> Tensor:
            if tensor.dtype is not source or not getattr(tensor, self._is_here):
                return tensor
            keep = source is torch.float32 and self._keeps_cast(tensor)
            done = self.cache.get_cast(tensor, target) if keep else None
            if done is not None:
                return done
            if verbose:
                _LOG.info("%s->%s (%s)", _SHORT_NAMES[source], _SHORT_NAMES[target], name)
            return self.cache.keep(tensor, target) if keep else convert(tensor, target)

        args = map_tensors(cast, args)
        if kwargs:
            # The result must go into the given tensor, not into a cast of it.
            out = {"out": kwargs["out"]} if "out" in kwargs else {}
            kwargs = {**map_tensors(cast, kwargs), **out}
        return args, kwargs

    def _keeps_cast(self, tensor: Tensor) -> bool:
        """Return whether the cast of a tensor is kept: only of parameters, which live long."""
        if torch.compiler.is_compiling() or not self.switch.thread.keeps_casts:
            return False
        return tensor.requires_grad and tensor.is_leaf and _may_be_kept(tensor)

    def _with_kept_casts(self, args: Any) -> Any:
        """Replace parameters by their kept casts, so that torch does not cast them again."""
        dtype, cache = torch.get_autocast_dtype(self.device_type), self.cache
        result = [*args]
        for index, value in enumerate(result):
            if not isinstance(value, Tensor) or not value.requires_grad or not value.is_leaf:
                continue
            done = cache.get_cast(value, dtype)
            if done is not None:
                result[index] = done
            elif (
                value.dtype is torch.float32
                and getattr(value, self._is_here)
                and _may_be_kept(value)
            ):
                result[index] = cache.keep(value, dtype)
        return result

    # Wrappers.

    def wrap(
        self,
        function: Function,
        name: str,
        cast: str,
        *,
        casts_inside: bool,
        is_registered: bool = False,
    ) -> Function:
        """Return `function` with its arguments cast before the call.

        Args:
            function: What to call.
            name: What a line of verbose output calls it.
            cast: "to_low", "to_float", "promote" or "match_first".
            casts_inside: Whether casts stay on for what the function calls.
            is_registered: Whether to warn if it writes its result to an argument [False].
        """
        cast_arguments, is_on = getattr(self, cast), self.is_on
        call = call_with if casts_inside else self.call_uncast

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not is_on():
                return self.call_where_off(wrapper, function, args, kwargs)
            given = args
            args, kwargs = cast_arguments(name, args, kwargs)
            result = call(function, args, kwargs)
            if is_registered:
                _output_buffers.check(name, given, args, result)
            return result

        return wrapper

    def follow(self, function: Function, name: str = "", cast: str = "") -> Function:
        """Return a wrapper of `function`, in which torch casts, that does so in every thread.

        Args:
            function: What to call.
            name: What a line of verbose output calls it.
            cast: Which cast torch makes, as for `wrap`; empty if it is neither logged nor kept.
        """
        is_on, is_compiling, thread = self.is_on, torch.compiler.is_compiling, self.switch.thread
        log_casts = getattr(self, cast) if cast and self.verbose else None
        may_keep = cast == "to_low" and self.enable_caching

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not is_on():
                return self.call_where_off(wrapper, function, args, kwargs)
            if log_casts is not None and not is_compiling():
                log_casts(name, args, kwargs)  # The casts themselves are torch's.
            if may_keep and not is_compiling() and thread.keeps_casts and "out" not in kwargs:
                args = self._with_kept_casts(args)
                if kwargs:
                    values = self._with_kept_casts(kwargs.values())
                    kwargs = dict(zip(kwargs, values, strict=True))
            return function(*args, **kwargs)

        return wrapper

    def call_uncast(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a function with casts switched off, in a thread where they are on."""
        device_type = self.device_type
        if torch.compiler.is_compiling():  # The way that Dynamo knows.
            with torch.autocast(device_type, enabled=False):
                return function(*args, **kwargs)
        torch.set_autocast_enabled(device_type, False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    def refuse_low(self, function: Function, error: str) -> Function:
        """Return `function` with a NotImplementedError for arguments in low precision."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on():
                return self.call_where_off(wrapper, function, args, kwargs)
            if self.has_low(args, kwargs):
                raise NotImplementedError(error)
            return self.call_uncast(function, args, kwargs)

        return wrapper

    def refuse_low_first(self, function: Function, name: str, error: str) -> Function:
        """Return an in-place method that refuses a low-precision tensor, and casts the others."""
        matching = self.wrap(function, name, "match_first", casts_inside=False)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on():
                return self.call_where_off(wrapper, function, args, kwargs)
            if self.has_low(args[:1], {}):
                raise NotImplementedError(error)
            return matching(*args, **kwargs)

        return wrapper


def call_with(function: Function, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _may_be_kept(parameter: Tensor) -> bool:
    return not (
        parameter._is_view()
        or torch.is_inference_mode_enabled()
        or torch._C._are_functorch_transforms_active()  # A cast made in one is invalid after it.
    )


class CastCache(dict[Tensor, Tensor]):
    """Casts of parameters, each with the tensor and the version that it was made from.

    `_cdata` identifies the tensor, because `swap_tensors` puts another tensor into a parameter.
    """

    def get_cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the kept cast to `dtype`; None if there is none or the parameter has changed."""
        done = self.get(tensor)
        if done is None or done.dtype is not dtype:  # Another thread may want another dtype.
            return None
        source = (tensor._cdata, tensor._version)
        return done if getattr(done, "_source", None) == source else None

    def keep(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a cast and keep it. It has a graph, because a later use may need gradients."""
        if torch.is_grad_enabled():
            done = convert(tensor, dtype)
        else:
            with torch.enable_grad():
                done = convert(tensor, dtype)
        done._source = (tensor._cdata, tensor._version)  # type: ignore[attr-defined]
        self[tensor] = done
        return done


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`, in a quarter of the time: `to` parses its arguments slowly."""
    if dtype is torch.float16:
        return tensor.half()
    if dtype is torch.bfloat16:
        return tensor.bfloat16()
    return tensor.float() if dtype is torch.float32 else tensor.to(dtype)


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of low precision."""
    return dtype in (torch.float16, torch.bfloat16)
