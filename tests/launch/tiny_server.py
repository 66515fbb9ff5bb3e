"""A warm server whose imports are next to nothing, torch, or leave a thread behind."""

import importlib
import sys
import threading
import time
from pathlib import Path

from converge_harness.rank.start import warm


def preload():
    if "--thread" in sys.argv:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if "--torch" in sys.argv:
        # Not as __main__, which a fork runs anew.
        for name in ("torch.distributed.run", "converge_harness.rank.recorder.imported"):
            importlib.import_module(name)
        # torchrun starts ranks with the Python that it runs in itself.
        sys.executable = str(address().with_name("python"))


def address():
    return Path(sys.argv[sys.argv.index("--socket") + 1])


if __name__ == "__main__":
    warm.serve(address(), preload)
