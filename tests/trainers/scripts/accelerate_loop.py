"""A loop with accelerate, as in its documentation."""

import sys

import torch
from accelerate import Accelerator

half = sys.argv[1:] == ["--half"]
torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="fp16" if half else "no")
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
if half:
    model.half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
inputs = torch.randn(640, 16, generator=torch.Generator().manual_seed(1))
batches = torch.utils.data.DataLoader(inputs, 32)
model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
for batch in batches:
    outputs = model(batch.half() if half else batch).float()
    loss = torch.nn.functional.cross_entropy(outputs, (batch[:, 0] > 0).long())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print({"loss": loss.item()})
