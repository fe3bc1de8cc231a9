"""transformers.Trainer on a checkpoint, by itself or with PEFT's LoRA."""

import argparse

import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--optim", default="adamw_torch")
parser.add_argument("--lora", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)
model = LlamaForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
if options.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
rows = [(torch.arange(16) * (1 + k % 3) + k) % 20 for k in range(256)]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "out",
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        optim=options.optim,
        fp16=options.fp16,
        report_to=[],
        save_strategy="no",
        logging_steps=8,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print({"loss": row["loss"]})
