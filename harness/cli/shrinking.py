"""A search for the smallest set-up that fails as a set does, with what the user sees of it."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.console import error_console, say
from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.options import TRIALS
from converge_harness.cli.quiet import RunningQuietly, short
from converge_harness.model import SEQ_LEN, TRAINING_STEPS
from converge_harness.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.matrix.failure import Failure
    from converge_harness.matrix.shrink import Shrinking
    from converge_harness.model import Experiment
    from converge_harness.shrink import Shrunk, Trial, Tried
    from converge_harness.store import Store


def shrunk_folder(name: str) -> Path:
    """Where the smallest experiment of a set goes unless another folder is asked for."""
    return Path("reports") / "shrunk" / name


def failed_in(source: Path, name: str) -> bool:
    """Whether a source of ``converge shrink`` is a report in which the set is not PASS."""
    from converge_harness.errors import StoreError
    from converge_harness.store import read_json

    try:
        tests = read_json(source / "report.json")["tests"] if source.is_dir() else ()
    except (StoreError, KeyError):
        return False
    return any(each["name"] == name and each["verdict"] != "PASS" for each in tests)


def shrink_set(
    console: Console,
    experiment: Experiment,
    name: str,
    out: Path,
    store: Store,
    arguments: argparse.Namespace,
    *,
    failed: bool = True,
    trials: int = TRIALS,
    until: float = math.inf,
) -> ExitCode:
    """Search for the smallest set-up that fails as a set of an experiment does.

    Args:
        console: where to print.
        experiment: with the set.
        name: of the set.
        out: folder for the smallest experiment.
        store: where runs are kept.
        arguments: of the command line: slots, and how to run.
        failed: whether the set has failed before. If it passes now, it is run again and counted.
        trials: how many to make at most.
        until: when to begin no more, by ``time.monotonic``.

    Returns 0 once nothing is left to take away, 2 if the set does not fail again, and 3 if the
    search was cut short, or the smallest set-up does not fail when it is run once more.
    """
    from converge_harness.matrix.shrink import NothingToShrinkError, Shrinking

    run = RunningQuietly(console, store, arguments)
    shrinking = Shrinking(experiment, name, run, arguments.slots)
    say(console, f"{name}: first without any change")
    try:
        failure = shrinking.failure(failed=failed)
        say(console, f"  {short(failure.cause)}")
        start = shrinking.start(failure)
    except NothingToShrinkError as error:
        say(error_console(), f"error: {error}", "red")
        return ExitCode.USAGE
    say(console, f"at most {trials} trials, each with real runs:")
    searching = _Searching(console, shrinking, trials, until)
    return searching.run(
        start, failure, lambda found, again: _conclude(console, found, name, out, again=again)
    )


class _Searching:
    """A search that says what it tries, and leaves the smallest set-up however it ends."""

    def __init__(self, console: Console, shrinking: Shrinking, trials: int, until: float) -> None:
        self._console, self._shrinking = console, shrinking
        self._trials, self._until = trials, until
        self._status = console.status("trial 1")
        self._best: Shrunk | None = None
        self._again: bool | None = None
        """Whether the smallest set-up failed once more; None: it was not run again."""

    def run(
        self, start: Experiment, failure: Failure, conclude: Callable[[Shrunk, bool | None], None]
    ) -> ExitCode:
        """Search, conclude with the smallest set-up so far, and say how it ended."""
        from converge_harness.errors import Interrupted

        code = ExitCode.INTERRUPTED
        try:
            with self._status:
                self._best = self._shrinking.search(start, failure, self._may_go_on, self._tell)
                if self._best.done:
                    self._again = self._fails_again(self._best.experiment, failure)
            code = ExitCode.PASS if self._again else ExitCode.UNDECIDED
        except (Interrupted, KeyboardInterrupt):  # the latter while it judges
            if self._best is None:
                raise
        finally:  # also if the disk is full: what was found is worth having
            if self._best is not None:
                conclude(self._best, self._again)
        return code

    def _fails_again(self, smallest: Experiment, failure: Failure) -> bool | None:
        """Whether the smallest set-up fails the same way once more, and say so; None: unknown."""
        from converge_harness.shrink import SILENT, Effect

        if time.monotonic() >= self._until:
            say(self._console, "not run once more: the minutes are over", "yellow")
            return None
        self._status.update("the smallest set-up once more")
        trial = self._shrinking.again(smallest, failure)
        if trial.effect is Effect.SAME:
            say(self._console, "run once more, from nothing: fails the same way")
            return True
        known = trial.effect not in SILENT
        so = "The failure comes and goes, so what it needs is not certain" if known else "Try again"
        again = f"run once more, from nothing, it {trial.effect}{_because(trial)}"
        say(self._console, f"warning: {again}. {so}", "yellow")
        return False if known else None

    def _may_go_on(self, tried: int) -> bool:
        return tried < self._trials and time.monotonic() < self._until

    def _tell(self, found: Shrunk, tried: Tried) -> None:
        from converge_harness.shrink import Effect

        self._best = found
        trial = tried.trial
        reason = "" if trial.effect is Effect.SAME else _because(trial)
        what = f"{tried.reduction.change}: {trial.effect}{reason}"
        say(self._console, f"  {found.tried:3} {what}")
        self._status.update(f"trial {found.tried + 1}")


def _conclude(
    console: Console, found: Shrunk, set_name: str, out: Path, *, again: bool | None
) -> None:
    """Say what the smallest set-up is, and write it as an experiment."""
    from converge_harness.matrix.pair_files import SHRUNK, write_pair
    from converge_harness.shrink import parts_of
    from converge_harness.store import write_json

    (control,), (test,) = found.experiment.controls, found.experiment.tests
    console.print()
    how = "" if found.done else " (the search was cut short)"
    say(console, f"smallest set-up{how}: {', '.join(parts_of(test)) or 'one rank'}", "bold")
    say(console, f"  against {', '.join(parts_of(control)) or 'one rank'}, {_sizes(found)}")
    needs = [
        f"needs {each.reduction.what}: without it, it {each.trial.effect}{_because(each.trial)}"
        for each in found.needed
    ]
    left = [
        f"may need {each.reduction.what}: without it, it {each.trial.effect}{_because(each.trial)}"
        for each in found.left
    ]
    others = [f"does not need {each.what}" for each in found.taken if each.part]
    for sentence in (*needs, *left, *others):
        say(console, f"  {sentence}")
    # After what was found is said: the disk may be full.
    command = shlex.join(["converge", *sys.argv[1:]])
    head = f"The smallest set-up that fails as {set_name} does, by\n{command}"
    path, *_ = write_pair(found.experiment, f"{set_name}-shrunk", out, head)
    write_json(
        out / SHRUNK,
        {
            "needs": needs,
            "may_need": left,
            "does_not_need": others,
            "trials": found.tried,
            "done": found.done,
            "fails_again": again,
        },
    )
    say(console, f"experiment: {path}")
    name, report = shlex.quote(set_name), shlex.quote(f"reports/{set_name}-shrunk")
    say(console, f"next: converge run {shlex.quote(str(path))}")
    say(console, f"      converge repro {report} --set {name}  # a draft of an issue")


def _sizes(found: Shrunk) -> str:
    (test,) = found.experiment.tests
    steps, length = test.setting(TRAINING_STEPS), test.setting(SEQ_LEN)
    layers = test.train_config.model.get("n_layers")
    sizes = [f"{steps} steps"]
    if isinstance(length, int):
        sizes.append(f"sequences of {length} tokens")
    if layers:
        sizes.append(counted(layers, "layer"))
    return ", ".join(sizes)


def _because(trial: Trial) -> str:
    return f" ({short(trial.said)})" if trial.said else ""
