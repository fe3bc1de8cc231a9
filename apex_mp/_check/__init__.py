"""`python -m apex_mp check`: what a repository needs to run, without running it."""
