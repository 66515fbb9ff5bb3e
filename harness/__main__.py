"""``python -m harness`` is the console script ``converge``."""

import sys

from harness.cli import main

sys.exit(main())
