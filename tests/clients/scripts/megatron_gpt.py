"""A GPT of Megatron-core in one process, as its examples train one, with its own optimizer."""

from __future__ import annotations

import argparse

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--distributed-optimizer", action="store_true")
args = parser.parse_args()

store = torch.distributed.HashStore()
torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
torch.cuda.set_device(0)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
torch.manual_seed(1)

WORDS, LENGTH = 64, 16
dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    fp16=args.fp16,
    bf16=args.bf16,
    params_dtype=dtype,
    pipeline_dtype=dtype,
    attention_softmax_in_fp32=True,
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=WORDS,
    max_sequence_length=LENGTH,
)
model.cuda()
if args.fp16 or args.bf16:
    model = Float16Module(config, model)
sharing = DistributedDataParallelConfig(
    grad_reduce_in_fp32=False, use_distributed_optimizer=args.distributed_optimizer
)
model = DistributedDataParallel(config, sharing, model)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        weight_decay=0.01,
        fp16=args.fp16,
        bf16=args.bf16,
        params_dtype=dtype,
        clip_grad=1.0,
        initial_loss_scale=2.0**12,
        use_distributed_optimizer=args.distributed_optimizer,
    ),
    [model],
)
print("optimizer", type(optimizer.chained_optimizers[0].optimizer).__module__)

positions = torch.arange(LENGTH, device="cuda").expand(8, LENGTH)
mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
skipped = 0
for step in range(30):
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (8, 1), generator=generator)
    tokens = ((start + 3 * torch.arange(LENGTH + 1)) % WORDS).cuda()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    loss = losses.float().mean()
    optimizer.scale_loss(loss).backward()
    finalize_model_grads([model])
    succeeded, norm, _ = optimizer.step()
    skipped += not succeeded
    if step % 10 == 9:
        print("loss", loss.item())
print("skipped", skipped)
