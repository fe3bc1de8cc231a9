"""The folder that stands in PYTHONPATH of child processes: it holds a sitecustomize."""
