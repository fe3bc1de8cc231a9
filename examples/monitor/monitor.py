"""Train a small float16 network with apex_mp.monitor, and show what mixed precision did.

python examples/monitor/monitor.py                          print the report, write run.json
python examples/monitor/monitor.py --plot run.png           and the picture
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.monitor import Monitor
from apex_mp.optimizers import FusedAdam


def train(steps: int = 600) -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ).half()
    optimizer = FP16_Optimizer(
        FusedAdam(model.parameters(), lr=1e-3, max_grad_norm=1.0),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 25},
        model=model,
        verbose=False,
    )
    monitor = Monitor(optimizer, model=model, every=50, after=3)
    images, labels = torch.randn(512, 64).half(), torch.randint(0, 10, (512,))
    for _ in range(steps):
        batch = torch.randint(0, 512, (32,))
        x, y = images[batch], labels[batch]
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(x).float(), y))
        optimizer.step()
    return monitor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save", default="run.json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    monitor = train(arguments.steps)
    print(monitor.report())
    monitor.save(arguments.save)
    if arguments.plot is not None:
        monitor.plot(arguments.plot)
