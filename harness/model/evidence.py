"""All that one run left, as arrays: a curve may have a million steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from converge_harness.model.experiment import Precision
from converge_harness.model.kinds import RestartOwner
from converge_harness.model.runs import RankError, RunStatus

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One number per step, or none: NaN is a value that a run left, a hole is none."""

    values: Floats
    """Shape (steps,); NaN in the holes."""
    present: Flags
    """Shape (steps,); False where the run left no value."""

    @classmethod
    def of(cls, values: Iterable[float | None] | Floats | Column) -> Column:
        """A column of numbers, None for a hole; an array has no holes."""
        if isinstance(values, Column):
            return values
        if isinstance(values, np.ndarray):
            return cls(values.astype(np.float64, copy=False), np.ones(values.size, dtype=np.bool_))
        listed = list(values)
        present = np.fromiter((value is not None for value in listed), np.bool_, len(listed))
        return cls(np.array(listed, dtype=np.float64), present)  # numpy makes None a NaN

    def __len__(self) -> int:
        return int(self.values.size)

    def __iter__(self) -> Iterator[float | None]:
        pairs = zip(self.values.tolist(), self.present.tolist(), strict=True)
        return (value if there else None for value, there in pairs)

    @overload
    def __getitem__(self, index: int) -> float | None: ...

    @overload
    def __getitem__(self, index: slice) -> Column: ...

    def __getitem__(self, index: int | slice) -> float | Column | None:
        if isinstance(index, slice):
            return Column(self.values[index], self.present[index])
        return float(self.values[index]) if self.present[index] else None

    def __eq__(self, other: object) -> bool:
        """Whether another column or sequence holds the same values and holes (NaN is not NaN)."""
        if not isinstance(other, Column | Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """Measurements of one kind of tensor (gradients, say), a row per parameter."""

    sketch: Floats
    """Shape (parameters, k): signed projections of the whole tensor, in float64."""
    norm: Floats
    """Shape (parameters,): Euclidean norm of the whole tensor, in float64."""
    zeros: Integers
    """Shape (parameters,): entries that are exactly zero."""
    not_finite: Integers
    """Shape (parameters,): entries that are NaN or infinite."""


@dataclass(frozen=True, slots=True, eq=False)
class PostStepState:
    """What a step left behind its gradients, a row per parameter."""

    clipped_norm: Floats
    """Shape (parameters,): norm of the gradient at the end of the step, clipped; NaN when it was
    gone by then."""
    states: tuple[str, ...]
    """Names of the optimizer's states that have a parameter's shape, as ``exp_avg``, sorted."""
    state_norm: Floats
    """Shape (parameters, states): NaN where the optimizer keeps no such state."""
    state_steps: Floats
    """Shape (parameters,): updates that the optimizer has counted; NaN where it counts none."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferRows:
    """Buffers of the whole model at the end of a step, a row per buffer."""

    names: tuple[str, ...]
    """Canonical names, sorted."""
    sizes: Integers
    """Shape (buffers,): entries; a complex one counts twice."""
    norm: Floats
    """Shape (buffers,): NaN where it could not be told."""
    sketch: Floats
    """Shape (buffers, k)."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSample:
    """Per-tensor evidence of one step. Two runs' samples share names, not necessarily order."""

    step: int
    """0 is before the first step: initial parameters, no gradients."""
    names: tuple[str, ...]
    """Canonical names of all trainable parameters, sorted."""
    sizes: Integers
    """Shape (parameters,): entries of each whole tensor."""
    parameters: TensorRows
    """After the update of the step."""
    gradients: TensorRows | None = None
    """Before clipping; a parameter without gradient has zeros all over. None at step 0."""
    post_step: PostStepState | None = None
    """None at step 0, and in runs that are older than this evidence."""
    buffers: BufferRows | None = None
    """The same."""


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSamples:
    """What forward and backward passes at the initial weights left, before training."""

    names: tuple[str, ...]
    """Canonical names of all trainable parameters, sorted."""
    sizes: Integers
    """Shape (parameters,): entries of each whole tensor."""
    sketch: Floats
    """Shape (batches, parameters, k): of the gradients; NaN where one could not be counted."""
    norm: Floats
    """Shape (batches, parameters): their norms."""
    loss: Floats
    """Shape (batches,): recomputed in float64; NaN where it could not be told."""
    batch_digests: tuple[str, ...]
    """Of the samples of each batch."""
    problems: tuple[str, ...] = ()
    """What the probe could not measure, in sentences."""
    again: Floats | None = None
    """Shape (parameters, k): sketches of a second pass over the first batch, with the random
    numbers that come next. Only a run that draws some differs from its first pass there. None in
    runs of before it was made."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that hold the same shard of a tensor and not the same bits."""

    kind: str
    """``parameter``, ``gradient``, ``optimizer state`` or ``buffer``."""
    tensor: str
    """Canonical name."""
    mesh_dims: tuple[str, ...]
    """Mesh dimensions along which the copies differ, as ``tp``; empty when unknown."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks that agree with each other, of the first shard that differs; largest group first."""


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """Whether the copies of the tensors agreed at one step."""

    step: int
    compared: Mapping[str, int]
    """Kind of tensor to how many shards with more than one copy were compared."""
    disagreements: tuple[Disagreement, ...] = ()
    """The first 20 of each kind, in the order of kind and name."""
    count: int = 0
    """How many tensors disagree in all."""


@dataclass(frozen=True, slots=True, eq=False)
class StateSample:
    """All that a checkpoint holds, as it was saved or right after it was loaded."""

    step: int
    """Of the checkpoint."""
    names: tuple[str, ...]
    """Canonical names of all trainable parameters, sorted."""
    sizes: Integers
    """Shape (parameters,): entries of each whole tensor."""
    parameters: TensorRows
    states: tuple[str, ...]
    """Names of the optimizer's states that have a parameter's shape, sorted."""
    state_norm: Floats
    """Shape (parameters, states): NaN where the optimizer keeps no such state."""
    state_sketch: Floats
    """Shape (parameters, states, k)."""
    state_steps: Floats
    """Shape (parameters,): updates that the optimizer has counted; NaN where it counts none."""
    lr: float
    """The rate that the next optimizer step will use."""
    trainer_step: int
    """The trainer's own counter of steps."""
    tokens_seen: int | None
    """The trainer's own counter of tokens, over all ranks; None when it keeps none."""
    samples_consumed: int | None
    """Samples that all ranks have been given; None when the loader does not tell."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One life of a run's ranks: from a start or resume to its end, wanted or not."""

    number: int
    """From 1, in the order of the starts."""
    segment: int | None
    """Index into the segments of an elastic set; None for other sets."""
    world_size: int
    loaded_step: int | None
    """Step of the checkpoint that it started from; 0: the seed checkpoint; None: it died before it
    had loaded any, or (if ``started`` is known) started from something else."""
    started: float | None
    """When its ranks had loaded; seconds since 1970, None when unknown."""
    steps: Integers
    """Shape (steps,): those whose evidence it left."""
    signals: Mapping[str, Column]
    """As in ``Evidence``; ``at`` is when each step ended, in seconds since 1970."""
    batch_digests: tuple[str | None, ...]
    ended: bool
    """Whether it came to the end that it was meant to have; False: it died."""
    in_force: Mapping[str, Any] | None = None
    loaded: StateSample | None = None
    """Right after the load; None for a start from the seed checkpoint."""
    saved: tuple[StateSample, ...] = ()
    """At every checkpoint that it wrote, in order."""
    whole: tuple[int, ...] = ()
    """Steps of the checkpoints whose save had returned, in order."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that really happened."""

    index: int
    """Into the script."""
    kind: str
    step: int
    at: float
    """Seconds since 1970."""
    number: int | None = None
    """Pass that it struck; None when unknown."""
    torn: bool = False
    """Whether it left a torn checkpoint at its step."""
    rank: int | None = None
    """That it struck; None when unknown, or of no single one."""
    node: int | None = None
    """The same."""


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All that one run left, from wherever it came.

    May be made with plain sequences: they become arrays. Every signal has one entry per step.
    """

    name: str
    source: str
    """Where it was read from, for messages."""
    steps: Integers
    """Shape (steps,)."""
    signals: Mapping[str, Column]
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
    """Signal name to half a unit of its last printed place: logs round, and that is no difference
    between runs."""
    significant: Mapping[str, int] = field(default_factory=dict)
    """Signal name to the significant digits that it is printed with, where nothing says that the
    places are fixed: then large values are printed more coarsely than ``rounding``."""
    samples: tuple[TensorSample, ...] = ()
    """Per-tensor evidence, in the order of the steps; empty when the source has none."""
    sample_steps: tuple[int, ...] | None = None
    """Steps at which the run was told to leave samples; None when nothing told it."""
    replicas: tuple[ReplicaSample, ...] = ()
    """Agreement of replicas, in the order of the steps."""
    frozen: FrozenSamples | None = None
    """Of the frozen steps before training; None without any."""
    frozen_steps: int = 0
    """How many frozen steps the run was told to make."""
    problems: tuple[str, ...] = ()
    """What the probe could not measure, in sentences, the step in each."""
    contradictions: tuple[str, ...] = ()
    """What the source says of its own steps that its values do not hold, in clauses."""
    replayed: tuple[int, ...] = ()
    """Steps that the source has more than once (a restart replays): the last values are kept."""
    replay_conflicts: tuple[str, ...] = ()
    """Replayed steps whose values differ, in clauses: ``step 12: loss 5.1, then 5.2``."""
    identity: str | None = None
    """Identity of the job, for runs of ours."""
    repeat: str | None = None
    """Kind of A/A repeat that the run is; None for other runs, and where nothing says so."""
    passes: tuple[Pass, ...] = ()
    """Of a run that was resumed on purpose, each by itself; everything above is then the one curve
    that they make: of a replayed step, what its last pass left. Empty for other runs."""
    struck: tuple[Struck, ...] = ()
    """Faults that happened, in the order of the script."""
    restarts: RestartOwner | None = None
    """Who starts a run again that was interrupted; None where nobody does, and where nothing says
    so."""

    @property
    def requeued(self) -> bool:
        """Whether it came in several passes because a scheduler interrupted it."""
        return self.restarts is RestartOwner.CLUSTER and len(self.passes) > 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", np.asarray(self.steps, dtype=np.int64))
        columns = {name: Column.of(values) for name, values in self.signals.items()}
        object.__setattr__(self, "signals", columns)


@dataclass(frozen=True, slots=True, eq=False)
class SeedRuns:
    """What control and test set left when each was trained with several seeds."""

    control: tuple[Evidence, ...]
    """One per seed; the first is the control that every other check looks at."""
    test: tuple[Evidence, ...]
    """As many or another number, of the same seeds or others."""
    paired: bool = False
    """Whether the runs at one place of both sides have one seed: initial weights and samples."""
