"""Baselines (schema 1): folders with the evidence of a blessed control.

::

    baselines/NAME/
      baseline.json      who blessed it, from what it was made, and what it replaces
      job.json  record.json  metrics.jsonl  in_force.json  tensors/*.npz     as in a run folder
      frozen.npz         if the control made frozen steps
      calibration.json   what was learnt from repeats of the control
      reference/         the control in float32, if its precision is lower: the same files
      previous/1/ …      complete earlier baselines, oldest first

``baseline.json``::

    {"schema": 1, "name": "llama3", "author": "ada", "reason": "first release",
     "date": "2026-11-22T04:05:06+00:00", "converge": "0.1.0",
     "control": "fsdp2", "identity": "…", "precision": "fp32", "hardware": "cpu-x86_64 …",
     "dtype": {"param_dtype": "float32", "mixed_precision_param": "float32"},
     "toolchain": {"name": "torchtitan-0.3.0", "dialect": "titan_0_3"},
     "versions": {"torch": "2.13.0", "…": "…"}, "facts": {"…": "inputs of the identity"},
     "files": {"metrics.jsonl": "SHA-256", "…": "…"}, "digest": "SHA-256 of the rest of this",
     "replaces": {"kept": "previous/1", "identity": "…", "author": "…", "reason": "…", "date": "…",
                  "change": {"kind": "same within rounding", "sentence": "…", "onset": 3,
                             "growth": {"loss_recomputed": "step^0.5"}}}}

``replaces`` is null for the first baseline of its name. ``job.json`` and ``record.json`` do not
contain paths of the machine that ran the control.

Whether a baseline still matches a file's control is decided by their facts (``misfits``): versions,
rank code and SPMD backend may differ, since a baseline is meant to show the effect of such changes.
Everything else must mean the same, or the file says what may differ.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from converge_harness import __version__
from converge_harness.calibrations import (
    CALIBRATION_FILE,
    StoredCalibration,
    find_calibration,
    read_calibrations,
    what_changed,
    write_calibrations,
)
from converge_harness.errors import StoreError
from converge_harness.model import (
    BASELINES,
    Across,
    Baseline,
    Blessing,
    Precision,
    RunRecord,
    Toolchain,
    flattened,
)
from converge_harness.readers import read_spec
from converge_harness.run_folder.documents import spell_not_finite
from converge_harness.run_folder.job import JobDocument
from converge_harness.run_folder.layout import (
    ACTIVATIONS,
    FROZEN,
    IN_FORCE,
    JOB,
    METRICS,
    PASSES,
    RECORD,
    TENSORS,
)
from converge_harness.store import read_json, write_json

BASELINE_FILE = "baseline.json"
PREVIOUS = "previous"
REFERENCE = "reference"
_COPIED = (METRICS, IN_FORCE)
EXPERIMENTS = "experiments"
"""A folder of experiments; baselines are in a folder next to it."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True)


class Change(_Table):
    """How a baseline differs from the one before it (``converge_harness.judge.changes``)."""

    kind: str
    sentence: str
    onset: int | None = None
    growth: dict[str, str] = {}
    """By signal, how its difference grows over the steps."""


class Replaced(_Table):
    """The previous baseline."""

    kept: str
    """Its folder, within the baseline's."""
    identity: str
    author: str
    reason: str
    date: str
    change: Change


class _Environment(_Table):
    name: str
    dialect: str


class _BaselineFile(_Table):
    name: str
    author: str
    reason: str
    date: str
    converge: str
    control: str
    identity: str
    precision: Precision
    hardware: str
    dtype: dict[str, str | None]
    toolchain: _Environment
    versions: dict[str, str]
    facts: dict[str, Any]
    files: dict[str, str]
    replaces: Replaced | None = None


@dataclass(frozen=True, slots=True)
class StoredBaseline:
    """The content of a baseline's folder."""

    baseline: Baseline
    learnt: StoredCalibration
    """What was learnt from repeats of the control."""
    hardware: str
    dtype: Mapping[str, str | None]
    converge: str
    """Version of converge that wrote it."""
    replaces: Replaced | None


