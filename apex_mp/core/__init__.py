"""What the public packages share: operators, gradients, masters, and the step with its outcome."""
