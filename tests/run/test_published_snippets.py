"""Scripts as articles of 2018 and 2019 teach them run after their import is replaced, and train.

A new snippet is a file in `published_snippets/` and a row in ROWS. Each runs twice: with apex_mp,
and as its own reference in float32 with the stand-ins of `apex_in_fp32/`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import F16, F32
from snippet_cases import BATCHES, SNIPPETS, Run, TinyBert, TinyConvNet, text_of
from tolerances import FP16_CONVNET_TRAINING, FP16_TRAINING, FP32_TRAINING, Closeness
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of a snippet, and what it must come to.

    Args:
        snippet: Name of the file.
        args: What the script finds in its `args`.
        model: What it trains.
        dtype: Of the model's weights at the end; affine batch norms are float32.
        bad: Numbers of the forward passes whose gradients overflow. A script that does not look
            for overflows has none.
        every: Forward passes a step; None if the optimizer decides.
        near: How near to the reference; None for an optimizer that amplifies any difference.
        batches: From how many it learns, again and again.
    """

    snippet: str
    args: dict[str, Any]
    model: type[nn.Module] = TinyBert
    dtype: torch.dtype = F16
    bad: tuple[int, ...] = ()
    every: int | None = 1
    near: Closeness | None = FP16_TRAINING
    batches: int = BATCHES


def bert(*, fp16: bool = True, loss_scale: float = 0, every: int = 1, **more: Any) -> Row:
    args = {
        "fp16": fp16,
        "loss_scale": loss_scale,
        "learning_rate": 0.01,
        "warmup_proportion": 0.1,
        "num_train_epochs": 2 * every,
        "gradient_accumulation_steps": every,
        # A step more than are taken, so that none has a learning rate of 0.
        "t_total": 2 * BATCHES + 1,
    }
    return Row("bert_fine_tuning", args, every=every, dtype=F16 if fp16 else F32, **more)


DYNAMIC = {"dynamic_loss_scale": True, "static_loss_scale": 1.0}
STATIC = {"dynamic_loss_scale": False, "static_loss_scale": 128.0}
BY_HAND = {"init_scale": 2.0**32, "scale_window": 10, "lr": 0.5, "clip": 0.25, "epochs": 3}

ROWS = {
    "BERT dynamic": bert(bad=(5, 30)),
    "BERT static": bert(loss_scale=128, bad=(5, 30)),
    "BERT accumulating": bert(every=2, bad=(5, 30)),
    "BERT static accumulating": bert(loss_scale=1024, every=4),
    "BERT fp32": bert(fp16=False, near=FP32_TRAINING),
    "BERT fp32 accumulating": bert(fp16=False, every=2, near=FP32_TRAINING),
    "any optimizer dynamic": Row(
        "fp16_optimizer", {**DYNAMIC, "lr": 0.1, "epochs": 3}, bad=(30, 41)
    ),
    "any optimizer static": Row("fp16_optimizer", {**STATIC, "lr": 0.1, "epochs": 3}, bad=(30, 41)),
    "clipping dynamic": Row(
        "fp16_optimizer_language_model",
        {**DYNAMIC, "clip": 0.25, "lr": 0.02, "epochs": 3},
        bad=(30, 41),
    ),
    "clipping static": Row(
        "fp16_optimizer_language_model",
        {**STATIC, "clip": 0.25, "lr": 0.02, "epochs": 3},
        bad=(30, 41),
    ),
    "accumulating": Row(
        "fp16_optimizer_accumulation",
        {"update_freq": 4, "clip": 0.25, "lr": 0.1, "epochs": 8},
        bad=(30, 41),
        every=4,
    ),
    "closure": Row("fp16_optimizer_closure", {"lbfgs": False, "lr": 0.2, "epochs": 3}),
    # On one batch: what LBFGS makes of another batch each time is chance, in float32 as well.
    "closure of LBFGS": Row(
        "fp16_optimizer_closure",
        {"lbfgs": True, "lr": 0.1, "epochs": 20},
        every=None,
        near=None,
        batches=1,
    ),
    "resumable": Row(
        "fp16_optimizer_resume",
        {"resume": "", "checkpoint": os.devnull, "lr": 0.1, "epochs": 3},
        bad=(30, 41),
    ),
    "GradScaler": Row("grad_scaler", {"clip": 0, "lr": 0.01, "epochs": 2}, dtype=F32, bad=(5, 30)),
    "GradScaler clipping": Row(
        "grad_scaler", {"clip": 0.5, "lr": 0.01, "epochs": 2}, dtype=F32, bad=(5, 30)
    ),
    "amp": Row(
        "amp_one_optimizer",
        {"fp16": True, "clip": 0.5, "lr": 0.02, "epochs": 3},
        TinyConvNet,
        dtype=F32,
        bad=(30, 41),
        near=FP16_CONVNET_TRAINING,
    ),
    "amp switched off": Row(
        "amp_one_optimizer",
        {"fp16": False, "clip": 0.5, "lr": 0.02, "epochs": 3},
        TinyConvNet,
        dtype=F32,
        near=FP32_TRAINING,
    ),
    "amp with two losses": Row(
        "amp_two_losses", {"lr": 0.02, "epochs": 4}, dtype=F32, bad=(20, 31, 42, 43), every=2
    ),
    "amp with decorators": Row(
        "amp_custom_function", {"factor": 2.0, "lr": 0.05, "epochs": 3}, dtype=F32, bad=(30, 41)
    ),
    "amp with registrations": Row(
        "amp_registered_function", {"lr": 0.1, "epochs": 3}, dtype=F32, bad=(30, 41)
    ),
    "masters by hand": Row(
        "master_params_static",
        {
            "static_loss_scale": 128.0,
            "lr": 0.02,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "epochs": 2,
        },
        TinyConvNet,
        near=FP16_CONVNET_TRAINING,
    ),
    "masters by hand dynamic": Row("master_params_dynamic", {**DYNAMIC, **BY_HAND}, bad=(30, 41)),
    "masters by hand static": Row("master_params_dynamic", {**STATIC, **BY_HAND}),
}


