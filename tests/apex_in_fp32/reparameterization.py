"""reparameterization by torch's own weight norm, on every matrix of a recurrent layer."""

from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm


def apply_weight_norm(module, hook_child):
    for layer in module.rnns:
        for name in ("w_ih", "w_hh", "w_mih", "w_mhh"):
            weight_norm(layer, name)


def remove_weight_norm(module):
    for layer in module.rnns:
        for name in ("w_ih", "w_hh", "w_mih", "w_mhh"):
            parametrize.remove_parametrizations(layer, name)
