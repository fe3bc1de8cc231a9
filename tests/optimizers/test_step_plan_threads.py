"""A long step lets other Python threads run, and none of them into the step."""

from __future__ import annotations

import sys
import threading
import time

import torch
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdam


def test_other_threads_run_while_a_long_step_is_taken(device: torch.device) -> None:
    param = Parameter(torch.ones(1 << 24, device=device))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param])
    optimizer.step()
    beats = 0
    stepping = True

    def beat() -> None:
        nonlocal beats
        while stepping:
            beats += 1
            time.sleep(1e-4)  # lets go of the lock itself

    thread = threading.Thread(target=beat)
    switch = sys.getswitchinterval()
    # Who waits for the lock asks for it after so long: never, unless the step lets go of it.
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        before = beats
        for _ in range(3):
            optimizer.step()
        after = beats
    finally:
        stepping = False
        sys.setswitchinterval(switch)
        thread.join()
    # Torch lets go of the lock for a moment here and there; that is not meant.
    assert after - before > 30
