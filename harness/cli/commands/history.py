"""``converge history``: the results of earlier nights, as a table, JSON or charts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import add_history_file, add_store, history_of, positive
from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.model import Judgement

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.history import Entry, Filter, History

HELP = "list the verdicts of earlier nights, or plot their trends"
DESCRIPTION = """\
List the results of earlier `converge run` and `converge collect` commands: one line per night and
test set, newest first. With --html, plot the deviations of every test set over the nights, and mark
where their level changed: the first bad night, and what changed before it (torch, torchtitan,
torchao, driver, commit …)."""
EPILOG = """\
examples:
  converge history
  converge history smoke --test fsdp2_tp2 --limit 10
  converge history experiments/smoke.toml --verdict FAIL --since 2026-11-01 --json
  converge history smoke --html history.html"""
NOT_DONE = ""

SCHEMA = 1
"""Schema version of ``--json``'s output."""
NEWEST_RESULTS = 50
NEWEST_NIGHTS = 365
_COMMIT = 10
"""Digits of a commit shown to users."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument(
        "experiment",
        nargs="?",
        metavar="EXPERIMENT",
        help="only nights of this experiment: its name, or its file",
    )
    parser.add_argument("--test", metavar="NAME", help="only this test set")
    parser.add_argument(
        "--verdict",
        type=_verdict,
        metavar="WORD",
        help=f"only this verdict: {', '.join(Judgement)}",
    )
    parser.add_argument(
        "--since",
        type=_time,
        metavar="DATE",
        help="only nights since then: 2026-11-01, or with a time, 2026-11-01T06:00 (local time "
        "unless it has an offset)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        help="at most the N newest results (default 50); with --html, nights of a set (default "
        "365)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--json", action="store_true", help="print JSON, with the results of the checks"
    )
    how.add_argument(
        "--html", type=Path, metavar="FILE", help="write the trends as one self-contained page"
    )
    add_store(parser)
    add_history_file(parser)


def _verdict(text: str) -> Judgement:
    try:
        return Judgement(text.upper())
    except ValueError:
        verdicts = ", ".join(Judgement)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a verdict: give one of {verdicts}"
        ) from None


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a date: write 2026-11-01 or 2026-11-01T06:00"
        ) from None


def run(arguments: argparse.Namespace) -> ExitCode:
    """List or plot; the exit code is 0 whatever the verdicts."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console
        from converge_harness.history import Filter
    kept = history_of(arguments)
    query = Filter(
        experiment=_experiment(kept, arguments.experiment),
        test_set=arguments.test,
        verdict=arguments.verdict,
        since=arguments.since,
        limit=arguments.limit or NEWEST_RESULTS,
    )
    _require_known_set(kept, query)
    if arguments.html is not None:
        _draw(kept, query, arguments.html, arguments.limit or NEWEST_NIGHTS)
        return ExitCode.PASS
    entries = kept.listing(query)
    if arguments.json:
        print(json.dumps(_document(kept, entries), indent=1, ensure_ascii=False))
    else:
        _print(make_console(), kept, query, entries)
    return ExitCode.PASS


def _experiment(kept: History, asked: str | None) -> str | None:
    """The experiment's name, from its name or the path of its file."""
    if asked is None:
        return None
    known = kept.experiments()
    if asked in known:
        return asked
    path = str(Path(asked).resolve())
    named = next((name for name, source in known.items() if source == path), None)
    if named is None:
        raise ConfigError(
            Problem(f"{kept.path}: EXPERIMENT", f"no night of {asked!r}", suggest(asked, known))
        )
    return named


def _require_known_set(kept: History, query: Filter) -> None:
    if query.test_set is None:
        return
    experiments = [query.experiment] if query.experiment else list(kept.experiments())
    known = {name: None for each in experiments for name in kept.test_sets(each)}
    if query.test_set not in known:
        hint = suggest(query.test_set, known)
        raise ConfigError(Problem(f"{kept.path}: --test", f"no night of {query.test_set!r}", hint))


