"""Folders outside the store that only this user can enter: sockets, and files where agents meet.

They lie in the folder for temporary files, for a socket's path may have 107 bytes at most. Each
holds a lock file that is locked as long as its harness lives; the kernel frees it however the
harness ends. So the next one knows, in whatever container it runs, what a killed one left behind.
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
"""Marks a folder as one of these; it gets this name once it is locked."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end of the block.

    Raises OSError when there is no room for one.
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
    """Remove such folders of harnesses of this user that were killed; others stay."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{LOCK}"):
        try:
            if _is_abandoned(lock):
                shutil.rmtree(lock.parent)
        except OSError:  # another harness was faster, or it is somebody else's
            continue


def _is_abandoned(lock: Path) -> bool:
    """Whether the harness that made a folder of ours has ended."""
    folder = lock.parent.lstat()
    if folder.st_uid != os.getuid() or lock.parent.is_symlink():
        return False
    with lock.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
