"""Fine-tune a half model by transformers.Trainer: python examples/trainers/with_transformers.py

A BERT of 2 layers learns whether a sequence holds more numbers below 10 than above. Nothing is
downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam


def sequences(count: int, seed: int) -> list[dict[str, Tensor]]:
    numbers = torch.randint(1, 19, (count, 9), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": each, "labels": ((each < 10).sum() > 4).long()} for each in numbers]


def count_right(prediction: Any) -> dict[str, float]:
    return {"right": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> float:
    """Return the share of the held-out sequences that the model judges right."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config).half()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            num_train_epochs=6,
            max_grad_norm=1.0,
            logging_steps=64,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=sequences(2048, seed=1),
            eval_dataset=sequences(256, seed=2),
            compute_metrics=count_right,
            optimizer_cls_and_kwargs=(FusedAdam, {"lr": 2e-3, "master_weights": True}),
        )
        attach_scaler(trainer.accelerator, GradScaler(trainer.args.device.type, model=model))
        trainer.train()
        right: float = trainer.evaluate()["eval_right"]
    scale = trainer.accelerator.scaler.get_scale()
    print(f"{right:.1%} of 256 held-out sequences are judged right; scale {scale:g}")
    return right


if __name__ == "__main__":
    main()
