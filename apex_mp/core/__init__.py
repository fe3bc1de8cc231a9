"""What the public packages share: operators, gradients, masters, the step and what became of it."""
