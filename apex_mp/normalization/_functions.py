"""The autograd functions of apex.normalization.fused_layer_norm, as far as scripts call them.

They are not `torch.autograd.Function`s, because torch's norms are differentiable, even twice.
`forward` is `apply`, without the context: Megatron-core checks whether its arguments include
`memory_efficient`.
"""

from __future__ import annotations

from torch import Tensor

from apex_mp.normalization._norms import Shape, as_shape, layer_norm, rms_norm


class FusedLayerNormFunction:
    """Layer norm without weight and bias, by both calls of apex: an object, and `apply`.

    Args:
        normalized_shape: The last dimensions of the input.
        eps: Added to the variance [1e-6].
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-6) -> None:
        self.normalized_shape = normalized_shape
        self.eps = eps

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise, as until the spring of 2019."""
        return self.apply(input, self.normalized_shape, self.eps)

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalize, with the arguments of that era."""
        return layer_norm(input, as_shape(normalized_shape), None, None, eps)

    forward = apply


class FusedLayerNormAffineFunction:
    """As `FusedLayerNormFunction`, with a weight and a bias."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-6) -> None:
        self.normalized_shape = normalized_shape
        self.eps = eps

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: A002
        """Normalise, as until the spring of 2019."""
        return self.apply(input, weight, bias, self.normalized_shape, self.eps)

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalize, with the arguments of that era; the output has the input's dtype."""
        return layer_norm(input, as_shape(normalized_shape), weight, bias, eps)

    forward = apply


class FusedLayerNormAffineMixedDtypesFunction:
    """`FusedLayerNormAffineFunction` with an output in the weight's dtype; has only `apply`."""

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalise."""
        return layer_norm(input, as_shape(normalized_shape), weight, bias, eps, like="weight")

    forward = apply


class FusedRMSNormFunction:
    """RMS norm without a weight."""

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalise."""
        return rms_norm(input, as_shape(normalized_shape), None, eps)

    forward = apply


class FusedRMSNormAffineFunction:
    """As `FusedRMSNormFunction`, with a weight."""

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalise; the output has the input's dtype."""
        return rms_norm(input, as_shape(normalized_shape), weight, eps)

    forward = apply


class FusedRMSNormAffineMixedDtypesFunction:
    """`FusedRMSNormAffineFunction` with an output in the weight's dtype."""

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalise."""
        return rms_norm(input, as_shape(normalized_shape), weight, eps, like="weight")

    forward = apply
