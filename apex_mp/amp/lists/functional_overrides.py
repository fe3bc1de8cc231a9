"""The policy for `torch.nn.functional`."""

import torch

MODULE = torch.nn.functional

# Run in low precision: convolutions and matrix products, which is what fp16 makes fast.
FP16_FUNCS = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
    "linear",
]

# Run in float32: they add many numbers up, or need more range than fp16 has.
FP32_FUNCS = [
    # Pointwise
    "softplus",
    "softmin",
    "log_softmax",
    "softmax",
    "gelu",
    # Normalization
    "layer_norm",
    "group_norm",
    "local_response_norm",
    "normalize",
    "cosine_similarity",
    # Resampling
    "interpolate",
    "grid_sample",
    # Losses
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "cross_entropy",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "multi_margin_loss",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "ctc_loss",
]

# Run in the widest precision among the arguments.
CASTS = ["bilinear"]

# Refused with low-precision arguments, and why.
BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "
        "It requires that the output of the previous function be already a FloatTensor. \n\n"
        "Most models have a Sigmoid right before BCELoss. In that case, you can use\n"
        "    torch.nn.BCEWithLogitsLoss\n"
        "to combine Sigmoid+BCELoss into a single layer that is compatible with amp.\n"
        "Another option is to add\n"
        "    amp.register_float_function(torch, 'sigmoid')\n"
        "before calling `amp.init()`.\n"
        "If you _really_ know what you are doing, you can disable this warning by passing "
        "allow_banned=True to `amp.init()`.",
    )
]
