"""Why a user's program failed, from its ranks' output, since they write no error file.

Under torchrun and srun each rank has its own log, and it is known which ranks failed. Other
launchers mix the output of all ranks. A Python traceback is most informative, so it is searched for
first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGTERM, Signals

from converge_harness.model import RankError
from converge_harness.run_folder.failures import read_failures
from converge_harness.run_folder.layout import PROGRAM_LOG
from converge_harness.trainers.failure import (
    TRACEBACK,
    end_of,
    is_aftermath,
    last_output,
    launcher_tail,
    listed_ranks,
    log_tail,
    places,
    rank_log,
)

TASKS = "srun/attempt_0"
"""In the logs of a call: a folder for each task of srun, laid out as torchrun does for ranks."""
TASK_END = "ended"
"""In a task's folder: its exit code (above 128: of a signal), and when, in seconds since 1970."""

_OF_SIGNALS = 128
"""A shell's exit code for a signal is this plus its number."""
_CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above")
_WHO_HOLDS_IT = (
    ": another process listens on the port; `ss -ltnp` shows which. End it, or take port 0, which "
    "the system fills in. The process may be one that the program started and that outlived its "
    "rank"
)
"""What to do about a port that is taken."""
_PREFIX = re.compile(r"^\[(?:rank)?(\d+)\]:? ?")
"""Prefix with which torch or a launcher marks a line with its rank."""


@dataclass(frozen=True, slots=True)
class _Report:
    """One traceback, or the last output of a rank without one."""

    message: str
    text: str
    rank: int | None = None
    ended: bool = False
    """Whether the launcher stopped it because of another rank."""

    @property
    def follows(self) -> bool:
        """Whether another rank failed before this one."""
        return self.ended or is_aftermath(self.message)


def program_error(
    logs: Sequence[Path], returncode: int | None, script: Path | None = None
) -> RankError:
    """The error of the rank that failed first, as far as the logs of a call show.

    Args:
        logs: the log folders of the call, one per node.
        returncode: of the whole call; None: unknown.
        script: the log of the batch script around it, if there is one.
    """
    failures = sorted(each for folder in logs for each in _failures(folder))
    found = [_of_rank(each) for each in failures]
    found = found or [each for one in logs for each in _tracebacks(end_of(one / PROGRAM_LOG))]
    first = next((each for each in found if not each.follows), found[0] if found else None)
    if first is not None:
        error = RankError(first.rank, first.message, first.text)
        return replace(error, message=error.message + _WHO_HOLDS_IT) if error.port_taken else error
    text = next((text for folder in logs if (text := launcher_tail(folder))), "")
    if not text and script is not None:
        text = log_tail(script)
    return RankError(None, f"the program {_ended(returncode)}{last_output(text)}", text)


@dataclass(frozen=True, slots=True, order=True)
class _RankFailure:
    """A rank that failed. Sorts by time of failure."""

    at: float
    """Seconds since 1970, or its place among those of a log without times."""
    rank: int
    place: int
    """Of the rank on its node, by which torchrun names its logs."""
    code: int
    logs: Path


def _failures(logs: Path) -> Iterator[_RankFailure]:
    """The ranks that failed, by torchrun or by the tasks themselves."""
    placed = places(logs)
    try:
        yield from [
            _RankFailure(
                at=entry.get("timestamp", 0),
                rank=entry["rank"],
                place=placed.get(entry["rank"], entry["rank"]),
                code=entry["exitcode"],
                logs=logs,
            )
            for entry in read_failures(logs)
        ]
    except (OSError, ValueError):
        for number, each in enumerate(dict.fromkeys(reversed(listed_ranks(logs)))):
            yield _RankFailure(float(number), each.rank, each.place, each.code, logs)
    for path in (logs / TASKS).glob(f"*/{TASK_END}"):
        said, _, at = end_of(path).partition(" ")
        try:
            rank = int(path.parent.name)
            failure = _RankFailure(float(at), rank, rank, int(said), logs)
        except ValueError:  # it is being written
            continue
        if failure.code:
            yield failure


def _of_rank(failure: _RankFailure) -> _Report:
    logs, rank, place = failure.logs, failure.rank, failure.place
    text = rank_log(logs, place, end_of)
    ended = failure.code in (-SIGTERM, _OF_SIGNALS + SIGTERM)
    found = list(_tracebacks(text))
    if found:
        return _Report(found[-1].message, found[-1].text, rank, ended=ended)
    message = f"{_ended(failure.code)}{last_output(text)}"
    return _Report(message, rank_log(logs, place), rank, ended=ended)


def _tracebacks(text: str) -> list[_Report]:
    """Every Python traceback of a log; a chain counts as one, with its last exception."""
    found: list[_Report] = []
    block: list[str] = []
    rank: int | None = None
    chained = False
    for line in text.splitlines():
        marked = _PREFIX.match(line)
        bare = line[marked.end() :] if marked else line
        if bare.startswith(TRACEBACK):
            block, rank = [bare], int(marked[1]) if marked else None
        elif block and (bare.startswith(" ") or not bare.strip()):
            block.append(bare)
        elif block:
            whole = "\n".join([*block, bare])
            if chained and found:
                whole = f"{found.pop().text}\n\n{whole}"
            found.append(_Report(bare.strip(), whole, rank))
            block, chained = [], False
        elif _CHAINED.search(bare):
            chained = True
    return found


def _ended(code: int | None) -> str:
    if code is None:
        return "was ended"
    number = -code if code < 0 else code - _OF_SIGNALS
    if code < 0 or code > _OF_SIGNALS:
        try:
            return f"was killed by {Signals(number).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"
