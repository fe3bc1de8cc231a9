"""Checks of loaded states, and views of optimizers for torch.distributed.checkpoint."""
