"""The frozen values that pass between stages, and nothing else.

Every stage takes some of these and returns others; none changes one. Mappings inside are treated
as read-only. See ``docs/architecture.md`` for who makes what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, cast

Setting: TypeAlias = bool | int | float | str | list[Any] | None
"""A value that TOML and a train config can hold."""


# ---------------------------------------------------------------- experiment


class Role(StrEnum):
    """What a job is for."""

    SEED = "seed checkpoint"
    CONTROL = "control"
    REPEAT = "repeat"
    TEST = "test"


class Repeat(StrEnum):
    """How an A/A repeat of the control differs from it (mathematically: not at all)."""

    RERUN = "rerun"
    """The same job again: shows whether the set-up is deterministic."""
    ULP = "ulp"
    """Every initial weight moved by one unit in the last place: shows how rounding grows."""


class Technique(StrEnum):
    """A technique that is no parallelism. What it sets is up to the trainer's adapter."""

    COMPILE = "compile"
    ASYNC_TP = "async_tp"
    FLOAT8 = "float8"
    """Float8 linear layers, tensorwise scaling."""
    FLOAT8_ROWWISE = "float8_rowwise"
    FLOAT8_TP = "float8_tp"
    """Float8 all-gathers of tensor parallelism (Float8 TP styles), on top of ``float8``."""
    BF16 = "bf16"
    """Parameters, gradients and optimizer state in bfloat16."""


class Precision(StrEnum):
    """The coarsest arithmetic of a run: it decides the floating-point floor of its checks."""

    FP32 = "fp32"
    BF16 = "bf16"
    FLOAT8 = "float8"


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Parallelism degrees. ``ep`` borrows ranks from dp_shard, cp and tp, so it adds none."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        """As people write it: ``FSDP 2 x TP 2``, ``HSDP 2x2``, ``DDP 2``."""
        parts = []
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"HSDP {self.dp_replicate}x{self.dp_shard}")
        elif self.dp_replicate > 1:
            parts.append(f"DDP {self.dp_replicate}")
        elif self.dp_shard > 1:
            parts.append(f"FSDP {self.dp_shard}")
        parts += [
            f"{label} {degree}"
            for label, degree in (
                ("TP", self.tp),
                ("CP", self.cp),
                ("PP", self.pp),
                ("EP", self.ep),
            )
            if degree > 1
        ]
        return " x ".join(parts) or "one rank"


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """The project's own corpus (``harness/corpus``). Same values, same bytes, everywhere."""

    seed: int = 1
    vocab_size: int = 512
    """Size of the tokenizer's vocabulary, special tokens included."""
    tokens: int = 400_000
    """At least this many tokens of text are generated."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A trusted base config: torchtitan's own keys, and one table ``[converge]`` of ours."""

    path: str
    """As written in the experiment file, for messages."""
    settings: Mapping[str, Any]
    """Nested tables in the keys of the toolchain's torchtitan, ``[converge]`` removed."""
    module: str | None = None
    """``[converge] module``: torchtitan 0.3 model module (``llama3``); None for 0.2 job files."""
    config: str | None = None
    """``[converge] config``: its config function (``llama3_debugmodel``)."""
    model: Mapping[str, int] = field(default_factory=dict)
    """``[converge.model]``: shape overrides: ``dim n_layers n_heads n_kv_heads vocab_size``."""
    data: SyntheticData | None = None
    """``[converge.data]``; None means torchtitan's own dataset, as the settings name it."""


@dataclass(frozen=True, slots=True)
class SetSpec:
    """One control set or test set as the experiment file means it, defaults filled in."""

    name: str
    parallelism: Parallelism
    train_config: TrainConfig
    toolchain: str
    """A name under the toolchain root, as ``torchtitan-0.3.0``."""
    techniques: tuple[Technique, ...] = ()
    pipeline_schedule: str | None = None
    """``1F1B``, ``Interleaved1F1B``, …; None when pp is 1."""
    cp_rotation: str | None = None
    """``allgather`` or ``alltoall``; None leaves torchtitan's default and audits nothing."""
    overrides: Mapping[str, Setting] = field(default_factory=dict)
    """The file's ``set``: dotted keys in the toolchain's own config."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Signal name to largest allowed relative difference: replaces the learnt envelope."""
    waive: tuple[str, ...] = ()
    """Names of rules of the converging guide that this set is excused from."""
    inject: str | None = None
    """``path/to/file.py:function``, called in every rank with the built trainer."""
    without_fixes: tuple[str, ...] = ()
    """Fixes of the CPU shim for upstream bugs that are left out, to show the bug."""
    control: str | None = None
    """Name of the control that this test set is judged against; None for a control."""
    note: str = ""
    """The file's ``note``: one sentence on why the set is there; printed in reports."""

    def setting(self, key: str, default: Setting = None) -> Setting:
        """What a dotted train-config key resolves to: ``set`` first, then the train config."""
        if key in self.overrides:
            return self.overrides[key]
        value: Any = self.train_config.settings
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return cast("Setting", value)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment file, validated."""

    name: str
    path: Path
    controls: tuple[SetSpec, ...]
    """The first is the ``[control]``; others are ``[controls.NAME]``."""
    tests: tuple[SetSpec, ...]
    seed: int = 42
    repeats: tuple[Repeat, ...] = (Repeat.RERUN, Repeat.ULP)
    """A/A repeats made of every control."""
    startup_timeout_s: float = 600.0
    """Longest time from launch to the first finished step."""
    progress_timeout_s: float = 300.0
    """Longest time between two finished steps."""
    cpu_ranks: int | None = None
    """How many ranks may run side by side on the CPU; None: the launcher decides."""


# ---------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A Python environment with given versions, found on disk. Nothing in it was imported."""

    name: str
    python: Path
    dialect: str
    """Which rank adapter speaks to its torchtitan: ``titan_0_3`` or ``titan_0_2``."""
    versions: Mapping[str, str]
    """Distribution name to version: torch, torchtitan, torchao, triton, converge …"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lies outside the experiment file and can still change a job's numbers."""

    hardware: str
    """Hardware class: bit-identical results are expected within one, and only there."""
    rank_code: str
    """Hex digest of the code that runs inside ranks (probe, CPU shim, adapters)."""
    data: Mapping[SyntheticData, str] = field(default_factory=dict)
    """Hex digest of every synthetic corpus that the experiment uses."""
    injected: Mapping[str, str] = field(default_factory=dict)
    """Hex digest of the file of every ``inject``, by ``inject`` as the set has it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One torchrun call. Two jobs with the same identity would leave the same evidence."""

    name: str
    role: Role
    spec: SetSpec
    toolchain: Toolchain
    seed: int
    steps: int
    local_batch_size: int
    global_batch_size: int
    seq_len: int
    precision: Precision
    identity: str
    """Hex SHA-256 of all that can change the job's numbers."""
    repeat: Repeat | None = None
    needs: str | None = None
    """Identity of the seed-checkpoint job whose weights this one starts from."""

    @property
    def world_size(self) -> int:
        return 1 if self.role is Role.SEED else self.spec.parallelism.world_size

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.global_batch_size // (self.local_batch_size * self.spec.parallelism.dp)

    @property
    def tokens_per_step(self) -> int:
        """The token budget of one optimizer step."""
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True, slots=True)
class Plan:
    """All jobs of an experiment: seed checkpoints first, then controls, repeats, tests."""

    experiment: Experiment
    jobs: tuple[Job, ...]
    waived: tuple[str, ...] = ()
    """Sentences: which rule was waived by which set. Printed in the report."""

    def job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.name == name)


