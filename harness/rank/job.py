"""``job.json`` (schema 1) as a frozen value: all that a rank is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
SEED_ROLE = "seed checkpoint"


class JobError(Exception):
    """``job.json`` cannot be read: missing, not JSON, or of another schema."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallelism degrees, as in ``harness.model.Parallelism`` (which ranks cannot import)."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """The trusted base config: torchtitan's keys in ``settings``, ``[converge]`` beside them."""

    path: str
    module: str | None = None
    config: str | None = None
    model: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    loader: str = "converge"
    """What reads the corpus, as in ``harness.model.Loader``: ``converge``, ``torchtitan`` (its
    stock text loader) or ``streaming`` (MosaicML Streaming)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One torchrun call as its ranks see it; the fields are those of ``job.json``."""

    name: str
    role: str
    identity: str
    dialect: str
    run_folder: Path
    seed: int
    steps: int
    parallelism: Degrees
    train_config: BaseConfig
    techniques: tuple[str, ...] = ()
    pipeline_schedule: str | None = None
    cp_rotation: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    data_folder: Path | None = None
    """Folder with ``corpus.json`` and ``tokens.npy``; None: torchtitan's own dataset."""
    seed_checkpoint: Path | None = None
    """``.../checkpoint/step-0`` to start from; None: torchtitan's own initial weights."""
    sample_steps: tuple[int, ...] = ()
    """Steps at which per-tensor evidence is left; 0 is before the first step."""
    repeat: str | None = None
    """``rerun``, ``ulp``, ``permute`` or None."""
    repeat_seed: int = 1
    """Decides the directions of ``ulp`` and the order of ``permute``."""
    inject: str | None = None
    """``/abs/path.py:function``, called with the built trainer."""
    without_fixes: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def makes_seed_checkpoint(self) -> bool:
        return self.role == SEED_ROLE

    @property
    def order_seed(self) -> int | None:
        """Decides how a repeat deals out each global batch; None: as in every other run."""
        return self.repeat_seed if self.repeat == "permute" else None


def read_job(path: str | Path) -> Job:
    """The job in a file.

    Raises JobError when the file cannot be read as a job of this schema.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{path}: cannot be read as a job: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise JobError(f"{path}: job schema is {found!r}, this rank code reads {SCHEMA}")
    try:
        return _job(raw)
    except (KeyError, TypeError) as error:
        raise JobError(f"{path}: not a complete job: {error!r}") from error


def _job(raw: dict[str, Any]) -> Job:
    base = raw["train_config"]
    data = raw.get("data")
    checkpoint = raw.get("seed_checkpoint")
    return Job(
        name=raw["name"],
        role=raw["role"],
        identity=raw["identity"],
        dialect=raw["dialect"],
        run_folder=Path(raw["run_folder"]),
        seed=raw["seed"],
        steps=raw["steps"],
        parallelism=Degrees(**raw["parallelism"]),
        train_config=BaseConfig(
            path=base["path"],
            module=base.get("module"),
            config=base.get("config"),
            model=base.get("model") or {},
            settings=base.get("settings") or {},
            loader=base.get("loader") or "converge",
        ),
        techniques=tuple(raw.get("techniques") or ()),
        pipeline_schedule=raw.get("pipeline_schedule"),
        cp_rotation=raw.get("cp_rotation"),
        overrides=raw.get("overrides") or {},
        data_folder=Path(data["folder"]) if data else None,
        seed_checkpoint=Path(checkpoint) if checkpoint else None,
        sample_steps=tuple(raw.get("sample_steps") or ()),
        repeat=raw.get("repeat"),
        repeat_seed=raw.get("repeat_seed") or 1,
        inject=raw.get("inject"),
        without_fixes=tuple(raw.get("without_fixes") or ()),
        device=raw.get("device", "cpu"),
    )
