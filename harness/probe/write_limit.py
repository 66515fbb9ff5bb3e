"""Breaks off what this process writes, as a full disk does: files may not grow beyond a size.

The kernel writes up to the limit, refuses the rest (EFBIG, "File too large"), and sends SIGXFSZ
(setrlimit(2), ``RLIMIT_FSIZE``). So every way to write a file is broken off in its middle, in
Python or not: ``torch.save``, torch's distributed checkpoint, safetensors. Processes that are
started meanwhile have the same limit.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

OPEN_FILES = "/dev/fd"
MAY_GROW = 64 * 1024
"""Bytes by which files that are open already, such as logs, may still grow."""


class WriteLimit:
    """The limit, from its making until ``lift``. SIGXFSZ is its own meanwhile."""

    def __init__(self, size: int, reached: Callable[[], None]) -> None:
        """Files may have ``size`` bytes, or a little more than the largest that is open now.

        ``reached`` is called in the main thread whenever a write has been broken off.

        Raises RuntimeError outside of the main thread, which alone may handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("only the main thread can limit what is written")
        self.size = max(size, _largest_open_file() + MAY_GROW)
        self._reached = reached
        self._handler = signal.signal(signal.SIGXFSZ, self._notice)
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        soft, hard = self._limits
        least = self.size if soft == resource.RLIM_INFINITY else min(self.size, soft)
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, hard))

    def lift(self) -> None:
        """Let files grow again."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        # None: a handler that was not set in Python, which cannot be put back.
        signal.signal(signal.SIGXFSZ, self._handler or signal.SIG_IGN)

    def _notice(self, _number: int, _frame: FrameType | None) -> None:
        self._reached()


def _largest_open_file() -> int:
    """Bytes of the largest regular file that this process has open; 0 if there is none."""
    sizes = [0]
    for name in os.listdir(OPEN_FILES):  # noqa: PTH208 (these are numbers)
        with suppress(OSError):  # the folder itself, which is closed by now
            found = os.fstat(int(name))
            if stat.S_ISREG(found.st_mode):
                sizes.append(found.st_size)
    return max(sizes)
