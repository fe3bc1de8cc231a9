"""`import apex_mp.as_apex` makes `apex` importable: `apex_mp.install_as_apex()` as an import.

If it is installed already, of any era, this does nothing.
"""

from apex_mp._as_apex.install import install_as_apex, installed_era

if installed_era() is None:
    install_as_apex()
