"""`python -m apex_mp run script.py`: old scripts as they are, in this process and its children."""
