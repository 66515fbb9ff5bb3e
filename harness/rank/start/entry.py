"""Start a rank: import its dialect (perhaps ahead of time), then run or check a job.

A dialect is a package (``DIALECTS``) with these functions::

    preload(device: str) -> None                  imports, and patches that must come before them
    training.run(job: RankJob) -> None            train, or write the seed checkpoint
    config.build_config(job: RankJob) -> object   the config alone; raises SettingError
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
from collections.abc import MutableMapping
from dataclasses import replace
from types import ModuleType

from converge_harness.rank.inject import inject_problems
from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.rank.start.loopback import listen_on_loopback
from converge_harness.rank.start.parent import die_with_parent
from converge_harness.run_folder.job import JobError, RankJob, read_job
from converge_harness.run_folder.layout import GPU_OF_RANK
from converge_harness.run_folder.waits import with_saves_before_waits

DIALECTS = {
    "megatron_0_16": "converge_harness.rank.megatron",
    "titan_main": "converge_harness.rank.titan.v0_3",
    "titan_0_3": "converge_harness.rank.titan.v0_3",
    "titan_0_2": "converge_harness.rank.titan.v0_2",
}
"""By the dialect in ``job.json``, our package for it; main uses that of 0.3."""


def preload(dialect: str, device: str) -> None:
    """Import everything heavy that ranks of a dialect need, and nothing that a fork would break.

    Leaves the process single-threaded, without a process group and without a CUDA context:
    a child forked from it may set ``os.environ`` to a rank's and call ``run``.
    """
    _dialect(dialect).preload(device)


def run(job_path: str, segment: int | None = None) -> None:
    """Be one rank of the job in a file; the rank's place comes from torchrun's environment.

    An elastic job is run segment by segment, each in a call of its own.

    An exception reaches torchelastic's error file (``TORCHELASTIC_ERROR_FILE``, read now and not
    at import, so that a forked child uses its own) and is raised again.
    """
    die_with_parent()
    # converge sends it before it kills a hung run: standard error then says where each rank is.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_run)(job_path, segment)


def check(job_path: str) -> list[KeyProblem]:
    """Problems of the job's config, or of every segment's, found without starting anything."""
    job = read_job(job_path)
    module = _load(job)
    found = (
        _segments_problems(module, job_path, job) if job.segments else config_problems(module, job)
    )
    return [*found, *inject_problems(job.inject)]


def config_problems(dialect: ModuleType, job: RankJob) -> list[KeyProblem]:
    """What is wrong with the job's config; empty when the framework takes it."""
    try:
        importlib.import_module(f"{dialect.__name__}.config").build_config(job)
    except SettingError as error:
        return list(error.problems)
    return []


def _segments_problems(module: ModuleType, job_path: str, job: RankJob) -> list[KeyProblem]:
    """Those that all segments have, once; then each segment's own, with its place."""
    found: list[list[KeyProblem]] = [
        config_problems(module, read_job(job_path, index)) for index in range(len(job.segments))
    ]
    common = [problem for problem in found[0] if all(problem in other for other in found)]
    own = [
        (f"in segment {index} (until step {segment.until})", problem)
        for index, (segment, problems) in enumerate(zip(job.segments, found, strict=True))
        for problem in problems
        if problem not in common
    ]
    return [
        *common,
        *(replace(problem, message=f"{place}: {problem.message}") for place, problem in own),
    ]


def _run(job_path: str, segment: int | None) -> None:
    job = with_saves_before_waits(read_job(job_path, segment))
    if job.segments and segment is None:
        raise JobError(
            f"{job_path}: has {len(job.segments)} segments: say which one to run (--segment INDEX)"
        )
    job = job.on_world(int(os.environ["WORLD_SIZE"]))
    take_own_gpu(os.environ)
    module = _load(job)
    listen_on_loopback()
    importlib.import_module(f"{module.__name__}.training").run(job)


def take_own_gpu(environment: MutableMapping[str, str]) -> None:
    """Let a rank that shares a GPU see that one only, before anything asks for CUDA."""
    gpus = environment.get(GPU_OF_RANK)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[int(environment["LOCAL_RANK"])]


def _load(job: RankJob) -> ModuleType:
    module = _dialect(job.dialect)
    module.preload(job.device)
    return module


def _dialect(name: str) -> ModuleType:
    if name not in DIALECTS:
        raise ValueError(f"dialect {name!r} is unknown; known are {', '.join(DIALECTS)}")
    return importlib.import_module(DIALECTS[name])
