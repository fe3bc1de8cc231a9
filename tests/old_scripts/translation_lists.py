import torch
from apex import amp
from torch import nn

encoder, decoder = nn.Linear(4, 8).cuda(), nn.Linear(8, 2).cuda()
optimizers = [
    torch.optim.Adam(encoder.parameters(), lr=0.02),
    torch.optim.Adam(decoder.parameters(), lr=0.02),
]
models, optimizers = amp.initialize([encoder, decoder], optimizers, opt_level="O1", verbosity=0)
encoder, decoder = models
inputs = torch.randn(16, 4).cuda()
labels = (inputs[:, 0] > 0).long()
losses = []
for step in range(80):
    batch = slice(0, 8) if step % 2 else slice(8, 16)
    loss = nn.functional.cross_entropy(decoder(encoder(inputs[batch]).relu()), labels[batch])
    last = step % 2 == 1
    with amp.scale_loss(loss, optimizers, delay_unscale=not last) as scaled_loss:
        scaled_loss.backward()
    if last:
        for optimizer in optimizers:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    losses.append(loss.item())
state = amp.state_dict()
amp.load_state_dict(state)
