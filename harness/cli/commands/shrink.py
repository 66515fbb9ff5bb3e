"""``converge shrink``: the smallest set-up that fails the same way as a test set."""

from __future__ import annotations

import argparse
import math
import time

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import TRIALS, add_search, experiment_of, store_of

HELP = "find the smallest set-up that fails the same way as a test set"
DESCRIPTION = """\
Take techniques, degrees, steps, layers and data away from a failed test set and its control, one
change at a time, as long as it still fails in the same way: by the same class of cause, with at
least one tensor in common. Of a set that is INVALID because something that it names did not run,
as long as that does not run. Every trial is a real, judged run; earlier runs are reused. The
result is an experiment of its own, and what the failure needs: compile and tp 2 together, for
example."""
EPILOG = """\
examples:
  converge shrink reports/known_bugs --set tp_compile_no_embedding_gradient
  converge shrink experiments/smoke.toml --set fsdp2_tp2 --trials 20 --minutes 15

Ctrl-C keeps the smallest set-up so far. A trial that has begun when the minutes are over is
finished. Exit codes: 0 nothing is left to take away; 2 usage error, or the set does not fail
(again); 3 --trials or --minutes are used up, or the smallest set-up does not fail once more;
130 interrupted."""
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    out = "folder for the smallest experiment and its report (reports/shrunk/NAME)"
    add_search(parser, trials=TRIALS, tried="changes", out=out)


def run(arguments: argparse.Namespace) -> ExitCode:
    """0 once nothing is left to take away."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console
        from converge_harness.cli.shrinking import failed_in, shrink_set, shrunk_folder
        from converge_harness.store import require_writable
    begun = time.monotonic()
    out = arguments.out or shrunk_folder(arguments.set)
    store = store_of(arguments)
    store.require_writable()
    require_writable(out)
    until = math.inf if arguments.minutes is None else begun + 60.0 * arguments.minutes
    return shrink_set(
        make_console(),
        experiment_of(arguments.source),
        arguments.set,
        out,
        store,
        arguments,
        failed=failed_in(arguments.source, arguments.set),
        trials=arguments.trials,
        until=until,
    )
