"""Names that apex got from 2020 on, against torch's functions and float64."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tolerances import assert_near
from torch import Tensor
from torch.nn import functional

import apex_mp


@pytest.fixture(autouse=True)
def as_apex() -> Iterator[None]:
    apex_mp.install_as_apex("2020")
    yield
    apex_mp.uninstall_as_apex()


def name(place: str) -> Any:
    module, _, last = place.rpartition(".")
    return getattr(importlib.import_module(module), last)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_fast_layer_norm_is_a_layer_norm_with_its_names() -> None:
    norm = name("apex.contrib.layer_norm.FastLayerNorm")(48, eps=1e-3)
    assert [*norm.state_dict()] == ["weight", "bias"]
    assert norm.epsilon == 1e-3
    inputs, weight, bias = randn(4, 48), randn(48, seed=1), randn(48, seed=2)
    norm.load_state_dict({"weight": weight, "bias": bias})
    expected = functional.layer_norm(inputs, (48,), weight, bias, 1e-3)
    torch.testing.assert_close(norm(inputs), expected)
    function = name("apex.contrib.layer_norm.layer_norm.FastLayerNormFN")
    torch.testing.assert_close(function.apply(inputs, weight, bias, 1e-3), expected)


@pytest.mark.parametrize("to_float", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_cross_entropy_is_that_of_float64(dtype: torch.dtype, to_float: bool) -> None:
    logits = randn(6, 10, dtype=dtype).requires_grad_()
    labels, smoothing = torch.tensor([1, 0, 3, 9, 0, 5]), 0.1
    losses = name("apex.contrib.xentropy.SoftmaxCrossEntropyLoss").apply(
        logits, labels, smoothing, 0, to_float
    )
    assert losses.dtype == (torch.float32 if to_float else dtype)
    scores = logits.detach().double().requires_grad_()
    logs = scores.log_softmax(-1)
    each = -(1 - smoothing) * logs[range(6), labels] - smoothing * logs.mean(-1)
    expected = torch.where(labels == 0, 0.0, each)
    assert_near(losses.detach(), expected.detach())
    losses.sum().backward()
    expected.sum().backward()
    assert scores.grad is not None
    assert logits.grad is not None
    assert_near(logits.grad, scores.grad)


@pytest.mark.parametrize("masked", [False, True])
def test_the_softmax_of_attention_scales_masks_and_keeps_the_dtype(masked: bool) -> None:
    enums: Any = importlib.import_module("apex.transformer.enums")

    def fill(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask, -10000.0)

    kind = name("apex.transformer.functional.FusedScaleMaskSoftmax")
    softmax = kind(True, False, enums.AttnMaskType.causal, True, fill, True, 0.5)
    scores = randn(2, 3, 4, 4, dtype=torch.float16)
    mask = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    mask[..., 2] = True
    probabilities = softmax(scores, mask if masked else None)
    assert probabilities.dtype == torch.float16
    hidden = mask if masked else torch.ones(4, 4, dtype=torch.bool).triu(1)
    expected = (0.5 * scores.double()).masked_fill(hidden, -math.inf).softmax(-1)
    assert_near(probabilities, expected)
    with pytest.raises(RuntimeError, match="both fp16 and bf16 flags cannot be active"):
        kind(True, True, enums.AttnMaskType.padding, True, fill, True, None)
    with pytest.raises(RuntimeError, match="softmax should be in fp32 when scaled"):
        kind(True, False, enums.AttnMaskType.padding, True, fill, False, 2.0)


def test_the_rotary_embedding_turns_complex_numbers() -> None:
    positions, turned, size = 5, 4, 6
    t = randn(positions, 2, 3, size)
    angles = torch.outer(torch.arange(positions).double(), torch.tensor([1.0, 0.1]).double())
    freqs = torch.cat((angles, angles), -1)[:, None, None].float()
    found = name("apex.transformer.functional.fused_apply_rotary_pos_emb")(t, freqs)
    numbers = torch.complex(t[..., :2].double(), t[..., 2:turned].double())
    spun = numbers * torch.exp(1j * angles)[:, None, None]
    assert_near(found[..., :2], spun.real)
    assert_near(found[..., 2:turned], spun.imag)
    assert torch.equal(found[..., turned:], t[..., turned:])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_two_stages_of_lamb_are_those_of_float64(decay: float) -> None:
    amp_c: Any = importlib.import_module("amp_C")
    shapes = [(3, 4), (5,)]
    params, grads, first = ([randn(*s, seed=i) for s in shapes] for i in range(3))
    second = [value.square() for value in first]
    updates = [torch.empty_like(param) for param in params]
    wide = [[value.double() for value in values] for values in (params, grads, first, second)]
    flag, step, norm, max_norm = torch.zeros(1, dtype=torch.int32), 3, 2.0, 0.5
    decays = torch.full((2,), decay)
    lists = [grads, params, first, second, updates]
    options = (step, 0.9, 0.99, 1e-6)
    amp_c.multi_tensor_lamb_stage1_cuda(7, flag, lists, decays, *options, norm, max_norm)
    norms = [torch.stack([each.norm() for each in values]) for values in (params, updates)]
    amp_c.multi_tensor_lamb_stage2_cuda(7, flag, [params, updates], *norms, 0.01, decay)
    for param, update, old, grad, m, v in zip(params, updates, *wide, strict=True):
        clipped = grad / (norm / max_norm)
        m, v = 0.9 * m + 0.1 * clipped, 0.99 * v + 0.01 * clipped.square()
        direction = (m / (1 - 0.9**4)) / ((v / (1 - 0.99**4)).sqrt() + 1e-6) + decay * old
        assert_near(update, direction)
        ratio = old.norm() / direction.norm() if decay else 1.0
        assert_near(param, old - 0.01 * ratio * direction)
    flag.fill_(1)
    before = [param.clone() for param in params]
    amp_c.multi_tensor_lamb_stage1_cuda(7, flag, lists, decays, *options, norm, max_norm)
    amp_c.multi_tensor_lamb_stage2_cuda(7, flag, [params, updates], *norms, 0.01, decay)
    assert all(map(torch.equal, params, before))


def test_distributed_optimizers_say_what_to_take_instead() -> None:
    for module, kind in (("adam", "Adam"), ("lamb", "LAMB")):
        refused = name(f"apex.contrib.optimizers.distributed_fused_{module}.DistributedFused{kind}")
        with pytest.raises(NotImplementedError, match=rf"use apex_mp.optimizers.Fused{kind} "):
            refused([torch.ones(1)])
