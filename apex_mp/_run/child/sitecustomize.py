"""Applies a run of `python -m apex_mp run` to child processes, which find it by PYTHONPATH.

Python imports this when it starts. It installs a finder: when torch or apex is first imported, the
finder imports apex_mp, which applies the parent's settings. Then this runs the sitecustomize that
it hides.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_APEX = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")


class _Waiting:
    """A meta path finder that finds nothing, and acts when torch or apex is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for torch or apex, and None for all other modules."""
        if name == "torch":
            return self._torch(path)
        if name.partition(".")[0] in _APEX and self in sys.meta_path:
            import torch  # noqa: F401  # which sets everything up

            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _torch(self, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return torch's own spec, with a loader that applies the settings afterwards."""
        sys.meta_path.remove(self)
        spec = None
        for finder in sys.meta_path:
            spec = finder.find_spec("torch", path)
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del vars(loader)["exec_module"]
            load(module)
            _set_up()

        vars(loader)["exec_module"] = exec_module
        return spec


def _set_up() -> None:
    # The copy of apex_mp that this file belongs to, whatever else is installed.
    sys.path.insert(0, _ROOT)
    try:
        from apex_mp._run.apply import apply_in_child
    finally:
        sys.path.remove(_ROOT)
    apply_in_child()


def _run_the_hidden_one() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _modernize_sources() -> None:
    """Change how Python compiles scripts, before it compiles this process's."""
    path = os.path.join(os.path.dirname(_HERE), "modernize", "source.py")
    spec = spec_from_file_location("_apex_mp_source", path)
    if spec is not None and spec.loader is not None:
        source = module_from_spec(spec)
        spec.loader.exec_module(source)
        source.supply(setattr)


if "APEX_MP_RUN" in os.environ:
    sys.meta_path.insert(0, _Waiting())
    if json.loads(os.environ["APEX_MP_RUN"])["modernize"]:
        _modernize_sources()
_run_the_hidden_one()
