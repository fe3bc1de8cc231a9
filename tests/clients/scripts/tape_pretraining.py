"""TAPE's runner trains a small protein model as its tape-train-distributed does, and resumes."""

from __future__ import annotations

import argparse

import torch
from tape.models.modeling_bert import ProteinBertConfig, ProteinBertForMaskedLM
from tape.optimization import AdamW
from tape.training import BackwardRunner

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

store = torch.distributed.HashStore()
torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
device = torch.device("cuda:0")
torch.manual_seed(0)
config = ProteinBertConfig(
    vocab_size=30,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = ProteinBertForMaskedLM(config).to(device)
optimizer = AdamW(model.parameters(), lr=5e-3)
runner = BackwardRunner(
    model, optimizer, 2, device, 1, args.fp16, local_rank=0, num_train_optimization_steps=200
)
runner.initialize_fp16()
runner.initialize_distributed_model()
if args.resume:
    runner.model.load_state_dict(torch.load("saved/pytorch_model.bin"))
start = runner.resume_from_checkpoint("saved") if args.resume else 0
runner.train()
for epoch in range(start, start + 2):
    total = 0.0
    for step in range(20):
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * epoch + 2 * step + part)
            tokens = 5 + torch.randint(25, (8, 1), generator=generator).expand(8, 16)
            hidden = torch.rand(8, 16, generator=generator) < 0.2
            batch = {
                "input_ids": tokens.masked_fill(hidden, 4).to(device),
                "input_mask": torch.ones(8, 16, dtype=torch.long, device=device),
                "targets": tokens.masked_fill(~hidden, -1).to(device),
            }
            loss, _ = runner.forward(batch)
            runner.backward(loss)
            total += loss.item()
        runner.step()
    print("loss", total / 40)
print("steps", runner.global_step)
runner.save_state("saved", start + 1)
