"""The eras of apex, which differ in what a name stands for, and in which names exist."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from apex_mp._as_apex.table import (
    LATER_ENUMS,
    LATER_FUNCTIONAL,
    LATER_NORM_FUNCTIONS,
    LATER_NORM_KERNELS,
    LATER_NORMS,
)

Place = tuple[str, str]

_HERE = "apex_mp._as_apex"
_LATER_OPTIMIZERS = frozenset(
    {
        ("apex.optimizers", "FusedLAMB"),
        ("apex.optimizers", "FusedNovoGrad"),
        ("apex.optimizers", "FusedSGD"),
        ("amp_C", "multi_tensor_lamb"),
        ("amp_C", "multi_tensor_lamb_stage1_cuda"),
        ("amp_C", "multi_tensor_lamb_stage2_cuda"),
        ("amp_C", "multi_tensor_novograd"),
    }
)
_SINCE_2020 = frozenset(
    {
        ("apex.optimizers", "FusedAdagrad"),
        ("apex.optimizers.fused_adagrad", "FusedAdagrad"),
        ("apex.optimizers", "FusedMixedPrecisionLamb"),
        ("apex.optimizers.fused_mixed_precision_lamb", "FusedMixedPrecisionLamb"),
        ("amp_C", "multi_tensor_adagrad"),
        ("amp_C", "multi_tensor_adam_capturable"),
        ("amp_C", "multi_tensor_adam_capturable_master"),
        ("amp_C", "multi_tensor_l2norm_mp"),
        ("amp_C", "multi_tensor_l2norm_scale"),
        ("amp_C", "multi_tensor_lamb_mp"),
        ("amp_C", "multi_tensor_unscale_l2norm"),
        ("amp_C", "update_scale_hysteresis"),
    }
)
_LATER_MODULES = frozenset(
    (module, name)
    for module, names in (
        ("apex.contrib.layer_norm", "FastLayerNorm"),
        ("apex.contrib.layer_norm.layer_norm", "FastLayerNorm FastLayerNormFN"),
        ("apex.contrib.optimizers.distributed_fused_adam", "DistributedFusedAdam"),
        ("apex.contrib.optimizers.distributed_fused_lamb", "DistributedFusedLAMB"),
        ("apex.contrib.xentropy", "SoftmaxCrossEntropyLoss"),
        ("apex.contrib.xentropy.softmax_xentropy", "SoftmaxCrossEntropyLoss"),
        ("apex.transformer.enums", LATER_ENUMS),
        ("apex.transformer.functional", LATER_FUNCTIONAL),
        ("apex.normalization", LATER_NORMS),
        ("apex.normalization.fused_layer_norm", f"{LATER_NORMS} {LATER_NORM_FUNCTIONS}"),
        ("fused_layer_norm_cuda", LATER_NORM_KERNELS),
    )
    for name in names.split()
)
_LATER = {
    ("apex.amp", "initialize"): f"{_HERE}.since_2019_08",
    ("apex.amp.frontend", "initialize"): f"{_HERE}.since_2019_08",
    ("apex.optimizers", "FusedAdam"): f"{_HERE}.since_2019_08",
    ("apex.optimizers.fused_adam", "FusedAdam"): f"{_HERE}.since_2019_08",
}


@dataclass(frozen=True)
class Era:
    """One state of apex.

    Attributes:
        name: Year and month.
        origins: Names that another module than that of the table holds.
        absent: Names of the table that did not exist in this era.
    """

    name: str
    origins: dict[Place, str] = field(default_factory=dict)
    absent: frozenset[Place] = frozenset()


ERAS = {
    era.name: era
    for era in (
        Era(
            "2019-03",
            {
                ("apex.amp", "init"): f"{_HERE}.until_2019_08",
                ("apex.amp.amp", "init"): f"{_HERE}.until_2019_08",
                ("apex.optimizers", "FP16_Optimizer"): f"{_HERE}.until_2019_08",
                ("apex.optimizers.fp16_optimizer", "FP16_Optimizer"): f"{_HERE}.until_2019_08",
            },
            _LATER_OPTIMIZERS | _SINCE_2020 | _LATER_MODULES,
        ),
        Era("2019-08", _LATER, _SINCE_2020 | _LATER_MODULES),
        Era("2020", _LATER, frozenset({("apex.optimizers", "FP16_Optimizer")})),
    )
}


def eras_with(place: Place) -> list[str]:
    """Return the names of the eras in which a module held a name of the table."""
    return [era.name for era in ERAS.values() if place not in era.absent]


@dataclasses.dataclass(frozen=True)
class Wording:
    """The words for Python or for a command line.

    Attributes:
        caller: The function or command, for the message.
        force: How to hide an apex that is installed.
        era: How to choose another era, with a placeholder for its name.
    """

    caller: str
    force: str
    era: str
