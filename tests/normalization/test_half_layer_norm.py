"""Layer norms of 16-bit inputs with float32 weights under the transforms of torch.func."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from apex_mp.normalization import FusedLayerNorm


def per_sample(norm: nn.Module, data: Tensor) -> dict[str, Tensor]:
    params = dict(norm.named_parameters())

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(norm, params, (row,)).pow(3).sum()

    return vmap(grad(loss), (None, 0))(params, data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_per_sample_gradients_are_those_of_float64(
    dtype: torch.dtype, device: torch.device
) -> None:
    data = torch.randn(6, 8, device=device).to(dtype)
    expected = per_sample(nn.LayerNorm(8, device=device).double(), data.double())
    got = per_sample(FusedLayerNorm(8).to(device), data)
    for name, wanted in expected.items():
        torch.testing.assert_close(got[name].double(), wanted, rtol=2e-2, atol=0.05)


def test_a_directional_derivative_is_that_of_float64(device: torch.device) -> None:
    data, direction = (torch.randn(6, 8, device=device).half() for _ in range(2))
    _, wanted = jvp(
        nn.LayerNorm(8, device=device).double(), (data.double(),), (direction.double(),)
    )
    _, got = jvp(FusedLayerNorm(8).to(device), (data,), (direction,))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)
