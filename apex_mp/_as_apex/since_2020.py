"""What apex got in contrib and transformer from 2020 on and clients of today import, over torch."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apex_mp.normalization import FusedLayerNorm
from apex_mp.normalization.fused_layer_norm import fused_layer_norm_affine

# apex.contrib.layer_norm


class FastLayerNorm(FusedLayerNorm):
    """`apex_mp.normalization.FusedLayerNorm` over the last dimension, of any size.

    Args:
        hidden_size: Its size.
        eps: Added to the variance [1e-5].
        memory_efficient: As there [False].
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)

    @property
    def epsilon(self) -> float:
        """`eps`, by apex's name."""
        return self.eps


class FastLayerNormFN:
    """The function of that module; `apply` is called."""

    @staticmethod
    def apply(
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float = 1e-5,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Normalise the last dimension of `x`.

        Args:
            x: `[..., hidden_size]`.
            gamma: The weight, `[hidden_size]`.
            beta: The bias, `[hidden_size]`.
            epsilon: Added to the variance [1e-5].
            memory_efficient: No effect [False].
        """
        return fused_layer_norm_affine(x, gamma, beta, gamma.shape, epsilon)


# apex.contrib.xentropy


class SoftmaxCrossEntropyLoss:
    """A cross entropy with label smoothing, of each row; `apply` is called."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Return the loss of each row, computed in float32; 0 where the label is `padding_idx`.

        Args:
            logits: `[rows, classes]`, floating.
            labels: `[rows]`, int64.
            smoothing: The share of the label that is spread over all classes [0].
            padding_idx: The label of rows that do not count [0].
            half_to_float: Return float32 instead of the dtype of `logits` [False].
        """
        losses = functional.cross_entropy(
            logits.float(), labels, reduction="none", label_smoothing=smoothing
        )
        losses = losses.masked_fill(labels == padding_idx, 0.0)
        return losses if half_to_float else losses.to(logits.dtype)


# apex.transformer.enums


class LayerType(enum.Enum):
    """The part of a model in which a layer is."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """What an attention attends to."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """The kind of an attention's mask."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Whether a model has an encoder and a decoder."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


# apex.transformer.functional


class FusedScaleMaskSoftmax(torch.nn.Module):
    """The softmax of an attention's scores, scaled and masked.

    Args:
        input_in_fp16: The scores are float16, and so is the result.
        input_in_bf16: The same for bfloat16.
        attn_mask_type: `AttnMaskType.causal` masks later positions if no mask is given.
        scaled_masked_softmax_fusion: No effect.
        mask_func: Called with scores and mask; returns masked scores.
        softmax_in_fp32: Compute 16-bit scores in float32.
        scale: Factor on the scores; None: 1.

    Raises:
        RuntimeError: Both dtypes are asked for, or a scale without `softmax_in_fp32`.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("both fp16 and bf16 flags cannot be active at the same time.")
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError("softmax should be in fp32 when scaled")
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:  # noqa: A002
        """Return probabilities, `[batch, heads, queries, keys]` as the scores.

        Args:
            input: The scores.
            mask: What `mask_func` takes; None: nothing, or later positions.
        """
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        if mask is None and self.attn_mask_type is AttnMaskType.causal:
            queries, keys = scores.shape[-2:]
            ones = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
            mask = ones.triu(1)[None, None]
        if mask is not None:
            scores = self.mask_func(scores, mask)
        return scores.softmax(-1).to(input.dtype)


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    """Turn pairs of numbers by the angles of their positions (Su et al. 2021).

    Args:
        t: `[positions, batch, heads, size]`.
        freqs: Angles, `[positions, 1, 1, turned]`, for the first `turned` of `size` numbers.
        transpose_output_memory: No effect [False].
    """
    return fused_apply_rotary_pos_emb_cached(t, freqs.cos(), freqs.sin())


def fused_apply_rotary_pos_emb_cached(
    t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    """Turn pairs of numbers, given the cosines and sines of the angles.

    Args:
        t: As for `fused_apply_rotary_pos_emb`.
        cos_: `[positions, 1, 1, turned]`.
        sin_: The same.
        transpose_output_memory: No effect [False].
    """
    turned, rest = t[..., : cos_.shape[-1]], t[..., cos_.shape[-1] :]
    first, second = turned.chunk(2, -1)
    partner = torch.cat((-second, first), -1)
    both: Any = torch.cat(((turned * cos_ + partner * sin_).to(t.dtype), rest), -1)
    return both  # type: ignore[no-any-return]
