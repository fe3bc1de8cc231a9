"""What the integrations share: `accelerate`, `lightning` and `pytorch_lightning`."""
