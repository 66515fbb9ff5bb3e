"""The commands that judge a matrix: arguments in, printed verdicts and an exit code out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from harness import corpus
from harness.cli import matrix
from harness.cli.explaining import explain
from harness.cli.learnt import keep, learn, read_given, read_judged_by
from harness.cli.nights import history_of, remember
from harness.cli.running import Ran, gpu_ids, run_jobs
from harness.cli.saved import SavedMatrix, load_matrix, save_matrix
from harness.cli.shared import make_console, names, report_folder, store_of
from harness.experiment import load_experiment
from harness.gate import ExitCode, exit_code
from harness.history import History
from harness.model import Calibration, Evidence, Plan, Surroundings, SyntheticData, Verdict
from harness.references import CALIBRATION_FILE, StoredCalibration, write_calibrations
from harness.store import Store, require_writable

if TYPE_CHECKING:
    from harness.report import ReportView


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge run``: bring every job to a record, calibrate, judge, report."""
    console = make_console()
    begun = time.monotonic()
    on_gpu = bool(gpu_ids())
    only = names(arguments.only)
    plan = matrix.load_plan(
        arguments.experiment,
        only,
        on_gpu=on_gpu,
        slots=arguments.slots,
        calibration=arguments.calibration,
        launcher=arguments.launcher,
        cluster=arguments.cluster,
    )
    surroundings = matrix.surroundings_of(plan.experiment, on_gpu=on_gpu)
    given = read_given(plan, surroundings)
    store = store_of(arguments)
    store.require_writable()
    folder = report_folder(arguments, plan.experiment)
    require_writable(folder)  # now, not after an hour of training
    ran = run_jobs(plan, store, arguments, console)

    def explained(verdicts: Sequence[Verdict]) -> None:
        explain(console, plan, verdicts, folder, store=store, arguments=arguments)

    return conclude(
        console,
        plan,
        ran,
        folder,
        store=store,
        history=history_of(arguments),
        surroundings=surroundings,
        given=given,
        only=only,
        begun=begun,
        then=explained if arguments.explain else None,
    )


def conclude(
    console: Console,
    plan: Plan,
    ran: Ran,
    folder: Path,
    *,
    store: Store,
    history: History,
    surroundings: Surroundings,
    given: Mapping[str, StoredCalibration] | None,
    only: Sequence[str] | None,
    begun: float | None,
    then: Callable[[Sequence[Verdict]], None] | None = None,
) -> ExitCode:
    """Calibrate unless a calibration is given, judge, report, and say what it comes to.

    ``only``: what the plan was made of, to judge it again later; None: the matrix is not finished,
    so that is not wanted, and it is no night of the history.
    ``begun`` is the time of the monotonic clock when the command began; None for one that did not
    wait for the runs, whose own time says nothing. ``then`` is called with the verdicts at the end.
    """
    finished = SavedMatrix(
        plan, ran.records, matrix.versions_of(plan), _entropy_floor(plan, ran.data)
    )
    if only is not None:
        save_matrix(folder, finished, only, on_gpu=bool(gpu_ids()))
    evidences = matrix.read_evidence(plan, ran.records)
    learnt = given
    if learnt is None:
        learnt = learn(plan, evidences, surroundings)
        keep(store, learnt.values())
    write_calibrations(folder / CALIBRATION_FILE, tuple(learnt.values()))
    calibrations = {name: each.calibration for name, each in learnt.items()}
    wall_s = None if begun is None else time.monotonic() - begun
    judged = _judge(finished, evidences, calibrations, wall_s=wall_s)
    _show(console, judged.view, folder)
    if only is not None:
        remember(
            console,
            history,
            plan,
            ran.records,
            judged.verdicts,
            surroundings=surroundings,
            folder=folder,
            wall_s=wall_s,
        )
    if then is not None:
        then(judged.verdicts)
    return exit_code(judged.verdicts)


def report(arguments: argparse.Namespace) -> ExitCode:
    """``converge report``: judge a finished matrix again."""
    _, _, judged = judge_again(arguments.folder)
    _show(make_console(), judged.view, arguments.folder)
    return exit_code(judged.verdicts)


def judge_again(folder: Path) -> tuple[SavedMatrix, Mapping[str, Evidence], matrix.Judged]:
    """A report folder's matrix, its evidence by job name, and what comes of judging it now.

    Raises StoreError as ``load_matrix`` does.
    """
    finished = load_matrix(folder)
    evidences = matrix.read_evidence(finished.plan, finished.records)
    if finished.plan.experiment.calibration is None:
        calibrations = matrix.calibrate_controls(finished.plan, evidences)
    else:
        jobs = zip(finished.plan.jobs, finished.records, strict=True)
        identities = {job.name: record.identity for job, record in jobs}
        calibrations = read_judged_by(finished.plan, folder / CALIBRATION_FILE, identities)
    return finished, evidences, _judge(finished, evidences, calibrations)


def toolchains(arguments: argparse.Namespace) -> ExitCode:
    """``converge toolchains``: the environments that an experiment needs."""
    for name in matrix.toolchain_names(load_experiment(arguments.experiment)):
        print(name)
    return ExitCode.PASS


def _show(console: Console, view: ReportView, folder: Path) -> None:
    from harness.cli.showing import show_verdicts  # noqa: PLC0415 - what is refused draws nothing

    show_verdicts(console, view, folder)


def _judge(
    finished: SavedMatrix,
    evidences: Mapping[str, Evidence],
    calibrations: Mapping[str, Calibration],
    wall_s: float | None = None,
) -> matrix.Judged:
    return matrix.judge_matrix(
        finished.plan,
        finished.records,
        evidences,
        calibrations,
        versions=finished.versions,
        entropy_floor=finished.entropy_floor,
        wall_s=wall_s,
    )


def _entropy_floor(plan: Plan, data: Mapping[SyntheticData, corpus.PreparedData]) -> float | None:
    """Floor of the corpus that all jobs read; None when they read several, or a real one."""
    used = {job.spec.train_config.data for job in plan.jobs}
    (only, *others) = used
    return None if others or only is None else data[only].entropy_nats_per_token
