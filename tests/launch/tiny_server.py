"""A warm server whose imports are next to nothing, or leave a thread behind."""

import sys
import threading
import time
from pathlib import Path

from converge_harness.rank.start import warm


def preload():
    if "--thread" in sys.argv:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


if __name__ == "__main__":
    warm.serve(Path(sys.argv[sys.argv.index("--socket") + 1]), preload)
