"""Moved to examples/char_lstm/char_lstm.py."""

import sys

sys.exit("examples/char_lstm.py has moved: python examples/char_lstm/char_lstm.py")
