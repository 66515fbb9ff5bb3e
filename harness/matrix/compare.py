"""Judges finished runs, or curves from anywhere: no plan, no training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple, Protocol

from converge_harness.calibrations import CALIBRATION_FILE, StoredCalibration, write_calibrations
from converge_harness.judge import RcpInputs, calibrate, judge, judge_submission
from converge_harness.matrix.calibrate import timestamp
from converge_harness.matrix.judge import Judged
from converge_harness.model import Ask, Calibration, Evidence, SeedRuns, SetSpec, Verdict
from converge_harness.readers import (
    read_convergence,
    read_curves,
    read_rcps,
    read_spec,
    same_path,
)
from converge_harness.report import build_view


class Advise(Protocol):
    """Completes a verdict's next command with the options by which the curves were read."""

    def __call__(self, verdict: Verdict, *, of_run: bool) -> Verdict:
        """``of_run``: whether a run folder was judged."""


def _as_it_is(verdict: Verdict, *, of_run: bool) -> Verdict:  # noqa: ARG001 - as Advise
    return verdict


@dataclass(frozen=True, slots=True)
class Reading:
    """How curves are read."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """By signal, its column in the file, if the name differs."""
    since: int | None = None
    """The first step that counts; None: all do."""
    without: Sequence[str] = ()
    """Signals of curves that are left out."""
    count_from_1: bool = False
    """Add 1 to the steps of curves that begin at step 0."""

    def read(self, path: Path) -> Evidence:
        """A run folder, or a file of curves. Raises what ``readers.read_curves`` raises."""
        return read_curves(
            path,
            self.columns,
            since=self.since,
            without=self.without,
            count_from_1=self.count_from_1,
        )


@dataclass(frozen=True, slots=True)
class CurveQuestion:
    """What is asked of a test set."""

    ask: Ask | None = None
    margin: float | None = None
    """Largest relative difference that still counts as equivalent; None: by the precision."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Largest relative difference at any step, by signal: replaces what was learnt."""
    target: float | None = None
    """A loss that groups of seeds must reach in no more steps."""


def learn_from_repeats(
    control: Evidence, paths: Sequence[Path], reading: Reading, out: Path | None = None
) -> Calibration:
    """Learn a calibration from repeats of a control; ``out``: the report folder that stores it."""
    repeats = [reading.read(path) for path in paths]
    learnt = calibrate(control, repeats)
    if out is not None:
        known = {repeat.name: repeat.identity for repeat in repeats}
        kept = StoredCalibration(learnt, known, {}, timestamp())
        write_calibrations(out / CALIBRATION_FILE, [kept])
    return learnt


class Given(NamedTuple):
    """A run or curve, with its name in the comparison."""

    evidence: Evidence
    path: Path | None
    """Its path; None for columns in memory."""


def compare_curves(
    control: Given,
    tests: Iterable[Given],
    question: CurveQuestion,
    calibration: Calibration | None = None,
    advise: Advise = _as_it_is,
    here: Path | None = None,
) -> Judged:
    """Judge each run or curve against a control; ``tests`` are read one after the other.

    ``here`` is the folder to which the report's paths are relative, as for ``build_view``.
    """
    control_spec = _spec_of(control)
    verdicts = []
    comparisons = {}
    evidences = {control.evidence.name: control.evidence}
    for test in tests:
        evidences[test.evidence.name] = test.evidence
        spec = _spec_of(test)
        allowed = {**(spec.tolerances if spec else {}), **question.tolerances}
        verdict, comparisons[test.evidence.name] = judge(
            test.evidence,
            control.evidence,
            calibration,
            spec=spec,
            control_spec=control_spec,
            tolerances=allowed,
            margin=question.margin,
            ask=question.ask,
            one_path=_at_one_path(test, control),
        )
        # A command line cannot name columns in memory.
        verdicts.append(
            advise(verdict, of_run=spec is not None)
            if None not in (test.path, control.path)
            else replace(verdict, next_command="")
        )
    names = [name for name in evidences if name != control.evidence.name]
    view = build_view(
        title=f"{control.evidence.name} and {', '.join(names)}",
        verdicts=verdicts,
        evidences=evidences.values(),
        comparisons=comparisons,
        without_limits=[each.name for each in verdicts if each.not_asked],
        calibrations={control.evidence.name: calibration} if calibration else {},
        here=here,
    )
    return Judged(tuple(verdicts), view)


def read_control(path: Path, tests: Sequence[Path], reading: Reading) -> Given:
    """Read the control, under a name that tells it from the test sets."""
    return Given(_named_apart(reading.read(path), path, tests), path)


