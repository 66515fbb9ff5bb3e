"""What an experiment file means: sets with their degrees and kinds, and where their jobs run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from converge_harness.model.kinds import Kind, Parallelism, Recovery, Segment
from converge_harness.model.trainer import TORCHTITAN, TrainerSpec


class Launcher(StrEnum):
    """Who starts the ranks of a job."""

    LOCAL = "local"
    """The harness itself, by torchrun on this machine."""
    SLURM = "slurm"
    """Slurm, by one batch script per job."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``[cluster]``: what a scheduler is asked for, and what its nodes need before ranks start.

    Options of sbatch that are None are not asked for. Every text is what sbatch and bash take as it
    stands, or quoted: ``converge_harness.experiment.cluster`` refuses what they would read
    otherwise.
    """

    ranks_per_node: int
    """Ranks (GPUs) on a full node. A job of no more ranks gets one node."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Time limit of a job as sbatch takes it: ``04:00:00``, ``1-12``, ``90`` (minutes)."""
    gpus_per_node: bool = True
    """Whether to ask for a GPU per rank by ``--gpus-per-node``; off where ``gres`` says it, or
    where ranks run on CPUs."""
    gres: str | None = None
    """``gpu:h100:8``; replaces ``--gpus-per-node``."""
    cpus_per_rank: int | None = None
    memory_per_node: str | None = None
    """``64G``; sbatch's ``--mem``."""
    constraint: str | None = None
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each as on a ``#SBATCH`` line: ``--exclusive``."""
    srun: tuple[str, ...] = ()
    """Further arguments of srun, as ``--container-image=…`` of pyxis."""
    container: tuple[str, ...] = ()
    """What the ranks' command is given to: ``apptainer exec --nv image.sif``, as an argv."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    prologue: tuple[str, ...] = ()
    """Lines of bash that run on the first node before the ranks start, as they are written."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all ranks: ``NCCL_SOCKET_IFNAME``, ``GLOO_SOCKET_IFNAME`` …"""
    device: str = "cuda"
    """``cuda`` or ``cpu``."""
    hardware: str | None = None
    """Name of the nodes' hardware, as ``H100``: part of every job's identity. None: partition,
    gres and constraint stand for it."""
    max_jobs: int | None = None
    """How many jobs of the experiment may run at once; None: the scheduler decides."""
    requeue: bool = True
    """Whether a job comes back to the queue after a node failure or preemption."""
    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next of every job, which goes on from the newest when it
    has been requeued; None: it starts over."""
    poll_s: float = 10.0
    """How often the scheduler is asked, in seconds; by one query for all jobs."""


Setting: TypeAlias = bool | int | float | str | list[Any] | None
"""A value that TOML and a train config can hold."""
RESHARD = "parallelism.fsdp_reshard_after_forward"
"""``always`` frees gathered parameters after the forward, ``never`` keeps them for the backward
(torchtitan 0.2 and 0.3: ``default``, ``always`` or ``never``)."""
ZERO_2, ZERO_3 = "never", "always"
"""What ZeRO-2 and ZeRO-3 keep in memory, as values of ``RESHARD``."""
SPMD_BACKEND = "parallelism.spmd_backend"
"""Train config key of torchtitan 0.3's SPMD backend."""
SPMD_BACKENDS = ("spmd_types", "partial_dtensor", "full_dtensor")
"""Its values."""
LOCAL_BATCH = "training.local_batch_size"
"""Train config key of the samples that a rank takes at once."""
GLOBAL_BATCH = "training.global_batch_size"
"""Train config key of the samples of a step, over all ranks; -1: without accumulation."""


class Role(StrEnum):
    """What a job is for."""

    SEED = "seed checkpoint"
    ANCHOR = "anchor"
    """What the control is judged against."""
    CONTROL = "control"
    REPEAT = "repeat"
    REFERENCE = "reference"
    """A control's own configuration in float32: what errors of low precision are measured from."""
    MATCHED = "matched control"
    """A control's own configuration in the precision of a test set that computes in a coarser one.
    """
    TEST = "test"
    OTHER_SEED = "other seed"
    """A control or a test set once more, by another seed."""


