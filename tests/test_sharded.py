"""Our GradScaler trains what FSDP2 shards, and FusedAdam in ZeRO; the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_cases import BAD_STEP, STEPS, WORLD, fully_sharded, work, zero

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu_only,
    # FSDP2 has no masters here, which the scaler warns of once.
    pytest.mark.filterwarnings("ignore:GradScaler. AdamW steps .* no float32 masters"),
]

ALONE = {
    "fp16": lambda: fully_sharded(torch.float16, 0, 1),
    "fp32 fused": lambda: fully_sharded(torch.float32, 0, 1, fused=True),
    "zero": lambda: zero(0, 1),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", ALONE)
def test_shards_train_as_one_process_and_skip_together(
    way: str, found: list[dict[str, Any]]
) -> None:
    alone = ALONE[way]()
    for rank in range(WORLD):
        run = found[rank][way]
        assert run["moved"] == [step != BAD_STEP for step in range(STEPS)]
        assert run["scales"] == alone["scales"]
        # Gradients of two halves are rounded to float16 before they are added.
        tolerance = 2.0**-9 if way == "fp16" else 1e-6
        torch.testing.assert_close(
            run["norms"], alone["norms"], rtol=tolerance, atol=0, equal_nan=True
        )
        for param, other in zip(run["params"], alone["params"], strict=True):
            torch.testing.assert_close(param, other, rtol=0, atol=tolerance)


def test_optimizers_that_step_whole_tensors_refuse_a_dtensor(found: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        said = found[rank]["refused"]
        assert [each.split(":")[0] for each in said] == ["FusedAdam", "FP16_Optimizer"]
        assert all("params[0][0] is a DTensor" in each for each in said)
