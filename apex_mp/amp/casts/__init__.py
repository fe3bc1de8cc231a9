"""Casts for a whole process: what is cast, to which dtype, and where casts are on."""
