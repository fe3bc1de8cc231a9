"""A wrong line for apex_mp/, with the test file that has to fail with it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one line.

    Attributes:
        file: Under apex_mp/.
        before: Text that the file holds once, with lines around it where needed.
        after: What the mutant has instead.
        tests: File in a folder of tests/, without "test_" and ".py".
    """

    file: str
    before: str
    after: str
    tests: str
