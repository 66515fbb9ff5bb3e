"""A warm server whose torchruns start forks of it as well; see ``forking_python.py``.

``--dialect NAME`` imports what a dialect's ranks need; without it, only torch.
"""

import importlib
import sys
from pathlib import Path

from converge_harness.rank.start import entry, warm


def preload():
    if "--dialect" in sys.argv:
        entry.preload(sys.argv[sys.argv.index("--dialect") + 1], "cpu")
    else:
        # Not the module that a fork runs as __main__.
        importlib.import_module("torch.distributed.run")
    # torchrun starts ranks with the Python that it runs in itself.
    sys.executable = str(address().with_name("stand-in"))


def address():
    return Path(sys.argv[sys.argv.index("--socket") + 1])


if __name__ == "__main__":
    warm.serve(address(), preload)
