import torch
from torch import nn

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as LayerNorm
    from apex.optimizers import FP16_Optimizer, FusedAdam
    from apex.parallel import DistributedDataParallel as DDP
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex")

device = torch.device("cuda", 0)
n_gpu = torch.cuda.device_count()
torch.distributed.init_process_group(
    backend="nccl",
    init_method=store,  # noqa: F821
    rank=0,
    world_size=1,
)


class Model(nn.Module):
    def __init__(self):
        super(Model, self).__init__()
        self.embeddings = nn.Embedding(11, 8)
        self.norm = LayerNorm(8, eps=1e-12)
        self.decoder = nn.Linear(8, 11, bias=False)
        self.decoder.weight = self.embeddings.weight
        self.next_sentence = nn.Linear(8, 2)

    def forward(self, words, labels):
        mask = (words > 0).to(dtype=next(self.parameters()).dtype).unsqueeze(-1)
        hidden = self.norm(self.embeddings(words)) * mask
        scores = self.decoder(hidden)
        return nn.CrossEntropyLoss(ignore_index=-1)(scores.view(-1, 11).float(), labels.view(-1))


model = Model()
model.half()
model.to(device)
model = DDP(model)
no_decay = ["bias", "norm.bias", "norm.weight"]
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if not any(d in n for d in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in named if any(d in n for d in no_decay)], "weight_decay": 0.0},
]
optimizer = FusedAdam(groups, lr=0.02, bias_correction=False, max_grad_norm=1.0)
optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
words = torch.randint(1, 11, (4, 6), device=device)
words[:, -1] = 0
labels = torch.where(words > 0, words, torch.full_like(words, -1))
losses = []
accumulation = 2
for step in range(80):
    loss = model(words, labels) / accumulation
    optimizer.backward(loss)
    if (step + 1) % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
model_to_save = model.module if hasattr(model, "module") else model
saved = {name: value.cpu() for name, value in model_to_save.state_dict().items()}
# Of the next sentence nothing was asked.
untouched = model_to_save.next_sentence.weight.grad
torch.distributed.destroy_process_group()
