"""What amp_C had in 2025 beyond the kernels of 2019: norms with a factor, hysteresis."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apex_mp.multi_tensor_apply import amp_C

INF = float("inf")


@pytest.fixture
def flag(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def inputs(device: torch.device) -> list[Tensor]:
    return [
        torch.tensor([3.0], device=device, dtype=torch.float16),
        torch.tensor([4.0, 0.0], device=device),
    ]


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_norms_with_a_factor(
    as_tensor: bool, per_tensor: bool, flag: Tensor, device: torch.device
) -> None:
    lists, factor = inputs(device), torch.tensor([0.5], device=device) if as_tensor else 0.5
    norm, norms = amp_C.multi_tensor_unscale_l2norm(7, flag, [lists], factor, per_tensor)
    assert (norm.tolist(), norms.tolist()) == ([2.5], [1.5, 2.0] if per_tensor else [])
    assert [each.tolist() for each in lists] == [[3.0], [4.0, 0.0]]
    out = [torch.empty_like(each, dtype=torch.float32) for each in lists]
    norm, norms = amp_C.multi_tensor_l2norm_scale(7, flag, [lists, out], factor, per_tensor)
    assert (norm.tolist(), norms.tolist()) == ([2.5], [1.5, 2.0] if per_tensor else [])
    assert [each.tolist() for each in out] == [[1.5], [2.0, 0.0]]
    norm, norms = amp_C.multi_tensor_l2norm_mp(7, flag, [lists], per_tensor)
    assert (norm.tolist(), norms.tolist()) == ([5.0], [3.0, 4.0] if per_tensor else [])
    assert not flag
    lists[0].fill_(INF)
    amp_C.multi_tensor_unscale_l2norm(7, flag, [lists], 0.5)
    assert flag


class Scale:
    """A loss scale on a device, that grows after two good steps."""

    def __init__(self, device: torch.device, hysteresis: int, scale: float = 16.0) -> None:
        self.scale = torch.tensor([scale], device=device)
        self.growth, self.left = (
            torch.tensor([number], dtype=torch.int32, device=device) for number in (0, hysteresis)
        )
        self.hysteresis = hysteresis

    def update(self, is_bad: bool) -> tuple[float, int, int]:
        found = torch.full_like(self.scale, float(is_bad))
        returned = amp_C.update_scale_hysteresis(
            self.scale, self.growth, self.left, found, 2.0, 0.5, 2, self.hysteresis
        )
        assert returned is self.scale
        return self.scale.item(), int(self.growth), int(self.left)


def test_overflows_are_tolerated_until_a_good_step_fills_them_up(device: torch.device) -> None:
    scale = Scale(device, 2)
    assert scale.update(False) == (16.0, 1, 2)
    assert scale.update(True) == (16.0, 0, 1)  # tolerated, and growth begins anew
    assert scale.update(True) == (8.0, 0, 0)
    assert scale.update(True) == (4.0, 0, -1)  # each further one of the row
    assert scale.update(False) == (4.0, 1, 2)
    assert scale.update(True) == (4.0, 0, 1)
    assert scale.update(False) == (4.0, 1, 2)
    assert scale.update(False) == (8.0, 0, 2)
