"""benchmarks.house counts what it says on a made-up package; figures at their goal stay there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import house
from benchmarks import house_source as source

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

FILES = {
    "tiny/__init__.py": "from tiny.api import run\n",
    "tiny/api.py": "from tiny import _C, core\n\ndef run() -> None:\n    from tiny import late\n",
    "tiny/late.py": "from tiny import api\n",
    "tiny/core.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from tiny.unused import Told\n"
        "def unscale(grads):\n    ops.unscale_(grads)\n"
        "def patch(owner):\n    setattr(owner, 'a', 1)\n    delattr(owner, 'a')\n"
    ),
    "tiny/unused.py": (
        "import dataclasses\nimport torch\nfrom tiny import core\n\n"
        "@dataclasses.dataclass\nclass Told:\n    '''Whoever reads: told.'''\n\n"
        "    found_inf: bool\n    overflows: int\n\n"
        "class Wrapper(torch.optim.Optimizer):\n"
        "    def __init__(self):\n        self._overflow = False\n        self.cur_scale = 1.0\n\n"
        "    @property\n    def param_groups(self):\n        return []\n\n"
        "    def adopt(self):  # hold on\n        pass\n\n"
        "    def update(self, hold):\n        pass\n"
    ),
    "tiny/_C.pyi": "",
    "tiny/_private.py": "",
    "tiny/_version.py": "",
    "README.md": "Call `tiny.late`.\n",
    "csrc/a.h": (
        "struct Outcome {\n  bool found_inf = false;\n};\n"
        "struct Task {\n  float* found_inf;\n};\n// The room.\n"
    ),
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / "tiny"


def test_a_circle_is_found_through_functions_and_annotations(tiny: Path) -> None:
    assert source.import_circles(tiny) == ["tiny.api, tiny.late", "tiny.core, tiny.unused"]


def test_what_answers_did_it_overflow_is_found_in_python_and_in_cpp(tiny: Path) -> None:
    records, others = source.overflow_answers(tiny)
    assert records == ["tiny/unused.py:6 Told: found_inf", "csrc/a.h:1 Outcome: found_inf"]
    assert others == ["tiny/unused.py:12 Wrapper: _overflow"]


def test_a_module_is_loose_if_it_is_private_or_no_page_names_it(tiny: Path) -> None:
    assert source.loose_modules(tiny, [tiny.parent / "README.md"]) == ["_private", "core", "unused"]


def test_each_rule_finds_what_it_is_for(tiny: Path) -> None:
    wrapper = "tiny/unused.py:12 Wrapper"
    assert source.scale_holders(tiny) == [f"{wrapper}: cur_scale"]
    assert source.delegating_optimizers(tiny) == source.masters_adopted(tiny) == [wrapper]
    assert source.unscaling_files(tiny) == ["tiny/core.py"]
    assert source.patching_modules(tiny) == ["tiny/core.py"]


def test_the_longest_come_first(tiny: Path) -> None:
    sizes = source.sizes(tiny)
    assert sizes["file"][0] == (25, "tiny/unused.py")
    assert sizes["class"][0] == (4, "tiny/unused.py:12 Wrapper")
    assert sizes["function"][0] == (3, "tiny/unused.py:13 __init__")


def test_retired_words_count_in_names_and_the_unmistakable_ones_in_prose_too(tiny: Path) -> None:
    counts, places = source.retired_words(tiny)
    assert counts == {"told": 2, "whoever": 1, "hold": 1, "room": 1}
    assert "tiny/unused.py:24: hold: hold" in places


def test_a_file_is_counted_only_if_the_step_itself_runs_a_line_of_it(tmp_path: Path) -> None:
    module: dict = {}
    path = tmp_path / "module.py"
    path.write_text("def used():\n    pass\n")
    exec(compile(path.read_text(), str(path), "exec"), module)
    calls = []

    def step() -> None:
        calls.append(None)
        if len(calls) == 3:
            module["used"]()

    assert str(path) not in house.files_run(step, warm_up=3)
    calls.clear()
    assert str(path) in house.files_run(step, warm_up=2)


def test_every_line_of_the_table_has_what_was_measured_and_what_is_wanted(tiny: Path) -> None:
    figures = house.source_figures(tiny.parent, "tiny")
    rows = house.table(figures).splitlines()
    assert rows[0] == "| what | now | wanted |"
    assert "| import circles, those for annotations included | 2 | 0 |" in rows
    assert len(rows) == 2 + len(figures)


def test_no_modules_of_apex_mp_import_each_other_in_a_circle() -> None:
    assert source.import_circles(house.ROOT / "apex_mp") == []


def test_no_internal_module_lies_at_the_top_level_and_one_file_unscales() -> None:
    figures = house.source_figures(house.ROOT)
    assert figures["loose"].items == []
    assert figures["unscale"].items == ["apex_mp/core/found_inf.py"]


def test_one_class_delegates_to_an_inner_optimizer() -> None:
    (place,) = source.delegating_optimizers(house.ROOT / "apex_mp")
    assert place.endswith("DelegatingOptimizer")


def test_a_step_of_fused_adam_runs_lines_of_eight_modules_at_most() -> None:
    modules = house.modules_run("FusedAdam")
    assert "apex_mp.optimizers._fused" in modules
    assert len(modules) <= house.STEPS["FusedAdam"], modules


def test_every_path_in_the_glossary_exists() -> None:
    text = (house.ROOT / "docs" / "glossary.md").read_text()
    paths = re.findall(r"\| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(paths) == text.count("\n|") - 2 * text.count("\n| term |")
    for path in paths:
        home = house.ROOT if path.startswith("csrc/") else house.ROOT / "apex_mp"
        assert (home / path).exists(), path
