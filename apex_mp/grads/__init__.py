"""Gradients: where they come from, what is found in them, who has a part of them."""
