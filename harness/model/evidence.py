"""All evidence of one run, as arrays: a curve may have a million steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from converge_harness.model.experiment import Precision
from converge_harness.model.in_force import InForce
from converge_harness.model.kinds import RestartOwner
from converge_harness.model.runs import RankError, RunStatus
from converge_harness.model.trainer import ConfigKeys

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A number or a gap per step: NaN is a value that the run reported, a gap is no value."""

    values: Floats
    """Shape (steps,); NaN in the gaps."""
    present: Flags
    """Shape (steps,); False where the run reported no value."""

    @classmethod
    def of(cls, values: Iterable[float | None] | Floats | Column) -> Column:
        """A column from numbers, None for a gap; an array has no gaps."""
        if isinstance(values, Column):
            return values
        if isinstance(values, np.ndarray):
            return cls(values.astype(np.float64, copy=False), np.ones(values.size, dtype=np.bool_))
        listed = list(values)
        present = np.fromiter((value is not None for value in listed), np.bool_, len(listed))
        return cls(np.array(listed, dtype=np.float64), present)  # numpy converts None to NaN

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
        """Whether another column or sequence has the same values and gaps (NaN != NaN)."""
        if not isinstance(other, Column | Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """Measurements of one kind of tensor (such as gradients), a row per parameter."""

    sketch: Floats
    """Shape (parameters, projections): signed projections of the whole tensor, in float64."""
    norm: Floats
    """Shape (parameters,): Euclidean norm of the whole tensor, in float64."""
    zeros: Integers
    """Shape (parameters,): number of entries that are exactly zero."""
    not_finite: Integers
    """Shape (parameters,): number of entries that are NaN or infinite."""


@dataclass(frozen=True, slots=True, eq=False)
class PostStepState:
    """State after a step: clipped gradients and the optimizer's state, a row per parameter."""

    clipped_norm: Floats
    """Shape (parameters,): norm of the clipped gradient at the end of the step; NaN if it was
    already freed.
    """
    states: tuple[str, ...]
    """Names of the optimizer's states that have a parameter's shape, as ``exp_avg``, sorted."""
    state_norm: Floats
    """Shape (parameters, states): NaN where the optimizer keeps no such state."""
    state_steps: Floats
    """Shape (parameters,): the optimizer's count of updates; NaN if it does not count."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferRows:
    """Buffers of the whole model at the end of a step, a row per buffer."""

    names: tuple[str, ...]
    """Canonical names, sorted."""
    sizes: Integers
    """Shape (buffers,): entries; a complex one counts twice."""
    norm: Floats
    """Shape (buffers,): NaN if it could not be measured."""
    sketch: Floats
    """Shape (buffers, projections)."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSample:
    """Per-tensor evidence of one step. Two runs' samples may list names in another order."""

    step: int
    """0 is before the first step: initial parameters, no gradients."""
    names: tuple[str, ...]
    """Canonical names of all trainable parameters, sorted."""
    sizes: Integers
    """Shape (parameters,): number of entries of each whole tensor."""
    parameters: TensorRows
    """After the update of the step."""
    gradients: TensorRows | None = None
    """Before clipping; all zeros for a parameter without a gradient. None at step 0."""
    post_step: PostStepState | None = None
    """None at step 0, and in runs from before this evidence existed."""
    buffers: BufferRows | None = None
    """The same."""


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSamples:
    """Results of forward and backward passes at the initial weights, before training."""

    names: tuple[str, ...]
    """Canonical names of all trainable parameters, sorted."""
    sizes: Integers
    """Shape (parameters,): number of entries of each whole tensor."""
    sketch: Floats
    """Shape (batches, parameters, projections): of the gradients; NaN if one could not be
    measured."""
    norm: Floats
    """Shape (batches, parameters): their norms."""
    loss: Floats
    """Shape (batches,): recomputed in float64; NaN if it could not be."""
    batch_digests: tuple[str, ...]
    """Of the samples of each batch."""
    problems: tuple[str, ...] = ()
    """Sentences on what the probe could not measure."""
    again: Floats | None = None
    """Shape (parameters, projections): sketches of a second pass over the first batch, with the
    next random numbers. It differs from the first pass only in a run that draws random numbers.
    None in older runs, which did not make it.
    """


class ModuleTensor(NamedTuple):
    """A tensor that a module gets or gives, or its gradient."""

    module: str
    """Canonical name."""
    tensor: str
    """``in.0``, ``in.mask``, ``out.0``."""
    backward: bool
    """Whether it is the gradient."""

    @property
    def is_input(self) -> bool:
        return self.tensor.startswith("in.")


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Inputs and outputs of a model's modules in the first batches, summed over all ranks.

    A row per tensor; ``forward`` is of the tensors themselves, ``backward`` of their gradients.
    Columns: number of entries (of every rank that holds a part or a copy), sum of their squares,
    number of entries of tokens in one half of the vocabulary (0: unknown which those are), then
    SIGNS signed sums of entries, of entries of that half, and of squares: each with the last
    dimension as if each rank held its first entries, and again as if tensor-parallel ranks held
    its parts in order.
    """

    modules: tuple[str, ...]
    """Shape (rows,): canonical names, in the order of their calls."""
    tensors: tuple[str, ...]
    """Shape (rows,): ``in.0``, ``in.mask``, ``out.0``."""
    widths: Integers
    """Shape (rows,): entries of the last dimension, the most that any rank holds."""
    same_as: Integers
    """Shape (rows,): the first row of the same tensor, which alone has its gradient."""
    forward: Floats
    """Shape (batches, rows, 3 + 6 SIGNS)."""
    backward: Floats
    """The same; zeros where there is no gradient."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks whose copies of a shard of a tensor differ in some bits."""

    kind: str
    """``parameter``, ``gradient``, ``optimizer state`` or ``buffer``."""
    tensor: str
    """Canonical name."""
    mesh_dims: tuple[str, ...]
    """Mesh dimensions along which the copies differ, such as ``tp``; empty if unknown."""
    groups: tuple[tuple[int, ...], ...]
    """For the first shard that differs: groups of ranks that agree, largest group first."""


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """Whether the copies of the tensors agreed at one step."""

    step: int
    compared: Mapping[str, int]
    """Number of compared shards (those with more than one copy), by kind of tensor."""
    disagreements: tuple[Disagreement, ...] = ()
    """The first 20 of each kind, in the order of kind and name."""
    count: int = 0
    """How many tensors disagree in total."""


@dataclass(frozen=True, slots=True)
class DropoutMasks:
    """What dropout kept at one step, in the order of the ranks."""

    step: int
    units: tuple[int, ...]
    """Of all masks; 0 on a rank without any."""
    kept: tuple[int, ...]
    """Those of them that were not dropped."""
    sums: tuple[str, ...]
    """Equal for ranks that keep the same units; empty on a rank without any."""
    shared: bool | None
    """Whether ranks that train on other samples keep the same units; None if fewer than two
    data-parallel coordinates have masks."""


@dataclass(frozen=True, slots=True)
class ObjectiveTerm:
    """One term of an objective: sums over the tokens that weigh something."""

    total: float
    squares: float
    mixed: float
    """Of its values, each times a factor of its token: differs if other tokens have them."""
    trains: bool
    """Whether it depends on parameters."""


@dataclass(frozen=True, slots=True)
class ObjectiveTerms:
    """What the objective of a step is made of, as the program shows it."""

    step: int
    tokens: int
    """Those that weigh something in the loss."""
    targets: int
    """Those that have a label."""
    samples: int
    microbatches: int
    """Of the rank that has most."""
    weight: float
    """Sum of all weights, over the data-parallel degree: 1 for a mean."""
    uneven: Mapping[str, float]
    """By part of the step (``step``, ``rank``, ``microbatch``, ``sample``, the largest first), how
    far apart weights are in the worst one, as a share of the largest."""
    terms: Mapping[str, ObjectiveTerm]
    """By the program's names, in its order."""


@dataclass(frozen=True, slots=True, eq=False)
class StateSample:
    """Content of a checkpoint, as it was saved or right after it was loaded."""

    step: int
    """Of the checkpoint."""
    names: tuple[str, ...]
    """Canonical names of all trainable parameters, sorted."""
    sizes: Integers
    """Shape (parameters,): number of entries of each whole tensor."""
    parameters: TensorRows
    states: tuple[str, ...]
    """Names of the optimizer's states that have a parameter's shape, sorted."""
    state_norm: Floats
    """Shape (parameters, states): NaN where the optimizer keeps no such state."""
    state_sketch: Floats
    """Shape (parameters, states, projections)."""
    state_steps: Floats
    """Shape (parameters,): the optimizer's count of updates; NaN if it does not count."""
    lr: float
    """The learning rate of the next optimizer step."""
    trainer_step: int
    """The trainer's own counter of steps."""
    tokens_seen: int | None
    """The trainer's own counter of tokens, over all ranks; None if it has none."""
    samples_consumed: int | None
    """Samples that the ranks have received in total; None if the loader does not say."""
    buffers: BufferRows | None = None
    """Buffers that a checkpoint of the model has; None if not recorded."""
    schedule_steps: int | None = None
    """Steps of the schedule of the learning rate; None if it is not seen or not recorded."""
    random_states: tuple[str, ...] = ()
    """By rank, a digest of the states of its random generators; empty if not recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One execution of a run's ranks: from a start or resume to its end, planned or not."""

    number: int
    """From 1, in the order of the starts."""
    segment: int | None
    """Index into the segments of an elastic set; None for other sets."""
    world_size: int
    loaded_step: int | None
    """Step of the checkpoint from which it started; 0: the seed checkpoint; None: it died before it
    had loaded one, or (if ``started`` is known) it started from something else.
    """
    started: float | None
    """When its ranks had loaded; seconds since 1970, None if unknown."""
    steps: Integers
    """Shape (steps,): steps with evidence."""
    signals: Mapping[str, Column]
    """As in ``Evidence``; ``at`` is when each step ended, in seconds since 1970."""
    batch_digests: tuple[str | None, ...]
    ended: bool
    """Whether it reached its planned end; False: it died."""
    in_force: InForce | None = None
    loaded: StateSample | None = None
    """State right after the load; None for a start from the seed checkpoint."""
    saved: tuple[StateSample, ...] = ()
    """State at every checkpoint that it wrote, in order."""
    whole: tuple[int, ...] = ()
    """Steps of the checkpoints whose save had returned, in order."""
    random_states: tuple[str | None, ...] = ()
    """As in ``Evidence``."""
    by_curve: bool = False
    """Whether it is known by the program's own curve alone: then ``loaded_step`` is the step before
    the first of it, and nothing shows what was saved and loaded."""
    first_row_at: float | None = None
    """Of a pass that is known by its curve: when converge saw the first step of it, soon after that
    had ended; seconds since 1970, None if unknown."""

    def up_to(self, step: int) -> Pass:
        """This pass as if the run had ended with ``step``."""
        count = int(np.count_nonzero(self.steps <= step))
        return replace(
            self,
            steps=self.steps[:count],
            signals={name: column[:count] for name, column in self.signals.items()},
            batch_digests=self.batch_digests[:count],
            random_states=self.random_states[:count],
            ended=self.ended or step in self.steps,
            saved=tuple(each for each in self.saved if each.step <= step),
            whole=tuple(each for each in self.whole if each <= step),
        )


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that actually happened."""

    index: int
    """Index into the script of faults."""
    kind: str
    step: int
    at: float
    """Seconds since 1970."""
    number: int | None = None
    """Pass in which it happened; None if unknown."""
    torn: bool = False
    """Whether it left an incomplete checkpoint at its step."""
    rank: int | None = None
    """Rank that it hit; None if unknown, or if not a single one."""
    node: int | None = None
    """The same."""
    curve_step: int | None = None
    """The newest step in the program's curve when converge struck it by that curve: ``step``, or a
    later one. None: it struck in its step."""


class ReplayConflict(NamedTuple):
    """A replayed step whose values differ."""

    step: int
    values: str
    """``loss 5.1, then 5.2``"""
    within: int | None = None
    """Number of the pass that has the step twice; None: of the whole run."""

    def __str__(self) -> str:
        twice = "" if self.within is None else f" twice in pass {self.within}"
        return f"step {self.step}{twice}: {self.values}"


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All evidence of one run, from any source.

    Plain sequences passed to it become arrays. Every signal has one entry per step.
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
    """A 16-digit hex digest of the global batch per step; empty if the source has none."""
    batch_agrees: tuple[bool | None, ...] = ()
    """Whether all ranks of a data-parallel coordinate saw the same samples."""
    random_states: tuple[str | None, ...] = ()
    """Per step a 16-digit hex digest of the states that torch's generators had before it, of those
    that the ranks drew from; "" for a step that drew nothing, None for one of which that is not
    recorded. Empty if the source has none."""
    global_random_states: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """The same of the global generators of Python's ``random`` ("python") and of ``numpy.random``
    ("numpy"), each alone; without those that the source does not have."""
    random_shared: tuple[bool | None, ...] = ()
    """Whether ranks that train on other samples drew the same numbers; None where fewer than two
    data-parallel coordinates drew, or where it is not recorded."""
    masks: tuple[DropoutMasks, ...] = ()
    """Of the sampled steps in which dropout was seen, in order."""
    terms: tuple[ObjectiveTerms, ...] = ()
    """Of the sampled steps in which the program showed them, in order."""
    in_force: InForce | None = None
    """None if the source does not tell (an integrity check says so)."""
    complete: bool = True
    """False if the run ended before its last step."""
    expected_steps: int | None = None
    logged_every: int = 1
    """A program's own curve may have one step in so many, from the first or so on, to the end."""
    mean_over: int = 1
    """The loss at a step is the mean over this many steps up to it; 0: over all steps since the row
    before. 1 also if nothing says so. Other signals are the step's own."""
    settled_of: int | None = None
    """Planned steps of a run that ended after its last step here because its equivalence was
    settled, or because every set that reads it had been stopped; None for other runs."""
    error: RankError | None = None
    status: RunStatus = RunStatus.FINISHED
    says_why: str | None = None
    """Name of the file in ``source`` that says most about how a scheduler ended the run; None for
    other runs, whose ranks' logs say more."""
    wall_s: float | None = None
    precision: Precision = Precision.FP32
    grads_missing: tuple[str, ...] = ()
    """Parameters without a gradient at some step (``signals["grads_missing"]`` counts them)."""
    grads_missing_at: frozenset[tuple[int, str]] = frozenset()
    """The same, each with its step; empty if the source does not say it."""
    unread: tuple[str, ...] = ()
    """Signals that the source has and the user asked to leave out."""
    overlooked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By signal, names in the source that may mean it by their words, and that were not read."""
    counted_from_1: bool = False
    """Its source counts steps from 0, and 1 was added to every step, as the user asked."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """By signal, half a unit in the last printed place: rounding in a log is not a difference
    between runs.
    """
    significant: Mapping[str, int] = field(default_factory=dict)
    """By signal, the number of significant digits printed, unless the number of decimal places is
    known to be fixed: then large values are rounded more coarsely than ``rounding``.
    """
    samples: tuple[TensorSample, ...] = ()
    """Per-tensor evidence, in the order of the steps; empty if the source has none."""
    sample_steps: tuple[int, ...] | None = None
    """Steps at which the run had to take samples; None if that is not recorded."""
    replicas: tuple[ReplicaSample, ...] = ()
    """Agreement of replicas, in the order of the steps."""
    frozen: FrozenSamples | None = None
    """Of the frozen steps before training; None if there were none."""
    activations: Activations | None = None
    """Of the first frozen steps, else of step 1; None if the source has none."""
    frozen_steps: int = 0
    """How many frozen steps the run had to make."""
    problems: tuple[str, ...] = ()
    """Sentences on what the probe could not measure, each with its step."""
    uncounted: frozenset[tuple[int, str]] = frozenset()
    """Step and parameter of each gradient whose entries the probe could not count."""
    contradictions: tuple[str, ...] = ()
    """Clauses on claims of the source about its steps that its values contradict."""
    replayed: tuple[int, ...] = ()
    """Steps that the source has more than once (replayed after a restart): the last values
    count.
    """
    replay_conflicts: tuple[ReplayConflict, ...] = ()
    """Replayed steps whose values differ, in order."""
    identity: str | None = None
    """Identity of the job, for runs by converge."""
    repeat: str | None = None
    """Kind of A/A repeat; None for other runs, and if unknown."""
    keys: ConfigKeys = field(default_factory=ConfigKeys)
    """Of its trainer's config."""
    passes: tuple[Pass, ...] = ()
    """The passes of a resumed run. Everything above is then their combined curve, in which the last
    pass counts for a replayed step. Empty for other runs.
    """
    struck: tuple[Struck, ...] = ()
    """Faults that happened, in script order."""
    restarts: RestartOwner | None = None
    """What restarts an interrupted run; None if nothing does, or if unknown."""

    @property
    def may_continue(self) -> bool:
        """Whether interruptions that nobody planned are why it has passes, if it has several."""
        return self.restarts is not None and not self.restarts.follows_script

    @property
    def interrupted(self) -> bool:
        """Whether it was interrupted, by no script, and continued."""
        return self.may_continue and len(self.passes) > 1

    @property
    def by_curves(self) -> bool:
        """Whether its passes are known by the program's own curves alone."""
        return any(each.by_curve for each in self.passes)

    def without(self, signals: Collection[str]) -> Evidence:
        """This run without some of its signals, which it then names as ``unread``."""
        return replace(
            self,
            signals={name: each for name, each in self.signals.items() if name not in signals},
            unread=tuple(name for name in self.signals if name in signals),
            overlooked={
                name: each for name, each in self.overlooked.items() if name not in signals
            },
        )

    def counting_from_1(self) -> Evidence:
        """This curve with 1 added to every step, if its steps begin at 0."""
        if not self.steps.size or self.steps[0] != 0:
            return self
        return replace(
            self,
            steps=self.steps + 1,
            replayed=tuple(step + 1 for step in self.replayed),
            replay_conflicts=tuple(
                each._replace(step=each.step + 1) for each in self.replay_conflicts
            ),
            counted_from_1=True,
        )

    def up_to(self, step: int) -> Evidence:
        """This run as if ``step`` had been its last.

        Passes that began later are left out. Raises ValueError for an elastic or fault run, and for
        steps out of order.
        """
        if (self.passes and not self.may_continue) or np.any(np.diff(self.steps) <= 0):
            raise ValueError(f"{self.name} is judged by its resumes, or has steps out of order")
        count = int(np.count_nonzero(self.steps <= step))
        return replace(
            self,
            steps=self.steps[:count],
            signals={name: column[:count] for name, column in self.signals.items()},
            batch_digests=self.batch_digests[:count],
            batch_agrees=self.batch_agrees[:count],
            random_states=self.random_states[:count],
            global_random_states={
                name: states[:count] for name, states in self.global_random_states.items()
            },
            random_shared=self.random_shared[:count],
            masks=tuple(each for each in self.masks if each.step <= step),
            terms=tuple(each for each in self.terms if each.step <= step),
            samples=tuple(each for each in self.samples if each.step <= step),
            replicas=tuple(each for each in self.replicas if each.step <= step),
            replayed=tuple(each for each in self.replayed if each <= step),
            passes=tuple(
                each.up_to(step)
                for each in self.passes
                if each.loaded_step is None or each.loaded_step < step
            ),
            expected_steps=None if self.expected_steps is None else step,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", np.asarray(self.steps, dtype=np.int64))
        columns = {name: Column.of(values) for name, values in self.signals.items()}
        object.__setattr__(self, "signals", columns)


@dataclass(frozen=True, slots=True, eq=False)
class SeedRuns:
    """Evidence of control and test set if each was trained with several seeds."""

    control: tuple[Evidence, ...]
    """One per seed; the first is the control of all other checks."""
    test: tuple[Evidence, ...]
    """One per seed; their number and seeds may differ from the control's."""
    paired: bool = False
    """Whether runs at the same index have the same seed: initial weights and samples."""


@dataclass(frozen=True, slots=True)
class Rcp:
    """A reference convergence point: how long MLPerf's reference trains, by one batch size."""

    name: str
    benchmark: str
    batch_size: int
    """Global, in samples."""
    lengths: tuple[float, ...]
    """Samples (in some benchmarks epochs) until each run reached its target, in any order."""


@dataclass(frozen=True, slots=True)
class Convergence:
    """When one run of a submission reached its target."""

    name: str
    source: str
    benchmark: str
    batch_size: int
    """Global, in samples."""
    length: float
    """Samples or epochs, as in the reference; infinity for a run that never reached it."""
