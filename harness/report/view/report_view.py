"""The input of every renderer: one frozen value with all that a report shows.

Every text in it is plain (one line, no control characters; blocks keep their lines), so a renderer
only escapes for its own format. :mod:`converge_harness.report.view.build` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from converge_harness.judge import INTERRUPTED, Comparisons, LossOnlyGate
from converge_harness.model import (
    Ask,
    Check,
    Judgement,
    Kind,
    Outcome,
    RankError,
    Role,
    Tier,
    Verdict,
)
from converge_harness.report.view.against import Against
from converge_harness.report.view.curves import Comparison, Curve
from converge_harness.report.view.gradient_map import GradientMap
from converge_harness.report.view.module_tree import ModuleTree
from converge_harness.report.view.resumed_run import PassesView
from converge_harness.report.view.tensor_tables import ReplicaView, TensorTable
from converge_harness.report.view.tolerances import CalibrationView
from converge_harness.wording import counted

SEVERITY = tuple(reversed(Judgement))
"""Verdicts, failures first."""

SIGNAL_TITLES = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "loss_recomputed": "loss, recomputed in float64",
    "grad_norm_recomputed": "grad norm, recomputed in float64",
}


@dataclass(frozen=True, slots=True)
class Named:
    """A technique or degree as the test set names it, and what really ran."""

    what: str
    named: str
    in_force: str


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One key of the trainer's whole configuration that differs from the control's."""

    key: str
    control: str
    test: str
    declared: bool
    """True when the test set's own degrees, techniques or overrides set it."""


@dataclass(frozen=True, slots=True)
class RunView:
    """One run: a control, a repeat of it, or a test set."""

    name: str
    anchor: str
    """Fragment identifier of its section."""
    source: str = ""
    degrees: str = ""
    """Parallelism for people to read, with the events of a run in several passes; empty for
    imported curves, as all fields below."""
    world_size: int | None = None
    techniques: tuple[str, ...] = ()
    """Techniques, pipeline schedule, CP rotation and what is injected."""
    own_techniques: Mapping[str, str] = field(default_factory=dict)
    """By name, what each of the experiment file's own techniques is, as a sentence."""
    inject: str = ""
    """``file.py:function`` that is injected; empty if none is."""
    toolchain: str = ""
    deterministic: bool | None = None
    """Whether torch was held to deterministic algorithms; None where nothing says so."""
    note: str = ""
    repeat: str = ""
    """How an A/A repeat differs from its control; empty for other runs."""
    tokens_per_step: int | None = None
    wall_s: float | None = None
    reused: bool = False
    command: str = ""
    """The exact command, quoted for a shell; of a run in several passes, that of ``converge``."""
    requeues: int = 0
    """How often it was interrupted and started again, as far as its passes show."""
    error: RankError | None = None
    signals: Mapping[str, Curve] = field(default_factory=dict)

    @property
    def rank_seconds(self) -> float | None:
        """Cost of the run: wall time times ranks; None when not known."""
        if self.wall_s is None or self.world_size is None:
            return None
        return self.wall_s * self.world_size

    @property
    def own_sentences(self) -> tuple[str, ...]:
        """``fused_norm: RMSNorm by our kernel``, for each technique of the experiment file."""
        return tuple(f"{name}: {what}" for name, what in self.own_techniques.items())

    @property
    def requeue_sentence(self) -> str:
        """One sentence on its interruptions; empty when there were none."""
        times = "once" if self.requeues == 1 else f"{self.requeues} times"
        return f"It was {INTERRUPTED} {times}." if self.requeues else ""

    def signal(self, name: str) -> Curve:
        """The run's curve, empty when it has none."""
        return self.signals.get(name, Curve())


@dataclass(frozen=True, slots=True)
class TestView:
    """A test set: its run, its verdict, and how it compares with its control."""

    __test__ = False  # pytest would collect it because of its name

    run: RunView
    verdict: Verdict
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    loss_only: LossOnlyGate | None = None
    in_force: tuple[Named, ...] = ()
    config: tuple[ConfigChange, ...] = ()
    compared: Comparisons = ()
    """Differences of all parameters; ``tensors`` and ``gradients`` are excerpts."""
    tensors: TensorTable | None = None
    gradients: GradientMap | None = None
    modules: ModuleTree | None = None
    """None if modules were not recorded."""
    replicas: ReplicaView | None = None
    would_change: tuple[str, ...] = ()
    """Sentences on what would change the verdict."""
    challenged: bool = False
    """True for a control that is judged against an anchor."""
    kind: Kind = Kind.PARALLEL
    resumed: PassesView | None = None
    """None for a run that was made in one pass."""

    @property
    def configured(self) -> str:
        """Column title of the test set's configuration."""
        return "Test, first pass" if self.resumed else "Test"

    @property
    def asked(self) -> tuple[Check, ...]:
        """The checks that this set's kind asks for, in their order.

        A check of resumes is skipped only where it does not apply: no faults are named, no step was
        replayed. Where its evidence is missing it is INVALID.
        """
        return tuple(
            check
            for check in self.verdict.checks
            if check.tier is not Tier.RESUME or check.outcome is not Outcome.SKIPPED
        )

    def comparison(self, signal: str) -> Comparison:
        """The comparison of a signal, empty when a side lacks it."""
        return self.comparisons.get(signal, Comparison())


