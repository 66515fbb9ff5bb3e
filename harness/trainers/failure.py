"""Why a run failed: the error of the rank that failed first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals
from typing import NamedTuple

from converge_harness.model import RankError
from converge_harness.run_folder.failures import FailureDocument, read_failures
from converge_harness.run_folder.layout import AGENT_LOG, FAILURES, PROGRAM_LOG

_TAIL_LINES = 40
_SILENT = "ended without output"
TRACEBACK = "Traceback (most recent call last):"

_AFTERMATH = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|peer closed"
    r"|remote process exited|timed out waiting|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
"""Errors of ranks after another rank has died."""

_INFRASTRUCTURE = re.compile(
    r"address already in use|EADDRINUSE|RendezvousConnectionError|RendezvousTimeoutError"
    r"|failed to bind|connection (was )?(reset|refused|aborted)|DistNetworkError"
    r"|makeDeviceForHostname|lost its server",
    re.IGNORECASE,
)
"""Transient errors of the machine or network."""

_LISTED = re.compile(
    r"^ +rank +: (\d+) \(local_rank: (\d+)\).*\n +exitcode +: (-?\d+)", re.MULTILINE
)
"""How torchrun lists the ranks that failed (torch 2.13, ``ChildFailedError``)."""

_SCHEDULER = re.compile(r"(srun|sbatch|slurmstepd|slurmd)(\[\d+\])?: ")
"""Prefix of a scheduler's lines, which say that something ended but not why."""


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    exitcode: int
    written: float
    """When the rank wrote its error, or was found dead; seconds since 1970."""
    message: str
    traceback: str


def rank_error(*logs: Path, script: Path | None = None) -> RankError:
    """The error of the rank that failed first, else the end of the most informative log.

    ``logs`` are the log folders of a call's agents, ``script`` is the log of the batch script
    around them.
    """
    found = [(failure, folder) for folder in logs for failure in _failures(folder)]
    if all(_is_aftermath(failure) or _is_silent(failure) for failure, _ in found):
        for folder in logs:
            if error := _own_error(folder):
                text = log_tail(folder / AGENT_LOG)
                return RankError(None, f"torchrun itself failed: {error}", text)
    if not found:
        text = next((text for folder in logs if (text := log_tail(folder / AGENT_LOG))), "")
        if text or script is None:
            return RankError(rank=0, message=_last_line(text) or _SILENT, traceback=text)
        text = log_tail(script)
        return RankError(rank=None, message=_last_line(text) or _SILENT, traceback=text)
    first, folder = min(found, key=lambda pair: (_is_aftermath(pair[0]), pair[0].written))
    place = places(folder).get(first.rank, first.rank)
    text = first.traceback or rank_log(folder, place)
    message = first.message or f"ended with exit code {first.exitcode}{last_output(text)}"
    return RankError(first.rank, message, text)


def has_failed_rank(*logs: Path) -> bool:
    """Whether a rank failed by itself: not by SIGTERM, nor because of another that is gone."""
    return any(not _is_aftermath(failure) for folder in logs for failure in _failures(folder))


def is_infrastructure_fault(error: RankError) -> bool:
    """Whether an error before the first step is probably transient."""
    return bool(_INFRASTRUCTURE.search(error.message) or _INFRASTRUCTURE.search(error.traceback))


def log_tail(path: Path) -> str:
    """The last lines of a log; empty if there is none."""
    return "\n".join(end_of(path).splitlines()[-_TAIL_LINES:])


def end_of(path: Path) -> str:
    """The last 64 KiB of a log; empty if there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 65536))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def launcher_tail(logs: Path) -> str:
    """The last lines of the launcher's log."""
    return log_tail(logs / AGENT_LOG) or log_tail(logs / PROGRAM_LOG)


class ListedRank(NamedTuple):
    """A rank that failed, as torchrun lists it."""

    rank: int
    place: int
    """On its node; torchrun names the rank's logs by it."""
    code: int
    """Its exit code; negative: the signal."""


