"""A folder that is put into PYTHONPATH of child processes, for its sitecustomize."""
