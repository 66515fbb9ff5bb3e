"""The content of an experiment file: sets with their degrees and kinds, and where jobs run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from converge_harness.model.kinds import Kind, Parallelism, Recovery, Segment
from converge_harness.model.trainer import TrainerSpec


class Launcher(StrEnum):
    """What starts the ranks of a job."""

    LOCAL = "local"
    """converge itself, with torchrun on this machine."""
    SLURM = "slurm"
    """Slurm, with one batch script per job."""
    KUBERNETES = "kubernetes"
    """Whoever creates in Kubernetes the JobSets that converge writes, one per job."""


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """``[cluster.kubernetes]``: what the pods of a job need besides what their ranks request."""

    image: str
    """The container image of the ranks; it needs bash, and on several nodes getent."""
    claim: str
    """The PersistentVolumeClaim of the file system that pods share with the machine of converge."""
    mount: Path
    """Where both have it."""
    namespace: str = "default"
    gpu: str = "nvidia.com/gpu"
    """The resource of which a pod requests one per rank, if ranks run on GPUs."""
    queue: str | None = None
    """Kueue's LocalQueue of the JobSets; None: they do not wait for each other."""
    pod: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of pods' specs, as JSON values: ``nodeSelector``, ``tolerations`` …"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``[cluster]``: what is requested from a scheduler, and what nodes need before ranks start.

    Options of sbatch that are None are not set. sbatch and bash get every text unchanged, or
    quoted: ``converge_harness.experiment.cluster`` refuses texts that they would read differently.
    """

    ranks_per_node: int
    """Ranks (GPUs) on a full node. A job with at most as many ranks gets one node."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Time limit of a job as sbatch takes it: ``04:00:00``, ``1-12``, ``90`` (minutes)."""
    gpus_per_node: bool = True
    """Whether to request a GPU per rank with ``--gpus-per-node``; off if ``gres`` does, or if ranks
    run on CPUs.
    """
    gres: str | None = None
    """``gpu:h100:8``; replaces ``--gpus-per-node``."""
    cpus_per_rank: int | None = None
    memory_per_node: str | None = None
    """``64G``; sbatch's ``--mem``."""
    constraint: str | None = None
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each as on a ``#SBATCH`` line: ``--exclusive``."""
    srun: tuple[str, ...] = ()
    """Further arguments of srun, such as ``--container-image=…`` of pyxis."""
    container: tuple[str, ...] = ()
    """Prefix of the ranks' command as an argv, such as ``apptainer exec --nv image.sif``."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    prologue: tuple[str, ...] = ()
    """Lines of bash that run unchanged on the first node before the ranks start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all ranks: ``NCCL_SOCKET_IFNAME``, ``GLOO_SOCKET_IFNAME`` …"""
    device: str = "cuda"
    """``cuda`` or ``cpu``."""
    hardware: str | None = None
    """Name of the nodes' hardware, such as ``H100``: part of every job's identity. None: partition,
    gres and constraint are used instead.
    """
    max_jobs: int | None = None
    """How many jobs of the experiment may run at the same time; None: the scheduler decides."""
    requeue: bool = True
    """Whether a job returns to the queue after a node failure or preemption."""
    checkpoint_every: int | None = None
    """Steps between checkpoints of every job: interrupted, it continues from the newest. None: it
    starts over.
    """
    poll_s: float = 10.0
    """How often the scheduler is queried, in seconds; one query for all jobs."""
    kubernetes: Kubernetes | None = None
    """None: jobs are Slurm's."""


Setting: TypeAlias = bool | int | float | str | list[Any] | None
"""A value that both TOML and a train config can have."""
JUDGED_SIGNALS = ("loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed")
"""Signals that have an envelope and may have a tolerance; the recomputed two are the probe's, in
float64."""
RESHARD = "parallelism.fsdp_reshard_after_forward"
"""``always`` frees gathered parameters after the forward, ``never`` keeps them for the backward
(torchtitan 0.2 and 0.3: ``default``, ``always`` or ``never``)."""
ZERO_2, ZERO_3 = "never", "always"
"""What ZeRO-2 and ZeRO-3 keep in memory, as values of ``RESHARD``."""
SPMD_BACKEND = "parallelism.spmd_backend"
"""Train config key of torchtitan 0.3's SPMD backend."""
SPMD_BACKENDS = ("spmd_types", "partial_dtensor", "full_dtensor")
"""Its values."""


