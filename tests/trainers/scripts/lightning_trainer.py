"""A LightningModule, as in Lightning's documentation."""

import sys

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision

half, true = sys.argv[1:] == ["--half"], sys.argv[1:] == ["--true"]


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        )
        if half:
            self.network.half()

    def training_step(self, batch, number):
        outputs = self.network(batch.half() if half or true else batch).float()
        loss = torch.nn.functional.cross_entropy(outputs, (batch[:, 0] > 0).long())
        print({"loss": loss.item()})
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
classifier = Classifier()
inputs = torch.randn(640, 16, generator=torch.Generator().manual_seed(1))
trainer = lightning.Trainer(
    max_epochs=1,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    accelerator="cpu",
    plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if half else None,
    precision="16-true" if true else None,
)
trainer.fit(classifier, torch.utils.data.DataLoader(inputs, 32))
