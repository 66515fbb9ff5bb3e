"""Start a rank: import its dialect (perhaps ahead of time), then run or check a job.

A dialect is a package ``harness.rank.<dialect>`` with three functions::

    preload(device: str) -> None          imports and the patches that must come before them
    run(job: Job) -> None                 train, or write the seed checkpoint
    check(job: Job) -> list[KeyProblem]   build the config only
"""

from __future__ import annotations

import faulthandler
import importlib
import signal
from types import ModuleType

from harness.rank.inject import inject_problems
from harness.rank.job import Job, read_job
from harness.rank.parent import die_with_parent
from harness.rank.settings import KeyProblem

DIALECTS = ("titan_0_3", "titan_0_2")


def preload(dialect: str, device: str) -> None:
    """Import everything heavy that ranks of a dialect need, and nothing that a fork would break.

    Leaves the process single-threaded, without a process group and without a CUDA context:
    a child forked from it may set ``os.environ`` to a rank's and call ``run``.
    """
    _dialect(dialect).preload(device)


def run(job_path: str) -> None:
    """Be one rank of the job in a file; the rank's place comes from torchrun's environment.

    An exception reaches torchelastic's error file (``TORCHELASTIC_ERROR_FILE``, read now and not
    at import, so that a forked child uses its own) and is raised again.
    """
    die_with_parent()
    # The harness sends it before it kills a hung run: standard error then says where each rank is.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_run)(job_path)


def check(job_path: str) -> list[KeyProblem]:
    """Problems of the job's config, found without starting anything."""
    job = read_job(job_path)
    module = _load(job)
    return [*module.check(job), *inject_problems(job.inject)]


def _run(job_path: str) -> None:
    job = read_job(job_path)
    _load(job).run(job)


def _load(job: Job) -> ModuleType:
    module = _dialect(job.dialect)
    module.preload(job.device)
    return module


def _dialect(name: str) -> ModuleType:
    if name not in DIALECTS:
        raise ValueError(f"dialect {name!r} is unknown; known are {', '.join(DIALECTS)}")
    return importlib.import_module(f"harness.rank.{name}")