class Role(StrEnum):
    """What a job is for."""

    SEED = "seed checkpoint"
    ANCHOR = "anchor"
    """A set against which the control is judged."""
    CONTROL = "control"
    REPEAT = "repeat"
    REFERENCE = "reference"
    """A control's own configuration in float32, from which errors of low precision are measured."""
    MATCHED = "matched control"
    """A control's own configuration in the precision of a test set that computes in a coarser one.
    """
    TEST = "test"
    OTHER_SEED = "other seed"
    """A control or test set again, with another seed."""


class RepeatKind(StrEnum):
    """How an A/A repeat of the control differs from it (mathematically: not at all)."""

    RERUN = "rerun"
    """The same job again; shows whether the set-up is deterministic."""
    ULP = "ulp"
    """Every initial weight moved by one unit in the last place; shows how rounding grows. If a
    control computes in less than float32, a cast would undo it, and ``ROUNDING`` replaces it.
    """
    ROUNDING = "rounding"
    """Low-precision results rounded in another way, in every step; shows the effect of another
    implementation's rounding.
    """
    PERMUTE = "permute"
    """The samples of every global batch given to the ranks in another order; shows the effect of
    another order of summation.
    """


@dataclass(frozen=True, slots=True)
class Repeat:
    """One A/A repeat: its kind, and a seed for its directions or its order."""

    kind: RepeatKind
    seed: int = 1

    @property
    def in_low_precision(self) -> Repeat:
        """The repeat that replaces it if a control computes in less than float32."""
        return Repeat(RepeatKind.ROUNDING, self.seed) if self.kind is RepeatKind.ULP else self

    def __str__(self) -> str:
        """As in experiment files and job names: ``ulp``, ``ulp.2``."""
        return self.kind.value if self.seed == 1 else f"{self.kind.value}.{self.seed}"


DEFAULT_REPEATS = (
    Repeat(RepeatKind.RERUN),
    Repeat(RepeatKind.ULP),
    Repeat(RepeatKind.ULP, 2),
    Repeat(RepeatKind.ULP, 3),
    Repeat(RepeatKind.PERMUTE),
    Repeat(RepeatKind.PERMUTE, 2),
)
"""Repeats of every control, unless the file names others."""
ENOUGH_RERUNS = 3
"""Plain reruns from which the noise of kernels that are not deterministic is learnt: each is
compared with the two others."""
FROZEN_STEPS = 16
"""Frozen steps of every run that is judged by a reference, by default."""
STOP_AFTER = 16
"""Steps that a test set trains, by default, before it may be stopped: as many as a cause needs."""
LONG = 64
"""A run of at least so many steps has to show that its loss is equivalent to the control's."""
SETTLED_AT = (1 / 8, 1 / 4, 1 / 2)
"""Shares of a run after which its equivalence may be settled; the last look is at its end."""
FEWEST_DRAWN = 4
"""Frozen steps needed for a mean over random numbers (``own_random_numbers``)."""


class Across(StrEnum):
    """In what a baseline may differ from the runs judged against it, if the file allows it."""

    HARDWARE = "hardware"
    """Another hardware class, on which kernels sum in another order."""
    DTYPE = "dtype"
    """Another data type of parameters or of the arithmetic."""


Cadence: TypeAlias = int | str | tuple[int, ...]
"""At which steps per-tensor evidence is taken: ``"powers of two"`` (steps 0, 1, 2, 4, 8, …),
``"off"``, N (steps 0, 1, 2 and every N-th), or the steps themselves."""
POWERS_OF_TWO = "powers of two"
CADENCE_OFF = "off"


class Technique(StrEnum):
    """A technique that is not a parallelism. The trainer decides what it sets."""

    COMPILE = "compile"
    ASYNC_TP = "async_tp"
    FLOAT8 = "float8"
    """Float8 linear layers, tensorwise scaling."""
    FLOAT8_ROWWISE = "float8_rowwise"
    FLOAT8_TP = "float8_tp"
    """Float8 all-gathers in tensor parallelism (Float8 TP styles), in addition to ``float8``."""
    BF16 = "bf16"
    """Parameters, gradients and optimizer state in bfloat16."""


