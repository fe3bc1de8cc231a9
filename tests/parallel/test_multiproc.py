"""`python -m apex.parallel.multiproc main.py ...`: several processes, by torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import apex_mp
from apex_mp.parallel import multiproc

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]

SCRIPT = """
import argparse, os, sys
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--world-size", type=int)
parser.add_argument("--rank", type=int)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--dist-url", default="env://")
args = parser.parse_args()
dist.init_process_group(
    "gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank
)
assert (args.rank, args.world_size) == (dist.get_rank(), dist.get_world_size())
total = torch.tensor([args.rank + 1])
dist.all_reduce(total)
print("rank", args.rank, "of", args.world_size, args.data, "sum", total.item(), flush=True)
dist.barrier()
os._exit(3 if args.rank == args.fail_at else 0)
"""


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "main.py").write_text(SCRIPT)
    root = str(Path(apex_mp.__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_each_process_has_its_rank_as_an_argument_and_a_log(tmp_path: Path) -> None:
    command = ("-m", "apex_mp.parallel.multiproc", "--nproc_per_node", "2")
    result = python(tmp_path, *command, "main.py", "here", "--rank", "7")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "rank 0 of 2 here sum 3\n"
    assert (tmp_path / "GPU_1.log").read_text() == "rank 1 of 2 here sum 3\n"
    assert not (tmp_path / "GPU_0.log").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_may_give_an_address_and_the_number_of_processes(
    processes: int, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    run = ("-m", "apex_mp", "run", "--device", "cpu", "-m", "apex.parallel.multiproc", "main.py")
    # Without the option there is a process for each GPU, of which --device cpu says one.
    number = ("--world-size", str(processes)) if processes > 1 else ()
    result = python(tmp_path, *run, "here", "--dist-url", address, *number)
    assert result.returncode == 0, result.stderr
    total = sum(range(1, processes + 1))
    assert result.stdout == f"rank 0 of {processes} here sum {total}\n"


def test_it_has_its_old_name_in_a_run_and_fails_with_its_script(tmp_path: Path) -> None:
    run = ("-m", "apex_mp", "run", "--device", "cpu", "-m", "apex.parallel.multiproc")
    result = python(tmp_path, *run, "--nproc_per_node=2", "main.py", "there", "--fail-at", "1")
    assert result.returncode == 1
    assert result.stdout == "rank 0 of 2 there sum 3\n"
    assert (tmp_path / "GPU_1.log").read_text() == "rank 1 of 2 there sum 3\n"
    assert "exitcode  : 3" in result.stderr
    assert "RuntimeWarning" not in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["main.py"], "there is no GPU; say by --nproc_per_node how many processes to run"),
        (["--nproc_per_node", "0", "main.py"], "--nproc_per_node is 0; it must be at least 1"),
        ([], "the following arguments are required: script"),
    ],
)
def test_a_command_that_runs_nothing_gets_the_reason(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        multiproc.main(words)
    assert sentence in capsys.readouterr().err


def test_what_follows_the_script_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    monkeypatch.setattr(multiproc, "device_count", lambda: 4)
    multiproc.main(["main.py", "--nproc_per_node", "2", "-h", "--", "x"])
    (words,) = started
    assert words[:2] == ["--standalone", "--nproc_per_node=4"]
    assert words[3:] == ["main.py", "--nproc_per_node", "2", "-h", "--", "x"]
