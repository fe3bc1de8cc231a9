"""Moved to examples/speech_ctc/speech_ctc.py."""

import sys

sys.exit("examples/speech_ctc.py has moved: python examples/speech_ctc/speech_ctc.py")