def read_tests(control: Given, paths: Sequence[Path], reading: Reading) -> Iterator[Given]:
    """Read the test sets lazily, each under a name that no run before it has."""
    taken = {control.evidence.name}
    every = [path for path in (control.path, *paths) if path is not None]
    for path in paths:
        test = _named_apart(reading.read(path), path, every)
        test = replace(test, name=free_name(test, path, taken))
        taken.add(test.name)
        yield Given(test, path)


def _named_apart(run: Evidence, path: Path, others: Iterable[Path]) -> Evidence:
    """A curve by the folders in which its path differs from others with the same last name.

    Of ``a/out/trainer_state.json`` and ``b/out/trainer_state.json`` these are ``a`` and ``b``. A
    run of converge has a name of its own.
    """
    own = path.resolve()
    resolved = (other.resolve() for other in others)
    alike = [other for other in resolved if other.name == own.name and other != own]
    if run.identity is not None or not alike:
        return run
    folders = [each.parent.parts for each in (own, *alike)]
    while all(folders) and len({each[-1] for each in folders}) == 1:
        folders = [each[:-1] for each in folders]
    shared = len(list(takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))))
    return replace(run, name="/".join(folders[0][shared:]) or own.parent.name or str(path))


def _at_one_path(some: Given, other: Given) -> bool:
    if some.path is None or other.path is None:
        return False
    return same_path(some.path, other.path)


def _spec_of(given: Given) -> SetSpec | None:
    return read_spec(given.path) if given.path is not None else None


def compare_seeds(
    control_paths: Sequence[Path],
    tests: Sequence[Sequence[Path]],
    reading: Reading,
    question: CurveQuestion,
    advise: Advise = _as_it_is,
) -> Judged:
    """Judge each group of runs of several seeds against that of the control.

    The runs of the two sides do not come in pairs, so nothing is compared step by step.
    """
    taken: dict[str, Evidence] = {}
    every = [*control_paths, *chain.from_iterable(tests)]
    control = _read_group(control_paths, reading, taken, every)
    control_spec = read_spec(control_paths[0])
    verdicts, seeds = [], {}
    for paths in tests:
        runs = SeedRuns(control, _read_group(paths, reading, taken, every))
        spec = read_spec(paths[0])
        verdict, _ = judge(
            runs.test[0],
            control[0],
            spec=spec,
            control_spec=control_spec,
            margin=question.margin,
            ask=question.ask,
            seeds=runs,
            same_seed=False,
            target=question.target,
        )
        verdicts.append(advise(verdict, of_run=spec is not None))
        seeds[verdict.name] = runs
    named = ", ".join(_with_seeds(runs.test) for runs in seeds.values())
    view = build_view(
        title=f"{_with_seeds(control)} and {named}",
        verdicts=verdicts,
        evidences=taken.values(),
        here=Path.cwd(),
        seeds=seeds,
    )
    return Judged(tuple(verdicts), view)


def compare_submissions(
    table: Path, tests: Sequence[Sequence[Path]], margin: float | None = None
) -> Judged:
    """Judge groups of MLPerf Training logs by the reference convergence points of one table."""
    points = read_rcps(table)
    verdicts: list[Verdict] = []
    for paths in tests:
        runs = tuple(map(read_convergence, paths))
        name = _submission_name(paths, {each.name for each in verdicts})
        verdicts.append(judge_submission(name, table.stem, RcpInputs(points, runs, margin)))
    view = build_view(
        title=f"{table.stem} and {', '.join(each.name for each in verdicts)}",
        verdicts=verdicts,
        here=Path.cwd(),
    )
    return Judged(tuple(verdicts), view)


def free_name(test: Evidence, path: Path, taken: Iterable[str]) -> str:
    """A name that no other curve has: its own, else its path, else the path with a number."""
    tries = [test.name, str(path), *(f"{path} ({count})" for count in range(2, 1000))]
    return next(name for name in tries if name not in taken)


def _read_group(
    paths: Sequence[Path], reading: Reading, taken: dict[str, Evidence], every: Sequence[Path]
) -> tuple[Evidence, ...]:
    """Read the runs of one side; their unique names are added to ``taken``.

    ``every``: the paths of both sides.
    """
    runs = []
    for path in paths:
        read = _named_apart(reading.read(path), path, every)
        run = replace(read, name=free_name(read, path, taken))
        taken[run.name] = run
        runs.append(run)
    return tuple(runs)


def _with_seeds(runs: Sequence[Evidence]) -> str:
    return f"{runs[0].name} ({len(runs)} seeds)"


def _submission_name(paths: Sequence[Path], taken: Collection[str]) -> str:
    """The folder that holds the logs, as in a submission; else the first of them."""
    tries = (paths[0].resolve().parent.name, str(paths[0].parent), str(paths[0]))
    return next((name for name in tries if name and name not in taken), str(paths[0]))
