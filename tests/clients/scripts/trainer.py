"""The Trainer of transformers 2.11, which has apex behind fp16."""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", default="O1")
parser.add_argument("--seed", default=0, type=int)
given = parser.parse_args()

config = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
torch.manual_seed(given.seed)
model = BertForSequenceClassification(config)
ids = torch.randint(1, 40, (256, 12))
labels = (ids == 7).any(1).long()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return len(ids)

    def __getitem__(self, number):
        return number


class Rows:
    def collate_batch(self, numbers):
        rows = torch.tensor(numbers)
        return {"input_ids": ids[rows], "labels": labels[rows]}


losses = []


class Recording(Trainer):
    def _training_step(self, model, inputs, optimizer):
        loss = super()._training_step(model, inputs, optimizer)
        losses.append(loss)
        return loss


arguments = TrainingArguments(
    output_dir="out",
    overwrite_output_dir=True,
    num_train_epochs=3,
    learning_rate=1e-3,
    logging_steps=1000,
    fp16=given.fp16,
    fp16_opt_level=given.fp16_opt_level,
)
Recording(model=model, args=arguments, train_dataset=Numbers(), data_collator=Rows()).train()
for start in range(0, len(losses), 32):
    print("loss", sum(losses[start : start + 32]) / 32)