# ------------------------------------------------------------------ reading


def read_baseline(folder: Path) -> StoredBaseline:
    """Read the baseline of a folder.

    Raises StoreError if there is none, if one of its files is missing, was added or changed after
    the blessing, or if a newer converge wrote it.
    """
    path = folder / BASELINE_FILE
    if not path.is_file():
        raise StoreError(f"{folder}: there is no baseline here (no {BASELINE_FILE})")
    try:
        document = read_json(path)
        found = _BaselineFile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(f"{path}: {where}: {first['msg']}; bless the control again") from None
    if document.get("digest") != _seal(document):
        raise _other_file(path, found.author)
    for name, digest in {**found.files, **dict.fromkeys(_added(folder, found.files), "")}.items():
        if not (folder / name).is_file() or _digest(folder / name) != digest:
            raise _other_file(folder / name, found.author)
    learnt = find_calibration(read_calibrations(folder / CALIBRATION_FILE), found.identity)
    spec = read_spec(folder)
    if learnt is None or spec is None:
        raise StoreError(f"{folder}: the baseline is incomplete; bless the control again")
    return StoredBaseline(
        baseline=Baseline(
            name=found.name,
            folder=folder,
            identity=found.identity,
            spec=replace(spec, toolchain=found.toolchain.name),
            precision=found.precision,
            frozen=_frozen_steps(folder),
            reference=_reference(folder),
            toolchain=Toolchain(
                found.toolchain.name, Path("/"), found.toolchain.dialect, found.versions
            ),
            facts=found.facts,
            blessing=Blessing(found.author, found.reason, found.date),
        ),
        learnt=learnt,
        hardware=found.hardware,
        dtype=found.dtype,
        converge=found.converge,
        replaces=found.replaces,
    )


def _frozen_steps(folder: Path) -> int:
    if not (folder / FROZEN).is_file():
        return 0
    return int(cast("JobDocument", read_json(folder / JOB)).get("frozen") or 0)


def _reference(folder: Path) -> tuple[Path, str] | None:
    path = folder / REFERENCE
    if not path.is_dir():
        return None
    return path, str(read_json(path / RECORD)["identity"])


def _added(folder: Path, known: Collection[str]) -> list[str]:
    """Files that were not blessed but that a reader might take for evidence."""
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    ours = (name for name in found if name.parts[0] not in (BASELINE_FILE, PREVIOUS))
    return [
        name.as_posix()
        for name in ours
        if name.as_posix() not in known and not name.name.startswith(".")
    ]


def _other_file(path: Path, author: str) -> StoreError:
    return StoreError(
        f"{path} is not the file that {author} blessed; restore it (git restore {path.parent}), or "
        "bless the control again"
    )


# ------------------------------------------------------------------ writing


def require_no_passes(folders: Iterable[Path]) -> None:
    """Ask this before a control is trained: a run that has left passes goes on in passes.

    Raises StoreError, with what to do, if the evidence in one of the run folders is in passes. A
    folder need not exist.
    """
    for folder in folders:
        if (folder / PASSES).is_dir():
            raise StoreError(
                f"{folder}: its evidence is in passes (it was interrupted and resumed, or waited "
                "for other runs), which a baseline cannot hold; run the control again with --fresh"
            )


