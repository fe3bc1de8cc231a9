"""The one version number of apex_mp."""

__version__ = "0.2.0"
