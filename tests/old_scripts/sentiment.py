import torch
from apex import RNN
from apex.fp16_utils import FP16_Optimizer
from apex.reparameterization import apply_weight_norm, remove_weight_norm
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, rnn_type):
        super(RNNModel, self).__init__()
        kind = getattr(RNN, rnn_type)
        self.encoder = nn.Embedding(8, 8)
        self.rnn = kind(8, 8, 1)
        self.decoder = nn.Linear(8, 8)

    def forward(self, words):
        self.rnn.detach_hidden()
        output, _ = self.rnn(self.encoder(words))
        return self.decoder(output.float())


weight_norm = True
model = RNNModel("mLSTM").cuda()
model.encoder.half()
model.rnn.half()
if weight_norm:
    apply_weight_norm(model.rnn, hook_child=False)
optimizer = FP16_Optimizer(torch.optim.Adam(model.parameters(), lr=0.02), dynamic_loss_scale=True)
words = torch.arange(8).view(8, 1).cuda()
losses = []
model.rnn.init_hidden(1)
for _ in range(40):
    loss = nn.functional.cross_entropy(model(words).view(-1, 8), ((words + 1) % 8).view(-1))
    optimizer.zero_grad()
    optimizer.backward(loss, update_master_grads=False)
    optimizer.update_master_grads()
    optimizer.clip_master_grads(1.0)
    optimizer.step()
    losses.append(loss.item())
if weight_norm:
    remove_weight_norm(model.rnn)
