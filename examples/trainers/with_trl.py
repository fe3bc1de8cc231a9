"""Train a half model by TRL: python examples/trainers/with_trl.py [grpo | sft | dpo]

GRPO, the default, rewards a small Llama for sevens; SFT and DPO teach it to count up. Nothing is
downloaded. Untried on a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from apex_mp import cast_parameters
from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for machine.py
from machine import warn_if_older

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install trl")

WORDS = ["<pad>", "<eos>", *map(str, range(10))]


def tokenizer() -> PreTrainedTokenizerFast:
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    whole = Tokenizer(words)
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>")


def llama(width: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=width**-0.5,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def share_of_sevens(completions: list[str], **kwargs: Any) -> list[float]:
    return [each.split().count("7") / 8 for each in completions]


def counted(first: int, by: int) -> str:
    return "".join(f" {(first + by * i) % 10}" for i in range(1, 9))


def build(method: str, model: Any, optimizer: Any, folder: str) -> Any:
    """Return the trainer of a method; its arguments are as for a float32 model but for bf16."""
    shared: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 32,
        "max_steps": 60,
        "logging_steps": 20,
        "max_grad_norm": 1.0,
        "bf16": False,  # TRL's default is True.
        "save_strategy": "no",
        "report_to": [],
    }
    common = {"model": model, "processing_class": tokenizer(), "optimizers": (optimizer, None)}
    digits = [i % 10 for i in range(640)]
    if method == "sft":
        texts = Dataset.from_list([{"text": f"{i}{counted(i, 1)}"} for i in digits])
        return SFTTrainer(args=SFTConfig(**shared), train_dataset=texts, **common)
    if method == "dpo":
        pairs = Dataset.from_list(
            [{"prompt": str(i), "chosen": counted(i, 1), "rejected": counted(i, 2)} for i in digits]
        )
        frozen = llama()
        cast_parameters(frozen)
        frozen.load_state_dict(model.state_dict())
        args = DPOConfig(**shared)
        return DPOTrainer(ref_model=frozen, args=args, train_dataset=pairs, **common)
    args = GRPOConfig(num_generations=8, max_completion_length=8, **shared)
    prompts = Dataset.from_list([{"prompt": str(i)} for i in digits])
    return GRPOTrainer(reward_funcs=share_of_sevens, args=args, train_dataset=prompts, **common)


def main(method: str = "grpo") -> float:
    """Return the mean reward of the last steps for GRPO, else their loss."""
    if method not in ("grpo", "sft", "dpo"):
        sys.exit(f"with_trl.py: {method!r}; it must be grpo, sft or dpo")
    warn_if_older(trl="1.16.0", transformers="5.23.0")
    set_seed(0)
    model = llama()
    cast_parameters(model)  # half() would round the frequencies of its rotary embedding.
    optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(method, model, optimizer, folder)
        attach_scaler(trainer.accelerator, GradScaler(trainer.args.device.type, model=model))
        trainer.train()
    name = "reward" if method == "grpo" else "loss"
    values = [float(row[name]) for row in trainer.state.log_history if name in row]
    print(f"{method}: {name}", *(f"{value:.3f}" for value in values), "by 20 steps")
    print(f"scale {trainer.accelerator.scaler.get_scale():g}, weights in {model.dtype}")
    return values[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
