"""The name `apex`: what `import apex` and its like find while apex_mp stands in for it."""

# The eras' modules now, so that installing and uninstalling change nothing but the name apex.
from apex_mp._as_apex import contrib, since_2019_08, until_2019_08
from apex_mp._as_apex.install import install_as_apex, installed_era, uninstall_as_apex

__all__ = [
    "contrib",
    "install_as_apex",
    "installed_era",
    "since_2019_08",
    "uninstall_as_apex",
    "until_2019_08",
]
