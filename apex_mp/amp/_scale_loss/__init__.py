"""`scale_loss` blocks: gradients are unscaled when a block ends; an overflow skips a step."""
