"""Functions of others, by their names, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex import amp

amp.register_float_function(torch, "sigmoid")
amp.register_half_function(torch, "einsum")
amp_handle = amp.init()

model.cuda()
direction = torch.tensor([-1.0, 1.0], device=device)
criterion = torch.nn.BCELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

for _ in range(args.epochs):
    for input_ids, label_ids in train_dataloader:
        logits = torch.einsum("bc,c->b", model(input_ids.cuda()), direction)
        probabilities = torch.sigmoid(logits)
        loss = criterion(probabilities, label_ids.cuda().float())
        optimizer.zero_grad()
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
