"""The optimization levels of `amp.initialize`: their options, and masters in an optimizer."""
