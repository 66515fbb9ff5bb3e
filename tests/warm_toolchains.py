"""Toolchains whose programs are forks of a server, imports done: for tests of many short jobs.

Each server starts once in a process that runs tests, at its first use.
"""

import atexit
import functools
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from forking_python import forking_python

from converge_harness.trainers import find_toolchain

ROOT = Path(__file__).parents[1]
TOOLCHAINS = Path(os.environ.get("CONVERGE_TOOLCHAINS", ROOT / ".toolchains"))
"""The real ones."""


def warm_toolchains(name="torchtitan-0.3.0"):
    """A folder with one toolchain, for torchtitan's ranks."""
    return _folder(name, for_ranks=True)


def warm_torch():
    """A folder with ``torchtitan-0.3.0``, for programs of a user's own: only torch is imported."""
    return _folder("torchtitan-0.3.0", for_ranks=False)


@functools.cache
def _folder(name, *, for_ranks):
    real = find_toolchain(name, TOOLCHAINS.absolute())
    dialect = real.dialect if for_ranks else None
    folder = Path(tempfile.mkdtemp(prefix="converge-toolchains-"))
    running = ExitStack()
    running.callback(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(running.close)
    python = running.enter_context(forking_python(real.python, dialect=dialect))
    (folder / name / "bin").mkdir(parents=True)
    (folder / name / "bin" / "python").symlink_to(python)
    (folder / name / "lib").symlink_to(real.python.parents[1] / "lib")
    return folder
