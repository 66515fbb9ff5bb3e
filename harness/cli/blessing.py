"""``converge bless``: a control that somebody takes for right becomes golden."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.cli import matrix
from harness.cli.blessing_options import golden_name
from harness.cli.learnt import keep, learn, timestamp
from harness.cli.running import gpu_ids, run_jobs
from harness.cli.shared import make_console, say, store_of
from harness.errors import ConfigError, Problem, StoreError
from harness.gate import ExitCode
from harness.judge import ChangeKind, RunChange, classify, judge
from harness.model import (
    GOLDENS,
    Blessing,
    Evidence,
    Experiment,
    Job,
    Judgement,
    Outcome,
    Plan,
    Role,
    RunRecord,
    RunStatus,
)
from harness.plan import select_controls
from harness.readers import read_run
from harness.references import (
    Change,
    StoredGolden,
    default_folder,
    find_goldens,
    misfits,
    not_there,
    read_golden,
    write_golden,
)
from harness.store import require_writable

_USABLE = (Judgement.PASS, Judgement.INCONCLUSIVE)
"""Of a control against itself; a short run cannot be tested for equivalence."""


def bless(arguments: argparse.Namespace) -> ExitCode:
    """``converge bless``: exit code 0 when the golden is stored, or shown.

    Exit code 3 when the control cannot be blessed, 1 when it trains otherwise than the golden of
    that name and nobody has accepted that.
    """
    console = make_console()
    if arguments.show is not None:
        return _show(console, arguments)
    given = _required(arguments)
    experiment = _control_of(matrix.load(given, arguments.launcher, arguments.cluster), arguments)
    folder = (arguments.out or default_folder(given)) / arguments.name
    before = _golden_there(folder)
    require_writable(folder.parent)
    on_gpu = bool(gpu_ids())
    plan = matrix.plan_experiment(experiment, on_gpu=on_gpu, slots=arguments.slots)
    surroundings = matrix.surroundings_of(experiment, on_gpu=on_gpu)
    store = store_of(arguments)
    store.require_writable()
    ran = run_jobs(plan, store, arguments, console)
    evidences = matrix.read_evidence(plan, ran.records)
    learnt = learn(plan, evidences, surroundings)
    keep(store, learnt.values())
    (job,) = (each for each in plan.jobs if each.role is Role.CONTROL)
    (record,) = (each for each in ran.records if each.identity == job.identity)
    taught, control = learnt[job.name], evidences[job.name]
    reference = _reference_of(plan, ran.records)
    flaws = [*_flaws(job, control), *taught.calibration.problems]
    if reference is not None and reference.status is not RunStatus.FINISHED:
        flaws.append(f"its reference {reference.name} {reference.status.value}")
    for flaw in flaws:
        say(console, f"cannot be blessed: {flaw}")
    if flaws:
        return ExitCode.UNDECIDED
    change = None
    if before is not None:
        found = _change(before, job, control, taught.facts)
        _tell(console, before, found)
        if before.golden.identity == job.identity and found.kind is ChangeKind.BITWISE:
            say(console, f"{folder} is this very control: nothing to bless")
            return ExitCode.PASS
        if found.kind is ChangeKind.SEMANTIC and not arguments.accept_semantic_change:
            again = shlex.join(["converge", "bless", str(given), "--name", arguments.name])
            say(console, f"not blessed: {folder} is as it was")
            say(console, f"if it is meant: {again} … --accept-semantic-change")
            return ExitCode.FAIL
        change = _as_stored(found)
    told = Blessing(arguments.author.strip(), arguments.reason.strip(), timestamp())
    write_golden(folder, record, taught, job.toolchain, told, change, reference)
    _conclude(console, folder, given)
    return ExitCode.PASS


def _required(arguments: argparse.Namespace) -> Path:
    """The experiment file.

    Raises ConfigError when it, a name, an author or a reason is missing: a golden that nobody
    answers for is worth nothing.
    """
    missing = [
        Problem(place, why)
        for place, value, why in (
            ("EXPERIMENT", arguments.experiment, "is missing: whose control shall be golden"),
            ("--name", arguments.name, "is missing: under which name it is kept"),
            ("--author", (arguments.author or "").strip(), "is missing: who takes it for right"),
            ("--reason", (arguments.reason or "").strip(), "is missing: why it may be trusted"),
        )
        if not value
    ]
    missing += [
        Problem(place, "is not text in UTF-8: nobody could read it later")
        for place, value in (("--author", arguments.author), ("--reason", arguments.reason))
        if value and value.encode(errors="replace").decode() != value
    ]
    if missing:
        raise ConfigError(missing)
    golden_name(arguments.name)
    return Path(arguments.experiment)


def _control_of(whole: Experiment, arguments: argparse.Namespace) -> Experiment:
    """The experiment's control alone, and its repeats."""
    wanted = arguments.control or whole.controls[0].name
    chosen = select_controls(whole, (wanted,), references=True)
    if not all(spec.trainer.can.goldens for spec in chosen.controls):
        raise ConfigError(
            Problem(
                f"{whole.path}: trainer.kind",
                f"is {chosen.controls[0].trainer.kind}, and only a control that torchtitan trains "
                "can be blessed: the files and packages that make up another program are not all "
                "known",
                f"judge against it in every run: converge run {shlex.quote(str(whole.path))}",
            )
        )
    return chosen