# ---------------------------------------------------------------------- runs


class RunStatus(StrEnum):
    FINISHED = "finished"
    CRASHED = "crashed"
    HUNG = "hung"
    """No step finished within a timeout."""
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"
    """Something it needs did not finish."""


@dataclass(frozen=True, slots=True)
class RankError:
    """What the first failing rank said (torchelastic error file, else the end of its log)."""

    rank: int
    message: str
    """One line: type and text of the exception."""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What happened to a job. Written last, atomically: a run without one is unfinished."""

    name: str
    identity: str
    folder: Path
    status: RunStatus
    wall_s: float
    argv: tuple[str, ...]
    error: RankError | None = None
    reused: bool = False
    """True when an earlier run with this identity was taken instead of launching."""


# ------------------------------------------------------------------ evidence


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that one run left, from wherever it came.

    Every tuple in ``signals`` has one entry per entry of ``steps``; None means that the run left
    no value there, NaN and infinities mean that it left exactly that.
    """

    name: str
    source: str
    """Where it was read from, for messages."""
    steps: tuple[int, ...]
    signals: Mapping[str, tuple[float | None, ...]]
    """``loss``, ``grad_norm`` (as reported), ``loss_recomputed``, ``grad_norm_recomputed``
    (float64, by the probe), ``lr``, ``tokens`` (valid tokens of the step), ``seconds``
    (since training began)."""
    batch_digests: tuple[str | None, ...] = ()
    """One 16-digit hex digest of the global batch per step; empty when the source has none."""
    batch_agrees: tuple[bool | None, ...] = ()
    """Whether all ranks of a data-parallel coordinate saw the same samples."""
    in_force: Mapping[str, Any] | None = None
    """``in_force.json``: what really ran; None when the source has none (tier 0 says so)."""
    complete: bool = True
    """False when the run ended before its last step."""
    expected_steps: int | None = None
    error: RankError | None = None
    status: RunStatus = RunStatus.FINISHED
    wall_s: float | None = None
    precision: Precision = Precision.FP32
    grads_missing: tuple[str, ...] = ()
    """Parameters that got no gradient at some step (``signals["grads_missing"]`` counts them)."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """Signal name to half a unit of its last printed place: console logs round, and that is no
    difference between runs."""


# ------------------------------------------------------------------- verdict


class Outcome(StrEnum):
    """Result of one check."""

    PASS = "PASS"
    FAIL = "FAIL"
    INVALID = "INVALID"
    SKIPPED = "SKIPPED"
    """The evidence for it is not there by nature (say, a CSV has no batch digest)."""


class Tier(StrEnum):
    INTEGRITY = "integrity"
    FIRST_STEP = "first step"
    ENVELOPE = "envelope"


class Judgement(StrEnum):
    """Verdict words, from best to worst."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    ERROR = "ERROR"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Limit:
    """A tolerance that prints itself: a number and where it comes from."""

    value: float
    origin: str
    """``floor of fp32 arithmetic``, ``3 x the spread of 2 repeats``, ``set in the file`` …"""

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.origin})"


@dataclass(frozen=True, slots=True)
class Check:
    """One named question with its answer."""

    name: str
    """Slug, stable across releases: ``loss-envelope``."""
    title: str
    """The first line of the check's docstring: the sentence a report prints."""
    tier: Tier
    outcome: Outcome
    measured: float | None = None
    limit: Limit | None = None
    unit: str = ""
    steps: tuple[int, int] | None = None
    """First and last step looked at."""
    onset: int | None = None
    """First step outside the limit."""
    detail: str = ""
    """One sentence for a person: what was seen."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one test set."""

    name: str
    control: str
    judgement: Judgement
    cause: str = ""
    """One sentence: the likely cause, with its evidence; empty on PASS."""
    onset_step: int | None = None
    checks: tuple[Check, ...] = ()
    next_command: str = ""
