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

ROOT = Path(__file__).parents[1]
TOOLCHAINS = Path(os.environ.get("CONVERGE_TOOLCHAINS", ROOT / ".toolchains"))
"""The real ones."""
DIALECTS = {"torchtitan-0.3.0": "titan_0_3", "torchtitan-0.2.2": "titan_0_2"}


def warm_toolchains(name="torchtitan-0.3.0"):
    """A folder with one toolchain, for torchtitan's ranks."""
    return _folder(name, DIALECTS[name])


def warm_torch():
    """A folder with ``torchtitan-0.3.0``, for programs of a user's own: only torch is imported."""
    return _folder("torchtitan-0.3.0", None)


@functools.cache
def _folder(name, dialect):
    real = (TOOLCHAINS / name).absolute()
    if not real.is_dir():
        raise FileNotFoundError(f"{real}: converge toolchain build {name}")
    folder = Path(tempfile.mkdtemp(prefix="converge-toolchains-"))
    running = ExitStack()
    running.callback(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(running.close)
    python = running.enter_context(forking_python(real / "bin" / "python", dialect=dialect))
    (folder / name / "bin").mkdir(parents=True)
    (folder / name / "bin" / "python").symlink_to(python)
    (folder / name / "lib").symlink_to(real / "lib")
    return folder
