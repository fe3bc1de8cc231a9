"""A GPT of litgpt, whole or with LoRA; `--half` makes the weights bfloat16."""

import sys

import torch

lora, half = "--lora" in sys.argv, "--half" in sys.argv
torch.manual_seed(0)
sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 32, "block_size": 16}
if lora:
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    model = GPT(Config(**sizes, lora_r=4, lora_query=True, lora_value=True))
    mark_only_lora_as_trainable(model)
else:
    from litgpt import GPT, Config

    model = GPT(Config(**sizes))
model = model.to(torch.bfloat16) if half else model
params = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(params, lr=1e-3)
generator = torch.Generator().manual_seed(1)
for _ in range(20):
    ids = (torch.randint(32, (16, 1), generator=generator) + torch.arange(16)) % 32
    logits = model(ids[:, :-1]).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({"loss": loss.item()})
