"""float32 masters of 16-bit parameters, and the casts of a model that has them."""
