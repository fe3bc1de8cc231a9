"""amp without casts and scales: nothing but the steps that it skips."""

import contextlib

import torch


def half_function(fn):
    return fn


float_function = promote_function = half_function


def register_half_function(module, name):
    pass


register_float_function = register_promote_function = register_half_function


def grads_are_finite(optimizer):
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    return all(bool(grad.isfinite().all()) for grad in grads if grad is not None)


def init(*_, **__):
    return AmpHandle()


class AmpHandle:
    @contextlib.contextmanager
    def scale_loss(self, loss, optimizer):
        yield loss
        if not grads_are_finite(optimizer):
            optimizer.zero_grad(set_to_none=True)  # Then a step does nothing.

    def wrap_optimizer(self, optimizer, num_loss=1):
        return OptimWrapper(optimizer)


class OptimWrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    @contextlib.contextmanager
    def scale_loss(self, loss):
        yield loss

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        if grads_are_finite(self):
            self.optimizer.step()
