"""The scheduler's job of a run folder: ``submission.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from converge_harness.errors import StoreError
from converge_harness.model import Job
from converge_harness.run_folder.layout import SUBMISSION
from converge_harness.run_folder.records import SubmissionDocument
from converge_harness.store import folder_key, read_json, slug, write_json


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that was submitted, or is about to be."""

    identity: str
    name: str
    """Its name in the scheduler, which ends in the identity."""
    submitted: str
    """ISO 8601, UTC."""
    job_id: str | None = None
    """None until the scheduler has answered: it may or may not have the job."""
    after_ok: tuple[str, ...] = ()
    after_any: tuple[str, ...] = ()
    cancelled: str = ""
    """Why converge cancelled it, for people; empty: it did not."""
    hung: bool = False
    """Whether it was cancelled because no step finished within a timeout."""
    stopped: bool = False
    """Whether it was cancelled because its verdict was known."""
    uid: int | None = None
    """The job's user by number: a scheduler may hide jobs from other users."""
    continues_after: int | None = None
    """The number of the last call of an earlier job, from whose checkpoints it continues; None: it
    starts anew."""


def job_name(job: Job) -> str:
    """The job's name in the scheduler, by which it is found again."""
    return f"cv-{slug(job.name)}-{folder_key(job.identity)}"


def read_submission(folder: Path) -> Submission | None:
    """The submission of a run folder; None if there is none.

    Raises StoreError if the file is damaged or has a newer schema.
    """
    path = folder / SUBMISSION
    if not path.is_file():
        return None
    value = read_json(path)
    try:
        return _submission(cast("SubmissionDocument", value))
    except (KeyError, TypeError) as problem:
        raise StoreError(
            f"{path}: incomplete submission ({problem!r}); make sure that the job is not in the "
            "queue, then delete the folder to run it again"
        ) from problem


def write_submission(folder: Path, submission: Submission) -> None:
    """Write ``submission.json``, replacing its content. Raises StoreError."""
    write_json(folder / SUBMISSION, asdict(submission))


def _submission(value: SubmissionDocument) -> Submission:
    job_id = value["job_id"]
    return Submission(
        identity=value["identity"],
        name=value["name"],
        submitted=value["submitted"],
        job_id=None if job_id is None else str(job_id),
        after_ok=tuple(value["after_ok"]),
        after_any=tuple(value["after_any"]),
        cancelled=value.get("cancelled", ""),
        hung=bool(value.get("hung", False)),
        stopped=bool(value.get("stopped", False)),
        uid=value.get("uid"),
        continues_after=value.get("continues_after"),
    )
