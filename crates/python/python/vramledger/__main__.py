"""``python -m vramledger``."""

import sys

from vramledger.command import main

sys.exit(main())
