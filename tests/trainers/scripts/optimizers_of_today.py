"""A loop with an optimizer of a library; `--half` makes the weights bfloat16."""

import sys

import torch

name, half = sys.argv[1], "--half" in sys.argv[2:]
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 1)
)
model = model.bfloat16() if half else model
params = model.parameters()
if name == "lion-pytorch":
    from lion_pytorch import Lion

    optimizer = Lion(params, lr=1e-4)
elif name == "schedulefree":
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(params, lr=1e-3)
    optimizer.train()
elif name == "heavyball":
    import heavyball

    optimizer = heavyball.AdamW(params, lr=1e-3, compile_step=False)
elif name == "torchao":
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(params, lr=1e-3)
elif name == "came-pytorch":
    from came_pytorch import CAME

    optimizer = CAME(params, lr=2e-4)
elif name == "adam-mini":
    from adam_mini import Adam_mini

    optimizer = Adam_mini(model.named_parameters(), lr=1e-3, verbose=False)

generator = torch.Generator().manual_seed(1)
for _ in range(30):
    inputs = torch.randn(32, 16, generator=generator)
    outputs = model(inputs.bfloat16() if half else inputs).float()
    loss = (outputs - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({"loss": loss.item()})
