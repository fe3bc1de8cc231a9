"""What the public packages share: operators, tensors, options, messages, copies to the host."""