def _reference_of(plan: Plan, records: Sequence[RunRecord]) -> RunRecord | None:
    """The run in float32 of a control that computes in less."""
    made = {job.identity for job in plan.jobs if job.role is Role.REFERENCE}
    return next((record for record in records if record.identity in made), None)


def _golden_there(folder: Path) -> StoredGolden | None:
    """The golden that is to be replaced; None when there is none yet."""
    if not folder.exists():
        return None
    try:
        return read_golden(folder)
    except StoreError as error:
        raise ConfigError(
            Problem(str(folder), str(error), "move the folder away, or choose another --name")
        ) from error


def _flaws(job: Job, control: Evidence) -> Iterator[str]:
    """Why a control cannot stand for right training, in clauses."""
    if not any(sample.step == 0 for sample in control.samples):
        yield (
            "it left no sample of step 0 (probe.cadence), by which a later run proves that it "
            "starts from the same weights"
        )
    verdict = judge(control, control, spec=job.spec, control_spec=job.spec)
    if verdict.judgement not in _USABLE:
        wrong = [each for each in verdict.checks if each.outcome in (Outcome.INVALID, Outcome.FAIL)]
        yield wrong[0].detail if wrong else verdict.cause


# ------------------------------------------------------------------ changes


def _change(
    before: StoredGolden, job: Job, control: Evidence, facts: Mapping[str, Any]
) -> RunChange:
    """What lies between the golden and the control of now; another training is semantic."""
    golden = before.golden
    found = misfits(golden.facts, facts)
    change = classify(
        control,
        read_run(golden.folder),
        before.learnt.calibration,
        spec=job.spec,
        before_spec=golden.spec,
    )
    if not found.refused or change.kind is ChangeKind.BITWISE:
        return change
    return RunChange(
        ChangeKind.SEMANTIC,
        f"the control is told to be something else: {'; '.join(found.refused)}",
        change.onset,
        change.signals,
    )


def _as_stored(found: RunChange) -> Change:
    return Change(
        kind=found.kind.value,
        sentence=found.sentence,
        onset=found.onset,
        growth={each.signal: each.growth for each in found.signals if each.growth},
    )


def _tell(console: Console, before: StoredGolden, found: RunChange) -> None:
    """What has changed since the golden that is there."""
    say(console, f"\nagainst {before.golden.words}")
    say(console, f"the change is {found.kind.value}: {found.sentence}")
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
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(console, f"golden: {folder} ({size / 1024:.0f} kB; commit it)")
    written = folder.name if folder.parent == default_folder(experiment) else str(folder)
    say(console, f'judge against it: baseline = "{written}" at the top of {experiment}')


# ------------------------------------------------------------------ showing


def _show(console: Console, arguments: argparse.Namespace) -> ExitCode:
    """All goldens in a table, or one in full with those before it."""
    given = arguments.experiment
    beside = default_folder(given) if given is not None else Path(GOLDENS)
    folder = arguments.out or beside
    if not arguments.show:
        found = find_goldens(folder)
        if not found:
            raise StoreError(f"{folder} holds no golden; make one with: converge bless EXPERIMENT")
        _list(console, found)
        return ExitCode.PASS
    if not (folder / arguments.show).is_dir():
        raise StoreError(not_there(folder / arguments.show))
    stored = read_golden(folder / arguments.show)
    for line in _lines(stored):
        say(console, line)
    return ExitCode.PASS


def _list(console: Console, folders: tuple[Path, ...]) -> None:
    table = Table(show_edge=False)
    for title in ("golden", "author", "date", "reason", "toolchain", "hardware", "dtype"):
        table.add_column(title, overflow="fold")
    for folder in folders:
        stored = read_golden(folder)
        golden = stored.golden
        told = golden.blessing
        table.add_row(
            *map(
                escape,
                (
                    golden.name,
                    told.author,
                    told.date[:10],
                    told.reason,
                    golden.toolchain.name,
                    stored.hardware,
                    str(stored.dtype.get("param_dtype")),
                ),
            )
        )
    console.print(table)


def _lines(stored: StoredGolden) -> Iterator[str]:
    golden = stored.golden
    versions = ", ".join(f"{name} {text}" for name, text in golden.toolchain.versions.items())
    dtypes = ", ".join(f"{key} {value}" for key, value in stored.dtype.items())
    yield golden.words
    yield f"  control {stored.learnt.calibration.control}: {golden.spec.parallelism}"
    yield f"  versions: {versions}; written by converge {stored.converge}"
    yield f"  hardware: {stored.hardware}; {dtypes}"
    repeats = len(stored.learnt.calibration.repeats)
    yield f"  repeats: {repeats}, of which {stored.learnt.calibration.taught_by} differ from it"
    while stored.replaces is not None:
        before = stored.replaces
        yield f"  replaces {before.kept}: {before.author} on {before.date[:10]}: {before.reason}"
        onset = f" from step {before.change.onset} on" if before.change.onset is not None else ""
        yield f"    the change was {before.change.kind}{onset}: {before.change.sentence}"
        # Those before lie beside each other in the newest one's folder.
        kept = golden.folder / before.kept
        if not kept.is_dir():
            return
        stored = read_golden(kept)
