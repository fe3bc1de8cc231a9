"""A table of every module and name of apex that scripts import, and where it is here.

`docs/apex_names.md` shows this table to users; a test checks that the two agree.
"""

from __future__ import annotations

_REGISTRY = (
    "float_function half_function promote_function register_float_function "
    "register_half_function register_promote_function"
)
_FRONTEND = "disable_casts initialize load_state_dict scale_loss state_dict"
_CONVERSIONS = (
    "BN_convert_float FP16Model clip_grad_norm convert_module convert_network "
    "master_params_to_model_params model_grads_to_master_grads network_to_half prep_param_lists "
    "to_python_float tofp16"
)
_MULTI_TENSOR = "MultiTensorApply multi_tensor_applier"
_SYNC_BN = "SyncBatchNorm convert_syncbn_model create_syncbn_process_group"
_RNN = "GRU LSTM ReLU Tanh mLSTM"
_RNN_BACKEND = "RNNCell bidirectionalRNN stackedRNN"
_MLSTM_CELLS = "mLSTMCell mLSTMRNNCell"

# Names that apex.normalization got after 2020.
LATER_NORMS = "FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"
LATER_NORM_FUNCTIONS = (
    "FusedLayerNormAffineMixedDtypesFunction FusedRMSNormAffineFunction "
    "FusedRMSNormAffineMixedDtypesFunction FusedRMSNormFunction fused_rms_norm "
    "fused_rms_norm_affine manual_rms_norm mixed_dtype_fused_layer_norm_affine "
    "mixed_dtype_fused_rms_norm_affine"
)
LATER_NORM_KERNELS = (
    "forward_affine_mixed_dtypes rms_backward rms_backward_affine rms_forward rms_forward_affine "
    "rms_forward_affine_mixed_dtypes"
)

LATER_ENUMS = "AttnMaskType AttnType LayerType ModelType"
LATER_FUNCTIONAL = (
    "FusedScaleMaskSoftmax fused_apply_rotary_pos_emb fused_apply_rotary_pos_emb_cached"
)

_AMP_HELPERS = "apex_mp._as_apex.amp_helpers"
_SINCE_2020 = "apex_mp._as_apex.since_2020"

