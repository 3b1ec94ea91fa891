"""The ``vramledger`` command: the command line in this process."""

from __future__ import annotations

import signal
import sys

from vramledger import _native


def main() -> int:
    """Answers the question on the command line; the exit code is 0 yes, 1 no, 2 cannot be answered."""
    # The command line has its own way with Ctrl-C, and Python has nothing to clean up here.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main(["vramledger", *sys.argv[1:]])
