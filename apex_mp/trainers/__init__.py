"""The common parts of the integrations `accelerate`, `lightning` and `pytorch_lightning`."""
