"""A loop as in timm's train.py; `--half` is its `--model-dtype bfloat16`."""

import sys

import torch
import vision  # noqa: F401
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask

model_dtype = torch.bfloat16 if "--half" in sys.argv else torch.float32
torch.manual_seed(0)
sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
model = create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
model.to(device="cpu", dtype=model_dtype)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
task = ClassificationTask(model, torch.nn.CrossEntropyLoss(), dtype=model_dtype)
task.train()
generator = torch.Generator().manual_seed(1)
patterns = torch.randn(10, 3, 16, 16, generator=generator)
for _ in range(30):
    target = torch.randint(10, (32,), generator=generator)
    images = patterns[target] + torch.randn(32, 3, 16, 16, generator=generator)
    result = task(images.to(model_dtype), target)
    result["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    print({"loss": torch.nn.functional.cross_entropy(result["output"].float(), target).item()})
