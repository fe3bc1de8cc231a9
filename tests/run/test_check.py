"""`python -m apex_mp check`: what it says of small repositories whose answers are known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import apex_mp
from apex_mp._as_apex import evidence
from apex_mp._check.command import main
from apex_mp._check.report import examine

pytestmark = pytest.mark.cpu_only


LOOP = """
import torch
from torch.amp import GradScaler
def main():
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    net.to(device, torch.bfloat16)
    scaler = GradScaler("cuda")
    model(x.half())
"""


def test_master_weights_are_offered_to_a_script_of_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    assert main([str(script)]) == 0
    said = capsys.readouterr().out
    assert "weights in 16 bits by from_pretrained()" in said
    assert "weights in 16 bits by to()" in said
    assert "by half()" not in said
    assert "Attempting to unscale FP16 gradients  train.py" in said
    assert f"python -m apex_mp run --master-weights --device cpu {script} ..." in said
    script.write_text(LOOP + "from apex import amp\namp.init()\n")
    main([str(script)])
    assert "--master-weights" not in capsys.readouterr().out


MAIN = "if __name__ == '__main__':\n    pass\n"


OLD_SCRIPTS = Path(__file__).parents[1] / "old_scripts"
ADAM = "from apex.optimizers import FusedAdam\n"

# A repository as {file: text}, or the text of its train.py; era; what --modernize supplies; words
# of what will not work.
Repository = dict[str, str] | str
CASES: dict[str, tuple[Repository, str, list[str], list[str]]] = {
    # Eras.
    "nothing of apex": ("import torch\n", "2019-03", [], []),
    "amp only": ("from apex import amp\namp.init()\n", "2019-03", [], []),
    "old FusedAdam": (ADAM + "FusedAdam(p, max_grad_norm=1.0)\n", "2019-03", [], []),
    "its alias": (
        "import apex.optimizers as o\no.FusedAdam(p, eps_inside_sqrt=True)\n",
        "2019-03",
        [],
        [],
    ),
    "new FusedAdam": (ADAM + "FusedAdam(p, adam_w_mode=False)\n", "2019-08", [], []),
    "later FusedAdam": (ADAM + "FusedAdam(p, capturable=True)\n", "2020", [], []),
    "FusedLAMB": ("from apex.optimizers import FusedLAMB\n", "2019-08", [], []),
    "FusedLAMB in try": (
        "try:\n    from apex.optimizers import FusedLAMB\nexcept ImportError:\n    pass\n",
        "2019-08",
        [],
        [],
    ),
    "FusedAdagrad": ("import apex\napex.optimizers.FusedAdagrad(p)\n", "2020", [], []),
    "FusedRMSNorm": ("from apex.normalization import FusedRMSNorm\n", "2020", [], []),
    "amp_C": ("import amp_C\namp_C.multi_tensor_lamb\n", "2019-08", [], []),
    "caching second": ("from apex import amp\namp.init(True, False)\n", "2019-03", [], []),
    "scale second": ("from apex import amp\namp.init(True, 'dynamic')\n", "2019-08", [], []),
    "two eras": (
        {"a.py": "from apex.optimizers import FusedLAMB\n"}
        | {"b.py": ADAM + "FusedAdam(p, max_grad_norm=1.0, eps_inside_sqrt=True)\n"},
        "2019-03",
        [],
        ["FusedLAMB is of era 2019-08 and 2020, not 2019-03"],
    ),
    "pinned torch": (
        {"train.py": "from apex import amp\namp.init()\n", "requirements.txt": "torch==1.3.1\n"},
        "2019-08",
        [],
        [],
    ),
    "container": (
        {"train.py": "from apex import amp\namp.init()\n"}
        | {"Dockerfile": "FROM nvcr.io/nvidia/pytorch:20.03-py3\n"},
        "2020",
        [],
        [],
    ),
    # What --modernize supplies.
    "six": ("from torch._six import inf\n", "2019-03", ["torch._six"], []),
    "numpy": (
        "import numpy as np\nnp.int, np.asscalar\n",
        "2019-03",
        ["numpy.asscalar", "numpy.int"],
        [],
    ),
    "numpy of today": ("import numpy as np\nnp.int64, np.float32\n", "2019-03", [], []),
    "collections": (
        "import collections\ncollections.Iterable, collections.OrderedDict\n",
        "2019-03",
        ["collections.Iterable"],
        [],
    ),
    "pickles": (
        "import torch\ntorch.load(f)\ntorch.load(f, weights_only=False)\n",
        "2019-03",
        ["torch.load of any pickle"],
        [],
    ),
    "masks": (
        "import torch\nx.masked_fill_(m.byte(), 0)\n1 - (a == b)\n",
        "2019-03",
        ["1 - mask", "masks of uint8"],
        [],
    ),
    "bytes of images": ("image.byte()\n", "2019-03", [], []),
    "schedulers": (
        "from torch.optim.lr_scheduler import StepLR\nStepLR(o, 3, verbose=True)\n",
        "2019-03",
        ["StepLR(verbose=)"],
        [],
    ),
    "yaml": (
        "import yaml\nyaml.load(f)\nyaml.load(f, Loader=yaml.Loader)\n",
        "2019-03",
        ["yaml.load without a Loader"],
        [],
    ),
    "full": (
        "import torch\ntorch.full((2,), 0)\ntorch.full((2,), 0.0)\n",
        "2019-03",
        ["torch.full of an int"],
        [],
    ),
    "losses": ("loss.data[0]\nx.data[0]\n", "2019-03", ["loss.data[0]"], []),
    "iterators": ("data_iter.next()\nnode.next()\n", "2019-03", ["iterator.next()"], []),
    "AdamW": (
        "from transformers import AdamW\n",
        "2019-03",
        ["transformers.AdamW"],
        [],
    ),
    "other packages": (
        "from PIL import Image\nImage.ANTIALIAS, Image.BICUBIC\n"
        "from transformers.optimization import AdamW\n",
        "2019-03",
        ["PIL.Image.ANTIALIAS", "transformers.optimization.AdamW"],
        [],
    ),
    "linear algebra": (
        "import torch\ntorch.symeig(a), torch.gels(b, a), torch.svd(a)\n",
        "2019-03",
        ["torch.gels", "torch.symeig"],
        [],
    ),
    # What will not work.
    "pyprof": ("from apex import pyprof\n", "2019-03", [], ["use torch.profiler"]),
    "missing": ("from apex.amp.wrap import rnn_cast\n", "2019-03", [], ["leave it out"]),
    "no such name": (
        "import apex\napex.amp.nothing()\n",
        "2019-03",
        [],
        ["apex.amp.nothing is not"],
    ),
    "Python 2": ({"train.py": "print 1\n", "b.py": ""}, "2019-03", [], ["is not Python of today"]),
    "legacy function": (
        "from torch.autograd import Function\nclass F(Function):\n    def forward(self, x): pass\n"
        "class G(Function):\n    @staticmethod\n    def forward(ctx, x): pass\n",
        "2019-03",
        [],
        ["F: torch wants forward and backward"],
    ),
    "zero bytes": ("x = 1\0", "2019-03", [], ["is not Python of today"]),
    "too many levels": ("x = " + "-" * 100_000 + "1", "2019-03", [], ["is not Python of today"]),
    "removed": ("import torch\ntorch.eig(a)\n", "2019-03", [], ["use torch.linalg.eig"]),
}


def write(folder: Path, repository: Repository) -> Path:
    files = {"train.py": repository} if isinstance(repository, str) else repository
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_repository_with_a_known_answer(case: str, tmp_path: Path) -> None:
    repository, era, modernize, unsupported = CASES[case]
    report = examine(write(tmp_path, repository))
    assert report.era == era
    assert sorted(report.modernize) == modernize
    assert len(report.unsupported) == len(unsupported)
    for sentence, words in zip(report.unsupported, unsupported, strict=True):
        assert words in sentence
    assert ("--modernize" in report.options()) == bool(modernize)


@pytest.mark.parametrize("script", sorted(OLD_SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_old_scripts_need_what_their_tests_give_them(script: Path) -> None:
    report = examine(script)
    assert report.options() == (["--modernize"] if script.stem == "imagenet" else [])
    assert report.names
    assert report.gpu
    assert not report.unsupported
    assert report.era == "2019-03"


def test_nothing_that_is_examined_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    files = {"transformers/__init__.py": "raise SystemExit(3)\n"}
    write(tmp_path, files | {"train.py": "from transformers import AdamW\n"})
    assert examine(tmp_path).modernize == {"transformers.AdamW": ["train.py:1"]}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": ADAM, "train.py": "import a\n"})
    (tmp_path / "b.py").symlink_to(tmp_path / "gone.py")
    report = examine(tmp_path)
    assert report.unused == {"cannot be read: No such file or directory": ["b.py"]}
    assert report.files == 3
    (tmp_path / "train.py").write_text("import a, b\n")
    assert evidence.in_program(tmp_path / "train.py", tmp_path) == ([], {"a", "apex", "b"})


def test_the_command_has_the_options_that_this_machine_needs(tmp_path: Path) -> None:
    text = "from apex.optimizers import FusedLAMB\nimport torch._six\nmodel.cuda()\n"
    write(tmp_path, text)
    report = examine(tmp_path / "train.py")
    for has_gpu, options in ((True, ""), (False, " --device cpu")):
        last = report.text(has_gpu=has_gpu).splitlines()[-1]
        expected = f"  python -m apex_mp run --era 2019-08 --modernize{options} {tmp_path}/train.py"
        assert last == f"{expected} ..."


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("nothing", "there is no such file or folder"), (".", "there is no Python file in it")],
)
def test_nothing_to_read_is_a_sentence(
    path: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / path)])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


PROGRAMS: dict[str, tuple[dict[str, str], list[str]]] = {
    "in the script": ({"train.py": "from apex.optimizers import FusedLAMB\n"}, ["train.py:1"]),
    "in a module": (
        {"train.py": "import a.b\n", "a/b.py": "\nfrom apex.optimizers import FusedLAMB\n"},
        ["a/b.py:2"],
    ),
    "relative": (
        {"train.py": "from a import b\n", "a/b.py": "from .c import d\nfrom . import e\n"}
        | {"a/c.py": ADAM, "a/e.py": "from apex.optimizers import FusedLAMB\n"},
        ["a/e.py:1"],
    ),
    "not imported": ({"train.py": "", "b.py": "from apex.optimizers import FusedLAMB\n"}, []),
    "in a circle": ({"train.py": "import b\n", "b.py": "import train\n"}, []),
    "not of Python 3": ({"train.py": "import b\n", "b.py": "print 1 # apex\n"}, []),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_is_read_as_far_as_it_imports(case: str, tmp_path: Path) -> None:
    files, places = PROGRAMS[case]
    write(tmp_path, files)
    found, _ = evidence.in_program(tmp_path / "train.py", tmp_path)
    assert [each.where for each in found] == places


def test_the_page_shows_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = OLD_SCRIPTS.parents[1]
    monkeypatch.chdir(root)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = "tests/old_scripts/imagenet.py"
    assert main([command]) == 0
    page = (root / "docs" / "old_scripts.md").read_text()
    assert f"$ python -m apex_mp check {command}\n{capsys.readouterr().out}```" in page


@pytest.mark.slow
def test_run_takes_the_era_and_says_by_what(tmp_path: Path) -> None:
    line = "from apex.optimizers import FusedLAMB\nprint(FusedLAMB.__name__)\n"
    write(tmp_path, line)
    result = subprocess.run(
        [sys.executable, "-m", "apex_mp", "run", "train.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(apex_mp.__file__).parents[1]), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "FusedLAMB\n"), result.stderr
    assert result.stderr == "apex_mp run: --era 2019-08, by FusedLAMB at train.py:1\n"


@pytest.mark.parametrize(
    ("files", "first"),
    [
        ({"setup.py": MAIN, "tools/train.py": ADAM + MAIN, "a.py": MAIN}, "tools/train.py"),
        ({"a.py": MAIN, "main.py": MAIN, "b.py": ""}, "main.py"),
        ({"p/__init__.py": "", "p/train.py": "from . import a\n" + MAIN}, "-m p.train"),
        ({"p/__init__.py": "", "p/train.py": "import a\n" + MAIN}, "p/train.py"),
        ({"p/__init__.py": "", "p/__main__.py": MAIN}, "-m p"),
    ],
)
def test_the_likeliest_program_comes_first(
    files: dict[str, str], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path, files))
    lines = examine(Path()).text(has_gpu=True).splitlines()
    command = lines[lines.index("start with") + 1]
    assert command == f"  python -m apex_mp run {first} ..."


def test_a_module_is_read_in_its_own_package_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "p/__main__.py": "import p.a, other\n",
        "p/a.py": "import amp_C\namp_C.multi_tensor_lamb\n",
    }
    write(tmp_path, files | {"other.py": "from apex.optimizers import FusedAdagrad\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [each.where for each in evidence.in_module("p")[0]] == ["p/a.py:2"]
    assert [each.where for each in evidence.in_module("p.a")[0]] == ["p/a.py:2"]
    assert evidence.in_module("no.such.module") == ([], set())


GUARDED = """
try:
    from apex.contrib.multihead_attn import SelfMultiheadAttn
