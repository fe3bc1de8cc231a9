"""The optimization levels of `amp.initialize`: options, masters in an optimizer, checkpoints."""
