"""Lets timm and open_clip import torchvision, as tests/trainers/test_timm.py does."""

import sys

import torch

sys.path.append(f"{sys.prefix}/torchvision")
if not torch.version.cuda:
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)
