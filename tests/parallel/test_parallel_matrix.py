"""docs/parallel.md says which API works with which kind of parallelism: each cell is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_matrix_cases import (
    ALONE,
    APIS,
    BAD_STEP,
    KINDS,
    REFUSED,
    STEPS,
    WORLD,
    table,
    train,
    work,
)

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    folder = tmp_path_factory.mktemp("matrix")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {api: train(api, ALONE, 0) for api in APIS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", APIS)
def test_processes_train_as_one_does_or_refuse(
    api: str,
    kind: str,
    found: list[dict[tuple[str, str], Any]],
    alone: dict[str, dict[str, Any]],
) -> None:
    for of_rank in found:
        run, expected = of_rank[api, kind], alone[api]
        if (api, kind) in REFUSED:
            assert run["refused"].startswith(REFUSED[api, kind])
            continue
        assert run["moved"] == [step != BAD_STEP for step in range(STEPS)]
        assert run["scales"] == expected["scales"]
        # Gradients of parts are rounded to their dtype before they are added.
        is_float32 = "AdamW" in api
        moved, wanted = (each["params"] - each["start"] for each in (run, expected))
        assert (moved - wanted).norm() < (1e-5 if is_float32 else 0.01) * wanted.norm()


def test_the_table_in_the_docs_is_that_of_these_tests() -> None:
    page = Path(__file__).parents[2] / "docs" / "parallel.md"
    assert table() in page.read_text(encoding="utf-8")