@functools.cache
def run_of(name: str, device: torch.device) -> Run:
    row = ROWS[name]
    return Run("apex_mp", row.snippet, row.model, device, row.bad, row.batches, **row.args)


@functools.cache
def reference_of(name: str, device: torch.device) -> Run:
    """The same in float32, with infinite gradients wherever there were any."""
    row, finite = ROWS[name], run_of(name, device).watch.finite
    bad = [number for number, is_finite in enumerate(finite) if not is_finite]
    return Run("fp32", row.snippet, row.model, device, bad, row.batches, **row.args)


every_row = pytest.mark.parametrize("name", ROWS)


def test_every_snippet_has_a_row() -> None:
    assert {row.snippet for row in ROWS.values()} == set(SNIPPETS)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_nothing_but_the_import_and_cuda_is_replaced(snippet: str) -> None:
    published, ours = (text_of(snippet, kind).splitlines() for kind in (None, "apex_mp"))
    changed = [
        (old, new) for old, new in zip(published, ours, strict=True) if old.strip() != new.strip()
    ]
    imports = [(old, new) for old, new in changed if ".cuda()" not in old]
    assert len(imports) == 1
    ((old, new),) = imports
    assert old.startswith(("from apex.", "from apex import "))
    assert new == old.replace("from apex", "from apex_mp", 1)
    assert "apex_mp" not in text_of(snippet)


def relative(actual: Tensor, expected: Tensor, way: Tensor) -> float:
    return float((actual - expected).norm() / way.norm())


@every_row
def test_a_snippet_trains_as_in_float32(name: str, device: torch.device) -> None:
    run, reference, near = run_of(name, device), reference_of(name, device), ROWS[name].near
    assert run.loss() < 0.65 * run.loss_before
    if near is None:
        return
    way = reference.weights() - reference.start
    assert relative(run.weights(), reference.weights(), way) < near.weights
    for key in reference.moments():
        expected = reference.state(key)
        assert relative(run.state(key), expected, expected) < near.state, key


@every_row
def test_weights_keep_their_dtype_and_masters_are_float32(name: str, device: torch.device) -> None:
    run = run_of(name, device)
    for module in run.model.modules():
        wide = isinstance(module, nn.BatchNorm2d)
        for param in module.parameters(recurse=False):
            assert param.dtype == (F32 if wide else ROWS[name].dtype)
    assert all(param.dtype == F32 for param in run.stepped)
    for param in run.model.parameters():
        copies = [m.to(param.dtype) for m in run.stepped if m.shape == param.shape]
        assert any(torch.equal(param, copy) for copy in copies)


@every_row
def test_a_step_is_skipped_if_its_gradients_overflow_and_only_then(
    name: str, device: torch.device
) -> None:
    run, row = run_of(name, device), ROWS[name]
    if row.every is None:
        assert all(run.watch.finite)
        return
    finite, moved = run.watch.steps(row.every)
    assert moved == finite
    assert not any(finite[number // row.every] for number in row.bad)


# What the scripts themselves see.


def test_under_amp_functions_run_in_the_precision_that_they_are_given(
    device: torch.device,
) -> None:
    assert run_of("amp", device).names["output"].dtype == F16
    assert run_of("amp switched off", device).names["output"].dtype == F32
    decorated = run_of("amp with decorators", device).names
    assert (decorated["logits"].dtype, decorated["loss"].dtype) == (F16, F32)
    registered = run_of("amp with registrations", device).names
    assert (registered["logits"].dtype, registered["probabilities"].dtype) == (F16, F32)


def test_a_run_that_was_interrupted_ends_bit_for_bit_as_the_whole_one(
    tmp_path: Path, device: torch.device
) -> None:
    row = ROWS["resumable"]
    whole = run_of("resumable", device)
    checkpoint = tmp_path / "checkpoint.pt"
    parts = [
        {"epochs": 2, "resume": "", "checkpoint": checkpoint},
        {"resume": checkpoint, "checkpoint": os.devnull},
    ]
    # Of the third epoch, which alone is left for the second part.
    bads = [tuple(n for n in row.bad if n < 2 * BATCHES)]
    bads.append(tuple(n - 2 * BATCHES for n in row.bad if n >= 2 * BATCHES))
    for part, bad in zip(parts, bads, strict=True):
        run = Run("apex_mp", row.snippet, row.model, device, bad, **{**row.args, **part})
    assert len(run.watch.moved) == BATCHES
    assert torch.equal(run.weights(), whole.weights())
    assert torch.equal(run.state("momentum_buffer"), whole.state("momentum_buffer"))
    assert all(map(torch.equal, run.stepped, whole.stepped))
    assert run.optimizer.loss_scale == whole.optimizer.loss_scale
