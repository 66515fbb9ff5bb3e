"""Makes writes fail half-way, as on a full disk, by limiting the size of files.

The kernel writes up to the limit, refuses the rest (EFBIG, "File too large"), and sends SIGXFSZ
(setrlimit(2), ``RLIMIT_FSIZE``). So every way to write a file is cut short, in Python or not.
``torch.save`` and torch's distributed checkpoint leave half a file; safetensors removes what it
could not write, and a file that was to be enlarged first, as by ``numpy.memmap``, stays empty.
Processes that are started meanwhile keep the limit for good, and notice nothing.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

OPEN_FILES = "/dev/fd"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is written there
MEMORY_FILE = "/memfd:"
"""How the names of files begin that are in no folder (memfd_create(2))."""
MAY_GROW = 64 * 1024
"""Bytes by which files that are open already, such as logs, may still grow."""


class WriteLimit:
    """A limit that holds until ``lift``; until then it handles SIGXFSZ."""

    def __init__(self, size: int, reached: Callable[[], None]) -> None:
        """No file may grow beyond ``size`` bytes.

        If a file that this process writes to is open, and has more than ``size`` - ``MAY_GROW``
        bytes, the limit is that file's size and ``MAY_GROW``: it may be a log.

        ``reached`` is called in the main thread whenever a write of this process was broken off.

        Raises RuntimeError outside of the main thread, which alone may handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("only the main thread can limit what is written")
        largest, has = _largest_open_file()
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        soft, hard = self._limits
        least = max(size, has + MAY_GROW)
        self.size = least if soft == resource.RLIM_INFINITY else min(least, soft)
        """Largest size of a file, in bytes; the user's own limit if that is lower."""
        self.open_file = largest if self.size > size else None
        """The open file because of which it is more than was asked for."""
        self._reached = reached
        self._process = os.getpid()
        self._lifted = False
        self._handler = signal.signal(signal.SIGXFSZ, self._notice)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, hard))

    def lift(self) -> None:
        """Let files grow again. Any thread may call it."""
        self._lifted = True
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        if threading.current_thread() is threading.main_thread():
            # None: a handler that was not set in Python, which cannot be put back.
            before = signal.SIG_IGN if self._handler is None else self._handler
            signal.signal(signal.SIGXFSZ, before)

    def _notice(self, _number: int, _frame: FrameType | None) -> None:
        # A forked process inherits the handler.
        if not self._lifted and os.getpid() == self._process:
            self._reached()


def _largest_open_file() -> tuple[Path | None, int]:
    """The largest regular file that this process has open for writing, and its bytes.

    Files that are only read, such as memory-mapped tokens, do not grow, and neither does shared
    memory. None and 0 if there is none.
    """
    largest: tuple[Path | None, int] = (None, 0)
    for name in os.listdir(OPEN_FILES):  # noqa: PTH208 (these are numbers)
        with suppress(OSError):  # the folder itself, which is closed by now
            found = os.fstat(int(name))
            written = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            path = Path(OPEN_FILES, name).readlink()
            in_memory = SHARED_MEMORY in path.parents or str(path).startswith(MEMORY_FILE)
            if stat.S_ISREG(found.st_mode) and written and not in_memory:
                largest = max(largest, (path, found.st_size), key=lambda each: each[1])
    return largest
