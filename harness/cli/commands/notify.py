"""``converge notify``: what to report of a night, if anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import add_history_file, add_store, history_of
from converge_harness.errors import HistoryError, StoreError

if TYPE_CHECKING:
    from converge_harness.history import Entry, History, NightMark

HELP = "write a message if this night is the first bad one"
DESCRIPTION = """\
Write a message about a night, as Markdown for an issue, a comment or a mail: test sets that are bad
for the first time since they last passed, with their cause, their last good night and what has
changed since then. A set that stays bad in the same way is reported once; on a night without news
no file is written, and an earlier night's file is removed. With --experiment, a night that
left no report (nothing was launched, or the run was cut off) also gets a message; of several such
nights in a row only the first does. Whether the night was good is the exit code of `converge run`;
this command exits with 0 either way."""
EPILOG = (
    "example: converge notify reports/smoke --experiment experiments/smoke.toml --body "
    "message.md && [ ! -f message.md ] || gh issue create --title 'smoke is bad' --body-file "
    "message.md"
)
NOT_DONE = ""

REPORT = "report.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of the night")
    parser.add_argument(
        "--body", type=Path, required=True, metavar="FILE", help="where the message goes"
    )
    parser.add_argument(
        "--experiment",
        type=Path,
        metavar="FILE",
        help="the experiment of the night, so that a night without a report is reported, too",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="the output of `converge run`: quoted in the message of a night without a report",
    )
    add_store(parser)
    add_history_file(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write the message on the first bad night, and no file on others.

    Exit code 0 whatever the night was.
    """
    with leaving_when_interrupted():
        from converge_harness.store import atomic_write
    history = history_of(arguments)
    arguments.body.unlink(missing_ok=True)
    folder = arguments.folder.resolve()
    silent = arguments.experiment is not None and not (folder / REPORT).is_file()
    text = _of_silence(arguments, history, folder) if silent else _of_report(history, folder)
    if text is not None:
        atomic_write(arguments.body, text.encode(errors="replace"))
        print(f"message: {arguments.body}")
    return ExitCode.PASS


# ------------------------------------------------------------ a night with a report


def _of_report(history: History, folder: Path) -> str | None:
    """The body of a night that judged something; None when nothing is new."""
    from converge_harness.night import body, night, reported

    document = _read(folder / REPORT)
    known: tuple[Entry, ...] = ()
    note = ""
    try:
        known = _known(history, folder, document)
    except HistoryError as error:
        if document is None:
            raise
        note = f"Unknown which of these were reported before: {error}"
    tonight = _reported_to(str(folder), known)
    if document is not None and not _says(document, tonight):
        # The history could not be written that night: take the results from report.json instead.
        tonight = reported(document, str(folder), known)
        known = (*tonight, *known)
        note = note or "This night is missing from the history, so it may be reported again."
    if not tonight:
        raise HistoryError(
            f"{history.path}: no night was reported to {folder}; give the --out folder of a "
            "`converge run`, its history with --history, and for a night without a report "
            "--experiment"
        )
    found = night(known, tonight[0].night)
    what = [f"{len(found.news)} bad for the first time" if found.news else "nothing new"]
    old = len(found.bad) - len(found.news)
    what += [f"{old} still bad, already reported"] if old else []
    what += [note] if note else []
    print(f"{tonight[0].experiment}: {'; '.join(what)}")
    return body(found, note)


def _known(history: History, folder: Path, document: Mapping[str, Any] | None) -> tuple[Entry, ...]:
    """Every result of the experiment that was reported to a folder, newest first."""
    from converge_harness.history import Filter

    name = history.experiment_of(str(folder))
    if name is None and document is not None:
        name = document["experiment"]
    return history.listing(Filter(experiment=name)) if name is not None else ()


def _reported_to(folder: str, known: Sequence[Entry]) -> tuple[Entry, ...]:
    """The newest night among results that was reported to a folder."""
    number = next((entry.night for entry in known if entry.report == folder), None)
    return tuple(entry for entry in known if entry.night == number)


def _read(path: Path) -> dict[str, Any] | None:
    """A ``report.json``; None if there is no file.

    Raises StoreError when it is damaged.
    """
    from converge_harness.night import reported

    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        reported(document, "")
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: not a report that this version of converge can read ({error!r})"
        ) from error
    return dict(document)


def _says(document: Mapping[str, Any], night: Sequence[Entry]) -> bool:
    """Whether a report belongs to a night: its folder may have held another."""
    from converge_harness.report.sanitize import plain

    found = {test["name"]: (test["verdict"], test["cause_class"]) for test in document["tests"]}
    return found == {plain(each.test_set): (each.verdict, each.cause_class) for each in night}


# --------------------------------------------------------- a night without a report


def _of_silence(arguments: argparse.Namespace, history: History, folder: Path) -> str | None:
    """The message about a night without a report; also records the night in the history.

    None if the night before had no report either: that was already reported.
    """
    from converge_harness.night import nothing_judged

    name, now = _name(arguments.experiment), datetime.now(UTC)
    before, note = None, ""
    try:
        before = _remember_silence(history, name, arguments.experiment, folder, now)
    except HistoryError as error:
        note = f"Unknown whether this was reported before: {error}"
    if before is not None and not before.judged:
        print(f"{name}: nothing was judged, as on {before.finished:%Y-%m-%d}; already reported")
        return None
    print(f"{name}: nothing was judged")
    log = arguments.log
    said = log.read_text(errors="replace") if log is not None and log.is_file() else ""
    return nothing_judged(name, now, before, said, note)


def _remember_silence(
    history: History, name: str, experiment: Path, folder: Path, now: datetime
) -> NightMark | None:
    """Add the night unless it is there; return the one before it."""
    from converge_harness.history import Night

    known = history.newest(name, limit=2) if history.path.is_file() else ()
    if known and not known[0].judged and known[0].report == str(folder):
        return known[1] if known[1:] else None
    silence = Night(
        experiment=name,
        source=str(experiment.resolve()),
        finished=now,
        circumstances={},
        runs="",
        wall_s=None,
        report=str(folder),
        results=(),
    )
    history.append(silence)
    return known[0] if known else None


def _name(experiment: Path) -> str:
    """The experiment's name, although its file may be invalid."""
    try:
        import tomli

        name = tomli.loads(experiment.read_text()).get("name")
    except (OSError, ValueError):
        name = None
    return name if isinstance(name, str) and name else experiment.stem
