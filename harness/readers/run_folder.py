"""Run folders of ours (docs/architecture.md) as evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import EvidenceError
from harness.model import (
    Evidence,
    Parallelism,
    Precision,
    RunStatus,
    SetSpec,
    Technique,
    TrainConfig,
)
from harness.readers.documents import METRICS, is_texts, read_in_force, read_job
from harness.readers.lines import fail, json_objects, number, read_text, step_number
from harness.store import check_schema, read_record

SIGNALS = (
    "loss",
    "grad_norm",
    "loss_recomputed",
    "grad_norm_recomputed",
    "lr",
    "tokens",
    "seconds",
    "memory_bytes",
    "grads_missing",
)
"""Numbers of a step line."""


@dataclass(frozen=True, slots=True)
class _Metrics:
    """The content of a metrics file."""

    identity: str | None
    steps: tuple[int, ...]
    signals: Mapping[str, tuple[float | None, ...]]
    batch_digests: tuple[str | None, ...]
    batch_agrees: tuple[bool | None, ...]
    grads_missing: tuple[str, ...]
    ended: bool
    """Whether the run wrote its end line."""
    expected_steps: int | None


def run_folder_of(path: Path) -> Path | None:
    """The run folder that a path means: itself, or the parent of its metrics file."""
    if path.name in METRICS and (path.parent / "job.json").is_file():
        return path.parent
    if path.is_dir() and any((path / name).is_file() for name in ("job.json", *METRICS)):
        return path
    return None


def require_foreign(path: Path, text: str) -> None:
    """Raise EvidenceError for a metrics file of ours that lies outside of its run folder.

    Read as anybody's JSONL it would be judged without any audit.
    """
    _, first = next(json_objects(path, text), (0, {}))
    if first.get("kind") == "header" and "identity" in first:
        raise EvidenceError(
            f"{path}: holds the metrics of a run of converge, but {path.parent / 'job.json'} is "
            "missing, so nothing says what the run was meant to be; give its whole run folder"
        )


def read_run(folder: Path) -> Evidence:
    """All that a run left, finished or not.

    Raises EvidenceError for a line or key that cannot be understood (both named), for metrics
    without their job, or for files of different jobs in one folder; StoreError for a damaged or
    newer file of ours.
    """
    job = read_job(folder) or {}
    record = read_record(folder) if (folder / "record.json").is_file() else None
    in_force = read_in_force(folder)
    metrics = _read_metrics(folder)
    if job and metrics.identity not in (None, job.get("identity")):
        raise EvidenceError(
            f"{folder}: its metrics are of job {metrics.identity}, its job.json of job "
            f"{job.get('identity')}; delete the folder and run the job again"
        )
    return Evidence(
        name=str(job.get("name", folder.name)),
        source=str(folder),
        steps=metrics.steps,
        signals=metrics.signals,
        batch_digests=metrics.batch_digests,
        batch_agrees=metrics.batch_agrees,
        in_force=in_force,
        complete=metrics.ended,
        expected_steps=job.get("steps", metrics.expected_steps),
        error=record.error if record else None,
        status=record.status if record else RunStatus.FINISHED,
        wall_s=record.wall_s if record else None,
        precision=_precision(job, in_force),
        grads_missing=metrics.grads_missing,
    )


def read_spec(path: Path) -> SetSpec | None:
    """What a run was told to be, from its ``job.json``; None when the path is no run folder.

    Tolerances are not part of a job, so they are empty. Raises EvidenceError when the job is
    missing or cannot be understood, StoreError when the file is damaged.
    """
    folder = run_folder_of(path)
    job = read_job(folder) if folder else None
    if folder is None or job is None:
        return None
    try:
        config = job["train_config"]
        return SetSpec(
            name=job["name"],
            parallelism=Parallelism(**job["parallelism"]),
            train_config=TrainConfig(
                path=config["path"],
                settings=config["settings"],
                module=config["module"],
                config=config["config"],
                model=config["model"],
            ),
            toolchain=job["dialect"],
            techniques=tuple(Technique(name) for name in job["techniques"]),
            pipeline_schedule=job["pipeline_schedule"],
            cp_rotation=job["cp_rotation"],
            overrides=job["overrides"],
            inject=job["inject"],
            without_fixes=tuple(job["without_fixes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"{folder / 'job.json'}: no complete job ({error!r}); run the job again"
        ) from error


def _read_metrics(folder: Path) -> _Metrics:
    """The metrics file of a folder; the finished one if both are there, nothing if none is."""
    path = next((folder / name for name in METRICS if (folder / name).is_file()), None)
    if path is None:
        return _Metrics(None, (), {}, (), (), (), ended=False, expected_steps=None)
    text = read_text(path)
    if path.suffix == ".part":
        # A killed writer leaves half a line, which says nothing.
        text = text[: text.rfind("\n") + 1]
    header: dict[str, Any] = {}
    end: dict[str, Any] | None = None
    lines: list[tuple[int, dict[str, Any]]] = []
    for line, value in json_objects(path, text):
        kind = value.get("kind")
        if not header:
            if kind != "header":
                fail(path, line, f"kind is {kind!r}, but the first line must be the header")
            check_schema(path, value.get("schema"))
            header = value
        elif end is not None:
            fail(path, line, "a line after the end line")
        elif kind == "step":
            lines.append((line, value))
        elif kind == "end":
            end = value
        else:
            fail(path, line, f"kind is {kind!r}, must be 'step' or 'end'")
    steps = tuple(step_number(path, line, value.get("step")) for line, value in lines)
    columns = {
        name: tuple(number(path, line, name, value.get(name)) for line, value in lines)
        for name in SIGNALS
    }
    missing = [name for line, value in lines for name in _names_missing(path, line, value)]
    return _Metrics(
        identity=header.get("identity"),
        steps=steps,
        signals={name: column for name, column in columns.items() if set(column) - {None}},
        batch_digests=tuple(_text(path, line, value, "batch_digest") for line, value in lines),
        batch_agrees=tuple(_flag(path, line, value, "batch_agrees") for line, value in lines),
        grads_missing=tuple(dict.fromkeys(missing)),
        ended=end is not None,
        expected_steps=_steps(path, header.get("steps")),
    )


def _steps(path: Path, value: object) -> int | None:
    return None if value is None else step_number(path, 1, value)


def _text(path: Path, line: int, values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if not (value is None or isinstance(value, str)):
        fail(path, line, f"{name} is {value!r}, which is no text")
    return value


def _names_missing(path: Path, line: int, values: Mapping[str, Any]) -> list[str]:
    names = values.get("grads_missing_names")
    if not (names is None or is_texts(names)):
        fail(path, line, f"grads_missing_names is {names!r}, which is no list of texts")
    return names or []


def _flag(path: Path, line: int, values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if not (value is None or isinstance(value, bool)):
        fail(path, line, f"{name} is {value!r}, must be true, false or null")
    return value


def _precision(job: Mapping[str, Any], in_force: Mapping[str, Any] | None) -> Precision:
    """The coarsest arithmetic that the job names or that ran."""
    techniques = set(job.get("techniques") or ())
    ran = in_force or {}
    if techniques & {Technique.FLOAT8, Technique.FLOAT8_ROWWISE}:
        return Precision.FLOAT8
    if (ran.get("float8") or {}).get("modules"):
        return Precision.FLOAT8
    dtypes = {ran.get("param_dtype"), ran.get("mixed_precision_param")}
    return (
        Precision.BF16 if Technique.BF16 in techniques or "bfloat16" in dtypes else Precision.FP32
    )
