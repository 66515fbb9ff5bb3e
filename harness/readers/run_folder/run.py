"""Converge's run folders (docs/architecture.md) as evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from converge_harness.errors import EvidenceError
from converge_harness.model import (
    DATA_TYPES,
    GRACE_S,
    Evidence,
    Fault,
    FaultKind,
    InForce,
    Integers,
    Kind,
    Loader,
    OwnTechnique,
    Parallelism,
    Precision,
    Recovery,
    RestartOwner,
    RunRecord,
    RunStatus,
    Segment,
    SetSpec,
    SyntheticData,
    Technique,
    Torn,
    TrainConfig,
)
from converge_harness.readers.foreign.registry import read_foreign, read_unfinished
from converge_harness.readers.lines import fail
from converge_harness.readers.run_folder.arrays import (
    read_activations,
    read_frozen,
    read_samples,
)
from converge_harness.readers.run_folder.documents import read_in_force, read_job
from converge_harness.readers.run_folder.metrics import Metrics, read_metrics
from converge_harness.readers.run_folder.passes import merge, read_passes, read_struck
from converge_harness.readers.run_folder.starts import merge_starts, read_starts
from converge_harness.run_folder.job import (
    FaultDocument,
    JobDocument,
    OwnTechniqueDocument,
    SegmentDocument,
    recovery_of,
)
from converge_harness.run_folder.layout import (
    JOB,
    JOB_SCRIPT,
    METRICS_FILES,
    RECORD,
    SLURM_LOG,
    is_inside,
)
from converge_harness.run_folder.passes import passes_with_metrics
from converge_harness.seal import broken_seal, other_code
from converge_harness.store import read_record
from converge_harness.trainers import curve_outside, kinds, trainer_of_document

_SAYS_WHY = {
    RunStatus.REFUSED: JOB_SCRIPT,
    RunStatus.TIMED_OUT: SLURM_LOG,
    RunStatus.CANCELLED: SLURM_LOG,
}
"""The file of a run folder that says most about how a scheduler ended the run."""


def run_folder_of(path: Path) -> Path | None:
    """The run folder of a path: the path itself, or the parent of a metrics file."""
    if path.name in METRICS_FILES and (path.parent / JOB).is_file():
        return path.parent
    if not path.is_dir():
        return None
    ours = any((path / name).is_file() for name in (JOB, *METRICS_FILES)) or passes_with_metrics(
        path
    )
    return path if ours else None


def read_run(folder: Path) -> Evidence:
    """All evidence of a run, finished or not; several passes become one curve.

    Raises EvidenceError for a line or key that cannot be understood (both named), for metrics
    without their job, or for files of different jobs in one folder; StoreError for a damaged or
    newer file.
    """
    record = read_record(folder) if (folder / RECORD).is_file() else None
    if record is not None and record.evidence is not None:
        broken = broken_seal(folder, record.evidence)
        if broken:
            return _unsealed(folder, record, broken)
    job: JobDocument = read_job(folder) or {}
    if record is not None and record.status in (RunStatus.FINISHED, RunStatus.STOPPED):
        other = other_code(job.get("code") or {}, record.sources)
        if other:
            return _unsealed(folder, record, other)
    _require_registered(folder, job)
    passes = read_passes(folder)
    for metrics in (each.metrics for each in passes):
        _require_same_job(folder, job, metrics)
    sample_steps = job.get("sample_steps")
    known: dict[str, Any] = {
        "name": str(job.get("name", folder.name)),
        "source": str(folder),
        "error": record.error if record else None,
        "status": record.status if record else RunStatus.FINISHED,
        "says_why": _SAYS_WHY.get(record.status) if record else None,
        "wall_s": record.wall_s if record else None,
        "sample_steps": None if sample_steps is None else tuple(sample_steps),
        "identity": job.get("identity"),
        "repeat": job.get("repeat"),
        "keys": trainer_of_document(job).default_spec().keys,
        "frozen_steps": int(job.get("frozen") or 0),
        "struck": read_struck(folder),
        "restarts": _restarts(folder, job, in_passes=bool(passes)),
    }
    if passes:
        merged = merge(passes, job.get("steps", passes[-1].metrics.expected_steps), **known)
        return replace(merged, precision=_precision(job, merged.in_force))
    if trainer_of_document(job).own_rank_code:
        return _uninterrupted(folder, job, known)
    return _of_program(folder, job, known)


def _unsealed(folder: Path, record: RunRecord, broken: str) -> Evidence:
    """Evidence of a run whose files were changed after it finished: none of them counts."""
    return _unread(
        f"{broken}, so it is not evidence; converge run makes the run again",
        name=record.name,
        source=str(folder),
        identity=record.identity,
        status=record.status,
        says_why=_SAYS_WHY.get(record.status),
        error=record.error,
        wall_s=record.wall_s,
    )


def _unread(problem: str, **known: Any) -> Evidence:
    """Empty evidence of a run whose files are not usable, with the reason."""
    nothing = np.zeros(0, dtype=np.int64)
    return Evidence(steps=nothing, signals={}, complete=False, problems=(problem,), **known)


def _of_program(folder: Path, job: JobDocument, known: dict[str, Any]) -> Evidence:
    """Evidence of a user's program: as much as that of our ranks if it is probed, else a curve.

    Files that cannot be read make its own evidence unusable, not that of other sets.
    """
    expected: dict[str, Any] = {"expected_steps": job.get("steps"), **known}
    try:
        curve = trainer_of_document(job).curve_of(folder, job)
        if curve is None:
            return _uninterrupted(folder, job, known)
        starts = read_starts(folder, curve.columns)
        if starts is not None:
            of_starts = merge_starts(starts, job.get("steps"), **known)
            return replace(of_starts, precision=_precision(job, None))
        whole = known["status"] is RunStatus.FINISHED
        evidence = _read_curve(_inside(curve.path, folder), curve.columns, whole=whole)
        rarely = logged_every(evidence.steps, job.get("steps"))
        means = evidence.mean_over if curve.mean_over == 1 else curve.mean_over
        found = {"precision": _precision(job, None), "logged_every": rarely, **expected}
        return replace(evidence, mean_over=means, **found)
    except EvidenceError as error:
        return _unread(str(error), precision=_precision(job, None), **expected)


def _read_curve(path: Path, columns: Mapping[str, str], *, whole: bool) -> Evidence:
    """A curve; of a run that did not end by itself without half of a last row."""
    if whole:
        return read_foreign(path, dict(columns))
    evidence = read_unfinished(path, dict(columns))
    if not evidence.steps.size:
        fail(str(path), "has no row of values" if path.exists() else "does not exist")
    return evidence


def _inside(curve: Path, folder: Path) -> Path:
    if is_inside(curve, folder):
        return curve
    raise curve_outside(curve)


def logged_every(steps: Integers, expected: int | None) -> int:
    """How rarely a curve was logged, if regularly and to its end: 10 for 10, 20 … 240 of 240.

    Loggers count steps from 0 or from 1, so the first row may be step 0, 1, n - 1 or n. Some also
    log the first step (1, 10, 20 …) or the last one (… 230, 235 of 235). 1 for any other curve,
    which is whole only if it has every step.
    """
    if expected is None or steps.size <= 1:
        return 1
    every = int(np.diff(steps).max())
    rows = steps
    if rows[0] in (0, 1) and rows[1] - rows[0] < every:
        rows = rows[1:]
    if rows[-1] in (expected - 1, expected) and rows[-1] - rows[-2:][0] < every:
        rows = rows[:-1]
    if every <= 1 or rows.size <= 1 or (np.diff(rows) != every).any():
        return 1
    first = int(rows[0])
    if first not in (0, 1, every - 1, every):
        return 1
    gaps = rows.size - 1 + (first > 1)  # that before such a first row is one, too
    last = expected - 1 if first in (0, every - 1) else expected
    # A single gap may be a hole between two rows.
    return every if gaps > 1 and steps[-1] + every > last else 1


def _uninterrupted(folder: Path, job: JobDocument, known: dict[str, Any]) -> Evidence:
    """The evidence of a run in one pass."""
    in_force = read_in_force(folder)
    metrics = read_metrics(folder)
    _require_same_job(folder, job, metrics)
    expected = job.get("steps", metrics.expected_steps)
    return metrics.values.evidence(
        problems=metrics.sentences(),
        uncounted=metrics.uncounted,
        batch_digests=metrics.batch_digests,
        batch_agrees=metrics.batch_agrees,
        random_states=metrics.random_states,
        random_shared=metrics.random_shared,
        global_random_states=metrics.global_random_states,
        masks=metrics.masks,
        terms=metrics.terms,
        in_force=in_force,
        complete=metrics.end is not None and expected in (None, metrics.end),
        expected_steps=expected,
        precision=_precision(job, in_force),
        grads_missing=metrics.names_missing(),
        grads_missing_at=frozenset(metrics.grads_missing),
        samples=read_samples(folder),
        replicas=metrics.replicas,
        frozen=read_frozen(folder),
        activations=read_activations(folder),
        **known,
    )


def _require_same_job(folder: Path, job: JobDocument, metrics: Metrics) -> None:
    if job and metrics.identity not in (None, job.get("identity")):
        raise EvidenceError(
            f"{folder}: its metrics are of job {metrics.identity}, its job.json of job "
            f"{job.get('identity')}; delete the folder and run the job again"
        )


def read_spec(path: Path) -> SetSpec | None:
    """The set that a run trained, from its ``job.json``; None when the path is not a run folder.

    Tolerances are not part of a job, so they are empty; of the corpus only its presence is known.
    Jobs of older versions do not say who restarts a run and how soon it has to recover: those get
    the defaults. Raises EvidenceError when the job is missing or cannot be understood, StoreError
    when the file is damaged.
    """
    folder = run_folder_of(path)
    job = read_job(folder) if folder else None
    if folder is None or job is None:
        return None
    _require_registered(folder, job)
    try:
        config = job["train_config"]
        return SetSpec(
            name=job["name"],
            parallelism=Parallelism(**job["parallelism"]),
            train_config=TrainConfig(
                path=config["path"],
                settings=_table(config["settings"]),
                module=config["module"],
                config=config["config"],
                arguments=_table(config.get("arguments", {})),
                import_from=Path(config["import_from"]) if "import_from" in config else None,
                model=_table(config["model"]),
                data=SyntheticData() if job.get("data") else None,
                loader=Loader(config.get("loader", Loader.CONVERGE)),
            ),
            toolchain=job["dialect"],
            techniques=tuple(Technique(name) for name in job["techniques"]),
            own_techniques=tuple(map(_own_technique, job.get("own_techniques") or ())),
            pipeline_schedule=job["pipeline_schedule"],
            cp_rotation=job["cp_rotation"],
            spmd_backend=job.get("spmd_backend"),
            overrides=job["overrides"],
            inject=job["inject"],
            without_fixes=tuple(job["without_fixes"]),
            deterministic=job.get("deterministic", True),
            kind=_kind(job),
            segments=tuple(_segment(entry) for entry in job.get("segments") or ()),
            recovery=_recovery(job),
            trainer=trainer_of_document(job).spec_of(job),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"{folder / JOB}: incomplete job ({error!r}); run the job again"
        ) from error


def _own_technique(document: OwnTechniqueDocument) -> OwnTechnique:
    return OwnTechnique(
        name=document["name"],
        what=document["what"],
        overrides=_table(document["set"]),
        apply=document["apply"],
        place=document["place"],
        in_force=document["in_force"],
        folder=document["folder"],
    )


def _require_registered(folder: Path, job: JobDocument) -> None:
    """Refuse the job of an unknown trainer, since only the trainer can read its runs."""
    try:
        trainer_of_document(job)
    except KeyError as error:
        raise EvidenceError(
            f"{folder / JOB}: trained by {error.args[0]!r}, which is not registered here (known: "
            f"{', '.join(kinds())}); install or register its package: docs/extension.md"
        ) from None


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a table")
    return value


def _kind(job: JobDocument) -> Kind:
    """The kind of the job's set; sets of a space-time product are parallel ones in a job."""
    if job.get("segments"):
        return Kind.ELASTIC
    recovery = job.get("recovery")
    if recovery is not None and recovery["restarts"] in (RestartOwner.CLUSTER, RestartOwner.USER):
        return Kind.PARALLEL
    broken = recovery is not None or job.get("checkpoint_every") is not None
    return Kind.FAULT if broken else Kind.PARALLEL


