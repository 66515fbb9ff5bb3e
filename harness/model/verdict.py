"""What was decided about a test set, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from converge_harness.model.experiment import Ask


class Outcome(StrEnum):
    """Result of one check."""

    PASS = "PASS"
    FAIL = "FAIL"
    INVALID = "INVALID"
    INCONCLUSIVE = "INCONCLUSIVE"
    """There is evidence, but not enough."""
    SKIPPED = "SKIPPED"
    """Such evidence cannot exist (for example, a CSV has no batch digests)."""


class Tier(StrEnum):
    INTEGRITY = "integrity"
    FIRST_STEP = "first step"
    ENVELOPE = "envelope"
    EQUIVALENCE = "equivalence"
    RESUME = "resume"
    """For runs in several passes."""


class Sameness(StrEnum):
    """How a run differs from an earlier one of the same set, from best to worst."""

    BITWISE = "bitwise the same"
    """Every number that both left is the same."""
    ROUNDING = "same within rounding"
    """Other numbers, no further off than repeats of the control are from each other."""
    UNKNOWN = "not compared"
    """One of them left no evidence, or ran other code than it should."""
    DIFFERENT = "different"
    """A larger difference, or one not shown to be smaller: it trains differently."""


class Judgement(StrEnum):
    """Verdicts, from best to worst."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    ERROR = "ERROR"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Limit:
    """A tolerance: a number and its origin, which are printed together."""

    value: float
    origin: str
    """``floor of fp32 arithmetic``, ``3 x the spread of 2 repeats``, ``set in the file`` …"""

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.origin})"


@dataclass(frozen=True, slots=True)
class Deviation:
    """One tensor (or group of tensors) in a check of many."""

    tensor: str
    step: int
    measured: float
    limit: float


@dataclass(frozen=True, slots=True)
class Check:
    """One named question with its answer."""

    name: str
    """Slug, stable across releases: ``loss-envelope``."""
    title: str
    """The first line of the check's docstring, which reports print."""
    tier: Tier
    outcome: Outcome
    measured: float | None = None
    limit: Limit | None = None
    unit: str = ""
    steps: tuple[int, int] | None = None
    """First and last step checked."""
    onset: int | None = None
    """First step outside the limit."""
    detail: str = ""
    """One sentence on what was found."""
    deviations: tuple[Deviation, ...] = ()
    """Tensors outside the limit, largest measured / limit first, at most 20."""
    compare_with: str = ""
    """Options with which the two curves can be compared in part, where they cannot as wholes:
    ``--from 51``."""
    further_seeds: int | None = None
    """How many more seeds a side would probably answer an INCONCLUSIVE; None if no number would, or
    none is known."""


class CauseClass(StrEnum):
    """What kind of bug the evidence points to."""

    NOT_FINITE = "not finite"
    DATA = "data"
    LEARNING_RATE = "learning rate"
    NO_GRADIENT = "no gradient"
    METRIC_ONLY = "metric only"
    GRADIENT_SCALE = "gradient scale"
    GROUP_SCALE = "gradient scale of a group"
    GRADIENT_DIRECTION = "gradient direction"
    CLIPPING = "clipping"
    REPLICAS = "replicas differ"
    OBJECTIVE = "forward or objective"
    UPDATE = "update"
    FROZEN = "parameters do not move"
    STATE = "state lost"
    REPLAY = "replay differs"
    RECOVERY = "no recovery in time"
    GLITCH = "one step"
    ROUNDING_GROWTH = "rounding grows"
    LATER = "parts later"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one test set."""

    name: str
    control: str
    judgement: Judgement
    cause: str = ""
    """One sentence on the likely cause, with the evidence for it; empty on PASS."""
    cause_class: CauseClass | None = None
    """None unless the judgement is FAIL."""
    look_at: str = ""
    """Where to look first, in code or config; empty if unknown."""
    onset_step: int | None = None
    checks: tuple[Check, ...] = ()
    next_command: str = ""
    ask: Ask = Ask.SAME
    """What the test set had to prove."""
    not_asked: tuple[str, ...] = ()
    """Names of checks of an ordinary judgement that were not applied here."""
    module: str = ""
    """Canonical name of the module where the difference first appears; empty if unknown."""
    first_wrong: str = ""
    """A sentence on what modules computed in the first batches: what of it is wrong first, or that
    nothing is; empty on PASS and if it was not recorded."""
    wrong_forward: bool = False
    """Whether the module's forward pass is wrong."""

    @property
    def decided_by(self) -> tuple[Check, ...]:
        """The checks whose outcome is the judgement: the failed ones of a FAIL."""
        return tuple(each for each in self.checks if each.outcome.value == self.judgement.value)
