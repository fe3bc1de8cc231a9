"""`python -m apex_mp.parallel.multiproc main.py ...`: a process for each GPU, by torchrun.

Each process runs the script with `--world-size N --rank I` added to its arguments, or set if it has
them, and with the environment of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT),
so that `init_process_group("nccl")` needs no more arguments. An address in the script, such as
`init_method="tcp://127.0.0.1:23456"`, works too. Standard output of ranks above 0 goes to
`GPU_I.log` in the current folder. If one process fails, all are stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from torch.cuda import device_count

__all__ = ["main"]

_WORKER = Path(__file__).with_name("_multiproc_worker.py")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script in several processes of this machine; exit as torchrun does.

    Args:
        arguments: The command line: `--nproc_per_node N` or nothing, then the script and its
            arguments [None: that of this process].
    """
    parser = argparse.ArgumentParser(
        prog="python -m apex_mp.parallel.multiproc",
        allow_abbrev=False,
        description="Run a script in one process for each GPU, with --world-size N and --rank I.",
    )
    parser.add_argument(
        "--nproc_per_node",
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="how many processes [the --world-size that the script is given, or one for each GPU]",
    )
    parser.add_argument("script", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    options = parser.parse_args(arguments)
    count = options.nproc_per_node
    if count is None:
        count = _world_size(options.arguments)
    if count is None:
        count = device_count()
        if count == 0:
            parser.error("there is no GPU; say by --nproc_per_node how many processes to run")
    if count < 1:
        parser.error(f"--nproc_per_node is {count}; it must be at least 1")
    from torch.distributed import run

    # Without it no process would open a store at the address that the script gives.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    own = ["--standalone", f"--nproc_per_node={count}", str(_WORKER)]
    run.main([*own, options.script, *options.arguments])


def _world_size(arguments: Sequence[str]) -> int | None:
    """Return the --world-size among the arguments of a script."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int)
    known, _ = parser.parse_known_args([*arguments])
    return known.world_size  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
