"""``converge bisect``: the first commit or version at which a test set fails, or passes again."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import add_search, experiment_of, store_of

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.matrix.bisect import Bisecting, Ends, Found, Subject, TriedRevision
    from converge_harness.model import Experiment
    from converge_harness.store import Store

HELP = "find the first commit or version at which a test set fails, or passes again"
DESCRIPTION = """\
Train and judge a failed test set and its control at one revision after another, as git bisect does,
until the first one that fails the same way is found (the same class of cause, module and
tensors). If the good revision is the newer one, it finds the first that no longer fails. Revisions
that cannot be built, run or judged, or that fail in another way, are skipped; of a merge, only
the first parent is followed. The revisions are

  commits of torchtitan or Megatron-LM, in the clone that $CONVERGE_CHECKOUT names (toolchains are
  built from it);
  commits of your own code or fork, in the checkout that the experiment takes it from (--of code);
  released versions of a package of the toolchain (--package torchao)."""
EPILOG = """\
examples:
  CONVERGE_CHECKOUT=~/torchtitan converge bisect experiments/routing_bias.toml \\
      --set fsdp2_tp2_ep4 --good 48cb7ae1ff62 --bad 2f10a2590c76
  converge bisect mine.toml --set fused_norm --good main~20 --bad main
  converge bisect matrix.toml --set float8 --package torchao --good 0.17.0 --bad 0.18.0

After an interruption the same command continues: toolchains and runs are kept.
Exit codes: 0 found, and the same in a second run; 2 usage error, or the set does not pass at --good
or does not fail at --bad; 3 --trials or --minutes are used up, only skipped revisions are left, or
a second run differs; 130 interrupted. `git bisect run converge run EXPERIMENT --only NAME
--git-bisect` works, too."""
NOT_DONE = ""

TRIALS = 40
SHOWN = 20
"""Most candidates that are listed."""
TOOLCHAIN, CODE = "toolchain", "code"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    out = "folder for the result and the reports before and after (reports/bisected/NAME)"
    add_search(parser, trials=TRIALS, tried="revisions between the two", out=out)
    parser.add_argument("--good", required=True, metavar="REV", help="where the set passes")
    parser.add_argument("--bad", required=True, metavar="REV", help="where it fails")
    of = parser.add_mutually_exclusive_group()
    of.add_argument(
        "--of",
        choices=(TOOLCHAIN, CODE),
        help="whose commits: of the torchtitan or Megatron-LM in the set's toolchain, or of the "
        "experiment's own code or fork (default: toolchain, if converge builds it at any commit)",
    )
    of.add_argument("--package", metavar="NAME", help="versions of a package instead of commits")


def run(arguments: argparse.Namespace) -> ExitCode:
    """0 once it is found."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import error_console, make_console, say
        from converge_harness.cli.quiet import RunningQuietly
        from converge_harness.matrix.bisect import (
            Bisecting,
            NothingToBisectError,
            alone,
            asked_for,
        )
        from converge_harness.store import require_writable
    begun = time.monotonic()
    console = make_console()
    out = arguments.out or Path("reports") / "bisected" / arguments.set
    store = store_of(arguments)
    store.require_writable()
    require_writable(out)
    experiment = alone(experiment_of(arguments.source), arguments.set, arguments.slots)
    subject = _subject(experiment, arguments, console)
    bisecting = Bisecting(experiment, subject, RunningQuietly(console, store, arguments, bars=True))
    say(console, f"{arguments.set} with {subject.what}")
    try:
        asked = asked_for(subject, arguments.good, arguments.bad)
        ends = bisecting.ends(asked, lambda tried: _show(console, tried, "  ", says=True))
    except NothingToBisectError as error:
        say(error_console(), f"error: {error}", "red")
        return ExitCode.USAGE
    until = math.inf if arguments.minutes is None else begun + 60.0 * arguments.minutes
    searching = _Searching(console, bisecting, subject, out, store)
    return searching.run(ends, lambda tried: tried < arguments.trials and time.monotonic() < until)


def _subject(experiment: Experiment, arguments: argparse.Namespace, console: Console) -> Subject:
    from converge_harness.cli.building import building
    from converge_harness.matrix.bisect import OwnCommits, Releases, UpstreamCommits, trains_in

    if arguments.package:
        return Releases(arguments.package, experiment, building(console, quiet=True))
    of = arguments.of or (TOOLCHAIN if trains_in(experiment) else CODE)
    if of == TOOLCHAIN:
        return UpstreamCommits(experiment, building(console, quiet=True))
    return OwnCommits(experiment)


