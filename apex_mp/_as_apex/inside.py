"""What clients read, write and call inside of apex's amp, and what of it is here.

`docs/apex_names.md` shows this table; a test reads, writes and calls all of it in a training.
"""

from __future__ import annotations

from typing import NamedTuple


class Inside(NamedTuple):
    """Names of one object.

    Attributes:
        owner: The object, as a client writes it.
        names: Its attributes.
        use: "read, written": both have the effect that they have in apex; "read", "called"; or
            "absent": an AttributeError, as of an apex of another year.
        note: What is to be known.
    """

    owner: str
    names: str
    use: str
    note: str = ""


_STATE = "apex.amp._amp_state._amp_state"
_SCALER = f"{_STATE}.loss_scalers[0]"
_STASH = "optimizer._amp_stash"

INSIDE = (
    Inside(
        _STATE,
        "allow_incoming_model_not_fp32 handle hard_override loss_scalers opt_properties verbosity",
        "read, written",
    ),
    Inside(_STATE, "max_loss_scale min_loss_scale", "read", "the arguments of `amp.initialize`"),
    Inside(
        f"{_STATE}.opt_properties",
        "cast_model_type enabled keep_batchnorm_fp32 loss_scale master_weights opt_level options "
        "patch_torch_functions",
        "read",
        "an option is set by `amp.initialize` alone",
    ),
    Inside(
        _SCALER,
        "_has_overflow _loss_scale _max_loss_scale _min_loss_scale _overflow_buf _scale_seq_len "
        "_unskipped",
        "read, written",
        "`_min_loss_scale` is 2**-126 where apex has None; of a static scale only `_loss_scale`, "
        "`_has_overflow` and `_overflow_buf` are written",
    ),
    Inside(
        _SCALER,
        "dynamic has_fused_kernel warned_no_fused_kernel warned_unscaling_non_fp32_grad",
        "read",
    ),
    Inside(
        _SCALER,
        "clear_overflow_state loss_scale unscale unscale_with_stashed update_scale",
        "called",
        "`update_scale` returns True after an overflow with a static scale, too",
    ),
    Inside(_SCALER, "unscale_python unscale_with_stashed_python", "absent", "call `unscale`"),
    Inside(
        _STASH,
        "already_patched lazy_init_called params_have_scaled_gradients",
        "read, written",
        "`lazy_init_called` is True: masters are made by `amp.initialize`",
    ),
    Inside(
        _STASH,
        "all_fp16_params dummy_overflow_buf fp16_groups",
        "read",
        "a new list each time; its tensors are those that train",
    ),
    Inside(
        _STASH,
        "all_fp32_from_fp16_params all_fp32_from_fp32_grad_stash all_fp32_from_fp32_params "
        "fp32_from_fp16_groups fp32_from_fp32_groups",
        "read",
        "with masters (O2)",
    ),
    Inside(
        _STASH,
        "all_fp16_grad_stash all_fp32_grad_stash all_fp32_params",
        "read",
        "without masters (O0, O1, O3)",
    ),
    Inside(_STASH, "multi_tensor_scale", "absent", "import `amp_C`"),
    Inside(
        "optimizer",
        "_amp_lazy_init _lazy_init_maybe_master_weights _master_params_to_model_params "
        "_post_amp_backward _prepare_amp_backward",
        "called",
    ),
    Inside("optimizer", "_amp_stash", "read, written", "nothing here reads it"),
)
