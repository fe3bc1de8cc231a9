"""What torchrun starts for test_pretrain: pretrain.py, in which one process is killed once.

    torchrun ... pretrain_killed.py STAGE STEP [flags of pretrain.py]

The process of the highest rank is killed in that stage of that step, unless it was restarted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F  # noqa: N812

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "pretrain"))

import pretrain
from pretrain_model import Block

from apex_mp.grads import shards
from apex_mp.optimizers import FusedAdam


def main() -> None:
    stage, step, *flags = sys.argv[1:]
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        count = 0
        train_step = pretrain.Run.train_step

        def counted(run: Any) -> Any:
            nonlocal count
            count += 1
            return train_step(run)

        def killed(call: Callable[..., Any]) -> Callable[..., Any]:
            def then(*args: Any, **kwargs: Any) -> Any:
                if count == int(step):
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return then

        pretrain.Run.train_step = counted
        if stage == "forward":
            Block.forward = killed(Block.forward)
        elif stage == "backward":
            cross_entropy = F.cross_entropy

            def with_hook(*args: Any) -> Any:
                loss = cross_entropy(*args)
                loss.register_hook(killed(lambda grad: grad))
                return loss

            pretrain.F.cross_entropy = with_hook
        elif stage == "collective":
            shards.dist.all_reduce = killed(shards.dist.all_reduce)
        else:
            FusedAdam.step = killed(FusedAdam.step)
    pretrain.main(flags)


if __name__ == "__main__":
    main()
