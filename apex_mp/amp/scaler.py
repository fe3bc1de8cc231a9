"""The loss scaler of amp, under the name that pickles and imports have."""

from apex_mp.scale.amp_scaler import LossScaler

__all__ = ["LossScaler"]
