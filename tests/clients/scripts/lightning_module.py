"""pytorch-lightning 0.9 with amp_backend="apex"."""

import argparse

import pytorch_lightning as pl
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", default="O1")
parser.add_argument("--seed", default=1, type=int)
args = parser.parse_args()
losses = []


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        losses.append(loss.item())
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


pl.seed_everything(args.seed)
x = torch.randn(256, 16)
y = (x.sum(1) > 0).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
apex = {"precision": 16, "amp_backend": "apex", "amp_level": args.fp16_opt_level}
trainer = pl.Trainer(
    gpus=1,
    max_epochs=4,
    logger=False,
    checkpoint_callback=False,
    weights_summary=None,
    progress_bar_refresh_rate=0,
    gradient_clip_val=1.0,
    **(apex if args.fp16 else {}),
)
trainer.fit(Classifier(), loader)
for start in range(0, len(losses), 16):
    print("loss", sum(losses[start : start + 16]) / 16)
