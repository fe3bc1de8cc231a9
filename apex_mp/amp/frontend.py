"""amp.initialize() and its companions: optimization levels O0 to O3."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp import _current
from apex_mp.amp._amp_state import OptLevel, _amp_state, maybe_print, warn_or_err
from apex_mp.amp._initialize import prepare
from apex_mp.amp.scaler import LossScaler
from apex_mp.amp.scaling import Overflow, scaled_backward

_BRIEFS = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
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


def _defaults(opt_level: str, dtype: torch.dtype) -> OptLevel:
    return {
        "O0": OptLevel("O0", torch.float32, False, None, False, 1.0),
        "O1": OptLevel("O1", None, True, None, None, "dynamic"),
        "O2": OptLevel("O2", dtype, False, True, True, "dynamic"),
        "O3": OptLevel("O3", dtype, False, False, False, 1.0),
    }[opt_level]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: torch.dtype = torch.float16,
    device_type: str | None = None,
) -> Any:
    """Prepare models and optimizers for mixed precision.

    | option                | O0      | O1        | O2        | O3      |
    |-----------------------|---------|-----------|-----------|---------|
    | cast_model_type       | float32 | None      | `dtype`   | `dtype` |
    | patch_torch_functions | False   | True      | False     | False   |
    | keep_batchnorm_fp32   | None    | None      | True      | False   |
    | master_weights        | False   | None      | True      | False   |
    | loss_scale            | 1.0     | "dynamic" | "dynamic" | 1.0     |

    O1 is `amp.init()`. With O2 the optimizer steps float32 masters, `model.state_dict()` holds
    their values, and both load and resume exactly. An option that is not None overrides the level.

    Args:
        models: A module or a list of modules in float32, before DistributedDataParallel.
        optimizers: A torch optimizer or a list of them [None].
        enabled: With False nothing happens, here and in `scale_loss` [True].
        opt_level: "O0", "O1", "O2" or "O3" ["O1"].
        cast_model_type: dtype of parameters, and of floating inputs.
        patch_torch_functions: Cast around functions; only O1 does.
        keep_batchnorm_fp32: Leave affine batch norms in float32; may be the string "True".
        master_weights: Step float32 masters.
        loss_scale: "dynamic" or a number.
        cast_model_outputs: dtype of the models' floating outputs [None: float32 if models are
            cast].
        num_losses: Losses with a scale of their own, by `loss_id` [1].
        verbosity: 0 prints nothing, 1 options and skipped steps, 2 casts of O1 too [1].
        min_loss_scale: A dynamic scale does not back off below it [None: no floor].
        max_loss_scale: A dynamic scale does not grow above it [2**24].
        dtype: torch.float16 or torch.bfloat16 [torch.float16].
        device_type: Where O1 casts: "cuda" or "cpu" [None: where the models are].

    Returns:
        Models, or models and optimizers: the same objects, each in a list if it came in one.

    Raises:
        RuntimeError: The level is unknown, an option does not go with it, a model is not in
            float32 or is wrapped for parallel training, or an optimizer was here before.
        TypeError: `models` or `optimizers` is of a wrong type.
        ValueError: A loss scale or `num_losses` is out of range. Nothing is changed by an error.
    """
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.opt_properties = OptLevel(opt_level, None, False, None, None, 1.0, enabled=False)
        return models if optimizers is None else (models, optimizers)
    if opt_level not in _BRIEFS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.  Note "
            "that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    options = _defaults(opt_level, dtype)
    maybe_print(f"Selected optimization level {_BRIEFS[opt_level]}")
    maybe_print("Defaults for this optimization level are:")
    _show(options)
    maybe_print("Processing user overrides (additional kwargs that are not None)...")
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": _as_bool(keep_batchnorm_fp32),
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
    }
    for name, value in overrides.items():
        if value is not None:
            _check_override(opt_level, name, value)
            setattr(options, name, value)
    maybe_print("After processing overrides, optimization options are:")
    _show(options)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"amp.initialize: num_losses is {num_losses!r}; it must be at least 1")
    scalers = [
        LossScaler(
            _as_scale(options.loss_scale),
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        )
        for _ in range(num_losses)
    ]
    result = prepare(
        models, optimizers, options, dtype=dtype, device_type=device_type, verbosity=verbosity
    )
    _amp_state.opt_properties, _amp_state.loss_scalers = options, scalers
    return result


def _show(options: OptLevel) -> None:
    for name in _SHOWN:
        maybe_print(f"{name:22} : {getattr(options, name)}")


def _as_bool(value: bool | str | None) -> bool | None:
    if value in ("True", "False"):
        return value == "True"
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(
        f"amp.initialize: keep_batchnorm_fp32 is {value!r}; it must be True, False or None"
    )


def _as_scale(value: float | str) -> float | str:
    return value if value == "dynamic" else float(value)


def _check_override(opt_level: str, name: str, value: Any) -> None:
    """Raise if an option does not go with the level."""
    reason = ""
    if opt_level == "O1" and name == "cast_model_type" and value is not torch.float32:
        reason = "O1 casts around functions and leaves the weights in float32"
    elif opt_level == "O1" and name == "keep_batchnorm_fp32":
        reason = "O1 leaves the weights in float32, those of batch norms too"
    elif opt_level == "O1" and name == "master_weights":
        reason = "O1 leaves the weights in float32, so they are their own masters"
    elif opt_level != "O1" and name == "patch_torch_functions" and value:
        reason = "only O1 casts around functions"
    if reason:
        warn_or_err(f"amp.initialize: {name} is {value!r} with opt_level {opt_level!r}; {reason}")


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any | Sequence[Any],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the loss times its scale; the gradients are unscaled when the block ends.

    Args:
        loss: A floating tensor.
        optimizers: The optimizer or optimizers whose parameters get gradients.
        loss_id: Which of the `num_losses` scales [0].
        model: Not used; there for its place in the signature [None].
        delay_unscale: Leave the gradients scaled, for another block with this scale that adds to
            them and unscales them; spares a pass when gradients are accumulated [False].
        delay_overflow_check: Leave it to the next block with this scale to skip a step for an
            overflow in this one [False].

    Raises:
        RuntimeError: `amp.initialize` has not been called.
        ValueError: There is no scale of that `loss_id`.
    """
    options = _amp_state.opt_properties
    if options is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) must be called "
            "before `with amp.scale_loss`."
        )
    handle = _current.handle
    casts_disabled = options.patch_torch_functions and handle is not None and not handle.is_active()
    if not options.enabled or casts_disabled:
        yield loss
        return
    if options.cast_model_type is torch.float32 and options.loss_scale == 1.0:
        yield loss.float()  # O0, the float32 training that others are compared with.
        return
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise ValueError(
            f"amp.scale_loss: loss_id is {loss_id}; it must be less than num_losses of "
            f"amp.initialize, which is {len(_amp_state.loss_scalers)}"
        )

    def announce(overflow: Overflow) -> None:
        maybe_print(
            "\n".join(
                [
                    f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale "
                    f"to {overflow.scale_after}",
                    *overflow.lines(),
                ]
            )
        )

    with scaled_backward(
        loss,
        [*optimizers] if isinstance(optimizers, (list, tuple)) else [optimizers],
        _amp_state.loss_scalers[loss_id],
        names=_parameter_names,
        announce=announce,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
        expect_float32=options.opt_level == "O1",
    ) as scaled_loss:
        yield scaled_loss


