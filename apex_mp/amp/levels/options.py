"""The optimization levels O0 to O3, and options that override them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from apex_mp.loss_scale import DynamicLossScale
from apex_mp.scale.amp_scaler import WISH, held_value

_BRIEFS = {
    "O0": "O0:  Pure FP32 training.\n",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
    "O3": "O3:  Pure FP16 training.",
}
_SHOWN = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an optimization level, with the user's overrides.

    Attributes:
        opt_level: "O0" to "O3".
        cast_model_type: dtype of the model's parameters, or None: as they are.
        patch_torch_functions: Cast around functions, as `amp.init()` does.
        keep_batchnorm_fp32: Leave affine batch norms in float32.
        master_weights: Step float32 masters of low-precision parameters.
        loss_scale: "dynamic", a number or a dynamic loss scale.
        enabled: False: `initialize` and `scale_loss` change nothing.
        cast_model_outputs: dtype of the model's outputs, or None: float32 if the model is cast.
    """

    opt_level: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str | DynamicLossScale
    enabled: bool = True
    cast_model_outputs: torch.dtype | None = None

    @property
    def is_plain_float32(self) -> bool:
        """Return whether this is plain float32 training, without loss scaling."""
        plain = self.opt_level == "O0" and self.cast_model_type in (None, torch.float32)
        return plain and self.loss_scale == 1.0

    @property
    def saves_float32(self) -> bool:
        """Return whether a model's state_dict holds float32 values in place of its own."""
        return bool(self.master_weights) or self.opt_level == "O2"

    @property
    def output_dtype(self) -> torch.dtype | None:
        """Return the dtype to which a model's floating outputs are cast; None if they are not."""
        if self.cast_model_outputs is not None:
            return self.cast_model_outputs
        return None if self.cast_model_type is None else torch.float32

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that apex has, by name."""
        return {name: getattr(self, name) for name in _SHOWN}

    def lines(self) -> list[str]:
        """Return a line for each option that apex printed."""
        return [f"{name:22} : {value}" for name, value in self.options.items()]


def disabled(opt_level: str) -> Options:
    """Return the options of a process with `enabled=False`."""
    return Options(opt_level, None, False, None, False, 1.0, enabled=False)


def defaults(opt_level: str, dtype: torch.dtype) -> Options:
    """Return the options of a level.

    Args:
        opt_level: "O0" to "O3".
        dtype: The low precision: torch.float16 or torch.bfloat16.

    Raises:
        RuntimeError: There is no such level.
        ValueError: `dtype` is neither torch.float16 nor torch.bfloat16.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"amp.initialize: dtype is {dtype!r}; it must be torch.float16 or torch.bfloat16"
        )
    levels = {
        "O0": Options("O0", torch.float32, False, None, False, 1.0),
        "O1": Options("O1", None, True, None, None, "dynamic"),
        "O2": Options("O2", dtype, False, True, True, "dynamic"),
        "O3": Options("O3", dtype, False, False, False, 1.0),
    }
    if opt_level not in levels:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.  Note "
            "that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    return levels[opt_level]


def override(options: Options, **values: Any) -> tuple[Options, list[str]]:
    """Return options with those of `values` that are not None, and reasons against these.

    Raises:
        TypeError, ValueError: A value is of a wrong type or out of range.
    """
    plain = {name: _plain(name, value) for name, value in values.items() if value is not None}
    objections = [
        f"amp.initialize: {name} is {value!r} with opt_level {options.opt_level!r}; {reason}"
        for name, value in plain.items()
        if (reason := _reason_against(options.opt_level, name, value))
    ]
    return dataclasses.replace(options, **plain), objections


def description(chosen: Options, final: Options) -> str:
    """Return what apex printed: the level, its defaults, and the options that result."""
    return "\n".join(
        [
            f"Selected optimization level {_BRIEFS[chosen.opt_level]}",
            "Defaults for this optimization level are:",
            *chosen.lines(),
            "Processing user overrides (additional kwargs that are not None)...",
            "After processing overrides, optimization options are:",
            *final.lines(),
        ]
    )


def _plain(name: str, value: Any) -> Any:
    """Return the value of an option; a string from a command line becomes the value it names."""
    if name == "loss_scale":
        held = held_value(value)
        if held is None:
            return value if value == "dynamic" else _number(value)
        return held if isinstance(held, DynamicLossScale) else held.scale
    if name.startswith("cast_model"):
        if value is False:
            return None
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return value
        raise TypeError(f"amp.initialize: {name} is {value!r}; it must be a floating torch.dtype")
    if name == "keep_batchnorm_fp32" and value in ("True", "False"):
        return value == "True"
    if isinstance(value, bool):
        return value
    raise TypeError(f"amp.initialize: {name} is {value!r}; it must be True, False or None")


def _number(value: Any) -> float:
    try:
        if getattr(value, "dtype", type(value)) not in (bool, torch.bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"amp.initialize: loss_scale is {value!r}; {WISH}")


def _reason_against(opt_level: str, name: str, value: Any) -> str:
    """Return why an option does not go with the level; empty if it does."""
    if opt_level != "O1":
        if name == "patch_torch_functions" and value:
            return "only O1 casts around functions"
        return ""
    if name == "cast_model_type" and value not in (None, torch.float32):
        return "O1 casts around functions and leaves the weights in float32"
    if name == "keep_batchnorm_fp32":
        return "O1 leaves the weights in float32, those of batch norms too"
    if name == "master_weights":
        return "O1 leaves the weights in float32, so they are their own masters"
    return ""
