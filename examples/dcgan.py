"""Moved to examples/dcgan/dcgan.py."""

import sys

sys.exit("examples/dcgan.py has moved: python examples/dcgan/dcgan.py")
