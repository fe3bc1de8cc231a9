"""Whether gradients were edited between two calls."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

from torch.nn import Parameter

from apex_mp import _C


class Edits(enum.Enum):
    """Which gradients were edited after the masters' gradients were made from the model's."""

    NONE = "none, or masters' alone"
    OF_MODEL = "the model's"
    OF_BOTH = "the model's and masters'"


class EditWatch:
    """Detects edits of gradients by gradient version and norm.

    An all-reduce and an edit through `.data` do not change the version, so norms are compared too.
    """

    def __init__(self) -> None:
        self._model, self._masters = _C.GradVersions(), _C.GradVersions()
        self._norms: Mapping[int, float] | None = None

    def begin(
        self,
        models: list[Parameter],
        norms: Mapping[int, float] | None,
        masters: list[Parameter] | None = None,
    ) -> None:
        """Remember the gradients as they are."""
        self._norms = norms
        self._model.record(models)
        if masters is not None:
            self._masters.record(masters)

    def find(
        self, models: list[Parameter], norms: Mapping[int, float] | None, masters: list[Parameter]
    ) -> Edits:
        """Return what was edited since `begin`, with its Args; clearing a gradient is no edit."""
        before = self._norms
        has_new_norms = (
            before is not None
            and norms is not None
            and any(not _same(before.get(param), norm) for param, norm in norms.items())
        )
        if not has_new_norms and not self._model.changed(models):
            return Edits.NONE
        if not self._masters.changed(masters):
            return Edits.OF_MODEL
        # A write that changes no norm is not worth a warning.
        return Edits.OF_BOTH if has_new_norms or not norms else Edits.NONE


def _same(one: float | None, other: float) -> bool:
    """Whether two norms are equal, or both NaN."""
    return one == other or (one is not None and math.isnan(one) and math.isnan(other))