# module: {where its names live here: the names}
MODULES: dict[str, dict[str, str]] = {
    "apex": {},
    "apex.amp": {
        "apex_mp.amp": f"AmpHandle NoOpHandle _amp_state init master_params {_REGISTRY} {_FRONTEND}"
    },
    "apex.amp.__version__": {_AMP_HELPERS: "VERSION __version__"},
    "apex.amp._amp_state": {
        "apex_mp.amp._amp_state": "AmpState _amp_state master_params maybe_print warn_or_err"
    },
    "apex.amp._initialize": {},
    "apex.amp._process_optimizer": {},
    "apex.amp.amp": {"apex_mp.amp.amp": f"init {_REGISTRY}"},
    "apex.amp.compat": {
        _AMP_HELPERS: (
            "filter_attrs is_floating_point is_tensor_like scalar_python_val "
            "tensor_is_float_tensor tensor_is_variable variable_is_tensor"
        )
    },
    "apex.amp.frontend": {"apex_mp.amp.frontend": "initialize load_state_dict state_dict"},
    "apex.amp.handle": {
        "apex_mp.amp.handle": "AmpHandle NoOpHandle",
        "apex_mp.amp.frontend": "disable_casts scale_loss",
    },
    "apex.amp.lists": {},
    "apex.amp.lists.functional_overrides": {
        "apex_mp.amp.lists.functional_overrides": "BANNED_FUNCS FP16_FUNCS FP32_FUNCS MODULE"
    },
    "apex.amp.lists.tensor_overrides": {
        "apex_mp.amp.lists.tensor_overrides": ("CASTS FP16_FUNCS FP32_FUNCS MODULE SEQUENCE_CASTS")
    },
    "apex.amp.lists.torch_overrides": {
        "apex_mp.amp.lists.torch_overrides": "CASTS FP16_FUNCS FP32_FUNCS MODULE SEQUENCE_CASTS"
    },
    "apex.amp.opt": {"apex_mp.amp.opt": "OptimWrapper"},
    "apex.amp.rnn_compat": {_AMP_HELPERS: "RNN_NAMES has_old_rnns"},
    "apex.amp.scaler": {"apex_mp.amp.scaler": "LossScaler"},
    "apex.amp.utils": {
        _AMP_HELPERS: (
            "as_inplace get_cuda_version get_func has_func is_cuda_enabled is_fp_tensor is_nested "
            "maybe_float maybe_half set_func type_string"
        )
    },
    "apex.amp.wrap": {},
    "apex.contrib": {},
    "apex.contrib.layer_norm": {_SINCE_2020: "FastLayerNorm"},
    "apex.contrib.layer_norm.layer_norm": {_SINCE_2020: "FastLayerNorm FastLayerNormFN"},
    "apex.contrib.optimizers": {
        "apex_mp.optimizers": "FP16_Optimizer FusedLAMB FusedSGD",
        "apex_mp._as_apex.contrib": "FusedAdam",
    },
    "apex.contrib.optimizers.distributed_fused_adam": {},
    "apex.contrib.optimizers.distributed_fused_lamb": {},
    "apex.contrib.optimizers.fp16_optimizer": {"apex_mp.optimizers": "FP16_Optimizer"},
    "apex.contrib.optimizers.fused_adam": {"apex_mp._as_apex.contrib": "FusedAdam"},
    "apex.contrib.optimizers.fused_lamb": {"apex_mp.optimizers": "FusedLAMB"},
    "apex.contrib.optimizers.fused_sgd": {"apex_mp.optimizers": "FusedSGD"},
    "apex.contrib.xentropy": {_SINCE_2020: "SoftmaxCrossEntropyLoss"},
    "apex.contrib.xentropy.softmax_xentropy": {_SINCE_2020: "SoftmaxCrossEntropyLoss"},
    "apex.fp16_utils": {
        "apex_mp.fp16_utils": f"DynamicLossScaler FP16_Optimizer LossScaler {_CONVERSIONS}"
    },
    "apex.fp16_utils.fp16_optimizer": {
        "apex_mp.fp16_utils": f"DynamicLossScaler FP16_Optimizer LossScaler {_CONVERSIONS}"
    },
    "apex.fp16_utils.fp16util": {"apex_mp.fp16_utils": _CONVERSIONS},
    "apex.fp16_utils.loss_scaler": {
        "apex_mp.fp16_utils": "DynamicLossScaler LossScaler to_python_float"
    },
    "apex.multi_tensor_apply": {"apex_mp.multi_tensor_apply": _MULTI_TENSOR},
    "apex.multi_tensor_apply.multi_tensor_apply": {"apex_mp.multi_tensor_apply": _MULTI_TENSOR},
    "apex.normalization": {"apex_mp.normalization": f"FusedLayerNorm {LATER_NORMS}"},
    "apex.normalization.fused_layer_norm": {
        "apex_mp.normalization.fused_layer_norm": (
            "FusedLayerNorm FusedLayerNormAffineFunction FusedLayerNormFunction fused_layer_norm "
            f"fused_layer_norm_affine {LATER_NORMS} {LATER_NORM_FUNCTIONS}"
        )
    },
    "apex.optimizers": {
        "apex_mp.optimizers": (
            "FP16_Optimizer FusedAdagrad FusedAdam FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad "
            "FusedSGD"
        )
    },
    "apex.optimizers.fp16_optimizer": {"apex_mp.optimizers": "FP16_Optimizer"},
    "apex.optimizers.fused_adagrad": {"apex_mp.optimizers": "FusedAdagrad"},
    "apex.optimizers.fused_adam": {"apex_mp.optimizers": "FusedAdam"},
    "apex.optimizers.fused_lamb": {"apex_mp.optimizers": "FusedLAMB"},
    "apex.optimizers.fused_mixed_precision_lamb": {"apex_mp.optimizers": "FusedMixedPrecisionLamb"},
    "apex.optimizers.fused_novograd": {"apex_mp.optimizers": "FusedNovoGrad"},
    "apex.optimizers.fused_sgd": {"apex_mp.optimizers": "FusedSGD"},
    "apex.parallel": {"apex_mp.parallel": f"DistributedDataParallel ReduceOp Reducer {_SYNC_BN}"},
    "apex.parallel.LARC": {"apex_mp.parallel.LARC": "LARC"},
    "apex.parallel.distributed": {
        "apex_mp.parallel": "DistributedDataParallel Reducer",
        "apex_mp.multi_tensor_apply.apex_C": "flatten unflatten",
        "apex_mp.parallel.flat_calls": (
            "apply_flat_dist_call extract_tensors flat_dist_call split_by_type "
            "split_half_float_double"
        ),
    },
    "apex.parallel.multiproc": {"apex_mp.parallel.multiproc": "main"},
    "apex.parallel.optimized_sync_batchnorm": {"apex_mp.parallel": "SyncBatchNorm"},
    "apex.parallel.sync_batchnorm": {"apex_mp.parallel": "SyncBatchNorm"},
    "apex.parallel.sync_batchnorm_kernel": {},
    "apex.parallel.optimized_sync_batchnorm_kernel": {},
    "apex.RNN": {"apex_mp.RNN": _RNN},
    "apex.RNN.RNNBackend": {"apex_mp.RNN.RNNBackend": _RNN_BACKEND},
    "apex.RNN.cells": {"apex_mp.RNN.cells": f"RNNCell {_MLSTM_CELLS}"},
    "apex.RNN.models": {
        "apex_mp.RNN.models": (
            f"{_RNN} toRNNBackend {_RNN_BACKEND} {_MLSTM_CELLS} "
            "GRUCell LSTMCell RNNReLUCell RNNTanhCell"
        )
    },
    "apex.reparameterization": {
        "apex_mp.reparameterization": (
            "Reparameterization WeightNorm apply_reparameterization apply_weight_norm "
            "remove_reparameterization remove_weight_norm"
        )
    },
    "apex.reparameterization.reparameterization": {
        "apex_mp.reparameterization": "Reparameterization"
    },
    "apex.reparameterization.weight_norm": {
        "apex_mp.reparameterization": "Reparameterization WeightNorm"
    },
    "apex.transformer": {},
    "apex.transformer.enums": {_SINCE_2020: LATER_ENUMS},
    "apex.transformer.functional": {_SINCE_2020: LATER_FUNCTIONAL},
    "amp_C": {
        "apex_mp.multi_tensor_apply.amp_C": (
            "multi_tensor_adagrad multi_tensor_adam multi_tensor_adam_capturable "
            "multi_tensor_adam_capturable_master multi_tensor_axpby multi_tensor_l2norm "
            "multi_tensor_l2norm_mp multi_tensor_l2norm_scale multi_tensor_lamb "
            "multi_tensor_lamb_stage1_cuda multi_tensor_lamb_stage2_cuda "
            "multi_tensor_novograd multi_tensor_scale multi_tensor_sgd "
            "multi_tensor_unscale_l2norm scale_check_overflow update_scale_hysteresis"
        )
    },
    "apex_C": {"apex_mp.multi_tensor_apply.apex_C": "flatten unflatten"},
    "fused_adam_cuda": {"apex_mp.multi_tensor_apply.fused_adam_cuda": "adam"},
    "fused_layer_norm_cuda": {
        "apex_mp.normalization.fused_layer_norm_cuda": (
            f"backward backward_affine forward forward_affine {LATER_NORM_KERNELS}"
        )
    },
}
# Modules that `python -m` runs.
PROGRAMS = ("apex.parallel.multiproc",)
TOP_LEVEL = tuple(name for name in MODULES if "." not in name)
# Modules that `import apex` imported in one of the eras; the others are imported when used.
EAGER = [
    "apex.RNN",
    "apex.amp",
    "apex.contrib",
    "apex.fp16_utils",
    "apex.multi_tensor_apply",
    "apex.normalization",
    "apex.optimizers",
    "apex.parallel",
    "apex.reparameterization",
]

