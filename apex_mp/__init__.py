"""Mixed-precision training with the API of NVIDIA's apex (2018-2019), on today's PyTorch."""

from apex_mp import _extension
from apex_mp._version import __version__

try:
    _extension.load()
except ImportError:
    if not _extension.is_environment_report():
        raise
else:
    from apex_mp import amp, fp16_utils, optimizers

__all__ = ["__version__", "amp", "fp16_utils", "optimizers"]
