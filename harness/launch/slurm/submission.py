"""Which scheduler's job a run folder belongs to: ``submission.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from harness.errors import StoreError
from harness.run_folder.layout import SUBMISSION
from harness.run_folder.records import SubmissionDocument
from harness.store import read_json, write_json


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that was given to a scheduler, or is about to be."""

    identity: str
    name: str
    """Under which the scheduler has it; it ends in the identity."""
    submitted: str
    """ISO 8601, UTC."""
    job_id: str | None = None
    """None before the scheduler has answered: it may or may not have the job."""
    after_ok: tuple[str, ...] = ()
    after_any: tuple[str, ...] = ()
    cancelled: str = ""
    """Why a harness cancelled it, as a person reads it; empty: none did."""
    hung: bool = False
    """Whether it was cancelled because no step ended within a timeout."""
    uid: int | None = None
    """The user whose job it is, by number: a scheduler may show a user's jobs to nobody else."""


def read_submission(folder: Path) -> Submission | None:
    """The submission of a run folder; None where there is none.

    Raises StoreError for a damaged file or one of a newer schema.
    """
    path = folder / SUBMISSION
    if not path.is_file():
        return None
    value = read_json(path)
    try:
        return _submission(cast("SubmissionDocument", value))
    except (KeyError, TypeError) as problem:
        raise StoreError(
            f"{path}: no complete submission ({problem!r}); see that the job is not in the queue, "
            "then delete the folder to run it again"
        ) from problem


def write_submission(folder: Path, submission: Submission) -> None:
    """Write ``submission.json``, replacing what it said before. Raises StoreError."""
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
        uid=value.get("uid"),
    )