def listed_ranks(logs: Path) -> tuple[ListedRank, ...]:
    """The ranks of a node that torchrun says have failed; the root cause is last, and again."""
    found = _LISTED.findall(end_of(logs / AGENT_LOG))
    return tuple(ListedRank(*map(int, each)) for each in found)


def places(logs: Path) -> dict[int, int]:
    """The places of these ranks by rank; that of any other is its rank, on the first node."""
    return {each.rank: each.place for each in listed_ranks(logs)}


def rank_log(logs: Path, place: int, read: Callable[[Path], str] = log_tail) -> str:
    """The end of a rank's latest output: of standard error, else of standard output.

    ``place``: of the rank on the node of these logs.
    """
    attempts = _attempts(logs)
    files = (path / str(place) / name for name in ("stderr.log", "stdout.log") for path in attempts)
    return next((text for path in files if (text := read(path))), "")


def _attempts(logs: Path) -> list[Path]:
    """The folders of torchrun's attempts, one per start of its ranks, newest first."""
    found = logs.glob("*/attempt_*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("attempt_")), reverse=True)


def _is_of_scheduler(line: str) -> bool:
    """Whether a line of a batch script's log is the scheduler's, which does not say why."""
    return bool(_SCHEDULER.match(line))


def is_aftermath(message: str) -> bool:
    """Whether an error is only a consequence of another rank's death."""
    return bool(_AFTERMATH.search(message))


def _failures(logs: Path) -> list[_Failure]:
    try:
        listed = read_failures(logs)
    except (OSError, ValueError):
        # The agent has failed or was stopped, but the ranks' own files may exist.
        listed = [
            {"rank": int(path.parent.name), "exitcode": 1, "error_file": str(path)}
            for newest in _attempts(logs)[:1]
            for path in newest.glob("*/error.json")
        ]
    return [_failure(entry) for entry in listed]


def _own_error(logs: Path) -> str:
    """The exception of an agent that has failed by itself; empty for any other.

    One that was stopped by a signal ends with a ``SignalException``.
    """
    _, traceback, text = end_of(logs / AGENT_LOG).rpartition(TRACEBACK)
    if not traceback or (logs / FAILURES).exists():
        return ""
    lines = (line for line in text.splitlines()[1:] if line.strip())
    error = next((line for line in lines if not line.startswith(" ")), "")
    return "" if "SignalException" in error else error


def _failure(entry: FailureDocument) -> _Failure:
    exitcode, path = entry["exitcode"], Path(entry.get("error_file") or "")
    try:
        written = path.stat().st_mtime  # the time stamp in the file has whole seconds only
        error = json.loads(path.read_bytes())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        message = f"killed by {_signal_name(-exitcode)}" if exitcode < 0 else ""
        return _Failure(entry["rank"], exitcode, float(entry.get("timestamp", 0)), message, "")
    if isinstance(error, str):
        return _Failure(entry["rank"], exitcode, written, _first_line(error), error)
    trace = error.get("extraInfo", {}).get("py_callstack", "")
    return _Failure(entry["rank"], exitcode, written, _first_line(error["message"]), trace)


def _is_aftermath(failure: _Failure) -> bool:
    """Whether a rank ended because of another: by SIGTERM from torchrun or a lost connection."""
    return failure.exitcode == -SIGTERM or is_aftermath(failure.message)


def _is_silent(failure: _Failure) -> bool:
    """Whether a rank says no error: it has written no error file, or was ended while it did."""
    return not failure.message


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def last_output(text: str) -> str:
    """What a program printed last, to be added to how it ended."""
    line = _last_line(text)
    return f"; last output: {line}" if line else " without output"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    of_ranks = [line for line in lines if not _is_of_scheduler(line)]
    return next(reversed(of_ranks or lines), "")
