"""``converge bless``: store a control that somebody vouches for as a baseline."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import add_cluster, add_running, add_slots, add_store, store_of
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.model import BASELINES

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.baselines import StoredBaseline
    from converge_harness.judge import RunChange

HELP = "store a control as a baseline, to be judged against without running it"
DESCRIPTION = """\
Store the control of an experiment as a baseline: its curves, digests and sketches, what its repeats
showed, versions, and who vouches for it. Finished runs are not run again. An experiment
with `baseline = "NAME"` is then judged against it without running the control. Blessing again first
reports whether it is still bitwise the same, the same within rounding, or different."""
EPILOG = """\
examples:
  converge bless experiments/smoke.toml --name smoke --author ada --reason "first release"
  converge bless experiments/smoke.toml --name smoke --author ada --reason "mask fixed" \\
    --accept-different
  converge bless --show            # all baselines
  converge bless --show smoke      # one, and those that it replaced

exit codes: 0 stored or shown; 1 the control trains differently from the baseline of that name; 2
usage or configuration error; 3 the control cannot be blessed."""
NOT_DONE = ", nothing was launched"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
"""A name that is a valid folder name on every system."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("experiment", type=Path, nargs="?", metavar="EXPERIMENT")
    parser.add_argument("--name", metavar="NAME", help="of the baseline, a folder under baselines/")
    parser.add_argument("--author", metavar="WHO", help="who vouches for the control")
    parser.add_argument("--reason", metavar="WHY", help="why it can be trusted")
    parser.add_argument("--control", metavar="NAME", help="which control (default: the [control])")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the folder of baselines (default: baselines/ beside the experiments)",
    )
    parser.add_argument(
        "--accept-different",
        action="store_true",
        help="bless although the control trains differently from the baseline of that name",
    )
    parser.add_argument(
        "--show",
        nargs="?",
        const="",
        metavar="NAME",
        help="show a baseline and those it replaced, or without NAME list all; nothing is run",
    )
    add_store(parser)
    add_slots(parser)
    add_cluster(parser)
    add_running(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Exit code 0 when the baseline is stored, or shown.

    Exit code 3 when the control cannot be blessed, 1 when it trains differently from the baseline
    of that name and nobody has accepted that.
    """
    with leaving_when_interrupted():
        from converge_harness.baselines import default_folder, require_no_passes
        from converge_harness.cli.console import make_console, say
        from converge_harness.cli.progress import run_shown
        from converge_harness.matrix.bless import (
            baseline_there,
            bless,
            candidate,
            change_since,
            control_alone,
            folders_of,
        )
        from converge_harness.matrix.load import load_with_cluster, plan_experiment
        from converge_harness.matrix.run import gpu_ids
        from converge_harness.model import Sameness
        from converge_harness.store import require_writable
    console = make_console()
    if arguments.show is not None:
        return _show(console, arguments)
    given = _required(arguments)
    whole = load_with_cluster(given, arguments.launcher, arguments.cluster)
    experiment = control_alone(whole, arguments.control)
    folder = (arguments.out or default_folder(given)) / arguments.name
    before = baseline_there(folder)
    require_writable(folder.parent)
    plan = plan_experiment(experiment, on_gpu=bool(gpu_ids()), slots=arguments.slots)
    store = store_of(arguments)
    store.require_writable()
    if not arguments.fresh:
        require_no_passes(folders_of(plan, store))
    ran = run_shown(plan, store, arguments, console)
    control = candidate(plan, ran.records, store)
    flaws = control.flaws
    for flaw in flaws:
        say(console, f"cannot be blessed: {flaw}")
    if flaws:
        return ExitCode.UNDECIDED
    change = None
    if before is not None:
        change = change_since(before, control)
        _tell(console, before, change)
        if before.baseline.identity == control.job.identity and change.sameness is Sameness.BITWISE:
            say(console, f"{folder} already holds this control: nothing to bless")
            return ExitCode.PASS
        if change.sameness is Sameness.DIFFERENT and not arguments.accept_different:
            again = shlex.join(["converge", "bless", str(given), "--name", arguments.name])
            say(console, f"not blessed: {folder} is unchanged")
            say(console, f"if the change is intended: {again} … --accept-different")
            return ExitCode.FAIL
    bless(folder, control, arguments.author, arguments.reason, change)
    _conclude(console, folder, given)
    return ExitCode.PASS


def _required(arguments: argparse.Namespace) -> Path:
    """The experiment file.

    Raises ConfigError when it, a name, an author or a reason is missing: a baseline that nobody
    vouches for is worth nothing.
    """
    missing = [
        Problem(place, why)
        for place, value, why in (
            (
                "EXPERIMENT",
                arguments.experiment,
                "is missing: the experiment whose control becomes the baseline",
            ),
            ("--name", arguments.name, "is missing: the name to store it under"),
            ("--author", (arguments.author or "").strip(), "is missing: who vouches for it"),
            ("--reason", (arguments.reason or "").strip(), "is missing: why it can be trusted"),
        )
        if not value
    ]
    missing += [
        Problem(place, "is not UTF-8 text: nobody could read it later")
        for place, value in (("--author", arguments.author), ("--reason", arguments.reason))
        if value and value.encode(errors="replace").decode() != value
    ]
    if missing:
        raise ConfigError(missing)
    if not _NAME.fullmatch(arguments.name):
        place = f"--name {arguments.name}"
        raise ConfigError(Problem(place, "use letters, digits, dots, dashes and underscores"))
    return Path(arguments.experiment)


def _tell(console: Console, before: StoredBaseline, found: RunChange) -> None:
    """Print what has changed since the existing baseline."""
    from rich.table import Table

    from converge_harness.cli.console import say

    say(console, f"\nagainst {before.baseline.text}")
    say(console, f"the control is {found.sameness.value}: {found.sentence}")
    if found.onset is not None:
        say(console, f"off by more than rounding from step {found.onset} on")
    if not found.signals:
        return
    table = Table(show_edge=False)
    table.add_column("signal")
    for title in ("differs from", "off from", "worst", "its limit", "growth"):
        table.add_column(title, justify="right")
    for each in found.signals:
        table.add_row(
            each.signal,
            "" if each.first is None else f"step {each.first}",
            "" if each.onset is None else f"step {each.onset}",
            f"{each.difference:.2g} (step {each.step})",
            f"{each.limit:.2g}",
            each.growth,
        )
    console.print(table)


def _conclude(console: Console, folder: Path, experiment: Path) -> None:
    from converge_harness.baselines import default_folder
    from converge_harness.cli.console import say

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(console, f"baseline: {folder} ({size / 1024:.0f} kB; commit it)")
    written = folder.name if folder.parent == default_folder(experiment) else str(folder)
    say(console, f'judge against it: baseline = "{written}" at the top of {experiment}')


# ------------------------------------------------------------------ showing


def _show(console: Console, arguments: argparse.Namespace) -> ExitCode:
    """Print all baselines as a table, or one in full with those it replaced."""
    from converge_harness.baselines import default_folder, find_baselines, not_there, read_baseline
    from converge_harness.cli.console import say

    given = arguments.experiment
    beside = default_folder(given) if given is not None else Path(BASELINES)
    folder = arguments.out or beside
    if not arguments.show:
        found = find_baselines(folder)
        if not found:
            raise StoreError(
                f"{folder} holds no baseline; make one with: converge bless EXPERIMENT"
            )
        _list(console, found)
        return ExitCode.PASS
    if not (folder / arguments.show).is_dir():
        raise StoreError(not_there(folder / arguments.show))
    stored = read_baseline(folder / arguments.show)
    for line in _lines(stored):
        say(console, line)
    return ExitCode.PASS


def _list(console: Console, folders: tuple[Path, ...]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from converge_harness.baselines import read_baseline

    table = Table(show_edge=False)
    for title in ("baseline", "author", "date", "reason", "toolchain", "hardware", "dtype"):
        table.add_column(title, overflow="fold")
    for folder in folders:
        stored = read_baseline(folder)
        baseline = stored.baseline
        blessing = baseline.blessing
        table.add_row(
            *map(
                escape,
                (
                    baseline.name,
                    blessing.author,
                    blessing.date[:10],
                    blessing.reason,
                    baseline.toolchain.name,
                    stored.hardware,
                    str(stored.dtype.get("param_dtype")),
                ),
            )
        )
    console.print(table)


def _lines(stored: StoredBaseline) -> Iterator[str]:
    from converge_harness.baselines import read_baseline

    baseline = stored.baseline
    versions = ", ".join(f"{name} {text}" for name, text in baseline.toolchain.versions.items())
    dtypes = ", ".join(f"{key} {value}" for key, value in stored.dtype.items())
    yield baseline.text
    yield f"  control {stored.learnt.calibration.control}: {baseline.spec.parallelism}"
    yield f"  versions: {versions}; written by converge {stored.converge}"
    yield f"  hardware: {stored.hardware}; {dtypes}"
    repeats = len(stored.learnt.calibration.repeats)
    yield f"  repeats: {repeats}, of which {stored.learnt.calibration.taught_by} differ from it"
    while stored.replaces is not None:
        before = stored.replaces
        yield f"  replaces {before.kept}: {before.author} on {before.date[:10]}: {before.reason}"
        onset = f" from step {before.change.onset} on" if before.change.onset is not None else ""
        yield f"    it was {before.change.kind}{onset}: {before.change.sentence}"
        # All earlier ones lie side by side in the newest one's folder.
        kept = baseline.folder / before.kept
        if not kept.is_dir():
            return
        stored = read_baseline(kept)
