"""`python -m apex_mp check`: report what a repository needs to run, without running it."""
