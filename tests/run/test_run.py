"""`python -m apex_mp run`: a script sees no difference from plain python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import apex_mp

SEE = (
    "python -m apex_mp check names what else it needs "
    "[python -m apex_mp explain an-old-script-stops]"
)

pytestmark = pytest.mark.cpu_only

ROOT = str(Path(apex_mp.__file__).resolve().parent.parent)
RUN = ("-m", "apex_mp", "run")
MIRROR = """
import sys
print(__name__, sys.argv, sys.path[0], __file__, __package__, type(__loader__).__name__)
print(sorted(globals()), sys.modules["__main__"].__dict__ is globals())
def typed(x: int): pass
print(typed.__annotations__)
def fail():
    raise ValueError("as planned")
if "fail" in sys.argv: fail()
if "exit" in sys.argv: sys.exit(7)
if "words" in sys.argv: sys.exit("with words")
if "interrupt" in sys.argv: raise KeyboardInterrupt
"""


def python(
    folder: Path, *arguments: str, path: tuple[str, ...] = (ROOT,)
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "APEX_MP_RUN"}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


def assert_same(ours: subprocess.CompletedProcess[str], theirs: object) -> None:
    assert isinstance(theirs, subprocess.CompletedProcess)
    assert ours.stdout == theirs.stdout
    assert ours.stderr == theirs.stderr
    assert ours.returncode == theirs.returncode


# As python itself


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["", "fail", "exit", "words", "interrupt"])
def test_a_script_sees_and_leaves_what_it_would_under_python(argument: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mirror.py").write_text(MIRROR)
    command = ("there/mirror.py", "--flag", argument)
    assert_same(python(tmp_path, *RUN, *command), python(tmp_path, *command))


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["", "fail"])
def test_a_module_sees_and_leaves_what_it_would_under_python(argument: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "mirror.py").write_text(MIRROR)
    command = ("-m", "package.mirror", argument, "-x")
    assert_same(python(tmp_path, *RUN, *command), python(tmp_path, *command))


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, "x = (", "__main__"])
def test_what_cannot_be_run_is_reported_as_by_python(content: str | None, tmp_path: Path) -> None:
    if content == "__main__":  # a folder without one
        (tmp_path / "script.py").mkdir()
    elif content is not None:
        (tmp_path / "script.py").write_text(content)
    ours, theirs = (python(tmp_path, *start, "script.py") for start in (RUN, ()))
    assert (ours.returncode, ours.stdout) == (theirs.returncode, "")
    assert ours.stderr == theirs.stderr


@pytest.mark.slow
def test_the_command_line_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    wrong = python(tmp_path, "-m", "apex_mp", "ran")
    assert wrong.returncode == 2
    assert wrong.stderr.endswith(
        "is no command; it must be run, check, report, estimate or explain, or nothing\n"
    )
    assert (
        "usage: python -m apex_mp [-h] [--version] [run ...] [check ...] [report ...]"
        in wrong.stderr
    )
    era = python(tmp_path, *RUN, "--era", "2018", "script.py")
    assert era.returncode == 2
    assert "argument --era: invalid choice: '2018'" in era.stderr
    misspelt = python(tmp_path, *RUN, "--master_weights", "script.py")
    wish = "there is no option --master_weights; did you mean '--master-weights'?\n"
    assert misspelt.stderr.endswith(wish)
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    late = python(tmp_path, *RUN, "script.py", "--device", "cpu")
    assert late.returncode == 2
    said = (
        "apex_mp run: --device was given to the script; an option of run stands before the script"
    )
    assert late.stderr.endswith(f"{said}\n")


@pytest.mark.slow
def test_a_child_process_gives_the_hint_too(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, 'child.py']).returncode)\n"
    )
    (tmp_path / "child.py").write_text("import torch._six\n")
    result = python(tmp_path, *RUN, "parent.py")
    assert result.returncode == 1
    what = "--modernize supplies this: torch._six"
    assert result.stderr.endswith(f"apex_mp run: {what}; {SEE}\n")
    assert result.stderr.count("apex_mp run:") == 1


@pytest.mark.slow
@pytest.mark.parametrize("start", [("mirror.py",), ("-m", "mirror"), ("-mmirror",)])
def test_what_stands_behind_the_target_is_the_scripts(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mirror.py").write_text(MIRROR)
    command = (*start, "--", "-m", "a", "--", "--era", "--force")
    assert_same(python(tmp_path, *RUN, *command), python(tmp_path, *command))


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-m",), ("--era", "2020"), ("--force", "--")])
def test_nothing_to_run_is_an_error(words: tuple[str, ...], tmp_path: Path) -> None:
    result = python(tmp_path, *RUN, *words)
    assert result.returncode == 2
    assert "there is nothing to run; give a script, or -m and a module" in result.stderr


@pytest.mark.slow
def test_a_real_apex_beside_the_script_is_hidden_by_force_only(tmp_path: Path) -> None:
    (tmp_path / "apex.py").touch()
    (tmp_path / "script.py").write_text("import apex; print(apex.__doc__)")
    refused = python(tmp_path, *RUN, "script.py")
    assert refused.returncode == 1
    assert re.fullmatch(
        "apex_mp run: apex can be imported already, from .*; "
        "uninstall it, or give --force to hide it in this process\n",
        refused.stderr,
    )
    forced = python(tmp_path, *RUN, "--force", "--era", "2020", "script.py")
    assert forced.stdout == "apex, by apex_mp, as of 2020.\n"


# Child processes

CHILDREN = """
import subprocess, sys
CHILD = '''
import sys
import apex, amp_C
print("child", apex.__doc__, len([path for path in sys.path if "_run" in path]))
import other
'''
if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", CHILD], check=True)
    idle = "import sys; print('idle', 'torch' in sys.modules, 'apex_mp' in sys.modules)"
    subprocess.run([sys.executable, "-c", idle], check=True)