def _segment(entry: SegmentDocument) -> Segment:
    return Segment(
        until=int(entry["until"]),
        parallelism=Parallelism(**entry["parallelism"]),
        local_batch_size=int(entry["local_batch_size"]),
        pipeline_schedule=entry.get("pipeline_schedule"),
    )


def _recovery(job: JobDocument) -> Recovery | None:
    """How the run is interrupted and recovers; older jobs get the default for who restarts it."""
    recovery = recovery_of(job)
    if recovery is None:
        return None
    known = Recovery(
        _faults(recovery["faults"]),
        checkpoint_every=int(recovery["checkpoint_every"]),
        nodes=(int(recovery["nodes"][0]), int(recovery["nodes"][1])),
    )
    if job.get("recovery") is None:
        return known
    return replace(
        known,
        restarts=RestartOwner(recovery["restarts"]),
        max_restarts=int(recovery["max_restarts"]),
        within_s=float(recovery["within_s"]),
    )


def _restarts(folder: Path, job: JobDocument, *, in_passes: bool) -> RestartOwner | None:
    """Who restarts the run; None if nobody does, or if an older job does not say it."""
    restarts = (job.get("recovery") or {}).get("restarts")
    planned = job.get("segments") or job.get("checkpoint_every") is not None or not job
    if in_passes and not planned:  # it wrote its checkpoints where it waited for other runs
        return RestartOwner.USER
    try:
        return None if restarts is None else RestartOwner(restarts)
    except ValueError as error:
        raise EvidenceError(
            f"{folder / JOB}: recovery.restarts is {restarts!r}, must be one of "
            f"{', '.join(RestartOwner)}; run the job again"
        ) from error


