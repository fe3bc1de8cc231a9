"""Collectives over many tensors as one vector, under the names of apex."""

from apex_mp.core.flat_calls import (
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    split_by_type,
    split_half_float_double,
)

__all__ = [
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "split_by_type",
    "split_half_float_double",
]