@dataclass(frozen=True, slots=True)
class OwnTechnique:
    """``[technique.NAME]``: a technique that the experiment file defines."""

    name: str
    what: str
    """One sentence that says what it is, for reports."""
    overrides: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    """Its ``set``: keys of the train config, which every set that names it gets."""
    apply: str | None = None
    """``/abs/file.py:function``, called where ``place`` says."""
    place: str | None = None
    """Where ``apply`` is called, by the name of its parameter: ``config``, ``model``,
    ``parallel_model`` or ``trainer``.
    """
    in_force: str | None = None
    """``/abs/file.py:function``, called after the first step: a count or a bool; None: converge
    looks itself whether ``apply`` changed anything.
    """
    folder: str = field(default="", compare=False)
    """The experiment file's, from which modules that ``set`` names can be imported."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Functions of the user that ranks call for it, as ``file:function``."""
        return tuple(each for each in (self.apply, self.in_force) if each)

    @property
    def meaning(self) -> tuple[object, ...]:
        """What ranks get of it: all but the sentence."""
        return self.name, dict(self.overrides), self.apply, self.in_force


class Precision(StrEnum):
    """The coarsest arithmetic of a run, which decides the floating-point floor of its checks."""

    FP32 = "fp32"
    BF16 = "bf16"
    FLOAT8 = "float8"


class Ask(StrEnum):
    """What a test set has to prove."""

    SAME = "same"
    """It learns the same thing as the control: every check."""
    NO_WORSE = "no worse"
    """For a change that is meant to change numbers (another optimizer, schedule, precision, part of
    the architecture): its run is complete, and its loss is no higher than the control's.
    """


class Stop(StrEnum):
    """When the run of a test set may end before its last step."""

    NEVER = "never"
    FAIL = "fail"
    """Once its FAIL is certain."""
    SETTLED = "settled"
    """Also once it is settled that its loss is equivalent."""


def settling_steps(steps: int, warmup: int = 0) -> tuple[int, ...]:
    """The steps, before its last, after which a run of so many steps may be settled.

    They are planned, so that the error of all looks together is known. The test of equivalence is
    over the second half of the run so far, and while the learning rate warms up, all runs are
    alike: so no look comes before twice the warm-up.
    """
    planned = {max(int(share * steps), 2 * warmup) for share in SETTLED_AT}
    return tuple(sorted(step for step in planned if LONG <= step < steps))


DATA_TYPES: Mapping[str, Precision] = MappingProxyType(
    {
        "float64": Precision.FP32,
        "float32": Precision.FP32,
        "float16": Precision.BF16,
        "bfloat16": Precision.BF16,
        "float8": Precision.FLOAT8,
    }
)
"""Names of data types in a command trainer's config, and the floor used for each. A floor is never
finer than the type's own (float16 has more bits than bfloat16, but no floor of its own).
"""


def flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted keys; an empty table has none."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        flat |= flattened(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """The project's own corpus (``harness/corpus``): the same values, the same bytes."""

    seed: int = 1
    vocab_size: int = 512
    """Size of the tokenizer's vocabulary, special tokens included."""
    tokens: int = 400_000
    """At least this many tokens of text are generated."""


