"""A speech model as NVIDIA's FastPitch of 2020: FusedLAMB, scripted functions, and a restart."""

import argparse
import importlib
import os
import sys
import types

import torch
from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB

sys.modules["TTS.tts.layers.losses"] = types.ModuleType("losses")  # which needs librosa and more
generic = "TTS.tts.layers.generic"
FFTransformerBlock = importlib.import_module(f"{generic}.transformer").FFTransformerBlock
WN = importlib.import_module(f"{generic}.wavenet").WN

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", default="O1")
parser.add_argument("--optimizer", default="lamb", choices=["adam", "lamb"])
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--restart", default="")
parser.add_argument("-o", "--output", default=".")
args = parser.parse_args()


@torch.jit.script
def regulate(x, durations: int):
    return x.repeat_interleave(durations, dim=2)


class FastPitch(torch.nn.Module):
    def __init__(self, symbols=30, width=16, mels=4):
        super().__init__()
        self.word_emb = torch.nn.Embedding(symbols, width)
        self.encoder = FFTransformerBlock(width, 2, 32, 1, 0.0)
        self.pitch_predictor = torch.nn.Conv1d(width, 1, 3, padding=1)
        self.pitch_emb = torch.nn.Conv1d(1, width, 3, padding=1)
        self.decoder = WN(width, width, 3, 1, 2, dropout_p=0.0)
        self.proj = torch.nn.Conv1d(width, mels, 1)

    def forward(self, text, pitch):
        x = self.encoder(self.word_emb(text).transpose(1, 2))
        predicted = self.pitch_predictor(x)
        x = regulate(x + self.pitch_emb(pitch), 2)
        return self.proj(self.decoder(x, torch.ones_like(x[:, :1]))), predicted


torch.manual_seed(1234)
device = torch.device("cuda")
model = FastPitch().to(device)
kind = {"adam": FusedAdam, "lamb": FusedLAMB}[args.optimizer]
optimizer = kind(model.parameters(), lr=0.02, betas=(0.9, 0.98), eps=1e-9, weight_decay=1e-6)
if args.fp16:
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level, verbosity=0)

text = torch.randint(30, (96, 6), device=device)
pitch = (text.float() / 30).unsqueeze(1)
phases = text.float().repeat_interleave(2, 1).unsqueeze(1)
mel = torch.sin(phases * torch.arange(1.0, 5).view(-1, 1).cuda())
first = 0
if args.restart:
    checkpoint = torch.load(args.restart, map_location="cuda:0")
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if args.fp16:
        amp.load_state_dict(checkpoint["amp"])
    first = checkpoint["epoch"]
for epoch in range(first, args.epochs):
    total = 0.0
    for batch in range(0, 96, 8):
        part = slice(batch, batch + 8)
        optimizer.zero_grad()
        out, predicted = model(text[part], pitch[part])
        loss = torch.nn.functional.mse_loss(out.float(), mel[part])
        loss = loss + 0.1 * torch.nn.functional.mse_loss(predicted.float(), pitch[part])
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1000.0)
        else:
            loss.backward()
        optimizer.step()
        total += loss.item()
    print("loss", total / 12)
    state = {"epoch": epoch + 1, "state_dict": model.state_dict()}
    state["optimizer"] = optimizer.state_dict()
    state["amp"] = amp.state_dict() if args.fp16 else None
    torch.save(state, os.path.join(args.output, "checkpoint.pt"))
