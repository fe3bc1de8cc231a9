"""Tiny models, prompts and preferences for TRL's trainers; nothing is downloaded."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "trainers"))
import with_trl

LR, STEPS, INIT_SCALE = 1e-2, 4, 2.0**10
# So large that a gradient which is half as large makes a smaller step.
EPS = 0.05


def llama() -> Any:
    torch.manual_seed(0)
    return with_trl.llama(width=32)


def counted(first: int, by: int) -> str:
    return "".join(f" {(first + by * i) % 10}" for i in range(1, 6))


def sevens(completions: list[str], **kwargs: Any) -> list[float]:
    """The reward: how many words are 7."""
    return [float(each.split().count("7")) for each in completions]


PROMPTS = [{"prompt": str(i % 10)} for i in range(64)]
TEXTS = [{"text": f"{i % 10}{counted(i, 1)}"} for i in range(64)]
PREFERENCES = [
    {"prompt": str(i % 10), "chosen": counted(i, 1), "rejected": counted(i, 2)} for i in range(64)
]


def make(kind: str, model: Any, optimizer: Any, folder: Path, **options: Any) -> Any:
    """A trainer that takes STEPS steps, with two answers to each of four prompts in GRPO."""
    given = {name: options.pop(name) for name in ("callbacks", "reward_funcs") if name in options}
    shared: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": LR,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    shared |= options
    given |= {
        "processing_class": with_trl.tokenizer(),
        "optimizers": (optimizer, None),
        "model": model,
    }
    if kind == "SFT":
        return SFTTrainer(args=SFTConfig(**shared), train_dataset=Dataset.from_list(TEXTS), **given)
    if kind == "DPO":
        frozen = None if hasattr(model, "peft_config") else copy.deepcopy(model)
        return DPOTrainer(
            ref_model=frozen,
            args=DPOConfig(**shared),
            train_dataset=Dataset.from_list(PREFERENCES),
            **given,
        )
    assert kind == "GRPO"
    return GRPOTrainer(
        args=GRPOConfig(num_generations=4, max_completion_length=6, **shared),
        train_dataset=Dataset.from_list(PROMPTS),
        **{"reward_funcs": sevens, **given},
    )


def in_fp16(kind: str, model: Any, folder: Path, **options: Any) -> Any:
    """The same for a half model, with a scaler."""
    scaler = GradScaler("cpu", options.pop("init_scale", INIT_SCALE), model=model)
    trainable = (param for param in model.parameters() if param.requires_grad)
    optimizer = FusedAdam(trainable, lr=LR, eps=EPS, master_weights=True)
    trainer = make(kind, model, optimizer, folder, **options)
    attach_scaler(trainer.accelerator, scaler)
    return trainer


def in_fp32(kind: str, model: Any, folder: Path, **options: Any) -> Any:
    """The same for a float32 model, by torch's AdamW."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, eps=EPS, weight_decay=0.0)
    return make(kind, model, optimizer, folder, **options)
