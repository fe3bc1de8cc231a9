"""fp16_utils without fp16: the model's parameters are their own masters, every scale is 1."""

import torch

clip_grad_norm = torch.nn.utils.clip_grad_norm_


def network_to_half(network):
    return network


def prep_param_lists(model):
    params = list(model.parameters())
    return params, params


def model_grads_to_master_grads(model_params, master_params):
    assert model_params is master_params


master_params_to_model_params = model_grads_to_master_grads


def to_python_float(t):
    return t.item()


class LossScaler:
    loss_scale = 1.0

    def __init__(self, *_, **__):
        pass

    def backward(self, loss):
        loss.backward()

    def has_overflow(self, params):
        return False

    def update_scale(self, overflow):
        pass


class DynamicLossScaler(LossScaler):
    def has_overflow(self, params):
        return not all(bool(param.grad.isfinite().all()) for param in params)


class FP16_Optimizer:  # noqa: N801
    loss_scale = 1.0

    def __init__(self, init_optimizer, *_, **__):
        self.optimizer = init_optimizer
        self.state = init_optimizer.state
        self.overflow = False

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self):
        self.optimizer.zero_grad()

    def backward(self, loss, update_master_grads=True):
        loss.backward()
        self.overflow = not all(bool(param.grad.isfinite().all()) for param in self.params())

    def update_master_grads(self):
        pass

    def clip_master_grads(self, max_norm):
        return -1 if self.overflow else clip_grad_norm(self.params(), max_norm)

    def step(self, closure=None):
        if closure is not None:
            return self.optimizer.step(closure)
        if self.overflow:
            self.optimizer._opt_called = True  # Or a scheduler would warn.
            return None
        return self.optimizer.step()

    def state_dict(self):
        return {"inner": self.optimizer.state_dict()}