"""


@pytest.mark.slow
def test_a_child_process_sees_apex_and_its_own_sitecustomize_and_waits(tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hidden')")
    (tmp_path / "site" / "other.py").write_text("print('other')")
    path = (str(tmp_path / "site"), ROOT)
    result = python(tmp_path, *RUN, "--era", "2019-08", "children.py", path=path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "hidden",
        "hidden",
        "child apex, by apex_mp, as of 2019-08. 0",
        "other",
        "hidden",
        "idle False False",
    ]
    assert result.stderr == ""


SPAWNED = """
import os
import torch
from apex.optimizers import FusedAdam
from torch.utils.data import DataLoader, Dataset

class Words(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        import apex
        return len(apex.amp.__name__), torch.zeros(1, device="cuda")

def work(rank, era):
    import apex
    from apex.parallel import DistributedDataParallel, Reducer
    import torch.distributed as dist
    dist.init_process_group("nccl", init_method=f"file://{era}/store", rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    model = torch.nn.Linear(1, 1).cuda()
    model = DistributedDataParallel(model)
    model(torch.full((1, 1), float(rank)).cuda()).sum().backward()
    assert model.module.weight.grad.item() == 0.5
    other = torch.nn.Linear(1, 1, bias=False)
    other.weight.data.fill_(float(rank + 3))
    reducer = Reducer(other)
    assert other.weight.item() == 3.0
    other.weight.grad = torch.full((1, 1), float(rank))
    reducer.reduce()
    assert other.weight.grad.item() == 0.5
    dist.barrier()
    os._exit(0)  # An exit with gloo's threads about aborts now and then.

if __name__ == "__main__":
    import sys
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
    loader = DataLoader(Words(), num_workers=1, multiprocessing_context="spawn")
    assert len(list(loader)) == 2
    print("done")
"""


@pytest.mark.slow
def test_spawned_processes_and_workers_see_apex_and_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    result = python(tmp_path, *RUN, "--device", "cpu", "spawned.py", str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
    announced = re.findall("--device cpu: everything that the script puts on", result.stderr)
    assert len(announced) == 1


LAUNCHED = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
print("rank", parser.parse_args().local_rank)
import torch
"""


@pytest.mark.slow
def test_a_launched_script_is_given_the_option_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "launched.py").write_text("import torch\n" + LAUNCHED)
    start = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    (tmp_path / "launch.py").write_text(start)
    command = ("launch.py", "launched.py", "--local-rank=1")
    result = python(tmp_path, *RUN, *command)
    assert (result.returncode, result.stdout) == (0, "rank 1\n"), result.stderr
