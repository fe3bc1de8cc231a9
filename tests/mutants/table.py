"""Wrong lines for apex_mp/, each with the test file that has to fail with it."""

from __future__ import annotations

from around import CHECKPOINTS, MONITOR, OLD_SCRIPTS
from drawn import DRAWN
from scaling import AMP, SCALER
from training import FP16_UTILS, OPTIMIZERS

PARTS = (AMP, FP16_UTILS, OPTIMIZERS, CHECKPOINTS, SCALER, MONITOR, OLD_SCRIPTS, DRAWN)
MUTANTS = {name: mutant for part in PARTS for name, mutant in part.items()}
