"""Facts about a set's trainer, so that code that uses them need not know trainers by name.

The trainer itself is an object in ``harness/trainers``; it fills in these facts when an experiment
file is read. The judge, and everything else that may not import the trainer, uses them instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from converge_harness.model.kinds import FaultKind, Kind

if TYPE_CHECKING:
    from converge_harness.model.experiment import SetSpec
    from converge_harness.model.in_force import InForce


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a trainer can do. The defaults hold for any program that writes a loss curve."""

    probed: bool = False
    """Its runs write the probe's evidence; otherwise only a curve."""
    all_signals: bool = False
    """Its runs write every judged signal; otherwise only what the training loop computes."""
    counts_tokens: bool = False
    """A sample has as many tokens as the config says; otherwise only the program knows."""
    shares_initial_weights: bool = False
    """All its runs start from one seed checkpoint; otherwise the program makes its initial weights
    from the seed.
    """
    techniques: bool = False
    """Sets may name techniques, schedules and injected code, which its rank code applies."""
    guided: bool = False
    """The rules of torchtitan's converging guide are about its parallelism and its loaders."""
    references: bool = False
    """It can train one step of a set in another precision."""
    rounds_otherwise: bool = False
    """It can round low-precision results in another way: ``rounding`` repeats."""
    frozen_steps: bool = False
    """It can run forward and backward passes at the initial weights before training."""
    kinds: frozenset[Kind] = frozenset({Kind.PARALLEL})
    """Kinds of sets that it can run."""
    faults: frozenset[FaultKind] = frozenset()
    """Faults that can be made in its runs."""
    under_torchrun: bool = True
    """torchrun starts its ranks: it can start them again in place, tells them of SIGTERM, and its
    agents stand for nodes."""
    replicas_leave: bool = False
    """When a node leaves, dp_replicate shrinks where nothing is sharded; False: only dp_shard."""
    continues: bool = False
    """A run of any kind continues from its own checkpoints, written as often as the file says."""
    checks_config: bool = False
    """It can check a config before anything starts."""
    dry_run: bool = False
    """It can build a rank of a set without the hardware."""
    warm_start: bool = False
    """Its ranks can be forked from a process that has already imported everything."""
    under_scheduler: bool = False
    """A scheduler can run it."""
    baselines: bool = False
    """Everything that determines its runs is known, so a control can be blessed."""
    repeatable_argv: bool = False
    """The argv of a run is enough to repeat it."""


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Keys of a trainer's own config that converge reads; an empty one: it has no such key."""

    async_checkpoints: str = ""
    """Whether checkpoints are written in the background: neither null nor ``disabled``."""
    collective_timeout: str = ""
    """Seconds that a collective may take before its rank ends with an error."""
    pipeline_microbatch_size: str = ""
    """Samples of a pipeline microbatch."""
    of_repeats: frozenset[str] = frozenset()
    """Keys that may differ between a run and its repeat."""
    max_norm: str = ""
    """The norm to which gradients are clipped."""
    gradients_in_float32: str = ""
    """Whether gradients of parameters in a coarser type are added up in float32."""
    warmup_steps: str = ""
    """Steps over which the learning rate rises at the start."""
    not_loaded: str = ""
    """A list of the parts of a checkpoint that a resume leaves out."""


@dataclass(frozen=True, slots=True)
class ResumeAdvice:
    """What a person has to look at in a trainer when a resume went wrong; clauses.

    The defaults hold for any program.
    """

    data: str = (
        "where the loader goes on after a load: its place in the epoch and the seed of the order "
        "have to follow from the checkpoint, and not from the start of the process or from the "
        "number of ranks"
    )
    """Other samples than those that were due."""
    chosen: str = (
        "which checkpoint the program loads: {resume_from}, or the newest in {checkpoint_dir}"
    )
    """Training went on from another checkpoint, or from none."""
    counted: str = "and the step that it counts on from"
    """More on ``chosen`` where the step is another."""
    nothing_whole: str = (
        "what the program starts from while no checkpoint is complete: the same initial weights, "
        "optimizer and samples as at its first start"
    )
    """A restart loaded something unknown while no checkpoint of the run was complete."""
    torn: str = (
        "how the program tells a complete checkpoint from one that was only half written: by a "
        "file that is written last, or by a name that it gets only when it is complete"
    )
    """A checkpoint was loaded that was only half written."""
    loaded: str = (
        "what the program writes into its checkpoint and loads of it, on every rank: the "
        "state_dict of the model, of every optimizer and of the schedule; and whatever sets "
        "parameters, optimizer state or lr after the load"
    )
    """State came back otherwise than it was saved."""
    saved: str = (
        "when the program saves ({checkpoint_every} and {stop_at} of its command), and whether it "
        "calls probe.saved(step) after that"
    )
    """A checkpoint is missing."""
    generators: str = (
        "what a checkpoint holds of random generators, on every rank: torch.get_rng_state(), "
        "torch.cuda.get_rng_state() and the states of generators of your own; whether they are "
        "restored after everything that draws or seeds at a start"
    )
    """Random numbers start over, or are others from a step on."""
    tokens: str = "whether the checkpoint holds the count of tokens of all ranks, or that of one"
    """Only the trainer's count of tokens was not restored."""


class Audit(Protocol):
    """Whether what a set names is what ran, and nothing else: a trainer's answer. Pure.

    It is asked of each pass of a run, with what the set names for that pass.
    """

    def not_in_force(self, spec: SetSpec, ran: InForce) -> Iterable[str]:
        """One clause per setting that the set names and that was not in force."""

    def not_named(self, spec: SetSpec, ran: InForce) -> Iterable[str]:
        """One clause per technique that ran and that neither the set nor its config names."""


# Keys that mean the same in the train configs of all trainers.
TRAINING_STEPS = "training.steps"
"""Steps of the whole run."""
LOCAL_BATCH = "training.local_batch_size"
"""Samples per rank and microbatch."""
GLOBAL_BATCH = "training.global_batch_size"
"""Samples per step, over all ranks; -1: no accumulation."""
SEQ_LEN = "training.seq_len"
"""Tokens of a sample."""
DATA_TYPE_KEYS = ("training.dtype", "training.mixed_precision_param")
"""The data type of parameters, and the one that they are cast to for computing."""
PLAIN_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {SEQ_LEN: 1, **dict.fromkeys(DATA_TYPE_KEYS, "float32")}
)
"""Defaults for trainers that have none of their own; samples need not be sequences."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The trainer of a set."""

    kind: str
    """By which ``converge_harness.trainers`` finds it again."""
    can: Capabilities = field(default_factory=Capabilities)
    settings: Any = None
    """The part of ``[trainer]`` that only it understands: a frozen value of its own type."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: PLAIN_DEFAULTS)
    """Defaults of keys that its train configs may leave out."""
    keys: ConfigKeys = field(default_factory=ConfigKeys)
    audit: Audit | None = None
    """None: runs that record what was in force are INVALID, because nothing compares it."""
    advice: ResumeAdvice = field(default_factory=ResumeAdvice)
