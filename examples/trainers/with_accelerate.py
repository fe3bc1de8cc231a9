"""Train a model in float16 with accelerate: python examples/trainers/with_accelerate.py

The weights are float16, with float32 masters in the optimizer. On a GPU
Accelerator(mixed_precision="fp16"), without half() and master_weights, is autocast instead.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from apex_mp.accelerate import attach_scaler
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

EPOCHS = 10


def main() -> float:
    """Return the share of the held-out digits that the model recognizes."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    attach_scaler(accelerator, GradScaler(accelerator.device.type))

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float16)
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=50, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).half()
    optimizer = FusedAdam(model.parameters(), lr=5e-3, master_weights=True)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * len(loader) // 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(EPOCHS):
        skipped = 0
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs).float(), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()  # Stands still if the step was skipped.
                skipped += accelerator.sync_gradients and accelerator.optimizer_step_was_skipped
                optimizer.zero_grad()
        print(
            f"epoch {epoch}: loss {loss.item():.4f}, scale {accelerator.scaler.get_scale():g}, "
            f"{skipped} steps skipped"
        )

    with torch.no_grad():
        guesses = model(images[1500:].to(accelerator.device)).argmax(1).cpu()
    recognized = (guesses == labels[1500:]).float().mean().item()
    print(f"recognized {recognized:.1%} of {len(guesses)} held-out digits")
    return recognized


if __name__ == "__main__":
    main()
