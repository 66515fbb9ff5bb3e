"""Checks before any rank starts: seed checkpoints and configs.

Each toolchain builds its jobs' configs with the real configuration code of its trainer.
"""

from __future__ import annotations

import difflib
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from converge_harness.errors import ConfigError, Problem, StoreError, ToolchainError
from converge_harness.launch import processes
from converge_harness.launch.interruption import Interruption
from converge_harness.launch.options import RunOptions
from converge_harness.launch.private_folder import private_folder
from converge_harness.launch.warm import WarmServers
from converge_harness.model import Job, RunRecord
from converge_harness.run_folder.config_problems import ConfigProblemDocument, read_answer
from converge_harness.store import Store, write_json
from converge_harness.trainers import Resources, environment, job_payload, searching, trainer_of
from converge_harness.trainers.failure import log_tail

_TIMEOUT_S = 600.0
_POLL_S = 0.05
_SHOWN_KEYS = 12
_ELSEWHERE = ("ImportError", "ModuleNotFoundError", "AttributeError")
"""Errors of the rank code where the trainer has moved a module or a name."""


def unchecked(jobs: Sequence[Job], store: Store) -> tuple[Job, ...]:
    """The jobs whose configs were not checked yet."""
    return tuple(job for job in jobs if not store.checked_file(job.identity).is_file())


def require_seed_checkpoints(
    jobs: Sequence[Job], records: Mapping[str, RunRecord], store: Store
) -> None:
    """Raise StoreError if a job's seed checkpoint is neither planned nor stored."""
    known = {*records, *(job.identity for job in jobs)}
    for job in jobs:
        if job.needs is not None and job.needs not in known:
            raise StoreError(
                f"{job.name} starts from the seed checkpoint {job.needs[:12]}, which is neither in "
                f"the plan nor finished in {store.root}"
            )


def check_jobs(
    jobs: Sequence[Job],
    store: Store,
    options: RunOptions,
    base_environment: Mapping[str, str],
    servers: WarmServers,
    stop: Interruption,
) -> None:
    """Let each toolchain build its jobs' configs; record valid ones in the store.

    Raises:
        ConfigError: configs are invalid; all problems of all jobs together.
        ToolchainError: a toolchain could not run the check.
        Interrupted: a signal came.
    """
    wanted = environment(base_environment, Resources(device=options.device, devices=options.gpus))
    checks: list[_Check] = []
    with private_folder() as private:
        try:
            names = dict.fromkeys(job.toolchain.name for job in jobs)
            for number, toolchain in enumerate(names):
                mine = [job for job in jobs if job.toolchain.name == toolchain]
                while servers.starting(toolchain):
                    _pause(stop)
                python = servers.python(toolchain) or mine[0].toolchain.python
                folder = private / str(number)  # the name of a toolchain may be a path
                variables = searching(mine[0].toolchain, wanted)
                checks.append(_start(mine, folder, python, variables, store, options))
            answers = [(check, check.answer(stop)) for check in checks]
        finally:
            processes.end_all([(check.process, check.folder) for check in checks], grace_s=0.0)
    problems = []
    for check, found in answers:
        refused = {Path(entry["job"]).stem for entry in found}
        for job in check.jobs:
            if job.identity not in refused:
                write_json(store.checked_file(job.identity), {"name": job.name})
        by_identity = {job.identity: job for job in check.jobs}
        alike: dict[tuple[object, ...], list[tuple[Job, ConfigProblemDocument]]] = {}
        for entry in found:
            same = (entry["key"], entry["message"], *entry["valid"])
            alike.setdefault(same, []).append((by_identity[Path(entry["job"]).stem], entry))
        # A wrong module is wrong in every job that names it: said once.
        problems += [
            _problem([job for job, _ in entries], entries[0][1]) for entries in alike.values()
        ]
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class _Check:
    """A toolchain's running check of its jobs, whose files are named after their identities."""

    jobs: Sequence[Job]
    process: subprocess.Popen[bytes]
    folder: Path

    def answer(self, stop: Interruption) -> list[ConfigProblemDocument]:
        toolchain = self.jobs[0].toolchain.name
        deadline = time.monotonic() + _TIMEOUT_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise ToolchainError(f"toolchain {toolchain}: no answer within {_TIMEOUT_S:.0f} s")
            _pause(stop)
        try:
            found = read_answer(_answer_file(self.folder).read_bytes())
        except (OSError, ValueError):
            log = log_tail(self.folder / "log")
            raise ToolchainError(_unable(self.jobs[0], self.process.returncode, log)) from None
        return found


def _start(
    jobs: Sequence[Job],
    folder: Path,
    python: Path,
    wanted: Mapping[str, str],
    store: Store,
    options: RunOptions,
) -> _Check:
    folder.mkdir()
    argv = [str(python), "-m", options.rank_module, "--check"]
    for job in jobs:
        file = folder / f"{job.identity}.json"
        payload = job_payload(
            job,
            store.run_folder(job.name, job.identity),
            data=options.data_of(job),
            seed_checkpoint=None,
            device=options.device,
        )
        write_json(file, payload)
        argv.append(str(file))
    process = processes.start(argv, wanted, folder, folder / "log", _answer_file(folder))
    return _Check(jobs, process, folder)


def _unable(job: Job, exit_code: int, log: str) -> str:
    """Why the check did not run: our rank code's imports fail, or the build is broken."""
    toolchain, trainer = job.toolchain, trainer_of(job.spec)
    if Path(toolchain.name).is_absolute():  # of the user's own
        return f"{toolchain.name} cannot check configs (exit code {exit_code}):\n{log}"
    release, _, revision = toolchain.name.partition("@")
    last = log.rstrip().rpartition("\n")[2]
    if revision and last.startswith(_ELSEWHERE):
        return (
            f"toolchain {toolchain.name}: {trainer.kind} {trainer.release(toolchain)} has moved "
            f"too far from {release}, for which converge's rank code is written ({last}); choose a "
            "revision nearer to that release"
        )
    checkout = "CONVERGE_CHECKOUT=FOLDER " if revision else ""
    return (
        f"toolchain {toolchain.name} cannot check configs (exit code {exit_code}):\n{log}\n"
        f"build it again with: {checkout}converge toolchain build --fresh {toolchain.name}"
    )


def _answer_file(folder: Path) -> Path:
    return folder / "answer"


def _pause(stop: Interruption) -> None:
    stop.check()
    time.sleep(_POLL_S)


def _problem(jobs: Sequence[Job], entry: ConfigProblemDocument) -> Problem:
    key, valid = entry["key"], entry["valid"]
    near = difflib.get_close_matches(key, valid, n=1)
    if near:
        hint = f"did you mean {near[0]}?"
    elif valid:
        more = ", …" if len(valid) > _SHOWN_KEYS else ""
        hint = f"valid: {', '.join(valid[:_SHOWN_KEYS])}{more}"
    else:
        hint = ""
    name = jobs[0].name if len(jobs) == 1 else f"{jobs[0].name} and {len(jobs) - 1} more"
    where = f"{name}: {key}" if key else name
    return Problem(where, f"{entry['message']} [{jobs[0].toolchain.name}]", hint)
