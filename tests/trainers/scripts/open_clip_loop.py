"""A small CLIP in the loop of open_clip_train; `--half` is its `--precision pure_bf16`."""

import json
import math
import sys
import tempfile
from pathlib import Path

import torch
import vision  # noqa: F401
from open_clip import ClipLoss, create_model, get_input_dtype

precision = "pure_bf16" if "--half" in sys.argv else "fp32"
config = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": 16,
        "layers": 2,
        "width": 32,
        "head_width": 16,
        "patch_size": 8,
    },
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
}
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    model = create_model(f"local-dir:{folder}", precision=precision, output_dict=True)
model.train()
matrices = [param for param in model.parameters() if param.ndim > 1]
others = [param for param in model.parameters() if param.ndim < 2]
groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.2}]
optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
loss = ClipLoss()
generator = torch.Generator().manual_seed(1)
patterns = torch.randn(64, 3, 16, 16, generator=generator)
texts = torch.randint(1, 63, (64, 8), generator=generator)
texts[:, -1] = 63  # The end, whose features are taken.
for _ in range(30):
    images = patterns + 0.5 * torch.randn(patterns.shape, generator=generator)
    optimizer.zero_grad()
    found = model(images.to(dtype=get_input_dtype(precision)), texts)
    loss(**found).backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    print({"loss": loss(**{name: value.float() for name, value in found.items()}).item()})
