"""``matrix.json`` in a report folder: the runs that it judges, for ``converge report``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from converge_harness.calibrations import CALIBRATION_FILE
from converge_harness.errors import StoreError
from converge_harness.matrix.load import Finder, load_plan
from converge_harness.model import (
    GLOBAL_BATCH,
    Cluster,
    Experiment,
    Job,
    Launcher,
    Plan,
    Role,
    RunRecord,
    SetSpec,
    Toolchain,
)
from converge_harness.plan import broken_by
from converge_harness.readers import read_spec
from converge_harness.run_folder.layout import RECORD
from converge_harness.store import read_json, read_record, write_json
from converge_harness.trainers import assume_toolchain, comes_in_passes

FILE = "matrix.json"


class _SavedRun(BaseModel):
    model_config = ConfigDict(frozen=True)

    folder: str
    identity: str


class _Saved(BaseModel):
    model_config = ConfigDict(frozen=True)

    experiment: str
    only: tuple[str, ...]
    on_gpu: bool
    versions: dict[str, str]
    entropy_floor: float | None
    runs: dict[str, _SavedRun]
    calibrated: bool = False
    """Whether a calibration file or baseline was given; its content is in ``calibration.json``."""
    launcher: Launcher = Launcher.LOCAL
    cluster: Cluster | None = None
    """As it was then: the user's own file may have changed since."""
    code: dict[str, str] | None = None
    """``SavedMatrix.code``."""


@dataclass(frozen=True, slots=True)
class SavedMatrix:
    """A finished matrix as stored in its report folder."""

    plan: Plan
    records: tuple[RunRecord, ...]
    """In the plan's order."""
    versions: Mapping[str, str]
    """The toolchains of the runs."""
    entropy_floor: float | None
    code: Mapping[str, str] | None = None
    """Digests of the user's own code when the runs were planned, as ``code_of`` names it; None in
    a new matrix, and where an older converge saved it."""


def code_of(plan: Plan) -> dict[str, str]:
    """Digests of the user's own code as it is: by path, or ``path:function``."""
    found = plan.surroundings
    return {**{str(path): each for path, each in found.sources.items()}, **found.injected}


def save_matrix(folder: Path, matrix: SavedMatrix, only: Sequence[str], *, on_gpu: bool) -> None:
    """Store which runs a report folder judges."""
    plan = matrix.plan
    saved = _Saved(
        experiment=str(plan.experiment.path.resolve()),
        only=tuple(only),
        on_gpu=on_gpu,
        versions=dict(matrix.versions),
        calibrated=plan.experiment.calibration is not None or plan.experiment.baseline is not None,
        entropy_floor=matrix.entropy_floor,
        launcher=plan.experiment.launcher,
        cluster=plan.experiment.cluster,
        runs={
            job.name: _SavedRun(folder=str(record.folder.resolve()), identity=record.identity)
            for job, record in zip(plan.jobs, matrix.records, strict=True)
        },
        code=code_of(plan),
    )
    write_json(folder / FILE, saved.model_dump(mode="json"))


def load_matrix(folder: Path) -> SavedMatrix:
    """The matrix that a report folder was made from; needs no toolchain.

    Raises:
        StoreError: the folder is not a report folder, a run that it names is gone or was replaced,
        or the experiment has changed its meaning.
    """
    path = folder / FILE
    if not path.is_file():
        raise StoreError(
            f"{folder} has no {FILE}: it is not the --out folder of `converge run`; "
            "give that folder, or judge run folders with `converge compare`"
        )
    try:
        saved = _Saved.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise StoreError(f"{path}: {key}: {first['msg']}; run the experiment again") from None
    experiment = Path(saved.experiment)
    if experiment.is_relative_to(Path.cwd()):
        experiment = experiment.relative_to(Path.cwd())  # as the user wrote it

    def plan_by(find: Finder) -> Plan:
        return load_plan(
            experiment,
            saved.only,
            on_gpu=saved.on_gpu,
            calibration=folder / CALIBRATION_FILE if saved.calibrated else None,
            launcher=saved.launcher,
            cluster=saved.cluster,
            find=find,
        )

    plan = plan_by(assume_toolchain)
    named = _named_backends(plan.experiment)
    records = tuple(_record(job, saved, experiment, named.get(job.spec.name)) for job in plan.jobs)
    if any(job.baseline is not None for job in plan.jobs):
        # How strictly a baseline judges depends on whether the runs had its release, whatever is in
        # the toolchain's folder by now.
        then = versions_then(plan, records)
        plan = plan_by(
            lambda name, *, trainer=None: _as_then(assume_toolchain(name, trainer=trainer), then)
        )
    return SavedMatrix(
        plan=replace(plan, jobs=tuple(map(_with_backend_of, plan.jobs, records))),
        records=records,
        versions=saved.versions,
        entropy_floor=saved.entropy_floor,
        code=saved.code,
    )


