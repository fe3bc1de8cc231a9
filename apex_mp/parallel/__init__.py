"""Data parallelism with the names of apex.parallel, over torch.distributed."""

from torch.distributed import ReduceOp

from apex_mp.parallel import LARC
from apex_mp.parallel import flat_calls as flat_calls
from apex_mp.parallel.distributed import DistributedDataParallel
from apex_mp.parallel.reducer import Reducer
from apex_mp.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
