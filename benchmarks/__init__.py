"""Checks and measurements of apex_mp; no part of the package."""