def _parameter_names() -> dict[int, str]:
    several = len(_amp_state.models) > 1
    return {
        id(param): f"model {number}: {name}" if several else name
        for number, model in enumerate(_amp_state.models)
        for name, param in model.named_parameters()
    }


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Switch casts off in this thread for a `with` block, if they are on."""
    if _current.handle is None:
        yield
        return
    with _current.handle._disable_casts():
        yield


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of all loss scales, plain values by "loss_scaler0" and so on.

    Args:
        destination: A dict to put them into [None: a new one].
    """
    result = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        result[f"loss_scaler{number}"] = scaler.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take over the state of loss scales; of other numbers of scales what there is for them.

    Raises:
        RuntimeError: There is a key of another kind; nothing is changed.
        TypeError, ValueError, KeyError: A state is not one; nothing is changed.
    """
    scalers = _amp_state.loss_scalers
    unexpected = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. "
        )
    if len(state_dict) != len(scalers):
        maybe_print(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} "
            "loss_scalers are used"
        )
    before = [scaler.value for scaler in scalers]
    try:
        for number, scaler in enumerate(scalers):
            if f"loss_scaler{number}" in state_dict:
                scaler.load_state_dict(state_dict[f"loss_scaler{number}"])
    except BaseException:
        for scaler, value in zip(scalers, before, strict=True):
            scaler.value = value
        raise
