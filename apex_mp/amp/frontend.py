"""amp.initialize() and its companions: optimization levels O0 to O3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp._amp_state import LOG, _amp_state, maybe_print, warn_or_err
from apex_mp.amp._initialize import Setup, stop_casts
from apex_mp.amp._scale_loss.block import scaled_backward
from apex_mp.amp.amp import check_enabled
from apex_mp.amp.casts import current as _current
from apex_mp.amp.casts.casting import is_low
from apex_mp.amp.levels import options as _options
from apex_mp.grads.nonfinite import Overflow
from apex_mp.loss_scale import LossScale
from apex_mp.masters import parallel_masters
from apex_mp.saved.amp import load_scales, saved_scales
from apex_mp.scale.amp_scaler import LossScaler

__all__ = [
    "clear_cache",
    "disable_casts",
    "initialize",
    "load_state_dict",
    "scale_loss",
    "state_dict",
]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | LossScale | None = None,
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

    =====================  =======  =========  =========  =======
    option                 O0       O1         O2         O3
    =====================  =======  =========  =========  =======
    cast_model_type        float32  None       `dtype`    `dtype`
    patch_torch_functions  False    True       False      False
    keep_batchnorm_fp32    None     None       True       False
    master_weights         False    None       True       False
    loss_scale             1.0      "dynamic"  "dynamic"  1.0
    =====================  =======  =========  =========  =======

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
        loss_scale: "dynamic", a number, or a loss scale of `apex_mp.loss_scale`.
        cast_model_outputs: dtype of the models' floating outputs [None: float32 if models are
            cast].
        num_losses: Losses with a scale of their own, by `loss_id` [1].
        verbosity: 0 prints nothing, 1 options and skipped steps, 2 casts of O1 too [1].
        min_loss_scale: A dynamic scale does not back off below it [None: 1 once gradients have 16
            bits, which a smaller scale loses; else no floor].
        max_loss_scale: A dynamic scale does not grow above it [2**24].
        dtype: torch.float16 or torch.bfloat16 [torch.float16].
        device_type: Where O1 casts: "cuda" or "cpu" [None: where the models are].

    Returns:
        Models, or models and optimizers: the same objects, each in a list if it came in one.

    Raises:
        RuntimeError: The level is unknown, an option does not go with it, a model is not in
            float32 or is wrapped for parallel training, or an optimizer was here before.
        TypeError: `models`, `optimizers` or an option is of a wrong type.
        ValueError: `loss_scale`, one of its bounds, `num_losses`, `dtype` or `device_type` is out
            of range. Nothing is changed by an error.
    """
    check_enabled("amp.initialize", enabled)
    if not enabled:
        stop_casts()
        _amp_state.opt_properties, _amp_state.loss_scalers = _options.disabled(opt_level), []
        return models if optimizers is None else (models, optimizers)
    with _amp_state.printing(verbosity):
        defaults = _options.defaults(opt_level, dtype)
        options, objections = _options.override(
            defaults,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            cast_model_outputs=cast_model_outputs,
        )
        for objection in objections:
            warn_or_err(objection)
        scalers = _new_scalers(num_losses, options.loss_scale, min_loss_scale, max_loss_scale)
        parallel_masters.follow_join()
        setup = Setup(models, optimizers, options, dtype=dtype, device_type=device_type)
        setup.apply(verbose=verbosity == 2)
    maybe_print(_options.description(defaults, options))
    if dtype is torch.bfloat16 and loss_scale is not None and scalers[0].dynamic:
        maybe_print(
            "Warning:  gradients in bfloat16 do not underflow; a dynamic loss scale is not needed"
        )
    _amp_state.opt_properties, _amp_state.loss_scalers = options, scalers
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    return models if optimizers is None else (models, optimizers)


def _new_scalers(
    count: int,
    loss_scale: float | str | LossScale,
    min_loss_scale: float | None,
    max_loss_scale: float,
) -> list[LossScaler]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"amp.initialize: num_losses is {count!r}; it must be at least 1")
    return [
        LossScaler(loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(count)
    ]


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
        delay_overflow_check: Leave it to the next block with this scale to adjust it. An overflow
            skips the next step all the same [False].

    Raises:
        RuntimeError: `amp.initialize` has not been called, or an optimizer with masters was copied
            without its model.
        ValueError: There is no scale of that `loss_id`.
    """
    options = _amp_state.opt_properties
    if options is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) must be called "
            "before `with amp.scale_loss`. After amp.init() use its handle: amp_handle.scale_loss."
        )
    if not options.enabled:
        yield loss
        return
    if options.is_plain_float32:
        yield loss.float()
        return
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise ValueError(
            f"amp.scale_loss: loss_id is {loss_id}; it must be less than num_losses of "
            f"amp.initialize, which is {len(_amp_state.loss_scalers)}"
        )
    listed = [*optimizers] if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in listed:
        if options.master_weights and not hasattr(optimizer, "_amp_masters"):
            _check_has_no_low_precision(optimizer)
    with scaled_backward(
        loss,
        listed,
        _amp_state.loss_scalers[loss_id],
        names=_amp_state.parameter_names,
        announce=lambda overflow: _announce(loss_id, overflow),
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
        expect_float32=options.opt_level == "O1",
    ) as scaled_loss:
        yield scaled_loss


def _check_has_no_low_precision(optimizer: Any) -> None:
    groups = getattr(optimizer, "param_groups", [])
    if any(is_low(param.dtype) for group in groups for param in group["params"]):
        raise RuntimeError(
            "amp.scale_loss: the optimizer did not go through amp.initialize, so its low-precision "
            "parameters have no masters; make it before amp.initialize, and pass it in"
        )


def _announce(loss_id: int, overflow: Overflow) -> None:
    after = overflow.scale_after
    change = f"reducing loss scale to {after}"
    if after >= overflow.scale_before:
        change = f"which keeps its loss scale of {after}"
    if _amp_state.verbosity > 0:
        message = f"Gradient overflow.  Skipping step, loss scaler {loss_id} {change}"
        overflow.log(LOG, message)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Switch casts off in this thread for a `with` block, if they are on."""
    if _current.handle is None:
        yield
        return
    with _current.handle._disable_casts():
        yield


def clear_cache() -> None:
    """Drop the casts of weights that are kept during a call of a module, if casts are on.

    It is needed after an edit that cannot be detected: one through a tensor that was taken from
    `.data` earlier, or by foreign code that writes to memory.
    """
    if _current.handle is not None:
        _current.handle._clear_cache()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of all loss scales, plain values by "loss_scaler0" and so on.

    Args:
        destination: A dict to put them into [None: a new one].
    """
    return saved_scales(_amp_state.loss_scalers, destination)


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load the state of loss scales; if their number differs, of as many as both have.

    Args:
        state_dict: What `state_dict` returned, here or in 2019, or the state of a
            torch.amp.GradScaler, which had one scale for all losses.

    Raises:
        RuntimeError: There is a key of another kind; nothing is changed.
        TypeError, ValueError, KeyError: The state of a scale is not valid; nothing is changed.
    """
    load_scales(_amp_state.loss_scalers, state_dict, maybe_print)
