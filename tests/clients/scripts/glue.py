"""A fine-tuning script of 2019 on pytorch-transformers, with the calls of its examples."""

import argparse
import random

import numpy as np
import torch
from pytorch_transformers import (
    AdamW,
    BertConfig,
    BertForSequenceClassification,
    WarmupLinearSchedule,
)
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", type=str, default="O1")
parser.add_argument("--max_grad_norm", default=1.0, type=float)
parser.add_argument("--num_train_epochs", default=3, type=int)
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
args.n_gpu = torch.cuda.device_count()
random.seed(args.seed)
np.random.seed(args.seed)
torch.manual_seed(args.seed)
if args.n_gpu > 0:
    torch.cuda.manual_seed_all(args.seed)

config = BertConfig(
    vocab_size_or_config_json_file=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
model.to(args.device)
ids = torch.randint(1, 40, (256, 12))
labels = (ids == 7).any(1).long()
dataset = TensorDataset(ids, torch.ones_like(ids), labels)
loader = DataLoader(dataset, sampler=RandomSampler(dataset), batch_size=16)

no_decay = ["bias", "LayerNorm.weight"]
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = AdamW(groups, lr=2e-3, eps=1e-8)
t_total = len(loader) * args.num_train_epochs
scheduler = WarmupLinearSchedule(optimizer, warmup_steps=5, t_total=t_total)
if args.fp16:
    try:
        from apex import amp
    except ImportError:
        raise ImportError("Please install apex to use fp16 training.")
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
if args.n_gpu > 1:
    model = torch.nn.DataParallel(model)

for _ in range(args.num_train_epochs):
    total = 0.0
    for batch in loader:
        model.train()
        batch = tuple(t.to(args.device) for t in batch)
        loss = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])[0]
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        total += loss.item()
        scheduler.step()
        optimizer.step()
        model.zero_grad()
    print("loss", total / len(loader))
