"""Two losses for one optimizer, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex import amp

amp_handle = amp.init()

model.cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
optimizer = amp_handle.wrap_optimizer(optimizer, num_loss=2)

for _ in range(args.epochs):
    for batch, other_batch in zip(train_dataloader[::2], train_dataloader[1::2]):  # noqa: B905
        optimizer.zero_grad()

        loss1 = model(batch[0].cuda(), batch[1].cuda())
        with optimizer.scale_loss(loss1) as scaled_loss:
            scaled_loss.backward()

        loss2 = 0.1 * model(other_batch[0].cuda(), other_batch[1].cuda())
        with optimizer.scale_loss(loss2) as scaled_loss:
            scaled_loss.backward()

        optimizer.step()
