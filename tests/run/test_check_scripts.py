"""`check` counts what a script reaches, and not what lies beside it: status, order, apex itself."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from apex_mp._check.command import main
from apex_mp._check.report import Report, examine

pytestmark = pytest.mark.cpu_only

GUARD = "if __name__ == '__main__':\n    main()\n"
LEGACY = """
from torch.autograd import Function
class Old(Function):
    def forward(self, x): pass
"""
TRAINS = "from apex import amp\nwith amp.scale_loss(l, o) as s:\n    s.backward()\n"


def report_of(tmp_path: Path, files: dict[str, str]) -> Report:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text).replace("{}", tmp_path.name))
    return examine(tmp_path)


# (files, status, sentences of what will not work, and of what no script imports)
STATUS: dict[str, Any] = {
    "imported by a script": ({"train.py": f"import old\n{GUARD}", "old.py": LEGACY}, 1, 1, 0),
    "from its folder": ({"a/train.py": f"import old\n{GUARD}", "a/old.py": LEGACY}, 1, 1, 0),
    "through another": (
        {"train.py": "from m import x", "m/__init__.py": "from . import y", "m/y.py": LEGACY},
        1,
        1,
        0,
    ),
    "by the name of the package around it": (
        {"__init__.py": "", "train.py": f"import {{}}.old\n{GUARD}", "old.py": LEGACY},
        1,
        1,
        0,
    ),
    "not imported": ({"train.py": TRAINS, "old.py": LEGACY}, 0, 0, 1),
    "without a script": ({"layers.py": LEGACY}, 1, 1, 0),
    "Python 2 beside it": ({"train.py": TRAINS, "tools.py": "print 1\n"}, 0, 0, 1),
    "a program of Python 2": ({"train.py": TRAINS, "tools.py": f"print 1\n{GUARD}"}, 1, 1, 0),
    "of another era beside it": (
        {
            "train.py": f"{TRAINS}amp.init(True, False)\nFusedAdam(max_grad_norm=1)\n",
            "old.py": "from apex.optimizers import FusedAdagrad\n",
        },
        0,
        0,
        1,
    ),
    "CUDA code": ({"train.py": TRAINS, "a/kernel.cu": ""}, 3, 0, 0),
    "CUDA code and another": ({"train.py": LEGACY, "a/kernel.cu": ""}, 1, 1, 0),
    "nothing": ({"train.py": TRAINS}, 0, 0, 0),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", STATUS)
def test_the_status_is_that_of_what_scripts_reach(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, status, unsupported, unused = STATUS[case]
    report = report_of(tmp_path, files)
    found = report.status, len(report.unsupported), len(report.unused)
    assert found == (status, unsupported, unused)
    assert main([str(tmp_path)]) == status
    said = capsys.readouterr().out
    assert ("files that no script imports" in said) == bool(unused)
    assert ("CUDA code of its own, at a/kernel.cu," in said) == ("a/kernel.cu" in files)


APEX = {
    "setup.py": "",
    "apex/__init__.py": "",
    "apex/amp/__init__.py": "",
    "tests/test_mlp.py": "from apex.mlp import MLP\n",
    "csrc/kernel.cu": "",
}


@pytest.mark.parametrize("place", ["apex", "third_party/apex", "vendor/NVIDIA-apex", "package"])
def test_a_checkout_of_apex_is_not_read(place: str, tmp_path: Path) -> None:
    files = {f"{place}/{name}": text for name, text in APEX.items()}
    if place == "package":  # copied into the project
        files = {"apex/__init__.py": "", "apex/amp/__init__.py": "", "apex/mlp.py": LEGACY}
        place = "apex"
    report = report_of(tmp_path, {**files, "train.py": TRAINS})
    assert (report.status, report.era, [*report.names]) == (0, "2019-03", ["apex.amp.scale_loss"])
    assert report.left_out == [place]
    assert f"apex itself is at {place}; it is not read" in report.text(has_gpu=True)


def test_a_checkout_that_is_asked_for_is_read(tmp_path: Path) -> None:
    report = report_of(tmp_path, APEX)
    assert report.left_out == []
    assert any("apex.mlp" in sentence for sentence in (*report.unsupported, *report.unused))


def test_what_trains_comes_first(tmp_path: Path) -> None:
    model = f"from apex.normalization import FusedLayerNorm\n{GUARD}"
    files = {
        "model.py": model,
        "tools/evaluate.py": GUARD,
        "engine.py": TRAINS,
        "tools/train_net.py": f"import engine\n{GUARD}",
        "setup.py": "setup()",
        "tests/test_train.py": f"import engine\n{GUARD}",
    }
    report = report_of(tmp_path, files)
    scripts = [Path(script).relative_to(tmp_path).as_posix() for script in report.scripts]
    # The test trains, too, but is not named like a program.
    expected = ["tools/train_net.py", "tests/test_train.py", "model.py", "tools/evaluate.py"]
    assert scripts == expected


@pytest.mark.parametrize(
    "text",
    [
        "from apex import amp\nclass A:\n    def f(self):\n        self.amp = amp\n"
        "    def g(self):\n        self.amp.initialize(1)\n",
        "import apex\nmixed = apex.amp\nmixed.initialize(1)\n",
        "from apex import amp as a\nx.y.z = a\nx.y.z.initialize(1)\n",
    ],
)
def test_a_module_that_is_kept_somewhere_is_followed(text: str, tmp_path: Path) -> None:
    assert [*report_of(tmp_path, {"train.py": text}).names] == ["apex.amp.initialize"]


# (source, what --modernize supplies)
MODERNIZED = {
    "np.sctypes": ("import numpy as np\nnp.sctypes['int']\n", ["numpy.sctypes"]),
    "async": ("x.cuda(async=True)\n", ["x.cuda(async=True)"]),
    "set_": ("p.data.set_(t)\n", ["x.data.set_()"]),
    "set_ of another": ("p.set_(t)\nq.data.fill_(0)\n", []),
    "item": ("m.weight[3] = 0\n", ["an in-place change of a view of a parameter"]),
    "view": ("m.bias.view(3, -1)[:, 4] += 1\n", ["an in-place change of a view of a parameter"]),
    "name": ("b = m.bias.view(3)\nb[1] += 1\n", ["an in-place change of a view of a parameter"]),
    "call": ("m.weight[0].zero_()\n", ["an in-place change of a view of a parameter"]),
    "its data": ("m.weight.data[0] = 1\nm.weight.data[0].zero_()\nb = m.bias.data\nb[0] = 1\n", []),
    "no_grad": ("with torch.no_grad():\n    m.weight[0].zero_()\n", []),
    "whole": ("m.weight.fill_(0)\nnn.init.zeros_(m.weight[0])\n", []),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", MODERNIZED)
def test_what_modernize_supplies_is_named(case: str, tmp_path: Path) -> None:
    text, expected = MODERNIZED[case]
    report = report_of(tmp_path, {"train.py": text})
    assert [*report.modernize] == expected
    assert report.status == 0


def test_torchs_own_sync_batch_norm_asks_for_a_gpu(tmp_path: Path) -> None:
    text = "from torch import nn\nnn.SyncBatchNorm.convert_sync_batchnorm(m)\n"
    report = report_of(tmp_path, {"train.py": text})
    assert report.gpu == ["train.py:2 (torch's SyncBatchNorm)"]


def test_a_project_below_a_folder_named_tests_is_no_test(tmp_path: Path) -> None:
    files = {"a/b/train.py": f"{TRAINS}{GUARD}", "steps.py": f"{TRAINS}{GUARD}"}
    assert report_of(tmp_path / "tests" / "project", files).scripts[0].endswith("train.py")
