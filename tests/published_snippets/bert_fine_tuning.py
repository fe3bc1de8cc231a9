"""Fine-tuning BERT, 2019. Given: args, model, train_dataloader."""
# ruff: noqa: F821

from apex.optimizers import FP16_Optimizer, FusedAdam


def warmup_linear(x, warmup=0.002):
    if x < warmup:
        return x / warmup
    return 1.0 - x


if args.fp16:
    model.half()
model.cuda()

named_parameters = list(model.named_parameters())
no_decay = ["bias", "LayerNorm.bias", "LayerNorm.weight"]
decayed = [p for n, p in named_parameters if not any(nd in n for nd in no_decay)]
not_decayed = [p for n, p in named_parameters if any(nd in n for nd in no_decay)]
optimizer_grouped_parameters = [
    {"params": decayed, "weight_decay": 0.01},
    {"params": not_decayed, "weight_decay": 0.0},
]

optimizer = FusedAdam(
    optimizer_grouped_parameters, lr=args.learning_rate, bias_correction=False, max_grad_norm=1.0
)
if args.fp16:
    if args.loss_scale == 0:
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
    else:
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=args.loss_scale)

global_step = 0
model.train()
for _ in range(args.num_train_epochs):
    for step, batch in enumerate(train_dataloader):
        input_ids, label_ids = tuple(t.cuda() for t in batch)
        loss = model(input_ids, label_ids)
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps

        if args.fp16:
            optimizer.backward(loss)
        else:
            loss.backward()

        if (step + 1) % args.gradient_accumulation_steps == 0:
            progress = (global_step + 1) / args.t_total
            lr_this_step = args.learning_rate * warmup_linear(progress, args.warmup_proportion)
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr_this_step
            optimizer.step()
            optimizer.zero_grad()
            global_step += 1
