"""A multiplicative LSTM with weight norm, a language model in fp16, 2018. Given: args, batches."""
# ruff: noqa: F821

import torch
from apex import RNN
from apex.fp16_utils import FP16_Optimizer
from apex.reparameterization import apply_weight_norm, remove_weight_norm
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers):
        super(RNNModel, self).__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = RNN.mLSTM(ninp, nhid, nlayers, bias=True)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, input):
        self.rnn.detach_hidden()
        output, hidden = self.rnn(self.encoder(input))
        return self.decoder(output)


model = RNNModel(args.ntokens, args.emsize, args.nhid, args.nlayers)
apply_weight_norm(model.rnn, hook_child=False)
model = model.cuda().half()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
optimizer = FP16_Optimizer(
    optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": args.init_scale}
)
criterion = nn.CrossEntropyLoss()

losses, scales = [], []
for epoch in range(args.epochs):
    model.rnn.reset_hidden(args.batch_size)
    for data, targets in batches:
        output = model(data.cuda())
        loss = criterion(output.view(-1, args.ntokens).float(), targets.cuda().view(-1))
        optimizer.zero_grad()
        optimizer.backward(loss, update_master_grads=False)
        optimizer.update_master_grads()
        optimizer.clip_master_grads(args.clip)
        optimizer.step()
        losses.append(loss.item())
        scales.append(optimizer.loss_scale)

saved = model.state_dict()
remove_weight_norm(model.rnn)
