"""From records to verdicts and files: calibrate, judge, save, add to the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from converge_harness import __version__
from converge_harness.calibrations import CALIBRATION_FILE, StoredCalibration, write_calibrations
from converge_harness.checkout import checkout_commit
from converge_harness.history import History, night_of
from converge_harness.matrix.calibrate import (
    calibrate_controls,
    learn,
    read_judged_by,
    store_calibrations,
)
from converge_harness.matrix.judge import Judged, judge_matrix, read_evidence, versions_of
from converge_harness.matrix.run import Ran, gpu_ids
from converge_harness.matrix.save import SavedMatrix, load_matrix, save_matrix
from converge_harness.model import Calibration, Evidence, Launcher, Plan, RunRecord, Verdict
from converge_harness.store import Store
from converge_harness.surroundings import driver_version


def conclude(
    plan: Plan,
    ran: Ran,
    folder: Path,
    *,
    store: Store,
    given: Mapping[str, StoredCalibration] | None = None,
    selected: Sequence[str] = (),
    wall_s: float | None = None,
    save: bool = True,
) -> Judged:
    """Calibrate unless calibrations are given, and judge.

    Args:
        plan: what ran.
        ran: the result.
        folder: for the reports.
        store: for the calibrations.
        given: calibrations by the control's name; None: learn them from the repeats.
        selected: the sets that ``--only`` named, of which the plan was made; saved.
        wall_s: seconds from the beginning of the command until all runs had ended; None if it did
        not wait for them.
        save: whether to save what ``conclude_again`` needs, which is for finished matrices.
    """
    finished = SavedMatrix(plan, ran.records, versions_of(plan), _entropy_floor(plan, ran))
    if save:
        save_matrix(folder, finished, selected, on_gpu=bool(gpu_ids()))
    evidences = read_evidence(plan, ran.records, ran.kept)
    learnt = learn(plan, evidences) if given is None else given
    kept = _of_all_steps(learnt, evidences) if given is None else given
    if given is None:
        store_calibrations(store, kept.values())
    # Judged again, a matrix learns anew, unless the limits were given.
    write_calibrations(folder / CALIBRATION_FILE, tuple(kept.values()))
    calibrations = {name: each.calibration for name, each in learnt.items()}
    return _judge(finished, evidences, calibrations, folder if save else None, wall_s)


def _of_all_steps(
    learnt: Mapping[str, StoredCalibration], evidences: Mapping[str, Evidence]
) -> dict[str, StoredCalibration]:
    """Those that may be used again: not from runs that were stopped, as limits of all steps."""
    return {
        name: each
        for name, each in learnt.items()
        if name not in evidences or evidences[name].settled_of is None
    }


def conclude_again(folder: Path) -> tuple[SavedMatrix, Mapping[str, Evidence], Judged]:
    """A report folder's matrix, its evidence by job name, and the result of judging it now.

    Raises StoreError as ``load_matrix`` does.
    """
    finished = load_matrix(folder)
    evidences = read_evidence(finished.plan, finished.records)
    if finished.plan.experiment.calibration is None:
        calibrations = calibrate_controls(finished.plan, evidences)
    else:
        jobs = zip(finished.plan.jobs, finished.records, strict=True)
        identities = {job.name: record.identity for job, record in jobs}
        calibrations = read_judged_by(finished.plan, folder / CALIBRATION_FILE, identities)
    return finished, evidences, _judge(finished, evidences, calibrations, folder)


def remember(
    history: History,
    plan: Plan,
    records: Sequence[RunRecord],
    verdicts: Sequence[Verdict],
    *,
    folder: Path,
    wall_s: float | None,
) -> bool:
    """Add a night to the history; return False if it was there already.

    Raises HistoryError when the history cannot be read or written.
    """
    source = plan.experiment.path.resolve()
    surroundings = plan.surroundings
    # The machine that submits may have another driver than the cluster's nodes.
    local = plan.experiment.launcher is Launcher.LOCAL
    on_gpu_here = local and surroundings.hardware.startswith("gpu")
    return history.append(
        night_of(
            plan,
            records,
            verdicts,
            finished=datetime.now(UTC),
            source=str(source),
            report=str(folder.resolve()),
            circumstances={
                **versions_of(plan),
                "converge": __version__,
                "rank code": surroundings.rank_code[:12],
                "hardware": surroundings.hardware,
                "driver": driver_version() if on_gpu_here else "",
                "commit": checkout_commit(source.parent),
            },
            wall_s=wall_s,
        )
    )


def _judge(
    finished: SavedMatrix,
    evidences: Mapping[str, Evidence],
    calibrations: Mapping[str, Calibration],
    report: Path | None,
    wall_s: float | None = None,
) -> Judged:
    return judge_matrix(
        finished.plan,
        finished.records,
        evidences,
        calibrations,
        versions=finished.versions,
        entropy_floor=finished.entropy_floor,
        report=report,
        wall_s=wall_s,
    )


def _entropy_floor(plan: Plan, ran: Ran) -> float | None:
    """Entropy floor of the corpus that all jobs read; None for several corpora, or a real one."""
    used = {job.spec.train_config.data for job in plan.jobs}
    (only, *others) = used
    return None if others or only is None else ran.data[only].entropy_nats_per_token