@dataclass(frozen=True, slots=True)
class RepeatView:
    """An A/A repeat: it shows how much two runs of the same set-up differ."""

    run: RunView
    control: str
    comparisons: Mapping[str, Comparison]


@dataclass(frozen=True, slots=True)
class BesideView:
    """A run without a verdict of its own that others are judged with."""

    run: RunView
    role: str
    """As in a plan: ``reference``, ``matched control``, ``other seed``."""
    of: str = ""
    """Name of the control or test set that is trained by another seed here; empty for the rest."""

    @property
    def what(self) -> str:
        """``reference``, ``other seed of fsdp2``."""
        return f"{self.role} of {self.of}" if self.of else self.role


@dataclass(frozen=True, slots=True)
class ReportView:
    """A judged matrix, or a comparison of imported curves."""

    title: str
    source: str = ""
    """The experiment file, as given."""
    generated: str = ""
    """When, as the caller writes it."""
    seed: int | None = None
    steps: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    controls: tuple[RunView, ...] = ()
    anchor: RunView | None = None
    """What the first control is itself judged against."""
    calibrations: tuple[CalibrationView, ...] = ()
    """One per control, in their order."""
    repeats: tuple[RepeatView, ...] = ()
    besides: tuple[BesideView, ...] = ()
    tests: tuple[TestView, ...] = ()
    waived: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences on what the verdicts do and do not cover."""
    entropy_floor: float | None = None
    """Loss of a perfect model of the data, nats per token."""
    wall_s: float | None = None
    """Wall time of the whole matrix."""
    against: Against | None = None
    """The same matrix at another revision of the code; None: none was asked for."""

    @property
    def judged_against(self) -> tuple[RunView, ...]:
        """What test sets are judged against: the controls, then the anchor if there is one."""
        return (*self.controls, self.anchor) if self.anchor else self.controls

    def seeds_of(self, name: str) -> tuple[RunView, ...]:
        """The runs of a control or test set by its other seeds."""
        return tuple(each.run for each in self.other_seeds if each.of == name)

    @property
    def other_seeds(self) -> tuple[BesideView, ...]:
        """Every run by another seed; that by the first seed has the name of its set."""
        return tuple(each for each in self.besides if each.role == Role.OTHER_SEED)

    @property
    def by_severity(self) -> tuple[TestView, ...]:
        """Test sets, failures first, else in the file's order."""
        return tuple(sorted(self.tests, key=lambda test: SEVERITY.index(test.verdict.judgement)))

    @property
    def resumes(self) -> bool:
        """Whether some test set is made in several passes."""
        return any(test.kind in (Kind.ELASTIC, Kind.FAULT) for test in self.tests)

    @property
    def counts(self) -> Mapping[Judgement, int]:
        """How many test sets got each verdict, worst first; without verdicts that none got."""
        judgements = [test.verdict.judgement for test in self.tests]
        return {each: judgements.count(each) for each in SEVERITY if each in judgements}

    @property
    def worst(self) -> Judgement:
        """The verdict of the whole; INCONCLUSIVE when nothing was judged: never PASS."""
        return next(iter(self.counts), Judgement.INCONCLUSIVE)

    @property
    def headline(self) -> str:
        """One sentence that answers the question."""
        if not self.tests:
            return "No test set was judged."
        sets = sum(not test.challenged for test in self.tests)
        total = counted(sets, "test set")
        challenged = sets < len(self.tests)
        if self.worst is Judgement.PASS:
            if all("rcp-no-later" in test.verdict.not_asked for test in self.tests):
                which = "is no faster than its" if sets == 1 else "none is faster than its"
                return f"{total}: {which} RCP."
            which = "agrees" if sets == 1 else "all agree"
            if all(test.verdict.ask is Ask.NO_WORSE for test in self.tests):
                which = "is no worse than" if sets == 1 else "none is worse than"
                return f"{total}: {which} the control{self._unseen}."
            anchor = ", and the control with its anchor" if challenged else ""
            return f"{total}: {which} with the control{anchor}{self._unseen}."
        total += " and the control" if challenged else ""
        parts = [f"{amount} {word.value}" for word, amount in self.counts.items()]
        return f"Of {total}: {', '.join(parts)}{self._unseen}."

    @property
    def without_evidence(self) -> tuple[str, ...]:
        """Checks that some test set has no evidence for, without those that need a longer run."""
        skipped = {
            check.name
            for test in self.tests
            for check in test.asked
            if check.outcome is Outcome.SKIPPED and check.tier is not Tier.EQUIVALENCE
        }
        return tuple(sorted(skipped))

    @property
    def _unseen(self) -> str:
        """What no verdict covers, in brackets; empty when every check had its evidence."""
        skipped = self.without_evidence
        if not skipped:
            return ""
        compared = {
            check.name
            for test in self.tests
            for check in test.verdict.checks
            if check.tier is Tier.ENVELOPE and check.outcome is not Outcome.SKIPPED
        }
        loss_only = "loss only; " if compared == {"loss-envelope"} else ""
        return f" ({loss_only}{counted(len(skipped), 'check')} had no evidence)"
