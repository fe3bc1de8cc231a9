"""What torchrun starts for test_launched_snippets: a snippet, with what it finds and what it left.

    torchrun --nproc_per_node N launched_program.py snippet kind folder

Each process has every N-th row of each batch, and writes what it has come to to the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import torch
from snippet_cases import REPLACED, TinyBert, Watch, sentences

FOLDER = Path(__file__).parent / "whole_scripts"
# As for other snippets; and there is no GPU to choose, nor NCCL.
LAUNCHED = ((r"(?m)^torch\.cuda\.set_device\(.*\)$", "pass"), (r'"nccl"', '"gloo"'))
EPOCHS = 3


def text_of(snippet: str, kind: str) -> str:
    text = (FOLDER / f"{snippet}.py").read_text(encoding="utf-8")
    for pattern, replacement in (*REPLACED[kind], *LAUNCHED):
        text = re.sub(pattern, replacement, text)
    return text


def main() -> None:
    snippet, kind, folder = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)  # Rank 0 has the weights that count.
    bad = json.loads(os.environ["BAD_FORWARDS"])
    watch = Watch(bad if rank == world - 1 else ())
    model = TinyBert(watch)
    start = torch.cat([param.detach().flatten() for param in model.parameters()])
    names = {
        "args": argparse.Namespace(local_rank=rank, lr=0.1, epochs=EPOCHS),
        "device": "cpu",
        "model": model,
        "train_dataloader": [(x[rank::world], y[rank::world]) for x, y in sentences()],
    }
    exec(compile(text_of(snippet, kind), snippet, "exec"), names)
    watch.look(model)
    weights = torch.cat([param.detach().flatten().float() for param in model.parameters()])
    left = {
        "start": start,
        "weights": weights,
        "finite": watch.finite,
        "moved": watch.moved,
        "scales": names["scales"],
    }
    torch.save(left, f"{folder}/{kind}-{rank}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # An exit with gloo's threads about aborts now and then.


if __name__ == "__main__":
    main()
