"""transformers.Trainer with a GradScaler attached to its Accelerator, and LoRA adapters of PEFT."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("accelerate_state")]
LR = 5e-3
MAX_NORM = 1.0
# Its fp16 forward and backward overflow at 2**16: the first loss is about 1.
INIT_SCALE = 2.0**10


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def sequences(count: int = 256) -> list[dict[str, Tensor]]:
    """Whether more than half of the words are below 10."""
    words = torch.randint(1, 20, (count, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": ((each < 10).sum() > 4).long()} for each in words]


class Notes(TrainerCallback):
    """Weights after each step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_step_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        param = next(param for param in model.parameters() if param.requires_grad)
        self.weights.append(param.detach().clone())


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """A Trainer of two epochs, 16 steps each, with gradients of two batches in each step."""
    of_trainer = {
        name: options.pop(name)
        for name in ("optimizers", "optimizer_cls_and_kwargs", "callbacks")
        if name in options
    }
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": MAX_NORM,
        "learning_rate": LR,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=str(folder), **defaults | options)
    return Trainer(model=model, args=args, train_dataset=sequences(), **of_trainer)


def scaled(scaler: GradScaler, *args: Any, **kwargs: Any) -> Trainer:
    made = trainer(*args, **kwargs)
    attach_scaler(made.accelerator, scaler)
    return made


def logged(trained: Trainer, name: str) -> Tensor:
    return torch.tensor([float(row[name]) for row in trained.state.log_history if name in row])


def fp32_run(model: nn.Module, folder: Path) -> Trainer:
    run = trainer(model, folder, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": LR}))
    run.train()
    return run


def assert_same_course(run: Trainer, expected: Trainer) -> None:
    losses, norms = logged(run, "loss"), logged(run, "grad_norm")
    # 4 seeds: 0.0024 at the most. A learning rate that is a fifth larger: 0.036.
    torch.testing.assert_close(losses, logged(expected, "loss"), rtol=0, atol=0.01)
    # 4 seeds: 1.7 % at the most. A learning rate that is a fifth larger: 20 %.
    torch.testing.assert_close(norms, logged(expected, "grad_norm"), rtol=0.05, atol=0)
    assert norms.min() < MAX_NORM < norms.max()
    assert losses[-4:].mean() < 0.95 * losses[:4].mean()


@pytest.mark.parametrize("by", ["class", "object"])
def test_a_half_model_learns_as_in_fp32(by: str, tmp_path: Path) -> None:
    model = bert().half()
    options = {"lr": LR, "weight_decay": 0.01, "master_weights": True}
    if by == "class":
        optimizer: dict[str, Any] = {"optimizer_cls_and_kwargs": (FusedAdam, options)}
    else:
        # The Trainer's default decays no bias and no norm; so does the fp32 run's.
        names = set(trainer(model, tmp_path).get_decay_parameter_names(model))
        named = [*model.named_parameters()]
        groups = [
            {"params": [param for name, param in named if name in names]},
            {"params": [param for name, param in named if name not in names], "weight_decay": 0.0},
        ]
        optimizer = {"optimizers": (FusedAdam(groups, **options), None)}
    run = scaled(GradScaler("cpu", INIT_SCALE), model, tmp_path, **optimizer)
    run.train()
    assert run.accelerator.scaler.get_scale() == INIT_SCALE
    assert next(model.parameters()).dtype == torch.float16
    assert_same_course(run, fp32_run(bert(), tmp_path))


def overflowing(at: int) -> Any:
    """The model with a loss of inf in one of its forward passes."""
    model = bert().half()
    calls = []

    def overflow(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(None)
        if len(calls) == at:
            output.loss = output.loss * math.inf

    model.register_forward_hook(overflow)
    return model


def test_an_overflow_is_a_skipped_step_and_the_scheduler_stands_still(tmp_path: Path) -> None:
    notes, model = Notes(), overflowing(at=3)
    run = scaled(
        GradScaler("cpu", INIT_SCALE),
        model,
        tmp_path,
        optimizer_cls_and_kwargs=(FusedAdam, {"lr": LR, "master_weights": True}),
        callbacks=[notes],
        max_steps=4,
    )
    run.train()
    rates = logged(run, "learning_rate") / LR
    # Each is logged after its step; steps are two forward passes.
    assert rates.tolist() == pytest.approx([1.0, 0.75, 0.75, 0.5])
    assert torch.equal(notes.weights[0], notes.weights[1])
    assert not torch.equal(notes.weights[1], notes.weights[2])
    assert run.accelerator.scaler.get_scale() == INIT_SCALE / 2
    assert run.state.global_step == 4


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    fused = {"optimizer_cls_and_kwargs": (FusedAdam, {"lr": LR, "master_weights": True})}
    saving = {"save_strategy": "steps", "save_steps": 8}
    whole = overflowing(at=3)
    first = scaled(GradScaler("cpu", INIT_SCALE), whole, tmp_path, **fused, **saving)
    first.train()
    resumed = bert().half()
    second = scaled(GradScaler("cpu", 1.0), resumed, tmp_path, **fused)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    states = [each.accelerator.scaler.state_dict() for each in (first, second)]
    assert states[0] == states[1]
    assert states[0]["scale"] == INIT_SCALE / 2
    torch.testing.assert_close([*resumed.parameters()], [*whole.parameters()], rtol=0, atol=0)


# LoRA


@pytest.mark.parametrize("adapters", [torch.float32, torch.float16])
def test_adapters_over_frozen_fp16_weights_learn_as_in_fp32(
    adapters: torch.dtype, tmp_path: Path
) -> None:
    def with_adapters(model: nn.Module) -> Any:
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
        return get_peft_model(model, config, autocast_adapter_dtype=adapters == torch.float32)

    model = with_adapters(bert().half())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert {param.dtype for name, param in trained.items() if "lora" in name} == {adapters}
    assert {param.dtype for param in frozen.values()} == {torch.float16}
    fused = (FusedAdam, {"lr": LR, "weight_decay": 0.01, "master_weights": True})
    scaler = GradScaler("cpu", INIT_SCALE)
    run = scaled(scaler, model, tmp_path, optimizer_cls_and_kwargs=fused)
    run.train()
    state = run.optimizer.optimizer.state
    assert state.keys() == set(trained.values())
    kept = run.optimizer.optimizer._own_masters.kept
    has_master = {name: param in kept for name, param in trained.items()}
    assert has_master == {name: p.dtype == torch.float16 for name, p in trained.items()}
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in frozen.items())
    expected = fp32_run(with_adapters(bert()), tmp_path)
    losses, norms = logged(run, "loss"), logged(run, "grad_norm")
    # 4 seeds: 0.0012 and 0.06 % at the most. A learning rate that is a fifth larger: 0.008 and 4 %.
    torch.testing.assert_close(losses, logged(expected, "loss"), rtol=0, atol=0.004)
    torch.testing.assert_close(norms, logged(expected, "grad_norm"), rtol=0.01, atol=0)