class _Searching:
    """A search that says what it tries, and leaves what it knows however it ends."""

    def __init__(
        self, console: Console, bisecting: Bisecting, subject: Subject, out: Path, store: Store
    ) -> None:
        self._console, self._bisecting, self._subject = console, bisecting, subject
        self._out, self._store = out, store
        self._best: Found | None = None

    def run(self, ends: Ends, may_go_on: Callable[[int], bool]) -> ExitCode:
        """Search, run what was found a second time, and say it; also if it is cut off."""
        from converge_harness.cli.console import say
        from converge_harness.errors import ConvergeError, Interrupted
        from converge_harness.matrix.bisect import untried

        noun, count = self._subject.noun, len(ends.line) - 1
        change = "does not fail" if ends.mended else "fails"
        say(self._console, f"looking among {count} {noun}s for the first at which it {change}")
        self._best = untried(ends)
        try:
            self._best = self._bisecting.search(ends, may_go_on, self._tell)
            others = self._again()
        except (Interrupted, KeyboardInterrupt):  # the latter while it judges
            self._conclude(self._best, None)
            return ExitCode.INTERRUPTED
        except (ConvergeError, OSError):  # a full disk: what was found is worth having
            self._conclude(self._best, None)
            raise
        found = self._best
        self._conclude(found, others)
        for folder, at in (("before", found.before), ("after", found.after)):
            self._bisecting.report(ends, at, self._out / folder, self._store)
            say(self._console, f"report {folder} the change: {self._out / folder / 'report.html'}")
        certain = len(found.candidates) == 1 and not others
        return ExitCode.PASS if certain else ExitCode.UNDECIDED

    def _again(self) -> tuple[TriedRevision, ...]:
        """What is not as before in a second run of what was found."""
        from converge_harness.cli.console import say

        if self._best is None or len(self._best.candidates) > 1:
            return ()
        say(self._console, "running both sides of the change again, from scratch")
        return self._bisecting.confirm(self._best)

    def _tell(self, found: Found, tried: TriedRevision) -> None:
        self._best = found
        left = found.suspects.trials_left
        after = f"; about {left} more" if left and not found.done else ""
        _show(self._console, tried, f"  {len(found.tried):3} ", after)

    def _conclude(self, found: Found, others: Sequence[TriedRevision] | None) -> None:
        """Say and write what was found; ``others`` differ in a second run, None: there was none."""
        from converge_harness.cli.console import say
        from converge_harness.matrix.bisect import TELLING

        noun, change = self._subject.noun, _change(found)
        say(self._console, "")
        if len(found.candidates) == 1:
            say(self._console, f"first {noun} that {change}: {found.after.title}", "bold")
            if changes := self._subject.changes(found.after):
                say(self._console, changes)
        else:
            why = "those between are skipped" if found.done else "the search was cut short"
            said = (
                f"the first {noun} that {change} is one of these {len(found.candidates)} ({why}):"
            )
            say(self._console, said, "bold")
            shown = found.candidates if len(found.candidates) <= SHOWN else ()
            for each in shown or (found.candidates[0], found.candidates[-1]):
                say(self._console, f"  {each.title}" if shown else f"  … {each.title}")
        for other in others or ():
            before = "a second run gave another result: "
            _show(self._console, other, before, says=True)
            if other.trial.effect in TELLING:
                advice = "it fails in 1 of 2 runs there, so nothing found here is certain"
                say(self._console, advice, "yellow")
        say(self._console, f"result: {self._write(found, others)}")

    def _result(self, found: Found, others: Sequence[TriedRevision] | None) -> str:
        """The only revision that is left and that a second run confirmed, in a sentence."""
        if len(found.candidates) > 1 or others is None or others:
            return ""
        first = f"The first {self._subject.noun} that {_change(found)} is {found.after.title}"
        return f"{first}; the one before it is {found.before.title}."

    def _write(self, found: Found, others: Sequence[TriedRevision] | None) -> Path:
        from converge_harness.matrix.repro import BISECTED
        from converge_harness.store import write_json

        path = self._out / BISECTED
        content = {
            "set": found.ends.pair.tests[0].name,
            "of": self._subject.what,
            "cause": found.ends.failure.cause,
            "looked_for": "the first that passes" if found.ends.mended else "the first that fails",
            "before": found.before.name,
            "candidates": [each.name for each in found.candidates],
            "done": found.done,
            "result": self._result(found, others),
            "second_run_differs": [each.revision.name for each in others or ()],
            "tried": [
                {
                    "revision": each.revision.name,
                    "title": each.revision.title,
                    "effect": each.trial.effect.value,
                    "said": each.trial.said,
                }
                for each in found.tried
            ],
        }
        write_json(path, content)
        return path


def _change(found: Found) -> str:
    return "no longer fails that way" if found.ends.mended else "fails that way"


def _show(
    console: Console, tried: TriedRevision, before: str, after: str = "", *, says: bool = False
) -> None:
    """Print a trial, with the reason unless it is known; ``says``: also if it fails as before."""
    from converge_harness.cli.console import say
    from converge_harness.cli.quiet import short
    from converge_harness.shrink import Effect

    same = tried.trial.effect is Effect.SAME
    said = f" ({short(tried.trial.said)})" if tried.trial.said and (says or not same) else ""
    effect = "fails" if same and says else tried.trial.effect
    say(console, f"{before}{tried.revision.title}: {effect}{said}{after}")