def _with_backend_of(job: Job, record: RunRecord) -> Job:
    """The job with the SPMD backend of its run; older runs have none.

    The default backend of a set depends on the installed torch.
    """
    written = read_spec(record.folder)
    if written is None or job.baseline is not None:
        return job
    return replace(job, spec=replace(job.spec, spmd_backend=written.spmd_backend))


def versions_then(plan: Plan, records: Sequence[RunRecord]) -> dict[str, dict[str, str]]:
    """By name of a toolchain, the versions by distribution that its runs recorded."""
    found = {}
    for job, record in zip(plan.jobs, records, strict=True):
        if job.baseline is None:
            written = read_json(record.folder / RECORD)
            found[job.toolchain.name] = written.get("versions") or {}
    return found


def _as_then(now: Toolchain, then: Mapping[str, Mapping[str, str]]) -> Toolchain:
    return replace(now, versions=then.get(now.name) or now.versions)


def _named_backends(experiment: Experiment) -> dict[str, str | None]:
    """By name of a set, the SPMD backend that the file names for it."""
    anchor = () if experiment.anchor is None else (experiment.anchor,)
    sets = (*experiment.controls, *anchor, *experiment.tests)
    return {spec.name: spec.spmd_backend for spec in sets}


def _record(job: Job, saved: _Saved, experiment: Path, backend: str | None) -> RunRecord:
    """The saved run of a job, if it still matches the plan.

    ``backend`` is the SPMD backend that the file names; None: any.
    """
    again = f"run it again with: converge run {experiment}"
    run = saved.runs.get(job.name)
    if run is None:
        raise StoreError(f"{experiment} has changed: there is no run of {job.name!r}; {again}")
    record = read_record(Path(run.folder))
    if record.identity != run.identity:
        raise StoreError(f"{run.folder} has been replaced by another run; {again}")
    written = read_spec(record.folder)
    changed = written is not None and (
        _meaning(written) != _job_settings(job) or backend not in (None, written.spmd_backend)
    )
    if job.role is not Role.SEED and changed:
        raise StoreError(
            f"{experiment} or its train config has changed: {job.name!r} was run with other "
            f"settings; {again}"
        )
    return record


def _job_settings(job: Job) -> tuple[object, ...]:
    """The settings in a job's ``job.json``; for several passes also the global batch."""
    spec = job.spec
    if comes_in_passes(job):
        spec = replace(spec, overrides={**spec.overrides, GLOBAL_BATCH: job.global_batch_size})
    return _meaning(spec)


def _meaning(spec: SetSpec) -> tuple[object, ...]:
    """The settings of a set that its ranks get: not its name, notes, waivers and tolerances."""
    config = spec.train_config
    return (
        spec.parallelism,
        (config.module, config.config, dict(config.arguments)),
        (dict(config.model), dict(config.settings)),
        config.loader,
        spec.techniques,
        [
            (each.name, dict(each.overrides), _called(each.apply), _called(each.in_force))
            for each in spec.own_techniques
        ],
        spec.pipeline_schedule,
        spec.cp_rotation,
        dict(spec.overrides),
        _called(spec.inject),
        spec.without_fixes,
        spec.deterministic,
        spec.segments,
        broken_by(spec.recovery),
    )


def _called(function: str | None) -> str | None:
    """``file.py:function`` without its folder: a run of the same code from elsewhere is reused."""
    return None if function is None else function.rpartition("/")[2]
