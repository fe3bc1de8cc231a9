"""The autograd functions of apex.normalization.fused_layer_norm: what scripts call of them.

They are no `torch.autograd.Function`: torch's norms are differentiable, twice too. `forward` is
`apply`, without the context: Megatron-core looks whether its arguments include `memory_efficient`.
"""

from __future__ import annotations

from torch import Tensor

from apex_mp.normalization._norms import Shape, as_shape, layer_norm, rms_norm


class FusedLayerNormFunction:
    """What normalises, by both of its old calls: an object that is called, and `apply`.

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
    """See `FusedLayerNormFunction`; this one has a weight and a bias."""

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
    """`FusedLayerNormAffineFunction` to the weight's dtype; there was `apply` alone."""

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
    """The norm by the root of the mean square."""

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
    """See `FusedRMSNormFunction`; this one has a weight."""

    @staticmethod
    def apply(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalise, to the input's dtype."""
        return rms_norm(input, as_shape(normalized_shape), weight, eps)

    forward = apply


class FusedRMSNormAffineMixedDtypesFunction:
    """`FusedRMSNormAffineFunction` to the weight's dtype."""

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
