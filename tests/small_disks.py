"""File systems that are soon full."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk_at(folder, size):
    """A file system of that size (``64k``, ``1m``), mounted at a new folder; skips without root."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is refused: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
