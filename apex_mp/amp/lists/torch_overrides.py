"""The policy for functions of `torch`."""

import torch

MODULE = torch

# Run in low precision.
FP16_FUNCS = [
    # Convolutions
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
    "prelu",
    # Matrix products
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "mm",
    "mv",
    "bmm",
    "addbmm",
    "baddbmm",
]

# Run in float32. `mean` is not among them: it accumulates in float32 anyway.
FP32_FUNCS = [
    # Pointwise
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    # Reductions
    "cumprod",
    "cumsum",
    "dist",
    "norm",
    "prod",
    "std",
    "sum",
    "var",
    "renorm",
]

# Run in the widest precision among the arguments.
CASTS = [
    "addcdiv",
    "addcmul",
    "atan2",
    "cross",
    "dot",
    "vdot",
    # Arithmetic
    "add",
    "div",
    "mul",
    # Comparison
    "eq",
    "equal",
    "ge",
    "gt",
    "le",
    "lt",
    "ne",
]

# The same, for the tensors of a sequence.
SEQUENCE_CASTS = ["cat", "stack"]
