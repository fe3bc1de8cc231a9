"""Train a ResNet on images with amp.initialize.

    main_amp.py                                     the handwritten digits, O1
    main_amp.py DIR                                 your image folder
    main_amp.py --opt-level O2 --loss-scale 128.0 DIR
    main_amp.py --static-loss-scale 128.0 DIR       FP16_Optimizer, as main_fp16_optimizer.py
    python -m torch.distributed.launch --nproc_per_node=2 main_amp.py --sync_bn DIR

--fp16, --static-loss-scale and --dynamic-loss-scale are flags of FP16_Optimizer, and imply it; the
first line of the log says which API runs. The last lines are a table of all epochs.
"""

from __future__ import annotations

import argparse

import common
import flags
import main_fp16_optimizer
import torch.nn.functional as F  # noqa: N812
import training
from torch import Tensor

from apex_mp import amp
from apex_mp.optimizers import FusedSGD
from apex_mp.parallel import DistributedDataParallel, convert_syncbn_model


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    level = args.opt_level or "O1"
    scale = args.loss_scale or {"O0": "1", "O3": "1"}.get(level, "dynamic")
    api = f"amp.initialize, opt_level {level}, loss scale {scale}"
    if args.keep_batchnorm_fp32:
        api += f", keep_batchnorm_fp32 {args.keep_batchnorm_fp32}"
    with training.session(args, api) as (images, val):
        return fit(args, api, images, val, level)


def fit(
    args: argparse.Namespace, api: str, images: common.Folder, val: common.Folder, level: str
) -> list[dict[str, float]]:
    """Train in this process, which has joined the others."""
    module = common.make_model(args.arch, len(images.classes)).to(args.device)
    if args.sync_bn:
        module = convert_syncbn_model(module)
    optimizer = FusedSGD(
        module.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    module, optimizer = amp.initialize(
        module,
        optimizer,
        opt_level=level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    model = DistributedDataParallel(module) if args.world > 1 else module

    def step(batch: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = model(batch).float()
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return output, loss

    way = training.Training(
        api,
        module,
        optimizer,
        step,
        loss_scale=lambda: amp.state_dict()["loss_scaler0"]["loss_scale"],
        others={"amp": amp},
    )
    return training.fit(args, way, images, val)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    args = flags.parse_args(__doc__, argv)
    uses_fp16_optimizer = main_fp16_optimizer.is_asked_for(args)
    return main_fp16_optimizer.train(args) if uses_fp16_optimizer else train(args)


if __name__ == "__main__":
    main()
