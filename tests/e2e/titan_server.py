"""A warm server of torchtitan 0.3 whose torchruns start forks of it as well."""

import sys
from pathlib import Path

from converge_harness.rank.start import entry, warm


def preload():
    entry.preload("titan_0_3", "cpu")
    # torchrun starts ranks with the Python that it runs in itself.
    sys.executable = str(address().with_name("python"))


def address():
    return Path(sys.argv[sys.argv.index("--socket") + 1])


if __name__ == "__main__":
    warm.serve(address(), preload)
