"""What the names of apex mean, in float32 and without any scale.

A snippet that imports from here instead is the reference of its own run with apex_mp.
"""