except ImportError:
    SelfMultiheadAttn = None
"""


@pytest.mark.parametrize("again", ["", "from apex.contrib import multihead_attn\n"])
def test_an_import_whose_error_is_caught_is_optional(again: str, tmp_path: Path) -> None:
    report = examine(write(tmp_path, {"train.py": GUARDED + again}))
    assert bool(report.unsupported) == bool(again)
    (name,) = report.optional
    assert name.startswith("apex.contrib.multihead_attn.SelfMultiheadAttn is not in apex_mp; use")
    assert f"optional, and not here\n  {name}" in report.text(has_gpu=True)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that asks for apex of 2020."""
    text = "try:\n    from apex.normalization import FusedRMSNorm as Norm\nexcept ImportError:\n"
    write(tmp_path / "site", {"some_library/layers.py": f"{text}    Norm = None\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.mark.usefixtures("library")
def test_the_era_is_that_of_a_library_where_the_script_says_nothing(tmp_path: Path) -> None:
    files = {"train.py": "import some_library\n", "old.py": f"import some_library\n{ADAM}"}
    folder = write(tmp_path / "project", files)
    report = examine(folder / "train.py")
    assert report.era == "2020"
    assert [each.where for each in report.evidence] == ["some_library/layers.py:2"]
    assert report.options() == ["--era", "2020"]
    assert examine(folder / "old.py").era == "2020"
    (folder / "some_library").mkdir()  # Of data: Python takes the package.
    assert examine(folder / "train.py").era == "2020"
    own = write(tmp_path / "own", {"some_library.py": "", "train.py": "import some_library\n"})
    assert examine(own / "train.py").era == "2019-03"


def test_what_is_no_program_of_python_ends_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link.py").symlink_to(tmp_path / "link.py")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "link.py")])
    assert "there is no such file or folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "is not Python of today" in said
    assert "cannot be read: Too many levels of symbolic links" in said


def test_a_package_around_the_present_folder_is_left_by_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write(tmp_path / "p", {"__init__.py": "", "train.py": f"from . import a\n{MAIN}"})
    monkeypatch.chdir(package)
    for path in ("train.py", "."):
        last = examine(Path(path)).text(has_gpu=True).splitlines()[-1]
        assert last == f"  PYTHONPATH={tmp_path} python -m apex_mp run -m p.train ..."
    (package / "train.py").write_text(f"import a\n{MAIN}")
    last = examine(Path("train.py")).text(has_gpu=True).splitlines()[-1]
    assert last == "  python -m apex_mp run train.py ..."


CAUGHT = """
import contextlib
from typing import TYPE_CHECKING
{0}
"""
IMPORT = "from apex.mlp import MLP"


@pytest.mark.parametrize(
    ("text", "is_optional"),
    [
        (f"try:\n    {IMPORT}\nexcept:\n    MLP = None", True),
        (f"try:\n    {IMPORT}\nexcept (ValueError, ModuleNotFoundError):\n    MLP = None", True),
        (f"with contextlib.suppress(ImportError):\n    {IMPORT}", True),
        (f"if TYPE_CHECKING:\n    {IMPORT}", True),
        (f"try:\n    {IMPORT}\nexcept ImportError:\n    raise ImportError('install apex')", False),
        (f"try:\n    def later():\n        {IMPORT}\nexcept ImportError:\n    pass", False),
        (f"try:\n    {IMPORT}\nexcept ValueError:\n    MLP = None", False),
    ],
)
def test_an_import_is_optional_where_the_code_goes_on(
    text: str, is_optional: bool, tmp_path: Path
) -> None:
    report = examine(write(tmp_path, CAUGHT.format(text)))
    assert (bool(report.optional), bool(report.unsupported)) == (is_optional, not is_optional)


def test_what_is_no_file_and_what_is_too_deep_does_not_end_the_report(tmp_path: Path) -> None:
    deep = f"def f(model):\n    return model{'.b()' * 900}.half()\n"
    write(tmp_path, {"-train.py": f"from apex import amp\n{MAIN}", "a.py": deep})
    for name in ("dockerfiles", "README.assets"):
        (tmp_path / name).mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "kernel.cu").write_text("")
    os.mkfifo(tmp_path / "pipe.py")
    report = examine(tmp_path)
    assert report.files == 2
    (sentence,) = report.unused  # No script imports it.
    assert "is nested too deeply" in sentence
    assert report.status == 0


def test_a_script_whose_name_is_like_an_option_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path, {"-train.py": MAIN}))
    assert examine(Path()).text(has_gpu=True).endswith("python -m apex_mp run ./-train.py ...")


def test_what_import_module_imports_is_named(tmp_path: Path) -> None:
    text = "optimizers = importlib.import_module('apex.optimizers')\noptimizers.FusedNovoGrad\n"
    text += "importlib.import_module('apex.contrib.xentropy').SoftmaxCrossEntropyLoss\n"
    report = examine(write(tmp_path, f"import importlib\n{text}"))
    assert report.era == "2020"
    assert {*report.names} == {
        "apex.optimizers.FusedNovoGrad",
        "apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
    }


def test_without_a_program_the_options_are_shown_and_nothing_is_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import numpy\nnumpy.str('a')\nfrom apex.optimizers import FusedLAMB\n"
    report = examine(write(tmp_path, {"layers.py": text}))
    lines = report.text(has_gpu=True).splitlines()
    command = "  python -m apex_mp run --era 2019-08 --modernize YOUR_SCRIPT ..."
    assert lines[-2:] == ["start your script with", command]
    assert capfd.readouterr().err == ""
