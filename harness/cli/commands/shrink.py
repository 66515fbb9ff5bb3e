"""``converge shrink``: the smallest set-up that still fails as a test set does."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import add_running, add_slots, add_store, positive, store_of

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.launch.events import Event
    from converge_harness.matrix.run import Ran
    from converge_harness.matrix.shrink import Failure
    from converge_harness.model import Experiment, Plan
    from converge_harness.shrink import Shrunk, Trial, Tried
    from converge_harness.store import Store

HELP = "find the smallest set-up that still fails as a test set does"
DESCRIPTION = """\
Take techniques, degrees, steps, layers and data away from a failed test set and its control, one
change at a time, as long as it still fails in the same way: by the same class of cause, in the same
tensors. Every trial is a real, judged run; earlier runs are reused. The result is an experiment of
its own, which says what the failure needs: compile and tp 2 together, for example."""
EPILOG = """\
examples:
  converge shrink reports/known_bugs --set tp_compile_no_embedding_gradient
  converge shrink experiments/smoke.toml --set fsdp2_tp2 --trials 20 --minutes 15

Ctrl-C keeps the smallest set-up so far. Exit codes: 0 nothing is left to take away; 2 usage error,
or the set does not fail; 3 the budget ended before; 130 interrupted."""
UNDONE = ""

TRIALS = 60
SHOWN = 160
"""Characters of a cause on one line."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument(
        "source", type=Path, metavar="REPORT", help="a report folder of a run, or an experiment"
    )
    parser.add_argument("--set", required=True, metavar="NAME", help="the failed test set")
    parser.add_argument(
        "--trials",
        type=positive,
        default=TRIALS,
        metavar="N",
        help=f"try at most N changes ({TRIALS})",
    )
    parser.add_argument("--minutes", type=positive, metavar="M", help="begin none after M minutes")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the smallest experiment and its report (reports/shrunk/NAME)",
    )
    add_store(parser)
    add_slots(parser)
    add_running(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """0 once nothing is left to take away."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console, say
        from converge_harness.errors import Interrupted
        from converge_harness.matrix.shrink import Shrinking
        from converge_harness.shrink import Effect
        from converge_harness.store import require_writable
    console = make_console()
    begun = time.monotonic()
    out = arguments.out or Path("reports") / "shrunk" / arguments.set
    store = store_of(arguments)
    store.require_writable()
    require_writable(out)
    experiment = _experiment(arguments.source)
    said = _Said(console)

    def run_quietly(plan: Plan) -> Ran:
        return _run(plan, store, arguments, said)

    shrinking = Shrinking(experiment, arguments.set, run_quietly, arguments.slots)
    say(console, f"{arguments.set}: how it fails as it is")
    failure = shrinking.failure()
    say(console, f"  {_short(failure.cause)}")
    start = shrinking.start(failure)
    say(console, f"at most {arguments.trials} trials, each with real runs:")
    limit_s = None if arguments.minutes is None else 60.0 * arguments.minutes

    def may_go_on(tried: int) -> bool:
        in_time = limit_s is None or time.monotonic() - begun < limit_s
        return tried < arguments.trials and in_time

    best: list[Shrunk] = []
    status = console.status("trial 1")

    def tell(found: Shrunk, tried: Tried) -> None:
        best[:] = [found]
        trial = tried.trial
        reason = "" if trial.effect is Effect.SAME else _because(trial)
        say(console, f"  {found.tried:3} {tried.reduction.change}: {trial.effect}{reason}")
        status.update(f"trial {found.tried + 1}")

    interrupted = False
    try:
        with status:
            best[:] = [shrinking.search(start, failure, may_go_on, tell)]
    except Interrupted:
        interrupted = True
        if not best:
            raise
    _conclude(console, failure, best[0], out, arguments)
    if interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.PASS if best[0].done else ExitCode.UNDECIDED


def _experiment(source: Path) -> Experiment:
    from converge_harness.matrix.load import load_with_cluster
    from converge_harness.matrix.save import load_matrix

    return load_matrix(source).plan.experiment if source.is_dir() else load_with_cluster(source)


class _Said:
    """An observer that prints only what a person has to know of."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: Event) -> None:
        from converge_harness.cli.progress import line
        from converge_harness.launch.events import Notice, Retrying

        if isinstance(event, Notice):
            self._console.print(line(event)[0], style="yellow", markup=False, soft_wrap=True)
        elif isinstance(event, Retrying):
            self._console.print(f"{event.job.name}: starting again, because {event.reason}")


def _run(plan: Plan, store: Store, arguments: argparse.Namespace, said: _Said) -> Ran:
    from converge_harness.cli.progress import noticing_launches
    from converge_harness.matrix.run import run_jobs

    observer = noticing_launches(said, arguments)
    return run_jobs(plan, store, observer, fresh=arguments.fresh, warm=not arguments.cold)


def _conclude(
    console: Console,
    failure: Failure,
    found: Shrunk,
    out: Path,
    arguments: argparse.Namespace,
) -> None:
    """Write the smallest experiment, and say what it is."""
    from converge_harness.cli.console import say
    from converge_harness.matrix.pair_files import write_pair
    from converge_harness.matrix.repro import SHRUNK
    from converge_harness.shrink import parts_of
    from converge_harness.store import write_json

    (control,), (test,) = found.experiment.controls, found.experiment.tests
    command = shlex.join(["converge", *sys.argv[1:]])
    head = f"The smallest set-up that fails as {arguments.set} does, by\n{command}"
    path = write_pair(found.experiment, f"{arguments.set}-shrunk", out, head)
    console.print()
    how = "" if found.done else " (the search did not end)"
    say(console, f"smallest set-up{how}: {', '.join(parts_of(test)) or 'one rank'}", "bold")
    say(console, f"  against {', '.join(parts_of(control)) or 'one rank'}, {_sizes(found)}")
    needs = [
        f"needs {each.reduction.what}: without it, it {each.trial.effect}{_because(each.trial)}"
        for each in found.needed
    ]
    others = [f"does not need {each.what}" for each in found.taken if each.part]
    for sentence in (*needs, *others):
        say(console, f"  {sentence}")
    write_json(
        out / SHRUNK,
        {"needs": needs, "does_not_need": others, "trials": found.tried, "done": found.done},
    )
    say(console, f"  {_short(failure.cause)}")
    say(console, f"experiment: {path}")
    say(console, f"next: converge run {shlex.quote(str(path))}")


def _sizes(found: Shrunk) -> str:
    (test,) = found.experiment.tests
    steps, length = test.setting("training.steps"), test.setting("training.seq_len")
    layers = test.train_config.model.get("n_layers")
    return f"{steps} steps, sequences of {length} tokens" + (
        f", {layers} layer{'s' * (layers > 1)}" if layers else ""
    )


def _because(trial: Trial) -> str:
    return f" ({_short(trial.said)})" if trial.said else ""


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
