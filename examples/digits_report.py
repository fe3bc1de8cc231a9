"""What examples/digits.py shows: a table, notes, a picture, and a file of results."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from digits_measure import Run

import apex_mp
from apex_mp import _C

# Okabe and Ito's colours, told apart with any kind of colour vision; the styles tell them apart too.
STYLES: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#b3b3b3", "linewidth": 5.0},
    "fp16 static": {"color": "#e69f00", "linewidth": 1.8, "linestyle": (0, (5, 2))},
    "fp16 dynamic": {"color": "#0072b2", "linewidth": 1.6},
    "bf16": {"color": "#009e73", "linewidth": 1.8, "linestyle": (0, (1, 1.2))},
}


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    on_gpu = torch.device(args.device).type == "cuda"
    settings = ("optimizer", "learning_rate", "epochs", "batch_size", "scale_window", "seeds")
    return {
        "apex_mp": apex_mp.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(args.device) if on_gpu else "cpu",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_level": _C.cpu_level(),
        "settings": {name: getattr(args, name) for name in settings},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
