"""A precision plugin for `import pytorch_lightning`, whose classes are not those of `lightning`."""

from apex_mp.trainers.common import missing_package
from apex_mp.trainers.lightning_plugin import ScaledPrecision

try:
    from pytorch_lightning.plugins.precision import HalfPrecision, MixedPrecision
except ModuleNotFoundError as error:
    raise missing_package(__name__, error) from error

__all__ = [
    "FP16Plugin",
]


class FP16Plugin(ScaledPrecision, MixedPrecision):  # type: ignore[misc]
    __doc__ = ScaledPrecision.__doc__

    _half_precision = HalfPrecision
