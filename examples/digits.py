"""Moved to examples/digits/digits.py."""

import sys

sys.exit("examples/digits.py has moved: python examples/digits/digits.py")
