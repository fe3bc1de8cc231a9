"""A decoder in the manner of Llama, without rotary embeddings, and the number of its operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Causal attention and a multilayer perceptron."""

    def __init__(self, width: int, heads: int, recompute: bool) -> None:
        super().__init__()
        self.heads = heads
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        if self.recompute and self.training:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Scores of the next byte after each byte."""

    def __init__(self, width: int, heads: int, layers: int, length: int, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, recompute) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes, (batch, length), to scores, (batch, length, 256)."""
        x = self.embedding(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Give each parameter, or the part of it that lies here, the values that `seed` gives it.

        The values are the same in any number of processes, and no process holds more than one
        whole parameter at a time.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim == 1:
                param.fill_(1.0)
                continue
            std = 0.02
            if name.endswith("_out.weight"):  # What is added to the residual, as in GPT-2.
                std /= (2 * len(self.blocks)) ** 0.5
            whole = torch.randn(param.shape, generator=generator).mul_(std).to(param.device)
            if isinstance(param, DTensor):
                mesh, placements = param.device_mesh, param.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            param.copy_(whole)

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of forward and backward, recomputation not counted.

        6 for each weight that is multiplied, 12 * width * length for the attention of each layer
        (appendix B of PaLM, arXiv 2204.02311).
        """
        multiplied = sum(param.numel() for param in self.parameters() if param.ndim == 2)
        multiplied -= self.embedding.weight.numel() + self.positions.weight.numel()
        width = self.embedding.embedding_dim
        return 6.0 * multiplied + 12.0 * len(self.blocks) * width * length
