"""A step of an optimizer: how it is asked for, what became of it, who is notified."""
