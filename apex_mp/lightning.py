"""A precision plugin for `import lightning`: `Trainer(plugins=[FP16Plugin()])`."""

from apex_mp.trainers.common import missing_package
from apex_mp.trainers.lightning_plugin import ScaledPrecision

try:
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
except ModuleNotFoundError as error:
    raise missing_package(__name__, error) from error

__all__ = [
    "FP16Plugin",
]


class FP16Plugin(ScaledPrecision, MixedPrecision):  # type: ignore[misc]
    __doc__ = ScaledPrecision.__doc__

    _half_precision = HalfPrecision
