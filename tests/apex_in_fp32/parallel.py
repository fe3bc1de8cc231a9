"""parallel for one process, which has all of every batch."""


def DistributedDataParallel(module):  # noqa: N802
    return module
