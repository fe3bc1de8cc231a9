"""The one version number of apex_mp."""

__version__ = "0.1.0"
