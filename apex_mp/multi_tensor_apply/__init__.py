"""Functions over lists of tensors, with the signatures of apex's compiled ones."""

from apex_mp.multi_tensor_apply import amp_C, apex_C, fused_adam_cuda
from apex_mp.multi_tensor_apply.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

__all__ = ["MultiTensorApply", "amp_C", "apex_C", "fused_adam_cuda", "multi_tensor_applier"]