def write_baseline(
    folder: Path,
    record: RunRecord,
    learnt: StoredCalibration,
    toolchain: Toolchain,
    blessing: Blessing,
    change: Change | None = None,
    reference: RunRecord | None = None,
) -> None:
    """Store a finished control as a baseline, atomically; an existing one moves to ``previous``.

    Args:
        folder: the baseline's folder, named after it.
        record: the record of the control's run.
        learnt: what its repeats taught, with the facts of the control.
        toolchain: in which it ran.
        blessing: who blesses it, and why.
        change: the difference to the existing baseline; None if there is none.
        reference: the record of the control in float32, if its precision is lower.

    Raises:
        StoreError: the run was interrupted and resumed, or has waited for others; or the folder
        cannot be written.
    """
    before = read_baseline(folder) if change is not None else None
    for each in (record, *([reference] if reference else [])):
        if not (each.folder / METRICS).is_file():
            raise StoreError(
                f"{each.folder}: its evidence is in passes (it was interrupted and resumed, or "
                "waited for other runs); run the control again with --fresh"
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            new, old = Path(scratch) / "new", Path(scratch) / "old"
            _copy_evidence(record, new)
            if reference is not None:
                _copy_evidence(reference, new / REFERENCE)
            write_calibrations(new / CALIBRATION_FILE, [learnt])
            replaces = None
            if before is not None and change is not None:
                replaces = _keep(before, folder, new, change)
            write_json(
                new / BASELINE_FILE,
                _document(folder.name, new, learnt, toolchain, blessing, replaces),
            )
            if before is not None:
                folder.rename(old)
            try:
                new.rename(folder)
            except OSError:
                if before is not None:  # else it would be removed with the scratch folder
                    old.rename(folder)
                raise
    except OSError as error:
        raise StoreError(f"{folder}: cannot write: {error.strerror}") from error


def _copy_evidence(record: RunRecord, new: Path) -> None:
    """Copy the files of a run folder that are evidence, without paths of this machine."""
    new.mkdir()
    for name in _COPIED:
        shutil.copyfile(record.folder / name, new / name)
    for name in (FROZEN, ACTIVATIONS):
        if (record.folder / name).is_file():
            shutil.copyfile(record.folder / name, new / name)
    if (record.folder / TENSORS).is_dir():
        shutil.copytree(record.folder / TENSORS, new / TENSORS)
    job = read_json(record.folder / JOB)
    data = job.get("data")
    job |= {"run_folder": "", "seed_checkpoint": None, "data": data and {**data, "folder": ""}}
    write_json(new / JOB, job)
    known = read_json(record.folder / RECORD)
    kept = ("name", "identity", "status", "wall_s", "error", "started", "versions")
    write_json(new / RECORD, {**{key: known.get(key) for key in kept}, "folder": "", "argv": []})


def _keep(before: StoredBaseline, folder: Path, new: Path, change: Change) -> Replaced:
    """Copy the existing baseline and its predecessors into the new one's folder."""
    kept = new / PREVIOUS
    if (folder / PREVIOUS).is_dir():
        shutil.copytree(folder / PREVIOUS, kept)
    number = 1 + max((int(each.name) for each in kept.glob("[0-9]*")), default=0)
    shutil.copytree(folder, kept / str(number), ignore=shutil.ignore_patterns(PREVIOUS))
    baseline = before.baseline
    return Replaced(
        kept=f"{PREVIOUS}/{number}",
        identity=baseline.identity,
        author=baseline.blessing.author,
        reason=baseline.blessing.reason,
        date=baseline.blessing.date,
        change=change,
    )


def _document(
    name: str,
    new: Path,
    learnt: StoredCalibration,
    toolchain: Toolchain,
    blessing: Blessing,
    replaces: Replaced | None,
) -> dict[str, Any]:
    calibration = learnt.calibration
    ran = read_json(new / IN_FORCE)
    files = [path for path in sorted(new.rglob("*")) if path.is_file()]
    document = _BaselineFile(
        name=name,
        author=blessing.author,
        reason=blessing.reason,
        date=blessing.date,
        converge=__version__,
        control=calibration.control,
        identity=calibration.identity or "",
        precision=calibration.precision,
        hardware=learnt.facts["hardware"],
        dtype={key: ran.get(key) for key in ("param_dtype", "mixed_precision_param")},
        toolchain=_Environment(name=toolchain.name, dialect=toolchain.dialect),
        versions=dict(toolchain.versions),
        facts=json.loads(json.dumps(learnt.facts)),
        files={
            path.relative_to(new).as_posix(): _digest(path)
            for path in files
            if PREVIOUS not in path.relative_to(new).parts
        },
        replaces=replaces,
    )
    content = document.model_dump(mode="json")
    return {**content, "digest": _seal(content)}


def _seal(document: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a document's content: its facts and precision decide what it may judge."""
    content = {key: value for key, value in document.items() if key not in ("schema", "digest")}
    return hashlib.sha256(
        json.dumps(spell_not_finite(content), sort_keys=True).encode()
    ).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ------------------------------------------------------------------ locations


def default_folder(experiment: Path) -> Path:
    """The folder for an experiment's baselines: next to ``experiments/``, else next to the file."""
    beside = experiment.absolute().parent
    return (beside.parent if beside.name == EXPERIMENTS else beside) / BASELINES


def find_baselines(folder: Path) -> tuple[Path, ...]:
    """All baselines in a folder, by name."""
    return tuple(sorted(path.parent for path in folder.glob(f"*/{BASELINE_FILE}")))


def not_there(folder: Path) -> str:
    """A message that a baseline does not exist, and which others do."""
    beside = ", ".join(each.name for each in find_baselines(folder.parent)) or "none"
    return f"there is no baseline {folder} (there: {beside})"


# --------------------------------------------------------------- matching a control


FREE = ("versions", "rank_code", "software", "spmd_backend")
"""Facts in which a baseline may always differ. The default SPMD backend depends on torch."""
_DTYPE = re.compile(r"^train_config\.training\.(dtype|mixed_precision_\w+)\b")
_PRECISE = ("bf16", "float8", "float8_rowwise", "float8_tp")
"""Techniques that choose a data type."""


class Misfits(NamedTuple):
    """Clauses on what differs."""

    refused: tuple[str, ...]
    """Differences that change the training, or that ``baseline_across`` does not allow."""
    named: tuple[str, ...]
    """Differences that ``baseline_across`` allows."""
    across: frozenset[Across]
    """The words of ``baseline_across`` that would allow all refused differences; empty: none."""


def misfits(
    then: Mapping[str, Any], now: Mapping[str, Any], across: tuple[Across, ...] = ()
) -> Misfits:
    """Compare the facts of a baseline with those of a control (``plan.identity_facts``)."""
    found = list(_differences(_meaning(then), _meaning(now)))
    refused = [each for each in found if each.kind is None or each.kind not in across]
    kinds = [each.kind for each in refused]
    return Misfits(
        tuple(each.clause for each in refused),
        tuple(each.clause for each in found if each not in refused),
        frozenset() if None in kinds else frozenset(kind for kind in kinds if kind),
    )


class _Difference(NamedTuple):
    clause: str
    kind: Across | None


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[_Difference]:
    for key in dict.fromkeys((*now, *then)):
        before = {key: then[key]} if key in then else {}
        after = {key: now[key]} if key in now else {}
        for clause in what_changed(before, after):
            yield _Difference(clause, _kind(key, then.get(key), now.get(key)))


def _kind(key: str, before: Any, after: Any) -> Across | None:
    """The word of ``baseline_across`` for a fact."""
    if key == "hardware":
        return Across.HARDWARE
    if _DTYPE.match(key):
        return Across.DTYPE
    if key == "techniques" and {*(before or ())} ^ {*(after or ())} <= {*_PRECISE}:
        return Across.DTYPE
    return None


def _meaning(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the training, by dotted key; ``set`` and train config combined."""
    config = facts["train_config"]
    settings = {**flattened(config["settings"]), **facts["overrides"]}
    written = {f"train_config.{key}": value for key, value in sorted(settings.items())}
    shape = {f"model.{key}": value for key, value in config["model"].items()}
    skipped = {*FREE, "train_config", "overrides"}
    rest = {key: value for key, value in facts.items() if key not in skipped}
    return {"module": config["module"], "config": config["config"], **shape, **written, **rest}
