"""What tests of amp share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apex_mp import amp


@pytest.fixture
def handle(device: torch.device) -> Any:
    return amp.init(device_type=device.type)
