"""``record.json`` and ``submission.json``: what converge stores on a run besides its evidence.

Ranks neither write nor read them. ``converge_harness.store`` writes the record,
``converge_harness.launch`` the submission.
"""

from __future__ import annotations

from typing import Any, TypedDict


class RankErrorDocument(TypedDict):
    """The error of the rank that failed first."""

    rank: int | None
    message: str
    traceback: str


class RecordDocument(TypedDict, total=False):
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

    started: str
    """ISO 8601, UTC."""
    host: str
    versions: dict[str, str]
    job: dict[str, Any]
    """As in ``job.json``."""
    warm: bool
    environment: dict[str, str]
    calls: list[dict[str, Any]]
    """For a run in several passes: its calls."""
    cluster: dict[str, Any]
    """The job according to the scheduler."""


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