class RepeatKind(StrEnum):
    """How an A/A repeat of the control differs from it (mathematically: not at all)."""

    RERUN = "rerun"
    """The same job again: shows whether the set-up is deterministic."""
    ULP = "ulp"
    """Every initial weight moved by one unit in the last place: shows how rounding grows. Where a
    control computes in less than float32 a cast loses it, and ``ROUNDING`` is made in its place."""
    ROUNDING = "rounding"
    """What is computed in low precision rounded another way, in every step: shows what the rounding
    of another implementation does."""
    PERMUTE = "permute"
    """The samples of every global batch dealt out to the ranks in another order: shows what
    another order of the same sums does."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One A/A repeat: a kind, and a seed that decides its directions or its order."""

    kind: RepeatKind
    seed: int = 1

    @property
    def in_low_precision(self) -> Repeat:
        """What is made of it where a control computes in less than float32."""
        return Repeat(RepeatKind.ROUNDING, self.seed) if self.kind is RepeatKind.ULP else self

    def __str__(self) -> str:
        """As experiment files and job names write it: ``ulp``, ``ulp.2``."""
        return self.kind.value if self.seed == 1 else f"{self.kind.value}.{self.seed}"


DEFAULT_REPEATS = (
    Repeat(RepeatKind.RERUN),
    Repeat(RepeatKind.ULP),
    Repeat(RepeatKind.ULP, 2),
    Repeat(RepeatKind.ULP, 3),
    Repeat(RepeatKind.PERMUTE),
    Repeat(RepeatKind.PERMUTE, 2),
)
"""Repeats of every control unless the file names others."""
FROZEN_STEPS = 16
"""Frozen steps of every run that is judged by a reference, unless the file says otherwise."""
FEWEST_DRAWN = 4
"""Frozen steps that a mean over random numbers takes (``own_random_numbers``)."""


class Across(StrEnum):
    """What a golden may differ in from the runs judged against it, where a file says so."""

    HARDWARE = "hardware"
    """Another hardware class: kernels sum in another order."""
    DTYPE = "dtype"
    """Another data type of parameters or of the arithmetic."""


Cadence: TypeAlias = int | str | tuple[int, ...]
"""At which steps per-tensor evidence is taken: ``"powers of two"`` (steps 0, 1, 2, 4, 8, …),
``"off"``, N (steps 0, 1, 2 and every N-th), or the steps themselves."""
POWERS_OF_TWO = "powers of two"
CADENCE_OFF = "off"


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


class Ask(StrEnum):
    """What a test set has to show."""

    SAME = "same"
    """That it learns the same thing as the control: every check."""
    NO_WORSE = "no worse"
    """Of a change that is meant to change numbers (another optimizer, schedule, precision, part of
    the architecture): that its run is whole, and that its loss is no higher than the control's."""


DATA_TYPES: Mapping[str, Precision] = MappingProxyType(
    {
        "float64": Precision.FP32,
        "float32": Precision.FP32,
        "float16": Precision.BF16,
        "bfloat16": Precision.BF16,
        "float8": Precision.FLOAT8,
    }
)
"""What a command trainer's config may call its arithmetic, and the floor by which it is judged:
none is finer than that of its own (float16 has more bits than bfloat16, and no floor of its own).
"""


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """The project's own corpus (``harness/corpus``). Same values, same bytes, everywhere."""

    seed: int = 1
    vocab_size: int = 512
    """Size of the tokenizer's vocabulary, special tokens included."""
    tokens: int = 400_000
    """At least this many tokens of text are generated."""


class Loader(StrEnum):
    """What reads the project's corpus."""

    CONVERGE = "converge"
    """Our own: which samples make up a step depends on no degree."""
    TORCHTITAN = "torchtitan"
    """torchtitan's stock text loader: splits documents by data-parallel rank."""
    STREAMING = "streaming"
    """MosaicML Streaming's ``StreamingDataset``, from MDS shards."""


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
    """``[converge.model]``: shape overrides: ``dim n_layers n_heads n_kv_heads vocab_size``,
    ``head_dim`` of a Qwen 3 and ``moe_hidden_dim num_experts top_k`` of one with experts."""
    data: SyntheticData | None = None
    """``[converge.data]``; None means torchtitan's own dataset, as the settings name it."""
    loader: Loader = Loader.CONVERGE
    """``[converge.data] loader``: what reads the corpus."""

    @property
    def own_loader(self) -> bool:
        """Whether our own loader reads the corpus: then no degree changes the samples of a step."""
        return self.data is not None and self.loader is Loader.CONVERGE