def _draw(kept: History, query: Filter, path: Path, nights: int) -> None:
    from converge_harness.history.overview import overview
    from converge_harness.history.page import to_page
    from converge_harness.store import atomic_write

    if query.verdict is not None:
        raise ConfigError(
            Problem("--verdict", "says nothing with --html: a trend needs every night", "leave out")
        )
    sets = overview(
        kept,
        experiment=query.experiment,
        test_set=query.test_set,
        since=query.since,
        newest=nights,
    )
    page = to_page(sets, source_file=str(kept.path), generated=datetime.now(UTC))
    atomic_write(path, page.encode())
    print(path)


def _document(kept: History, entries: Sequence[Entry]) -> dict[str, Any]:
    from converge_harness.run_folder.documents import spell_not_finite

    document: dict[str, Any] = spell_not_finite(
        {
            "schema": SCHEMA,
            "history": str(kept.path),
            "results": [_result(kept, entry) for entry in entries],
        }
    )
    return document


def _result(kept: History, entry: Entry) -> dict[str, Any]:
    return {
        "night": entry.night,
        "finished": entry.finished.isoformat(),
        "experiment": entry.experiment,
        "source": entry.source,
        "test_set": entry.test_set,
        "techniques": entry.techniques,
        "control": entry.control,
        "verdict": entry.verdict.value,
        "previous_verdict": entry.previous and entry.previous.value,
        "cause_class": entry.cause_class and entry.cause_class.value,
        "cause": entry.cause,
        "onset_step": entry.onset,
        "wall_s": entry.wall_s,
        "reused": entry.reused,
        "circumstances": dict(entry.circumstances),
        "report": entry.report,
        "checks": [
            {
                "name": each.check,
                "tier": each.tier.value,
                "outcome": each.outcome.value,
                "measured": each.measured,
                "limit": each.limit,
                "unit": each.unit,
            }
            for each in kept.measurements(entry)
        ],
    }


def _print(console: Console, kept: History, query: Filter, entries: Sequence[Entry]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from converge_harness.cli.console import WIDE, say
    from converge_harness.cli.verdicts import STYLES
    from converge_harness.report.sanitize import plain
    from converge_harness.report.text import ABSENT, duration

    if not entries:
        say(console, f"{kept.path}: no such results")
        return
    table = Table(show_edge=False)
    titles = ["night", "experiment", "test set", "verdict", "before", "onset", "cause"]
    wide = console.width >= WIDE
    for title in [*titles, *(("commit", "wall") if wide else ())]:
        table.add_column(title, overflow="fold", no_wrap=title in ("night", "verdict"))
    for entry in entries:
        cells = [
            entry.finished.astimezone().strftime("%Y-%m-%d %H:%M"),
            *map(escape, (plain(entry.experiment), plain(_set_with_techniques(entry)))),
            f"[{STYLES[entry.verdict]}]{entry.verdict.value}[/]",
            entry.previous.value if entry.previous else ABSENT,
            ABSENT if entry.onset is None else f"step {entry.onset}",
            entry.cause_class.value if entry.cause_class else ABSENT,
        ]
        if wide:
            cells += [_commit(entry), duration(entry.wall_s) + (" (reused)" * entry.reused)]
        table.add_row(*cells)
    console.print(table)
    if len(entries) == query.limit:
        console.print(f"the newest {len(entries)}; more with --limit N", style="dim")


def _set_with_techniques(entry: Entry) -> str:
    return f"{entry.test_set} ({entry.techniques})" if entry.techniques else entry.test_set


def _commit(entry: Entry) -> str:
    from rich.markup import escape

    from converge_harness.report.sanitize import plain
    from converge_harness.report.text import ABSENT

    digits, _, dirty = entry.circumstances.get("commit", "").partition("-")
    return escape(plain(digits[:_COMMIT] + ("+" if dirty else ""))) or ABSENT
