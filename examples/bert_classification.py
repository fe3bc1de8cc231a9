"""Moved to examples/bert/bert.py."""

import sys

sys.exit("examples/bert_classification.py has moved: python examples/bert/bert.py")