@dataclass(frozen=True, slots=True)
class SetSpec:
    """One control set or test set as the experiment file means it, defaults filled in."""

    name: str
    parallelism: Parallelism
    train_config: TrainConfig
    toolchain: str
    """A name under the toolchain root, as ``torchtitan-0.3.0``; of a command trainer perhaps the
    absolute path of a Python instead."""
    techniques: tuple[Technique, ...] = ()
    pipeline_schedule: str | None = None
    """``1F1B``, ``Interleaved1F1B``, …; None when pp is 1."""
    cp_rotation: str | None = None
    """``allgather`` or ``alltoall``; None leaves torchtitan's default and audits nothing."""
    spmd_backend: str | None = None
    """``spmd_types``, ``partial_dtensor`` or ``full_dtensor``: how torchtitan 0.3 keeps track of
    what is sharded; None where nothing was said, until a plan fills in what the toolchain's torch
    is fit for, and where there is no such choice."""
    overrides: Mapping[str, Setting] = field(default_factory=dict)
    """The file's ``set``: dotted keys in the toolchain's own config."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Signal name to largest allowed relative difference: replaces the learnt envelope."""
    margin: float | None = None
    """Largest relative difference of the mean loss that still counts as equivalent; None: the
    default of the pair's precision."""
    ask: Ask = Ask.SAME
    own_random_numbers: bool = False
    """Draws other random numbers than its control, and should, as dropout does under another
    parallelism. It is then compared in the mean over frozen steps, not step by step."""
    waive: tuple[str, ...] = ()
    """Names of rules of the converging guide that this set is excused from."""
    inject: str | None = None
    """``path/to/file.py:function``, called in every rank with the built trainer."""
    without_fixes: tuple[str, ...] = ()
    """Fixes of the CPU shim for upstream bugs that are left out, to show the bug."""
    control: str | None = None
    """Name of the control that this test set is judged against; None for a control or anchor."""
    note: str = ""
    """The file's ``note``: one sentence on why the set is there; printed in reports."""
    kind: Kind = Kind.PARALLEL
    segments: tuple[Segment, ...] = ()
    """Of an elastic set, in order; ``parallelism`` is that of the first."""
    recovery: Recovery | None = None
    """Of a fault set, and of any other that a scheduler may interrupt and requeue."""
    trainer: TrainerSpec = TORCHTITAN

    @property
    def resumes(self) -> bool:
        """Whether the run is made in several passes, joined by checkpoints."""
        return bool(self.segments) or self.recovery is not None

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
    """Of initial weights and data order."""
    other_seeds: tuple[int, ...] = ()
    """With which every control, and every test set that trains in one pass, is trained as well."""
    repeats: tuple[Repeat, ...] = DEFAULT_REPEATS
    """A/A repeats made of every control; where one computes in less than float32, ``rounding`` is
    made for ``ulp``."""
    reference: bool = True
    """Whether what computes in less than float32 is also judged by a run in float32."""
    frozen: int = FROZEN_STEPS
    """Batches whose gradients are compared at the initial weights, where there is a reference."""
    frozen_sets: frozenset[str] | None = None
    """Names of the sets that make frozen steps, in a part of an experiment; None in a whole one."""
    referenced: frozenset[str] = frozenset()
    """Names of controls whose reference is run although no test set here asks for it."""
    calibration: Path | None = None
    """A calibration file to judge by; then no repeats are made."""
    baseline: Path | None = None
    """Folder of a golden that stands for the control; then neither it nor repeats are run."""
    baseline_across: tuple[Across, ...] = ()
    """What that golden may differ in."""
    cadence: Cadence = POWERS_OF_TWO
    """At which steps every run leaves per-tensor evidence."""
    anchor: SetSpec | None = None
    """``[anchor]``: what the first control is itself judged against (one device, DDP …)."""
    startup_timeout_s: float = 600.0
    """Longest time from launch to the first finished step."""
    progress_timeout_s: float = 300.0
    """Longest time between two finished steps."""
    cpu_ranks: int | None = None
    """How many ranks may run side by side on the CPU; None: the launcher decides."""
    seed_checkpoint: Path | None = None
    """Absolute path of the distributed checkpoint that every set starts from; None: the harness
    makes one."""
    launcher: Launcher = Launcher.LOCAL
    cluster: Cluster | None = None
    """``[cluster]``, completed by the user's own file; None where the launcher needs none."""
    tokens_per_gpu_second: float | None = None
    """Stated throughput, for estimates of cost; None: costs are not told."""
