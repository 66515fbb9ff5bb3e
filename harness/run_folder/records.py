"""``record.json`` and ``submission.json``: what converge stores on a run besides its evidence.

Ranks neither write nor read them. ``converge_harness.store`` writes the record,
``converge_harness.launch`` the submission.
"""

from __future__ import annotations

from typing import TypedDict

from converge_harness.run_folder.job import JobDocument


class RankErrorDocument(TypedDict):
    """The error of the rank that failed first."""

    rank: int | None
    message: str
    traceback: str


class CallDocument(TypedDict):
    """One call of the launcher."""

    argv: list[str]
    segment: int | None
    nodes: int
    started: str
    """ISO 8601, UTC."""
    ended: str | None
    """The same; null while it runs."""
    returncode: int | None


class ClusterDocument(TypedDict):
    """A job according to its scheduler."""

    job_id: str | None
    word: str
    reason: str
    restarts: int
    nodes: str


class RunFacts(TypedDict, total=False):
    """What only the launcher of a run knows of it."""

    started: str
    """ISO 8601, UTC."""
    host: str
    versions: dict[str, str]
    job: JobDocument
    """As in ``job.json``."""
    warm: bool
    environment: dict[str, str]
    calls: list[CallDocument]
    """For a run in several passes."""
    cluster: ClusterDocument


class RecordDocument(RunFacts, total=False):
    """The file without its schema version; files of older releases lack some keys."""

    name: str
    identity: str
    folder: str
    """The run folder's name only, because the folder may be moved."""
    status: str
    wall_s: float
    argv: list[str]
    error: RankErrorDocument | None
    reused: bool
    requeues: int
    evidence: dict[str, str] | None
    """SHA-256 of every evidence file by its path in the run folder; null in older files."""
    sources: dict[str, str | None]
    """SHA-256 of the run's sources by path; null where there is no digest."""


class SubmissionDocument(TypedDict, total=False):
    """The file without its schema version; files of older releases lack some keys."""

    identity: str
    name: str
    submitted: str
    job_id: str | None
    after_ok: list[str]
    after_any: list[str]
    cancelled: str
    hung: bool
    stopped: bool
    uid: int | None
    continues_after: int | None
