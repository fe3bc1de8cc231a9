"""The loss scale: on a device, and in the loss scalers of two packages."""
