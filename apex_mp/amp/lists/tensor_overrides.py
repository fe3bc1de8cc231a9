"""The policy for methods and operators of `torch.Tensor`."""

import torch

from apex_mp.amp.lists import torch_overrides

MODULE = torch.Tensor

# Run in low precision.
FP16_FUNCS = ["__matmul__", *(n for n in torch_overrides.FP16_FUNCS if hasattr(MODULE, n))]

# Run in float32. With `cpu`, whatever is printed, logged or saved is float32, as it always was.
FP32_FUNCS = ["__pow__", "__rpow__", "cpu", *torch_overrides.FP32_FUNCS]

# Run in the widest precision among the arguments.
CASTS = [
    "__add__",
    "__div__",
    "__eq__",
    "__ge__",
    "__gt__",
    "__le__",
    "__lt__",
    "__mul__",
    "__ne__",
    "__radd__",
    "__rdiv__",
    "__rmul__",
    "__rsub__",
    "__rtruediv__",
    "__sub__",
    "__truediv__",
    *torch_overrides.CASTS,
]

SEQUENCE_CASTS: list[str] = []

# Keep the dtype and the storage of what they change: torch does so by itself. In 2019 they made a
# new float tensor of a half one, and a parameter or buffer changed its dtype without a word.
IN_PLACE_OPERATORS = [
    "__iadd__",
    "__idiv__",
    "__imul__",
    "__ipow__",
    "__isub__",
    "__itruediv__",
]