class Loader(StrEnum):
    """The loader that reads the project's corpus."""

    CONVERGE = "converge"
    """Our own: the samples of a step do not depend on degrees."""
    TORCHTITAN = "torchtitan"
    """torchtitan's stock text loader, which splits documents by data-parallel rank."""
    STREAMING = "streaming"
    """MosaicML Streaming's ``StreamingDataset``, from MDS shards."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A trusted base config: torchtitan's own keys, and a table ``[converge]``."""

    path: str
    """As written in the experiment file, for messages."""
    settings: Mapping[str, Any]
    """Nested tables in the keys of the toolchain's torchtitan, ``[converge]`` removed."""
    module: str | None = None
    """``[converge] module``: what torchtitan 0.3 takes for ``--module`` (``llama3``, or a module of
    one's own); None for 0.2 job files."""
    config: str | None = None
    """``[converge] config``: its config function (``llama3_debugmodel``)."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """``[converge.arguments]``: keyword arguments of that function."""
    import_from: Path | None = None
    """The user's folder from which the module is imported; None: it is installed."""
    code: Path | None = None
    """The module's file there: its digest, with all that it imports from there, is part of the
    identity."""
    model: Mapping[str, int] = field(default_factory=dict)
    """``[converge.model]``: shape overrides: ``dim n_layers n_heads n_kv_heads vocab_size``,
    ``head_dim`` of a Qwen 3 and ``moe_hidden_dim num_experts top_k`` of one with experts."""
    data: SyntheticData | None = None
    """``[converge.data]``; None: torchtitan's own dataset, named in the settings."""
    loader: Loader = Loader.CONVERGE
    """``[converge.data] loader``."""

    @property
    def own_loader(self) -> bool:
        """Whether our own loader reads the corpus: then samples do not depend on degrees."""
        return self.data is not None and self.loader is Loader.CONVERGE

    def setting(self, key: str, default: Setting = None) -> Setting:
        """The value of a dotted key."""
        value: Any = self.settings
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return cast("Setting", value)


