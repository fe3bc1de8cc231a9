"""Train a model in float16 with Lightning: python examples/trainers/with_lightning.py [16-true]

16-mixed, the default, is autocast over float32 weights; 16-true has float16 weights, with float32
masters in the optimizer.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from apex_mp.lightning import FP16Plugin
from apex_mp.optimizers import FusedAdam

EPOCHS = 5


class Digits(lightning.LightningModule):
    """Recognizes digits of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images).float(), labels)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("recognized", right)

    def configure_optimizers(self) -> dict[str, Any]:
        half = self.trainer.precision == "16-true"
        optimizer = FusedAdam(self.parameters(), lr=2e-3, master_weights=half)
        scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * 30)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        # Lightning would go on after a skipped step too.
        if not self.trainer.precision_plugin.scaler.step_was_skipped(scheduler.optimizer):
            super().lr_scheduler_step(scheduler, metric)


def main(precision: str = "16-mixed") -> float:
    """Return the share of the held-out digits that the model recognizes."""
    lightning.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    training, held_out = torch.utils.data.random_split(data, [1500, len(data) - 1500])
    plugin = FP16Plugin(precision, device="cuda" if torch.cuda.is_available() else "cpu")
    trainer = lightning.Trainer(
        plugins=[plugin],  # In the place of precision="16-mixed".
        gradient_clip_val=1.0,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
    )
    model = Digits()
    loader = DataLoader(training, batch_size=50, shuffle=True)
    trainer.fit(model, loader, DataLoader(held_out, batch_size=len(held_out)))
    recognized = trainer.callback_metrics["recognized"].item()
    print(f"recognized {recognized:.1%} of {len(held_out)} held-out digits")
    print(f"scale {plugin.scaler.get_scale():g}, weights in {model.net[0].weight.dtype}")
    return recognized


if __name__ == "__main__":
    main(*sys.argv[1:])
