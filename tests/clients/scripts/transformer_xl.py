"""A language model of 2019 as in NVIDIA's Transformer-XL: FusedLAMB, memories, and a restart."""

import argparse
import os

import torch
from apex import amp
from apex.optimizers import FusedLAMB
from pytorch_transformers import TransfoXLConfig, TransfoXLLMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", default="O2")
parser.add_argument("--max_epoch", type=int, default=3)
parser.add_argument("--restart", default="")
parser.add_argument("--work_dir", default=".")
args = parser.parse_args()

torch.manual_seed(1111)
device = torch.device("cuda")
config = TransfoXLConfig(
    vocab_size_or_config_json_file=40,
    cutoffs=[10, 20],
    d_model=32,
    d_embed=32,
    n_head=2,
    d_head=16,
    d_inner=64,
    n_layer=2,
    tgt_len=8,
    ext_len=0,
    mem_len=8,
    div_val=1,
    dropout=0.0,
    dropatt=0.0,
)
model = TransfoXLLMHeadModel(config).to(device)
optimizer = FusedLAMB(model.parameters(), lr=0.02, weight_decay=0.0)
if args.fp16:
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level, verbosity=0)

stream = (torch.arange(8 * 321) * 7 % 37).view(8, 321).to(device)
first = 0
if args.restart:
    checkpoint = torch.load(args.restart)
    model.load_state_dict(checkpoint["model_state"])
    optimizer.load_state_dict(checkpoint["optimizer_state"])
    if args.fp16:
        amp.load_state_dict(checkpoint["amp_state"])
    first = checkpoint["epoch"] + 1
for epoch in range(first, args.max_epoch):
    mems, total = None, 0.0
    for start in range(0, 320, 8):
        data, target = stream[:, start : start + 8], stream[:, start + 1 : start + 9]
        model.zero_grad()
        loss, mems = model(data, labels=target, mems=mems)[:2]
        loss = loss.float().mean().type_as(loss)
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total += loss.data[0] if loss.dim() else loss.item()
    print("loss", total / 40)
    state = {"epoch": epoch, "model_state": model.state_dict()}
    state["optimizer_state"] = optimizer.state_dict()
    state["amp_state"] = amp.state_dict() if args.fp16 else None
    torch.save(state, os.path.join(args.work_dir, "checkpoint_last.pt"))
