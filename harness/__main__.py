"""``python -m converge_harness`` is the console script ``converge``."""

import sys

from converge_harness.cli import main

sys.exit(main())
