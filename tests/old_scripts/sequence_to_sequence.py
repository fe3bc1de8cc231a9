import torch
from apex import amp
from apex.optimizers import FP16_Optimizer, FusedAdam
from torch import nn


class FP16_Optimizer_State(FP16_Optimizer):
    def __init__(
        self,
        init_optimizer,
        static_loss_scale=1.0,
        dynamic_loss_scale=False,
        dynamic_loss_args=None,
        verbose=True,
    ):
        super().__init__(
            init_optimizer, static_loss_scale, dynamic_loss_scale, dynamic_loss_args, verbose
        )

    def state_dict(self):
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "scale_factor": self.scale_factor,
            "scale_window": self.scale_window,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups_flat": self.fp32_groups_flat,
        }


amp_handle = amp.init(enable_caching=True)
model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 2)).half().cuda()
optimizer = FusedAdam(model.parameters(), lr=0.02, bias_correction=False)
optimizer = FP16_Optimizer_State(optimizer, dynamic_loss_scale=True)
first_scale = optimizer.cur_scale
words = torch.arange(8).cuda()
losses = []
for _ in range(40):
    loss = nn.functional.cross_entropy(model(words), words % 2)
    optimizer.backward(loss)
    amp_handle._clear_cache()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
state = optimizer.state_dict()
