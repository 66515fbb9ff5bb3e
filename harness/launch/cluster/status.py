"""How the jobs of a plan stand, for a person; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from harness.errors import StoreError
from harness.launch.cluster.backend import Phase
from harness.launch.cluster.settle import settle
from harness.launch.cluster.standing import (
    Site,
    Standing,
    known_of,
    look,
    needed_record,
    never_submitted,
)
from harness.launch.cluster.submission import read_submission
from harness.launch.progress import last_line
from harness.model import Plan, Role, RunRecord
from harness.run_folder.layout import JOB, RECORD
from harness.store import Store, read_json
from harness.trainers import comes_in_passes

NOT_SUBMITTED = "not submitted"
BROKEN_OFF = "submission interrupted"
"""States that no scheduler tells of: the harness ended before it knew what became of the job."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a person wants to know of a job."""

    name: str
    role: Role
    job_id: str
    state: str
    """``pending``, ``running``, how it ended, or one of the two words above."""
    reason: str
    step: int | None
    steps: int
    loss: float | None
    elapsed_s: float | None
    nodes: str
    requeues: int = 0
    """How often the scheduler began it again; ``elapsed_s`` is then that of its last life."""
    settled: bool = True
    """False for what has ended and has no record yet: ``collect`` writes it."""


def status(plan: Plan, site: Site) -> tuple[Row, ...]:
    """How every job of a plan stands, in the plan's order. Nothing is written.

    Raises StoreError and ClusterError.
    """
    standings = look(site, plan.jobs)
    orphans = _orphans(site.store)
    foreseen: dict[str, Standing] = {}
    rows = {}
    for identity, standing in standings.items():
        known = known_of(site, standing, needed_record(standing.job, foreseen))
        over = settle(known) if known is not None else never_submitted(standing, foreseen)
        foreseen[identity] = replace(standing, record=standing.record or over)
        rows[identity] = _row(standing, over, orphans)
    return tuple(replace(rows[job.identity], name=job.name) for job in plan.jobs)


def _orphans(store: Store) -> dict[str, str]:
    """Ids of submitted jobs that have no record, by their names.

    A job of a plan whose folder has another identity is one of those as they were meant before.
    """
    found = {}
    for folder in store.run_folders().values():
        if (folder / RECORD).is_file():
            continue
        with suppress(StoreError):  # of another plan, perhaps: whose turn it is, will say so
            if submission := read_submission(folder):
                name = str(read_json(folder / JOB).get("name"))
                found[name] = submission.job_id or submission.name
    return found


def _row(standing: Standing, over: RunRecord | None, orphans: Mapping[str, str]) -> Row:
    job, state, submission = standing.job, standing.state, standing.submission
    record = standing.record or over
    last = last_line(standing.folder, in_passes=comes_in_passes(job))
    reason = state.reason if state is not None else ""
    if record is not None:
        word = str(record.status)
        reason = record.error.message if record.error else ""
    elif state is None:
        word = NOT_SUBMITTED if submission is None else BROKEN_OFF
        before = orphans.get(job.name) if submission is None else None
        if before is not None:
            reason = (
                f"job {before} of this name is another: of another experiment, or what it means "
                "has changed since (the file, converge, or what is installed); if nobody wants it "
                f"any more: scancel {before}"
            )
    else:
        word = str(state.phase) if state.phase is not Phase.ENDED else state.word.lower()
    started = state is not None and state.phase is Phase.RUNNING
    return Row(
        name=job.name,
        role=job.role,
        job_id=(submission.job_id or "") if submission else "",
        state=word,
        reason=reason,
        step=last.step if last else None,
        steps=job.steps,
        loss=last.loss if last else None,
        elapsed_s=record.wall_s if record else state.ran_s if started and state else None,
        nodes=state.nodes if state is not None else "",
        requeues=record.requeues if record else state.restarts if state else 0,
        settled=over is None or submission is None,
    )
