"""examples/pretrain: it learns, alone and sharded, and goes on after a process was killed."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.cpu_only

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "pretrain"
sys.path.append(str(EXAMPLES))

import pretrain  # noqa: E402
import pretrain_model  # noqa: E402

SMALL = ("--width", "32", "--length", "32", "--batch_size", "8", "--device", "cpu", "--warmup", "5")
STAGES = ("forward", "backward", "collective", "step")


def train(*flags: Any) -> Any:
    return pretrain.train(pretrain.parse_args([*SMALL, *map(str, flags)]))


def weights(run: Any) -> list[Tensor]:
    return [param.detach().clone() for param in run.model.parameters()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_decoder_learns(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = train("--steps", 200, "--dtype", dtype, "--log_every", 100, "--peak_tflops", 1)
    # Without knowing anything: log(256) = 5.5. Of 3 seeds and 2 dtypes the largest is 2.70.
    assert result.test_loss < 2.9
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"42,144 parameters in {dtype}, 256 tokens a step, 1 process"
    assert "% of the peak" in printed[1]
    assert "state 0.5 MiB" in printed[-1]  # 12 bytes for each


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain, recomputed = (train("--steps", 3, *flags).run for flags in ([], ["--recompute"]))
    assert all(map(torch.equal, weights(plain), weights(recomputed)))


def test_the_operations_of_a_step_are_those_that_torch_counts() -> None:
    model = pretrain_model.Decoder(32, 4, 2, 64, recompute=False)
    model.initialize(0)
    # Other kernels compute the scores of attention once more in backward.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 64, dtype=torch.int64)).sum().backward()
    assert model.flops_per_token(64) == counter.get_total_flops() / 128


def test_a_run_that_is_started_again_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = train("--steps", 12).run
    flags = ("--steps", 12, "--checkpoints", tmp_path, "--save_every", 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.Run, "train_step", stopping_at(7))
        with pytest.raises(KeyboardInterrupt):
            train(*flags)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    resumed = train(*flags).run
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()


def stopping_at(step: int) -> Any:
    train_step = pretrain.Run.train_step

    def stopped(run: Any) -> Any:
        if run.step == step:
            raise KeyboardInterrupt
        return train_step(run)

    return stopped


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--heads", "5"], "--heads 5 must divide --width 32"),
        (["--batch_size", "6"], "--batch_size 6 must be a multiple of the 4 processes"),
        (["--replicate", "3"], "--replicate 3 must divide the 4 processes"),
        (["--text", str(EXAMPLES / "pretrain_data.py")], " has 0 bytes to train on and "),
    ],
)
def test_flags_that_do_not_fit_are_a_sentence(
    flags: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        pretrain.parse_args([*SMALL, *flags])
    assert sentence in capsys.readouterr().err


# Several processes.


def torchrun(
    world: int, *command: Any, restarts: int = 0, folder: Path
) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world))
    return subprocess.run(
        [*launcher, "--standalone", "--max-restarts", str(restarts), *map(str, command), *SMALL]
        + ["--checkpoints", str(folder), "--save_every", "2", "--steps", "6", "--log_every", "2"],
        # Else a restart may read the addresses of the processes before it: pytorch#135712.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def saved(folder: Path, step: int) -> dict[str, Any]:
    """Return what a sharded checkpoint holds, whole."""
    dcp_to_torch_save(folder / f"step-{step:08}", folder / f"{step}.pt")
    run: dict[str, Any] = torch.load(folder / f"{step}.pt", weights_only=False)["run"]
    return run


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the tensors and numbers in nested dicts, by their path."""
    found = {}
    for name, value in state.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {}
        found.update(inner or {f"{prefix}{name}": value})
    return found


def copies(world: int) -> tuple[str, str]:
    return ("--replicate", str(max(1, world // 2)))  # two parts, so four processes are HSDP


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints of two and four processes that nothing happened to."""
    folders = {world: tmp_path_factory.mktemp("unharmed") for world in (2, 4)}
    for world, folder in folders.items():
        ended = torchrun(world, EXAMPLES / "pretrain.py", *copies(world), folder=folder)
        assert ended.returncode == 0, ended.stderr
        assert "state 0.3 MiB" in ended.stdout  # two parts of 14 bytes for each parameter
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_processes_train_as_one_does(unharmed: dict[int, Path], world: int) -> None:
    run = saved(unharmed[world], 6)
    alone = train("--steps", 6).run
    assert run["step"] == 6
    assert run["scaler"] == alone.scaler.state_dict()
    for name, param in alone.model.named_parameters():
        found = run["model"][name]
        assert found.dtype == torch.float16
        torch.testing.assert_close(found, param.detach(), rtol=0, atol=4e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), [*((2, stage) for stage in STAGES), (4, "collective")])
def test_a_run_goes_on_after_a_process_was_killed(
    unharmed: dict[int, Path], world: int, stage: str, tmp_path: Path
) -> None:
    killed = (HERE / "pretrain_killed.py", stage, "4", *copies(world))
    ended = torchrun(world, *killed, restarts=1, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"going on from {tmp_path}/step-00000002" in ended.stdout
    found, expected = (flat(saved(folder, 6)) for folder in (tmp_path, unharmed[world]))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        same = torch.equal if isinstance(value, Tensor) else operator.eq
        assert same(value, expected[name]), name


@pytest.mark.slow
def test_a_killed_process_ends_all_and_is_named(tmp_path: Path) -> None:
    since = time.monotonic()
    ended = torchrun(2, HERE / "pretrain_killed.py", "collective", "4", folder=tmp_path)
    assert ended.returncode != 0
    assert "rank      : 1" in ended.stderr
    assert "Signal 9 (SIGKILL) received by PID" in ended.stderr
    assert time.monotonic() - since < 60