def _faults(entries: Iterable[FaultDocument]) -> tuple[Fault, ...]:
    return tuple(
        Fault(
            kind=FaultKind(entry["kind"]),
            step=int(entry["step"]),
            rank=int(entry.get("rank") or 0),
            node=int(entry.get("node") or 0),
            torn=Torn(entry.get("torn") or Torn.DEATH),
            grace_s=float(entry.get("grace_s") or GRACE_S),
            saves=bool(entry.get("saves")),
        )
        for entry in entries
    )


def _precision(job: JobDocument, in_force: InForce | None) -> Precision:
    """The lowest precision that the job names or that was in force."""
    techniques = set(job.get("techniques") or ())
    ran = in_force or InForce()
    if techniques & {Technique.FLOAT8, Technique.FLOAT8_ROWWISE}:
        return Precision.FLOAT8
    if ran.float8.modules:
        return Precision.FLOAT8
    named = {*_parts(ran.param_dtype)} | trainer_of_document(job).data_types(job, ran)
    known = [DATA_TYPES[each] for each in named if each in DATA_TYPES]
    return max(known, key=list(Precision).index, default=Precision.FP32)


def _parts(dtypes: str | None) -> list[str]:
    """The single data types of parameters whose types differ."""
    return dtypes.split("+") if dtypes else []
