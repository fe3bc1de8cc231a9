"""The engine: steps lists of tensors by a rule, on devices, in processes, in host memory."""
