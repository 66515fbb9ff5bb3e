"""Folders outside the store that only this user can enter, for sockets and rendezvous files.

They are in the folder for temporary files, because a socket's path may have at most 107 bytes. Each
has a lock file that is locked while its converge process runs; the kernel frees it however the
process ends. So the next one knows, in whatever container it runs, what a killed one left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "converge-"
LOCK = "harness.lock"
"""Name of the lock file, which marks such a folder; it gets this name once it is locked."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end of the block.

    Raises OSError if there is no space for one.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # 0700, whatever the umask
    try:
        with (folder / "new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left_behind() -> None:
    """Remove such folders of this user's killed converge processes; others stay."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{LOCK}"):
        try:
            if _is_abandoned(lock):
                shutil.rmtree(lock.parent)
        except OSError:  # another process was faster, or it is another user's
            continue


def _is_abandoned(lock: Path) -> bool:
    """Whether the converge process that made the folder has ended."""
    folder = lock.parent.lstat()
    if folder.st_uid != os.getuid() or lock.parent.is_symlink():
        return False
    with lock.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