@dataclass(frozen=True, slots=True)
class SetSpec:
    """One control or test set of the experiment file, with defaults filled in."""

    name: str
    parallelism: Parallelism
    train_config: TrainConfig
    toolchain: str
    """A name under the toolchain root, such as ``torchtitan-0.3.0``; for a command trainer it may
    be the absolute path of a Python.
    """
    techniques: tuple[Technique, ...] = ()
    own_techniques: tuple[OwnTechnique, ...] = ()
    """Techniques of the experiment file's ``[technique.NAME]`` tables, in the order in which they
    are named and applied. Their keys are in ``overrides``.
    """
    pipeline_schedule: str | None = None
    """``1F1B``, ``Interleaved1F1B``, …; None when pp is 1."""
    cp_rotation: str | None = None
    """``allgather`` or ``alltoall``; None: torchtitan's default, which is not audited."""
    spmd_backend: str | None = None
    """``spmd_types``, ``partial_dtensor`` or ``full_dtensor``: how torchtitan 0.3 tracks sharding.
    None if not specified, until a plan fills in the default for the toolchain's torch; also None if
    there is no such choice.
    """
    overrides: Mapping[str, Setting] = field(default_factory=dict)
    """The file's ``set``: dotted keys in the toolchain's own config."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Largest allowed relative difference by signal; replaces the learnt envelope."""
    margin: float | None = None
    """Largest relative difference of the mean loss that still counts as equivalent; None: the
    default for the pair's precision.
    """
    ask: Ask = Ask.SAME
    own_random_numbers: bool = False
    """Whether it legitimately draws other random numbers than its control, as dropout does under
    another parallelism. Then the mean over frozen steps is compared, not single steps.
    """
    stop: Stop = Stop.FAIL
    """When its run may end before its last step (not before ``Experiment.stop_after``)."""
    waive: tuple[str, ...] = ()
    """Names of the rules of the converging guide that this set waives."""
    inject: str | None = None
    """``path/to/file.py:function``, called in every rank with the built trainer."""
    deterministic: bool = True
    """Whether torch may use deterministic algorithms only; off: all, as in production."""
    without_fixes: tuple[str, ...] = ()
    """The CPU shim's fixes of upstream bugs that are left out, to show the bug."""
    operations_of: str = ""
    """The module whose operations are recorded: in reruns that ``--explain`` makes, in no file."""
    control: str | None = None
    """Name of the control that this test set is judged against; None for a control or anchor."""
    note: str = ""
    """The file's ``note``: one sentence on the set's purpose; printed in reports."""
    kind: Kind = Kind.PARALLEL
    segments: tuple[Segment, ...] = ()
    """Segments of an elastic set, in order; ``parallelism`` is that of the first."""
    recovery: Recovery | None = None
    """For a fault set, and for any other whose interrupted run continues from a checkpoint."""
    trainer: TrainerSpec = field(kw_only=True)
    starts_from_control: bool = False
    """Whether it starts from its control's seed checkpoint, which another trainer makes. Its
    evidence then has that trainer's names."""

    @property
    def resumes(self) -> bool:
        """Whether the run consists of several passes, joined by checkpoints."""
        return bool(self.segments) or self.recovery is not None

    @property
    def technique_names(self) -> tuple[str, ...]:
        """Names of all techniques, the trainer's and those of the experiment file."""
        return (*map(str, self.techniques), *(each.name for each in self.own_techniques))

    @property
    def injected(self) -> str:
        """``inject: file.py:function``, without the folder; empty if nothing is injected."""
        return f"inject: {self.inject.rpartition('/')[2]}" if self.inject else ""

    @property
    def warmup_steps(self) -> int | None:
        """Steps over which the learning rate rises at the start; None if nobody says."""
        key = self.trainer.keys.warmup_steps
        value = self.setting(key, self.trainer.defaults.get(key)) if key else None
        return value if isinstance(value, int) and value >= 0 else None

    def setting(self, key: str, default: Setting = None) -> Setting:
        """The value of a dotted train-config key: from ``set``, else from the train config."""
        if key in self.overrides:
            return self.overrides[key]
        return self.train_config.setting(key, default)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A set that is not run, because its trainer cannot be told to run it."""

    why: str
    """As a clause."""
    kind: Kind
    control: str

    @property
    def was_asked_for(self) -> bool:
        """Whether the file names the set itself, so that without a run it is INVALID.

        Of a ``space_time`` table, the trainer decides which sets there are.
        """
        return self.kind is not Kind.SPACE_TIME


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment file, validated."""

    name: str
    path: Path
    controls: tuple[SetSpec, ...]
    """The first is the ``[control]``; others are ``[controls.NAME]``."""
    tests: tuple[SetSpec, ...]
    left_out: Mapping[str, LeftOut] = field(default_factory=dict, hash=False)
    """By name, the sets that are not among them."""
    seed: int = 42
    """Of initial weights and data order."""
    other_seeds: tuple[int, ...] = ()
    """Further seeds with which every control and every one-pass test set is trained."""
    repeats: tuple[Repeat, ...] = DEFAULT_REPEATS
    """A/A repeats of every control; for one that computes in less than float32, ``rounding``
    replaces ``ulp``.
    """
    reference: bool = True
    """Whether sets in less than float32 are also judged against a run in float32."""
    frozen: int = FROZEN_STEPS
    """Number of batches whose gradients are compared at the initial weights, if there is a
    reference.
    """
    frozen_sets: frozenset[str] | None = None
    """In a selection from an experiment, the names of sets with frozen steps; None otherwise."""
    referenced: frozenset[str] = frozenset()
    """Names of controls whose reference is run although no test set here needs it."""
    calibration: Path | None = None
    """A calibration file to use; then no repeats are run."""
    baseline: Path | None = None
    """Folder of a baseline that replaces the control; then neither control nor repeats are run."""
    baseline_across: tuple[Across, ...] = ()
    """In what that baseline may differ."""
    cadence: Cadence = POWERS_OF_TWO
    """Steps at which every run writes per-tensor evidence."""
    stop_after: int | None = STOP_AFTER
    """The earliest step after which a test set is stopped; None: all train on."""
    waiting_ranks: int | None = None
    """How many ranks may be in memory in runs that wait for each other; None: as many as the
    launcher finds room for.
    """
    anchor: SetSpec | None = None
    """``[anchor]``: a set against which the first control is judged (one device, DDP …)."""
    startup_timeout_s: float = 600.0
    """Longest time from launch to the first finished step."""
    progress_timeout_s: float = 300.0
    """Longest time between two finished steps."""
    cpu_ranks: int | None = None
    """How many ranks may run at the same time on the CPU; None: the launcher decides."""
    seed_checkpoint: Path | None = None
    """Absolute path of the distributed checkpoint from which every set starts; None: converge makes
    one.
    """
    launcher: Launcher = Launcher.LOCAL
    cluster: Cluster | None = None
    """``[cluster]``, completed from the user's own file; None if the launcher needs none."""
    tokens_per_gpu_second: float | None = None
    """Stated throughput, for estimates of cost; None: no estimates."""