_SYNC_FUNCTION = "use apex_mp.parallel.SyncBatchNorm, which is the module around it"
_CASTS = "register the function by amp.register_half_function or amp.register_float_function"
_RNN_CASTS = "amp casts torch.nn.LSTM, GRU, RNN and their cells as they are; leave it out"
_INITIALIZE = "call amp.initialize"
_LAMB = "take the step with apex_mp.optimizers.FusedLAMB"

# module: {a name that scripts import and that is not here: what to use instead}
MISSING: dict[str, dict[str, str]] = {
    "apex.amp._initialize": {"_initialize": _INITIALIZE},
    "apex.amp._process_optimizer": {
        "AmpOptimizerState": _INITIALIZE,
        "_process_optimizer": _INITIALIZE,
    },
    "apex.amp.rnn_compat": {"VariableFunctionsShim": _RNN_CASTS, "whitelist_rnn_cells": _RNN_CASTS},
    "apex.amp.utils": {"cached_cast": _CASTS, "casted_args": _CASTS, "set_func_save": _CASTS},
    "apex.amp.wrap": {
        "cached_cast": _CASTS,
        "make_cast_wrapper": _CASTS,
        "make_promote_wrapper": "register the function by amp.register_promote_function",
        "promote": "register the function by amp.register_promote_function",
        "rnn_cast": _RNN_CASTS,
    },
    "apex.contrib.optimizers.distributed_fused_adam": {
        "DistributedFusedAdam": "use apex_mp.optimizers.FusedAdam under torch's fully_shard"
    },
    "apex.contrib.optimizers.distributed_fused_lamb": {
        "DistributedFusedLAMB": "use apex_mp.optimizers.FusedLAMB in each process"
    },
    "apex.parallel.optimized_sync_batchnorm_kernel": {"SyncBatchnormFunction": _SYNC_FUNCTION},
    "apex.parallel.sync_batchnorm_kernel": {"SyncBatchnormFunction": _SYNC_FUNCTION},
    "amp_C": {
        "multi_tensor_lamb_mp": _LAMB,
    },
}


def is_package(module: str) -> bool:
    """Return whether a module has submodules."""
    return any(other.startswith(f"{module}.") for other in MODULES)
